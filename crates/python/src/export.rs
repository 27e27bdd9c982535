//! Tensors of a framework, shown where they lie, many at once.

use ingot_format::{Dtype, to_u64};
use pyo3::exceptions::{PyException, PyMemoryError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMapping, PyType};

use crate::dlpack::{Exchange, Take, taken};

/// A name and a tensor, of whatever types the caller gave.
pub(crate) type Item<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Tensors that are taken at once: few enough to be in the cache of a core from one look at them to the next, many enough
/// that the call does not count.
const AT_ONCE: usize = 256;

/// How a framework shows many tensors at once.
#[pyclass(module = "ingot._native", frozen)]
pub(crate) struct Export {
    /// Classes of tensors whose values are where the framework looks for them. Of others nothing is shown.
    plain: Vec<Py<PyType>>,
    style: Style,
}

enum Style {
    Dlpack(ByDlpack),
    Buffer(ByBuffer),
}

/// As DLPack shows them, where the framework's storages say that they are there.
struct ByDlpack {
    /// `places(tensors)` gives the storages that the tensors lie in, whose `len` is in bytes, and how many elements come
    /// before each tensor's own there; or None where what DLPack shows of one of them would be wrong.
    places: Py<PyAny>,
    /// `stored(tensors)` says whether files have the dtypes of all of these, and their values are those that lie there. It
    /// is asked about those of dtypes that DLPack may be wrong of.
    stored: Py<PyAny>,
    /// `capsule(tensor)`, where the framework has no C function that does the same.
    capsule: Py<PyAny>,
    exchange: Option<Exchange>,
}

/// As the buffer protocol shows them.
struct ByBuffer {
    /// `code(dtype)` is what files call elements of a dtype that lie as buffers show them; None for others.
    code: Py<PyAny>,
}

#[pymethods]
impl Export {
    /// For frameworks that export DLPack. `exchange` is `__dlpack_c_exchange_api__` of its class, where it has one.
    #[staticmethod]
    #[pyo3(signature = (plain, places, stored, capsule, exchange = None))]
    fn dlpack(
        plain: Vec<Py<PyType>>,
        places: Py<PyAny>,
        stored: Py<PyAny>,
        capsule: Py<PyAny>,
        exchange: Option<&Bound<'_, PyAny>>,
    ) -> Export {
        let style = Style::Dlpack(ByDlpack {
            places,
            stored,
            capsule,
            exchange: exchange.and_then(Exchange::of),
        });
        Export { plain, style }
    }

    /// For frameworks that export the buffer protocol.
    #[staticmethod]
    fn buffer(plain: Vec<Py<PyType>>, code: Py<PyAny>) -> Export {
        let style = Style::Buffer(ByBuffer { code });
        Export { plain, style }
    }
}

impl Export {
    /// The tensors of these items, `None` for those that cannot be taken as they are; nothing where none can.
    fn all<T: Take>(&self, py: Python<'_>, items: &[Item<'_>]) -> PyResult<Vec<Option<T>>> {
        let is_plain = |(_, tensor): &Item<'_>| {
            let class = tensor.get_type_ptr().cast();
            self.plain.iter().any(|plain| plain.as_ptr() == class)
        };
        match &self.style {
            _ if !items.iter().all(is_plain) => Ok(Vec::new()),
            Style::Dlpack(way) => way.all(py, items),
            Style::Buffer(way) => way.all(py, items),
        }
    }
}

impl ByDlpack {
    fn all<T: Take>(&self, py: Python<'_>, items: &[Item<'_>]) -> PyResult<Vec<Option<T>>> {
        let tensors = PyList::new(py, items.iter().map(|(_, tensor)| tensor))?;
        let Some((storages, firsts)) = self
            .places
            .bind(py)
            .call1((tensors,))?
            .extract::<Option<(Bound<'_, PyList>, Bound<'_, PyList>)>>()?
        else {
            return Ok(Vec::new());
        };
        let places = storages.iter().zip(firsts);
        let one = |((_, tensor), (storage, first)): (&Item<'_>, _)| self.one(tensor, &storage, &first);
        let all: Vec<Option<T>> = items.iter().zip(places).map(one).collect::<PyResult<_>>()?;
        let is_doubtful = |taken: &Option<T>| taken.as_ref().is_some_and(|taken| is_doubtful(taken.dtype()));
        let asked = items.iter().zip(&all).filter(|(_, taken)| is_doubtful(taken));
        let asked: Vec<_> = asked.map(|((_, tensor), _)| tensor).collect();
        if asked.is_empty() || self.stored.bind(py).call1((asked,))?.is_truthy()? {
            Ok(all)
        } else {
            Ok(Vec::new())
        }
    }

    /// `tensor`, which lies in `storage` after `first` elements of others; `None` where it cannot be taken as it is.
    fn one<T: Take>(
        &self,
        tensor: &Bound<'_, PyAny>,
        storage: &Bound<'_, PyAny>,
        first: &Bound<'_, PyAny>,
    ) -> PyResult<Option<T>> {
        let (first, nbytes) = (first.extract()?, to_u64(storage.len()?));
        match self.exchange {
            Some(exchange) => Ok(exchange.take(tensor, storage, first, nbytes)),
            None => taken(&self.capsule.bind(tensor.py()).call1((tensor,))?, first, nbytes),
        }
    }
}

/// Whether DLPack shows as this dtype what is another: it shows integers of fewer bits than a byte as bytes, and of complex
/// numbers that are conjugated when they are read those that lie beneath.
fn is_doubtful(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::I8 | Dtype::U8 | Dtype::C64)
}

impl ByBuffer {
    fn all<T: Take>(&self, py: Python<'_>, items: &[Item<'_>]) -> PyResult<Vec<Option<T>>> {
        let mut all = Vec::with_capacity(items.len());
        // Of many arrays few have another dtype than the one before.
        let mut last: Option<(Bound<'_, PyAny>, Option<Dtype>)> = None;
        for (_, array) in items {
            let dtype = array.getattr(intern!(py, "dtype"))?;
            let known = match &last {
                Some((same, known)) if same.is(&dtype) => *known,
                _ => self.known(&dtype)?,
            };
            last = Some((dtype, known));
            all.push(match known.map(|known| T::lend(known, array)) {
                Some(Err(fault)) if !is_refusal(py, &fault) => return Err(fault),
                lent => lent.and_then(Result::ok),
            });
        }
        Ok(all)
    }

    fn known(&self, dtype: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
        let code = self.code.bind(dtype.py()).call1((dtype,))?;
        let code = code.extract::<Option<String>>()?;
        Ok(code.and_then(|code| Dtype::from_code(&code)))
    }
}

/// What `made` gives of each item, in turn, and of its tensor as `export` shows it: `None` for one that it does not show as
/// it is.
pub(crate) fn each<'i, 'py, T: Take, R>(
    export: Option<&Bound<'py, Export>>,
    items: &'i [Item<'py>],
    mut made: impl FnMut(&'i Item<'py>, Option<T>) -> PyResult<R>,
) -> PyResult<Vec<R>> {
    let mut all = Vec::with_capacity(items.len());
    for items in items.chunks(AT_ONCE) {
        let mut shown = shown(export, items)?.into_iter();
        for item in items {
            all.push(made(item, shown.next().flatten())?);
        }
    }
    Ok(all)
}

/// The tensors of these items, as far as `export` shows them as they are; nothing where it shows none.
fn shown<T: Take>(export: Option<&Bound<'_, Export>>, items: &[Item<'_>]) -> PyResult<Vec<Option<T>>> {
    let Some(export) = export else {
        return Ok(Vec::new());
    };
    match export.get().all(export.py(), items) {
        Err(fault) if is_refusal(export.py(), &fault) => Ok(Vec::new()),
        taken => taken,
    }
}

/// Whether an exporter only says that it cannot take the tensor, for which `payload` then has words; and not that
/// the user pressed Ctrl-C or that memory ran out.
fn is_refusal(py: Python<'_>, fault: &PyErr) -> bool {
    fault.is_instance_of::<PyException>(py) && !fault.is_instance_of::<PyMemoryError>(py)
}

/// All items of a mapping from names to tensors.
pub(crate) fn items<'py>(tensors: &Bound<'py, PyAny>) -> PyResult<Vec<Item<'py>>> {
    if let Ok(tensors) = tensors.cast::<PyDict>() {
        return Ok(tensors.iter().collect());
    }
    let items = tensors.cast::<PyMapping>()?.items()?;
    items.iter().map(|item| item.extract()).collect()
}
