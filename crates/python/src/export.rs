//! Reads where many tensors of a framework are in memory, without copying them.

use ingot_format::{Dtype, to_u64};
use pyo3::exceptions::{PyException, PyMemoryError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMapping, PyType};

use crate::dlpack::{Exchange, Take, taken};

/// A name and a tensor, of any type.
pub(crate) type Item<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// The number of tensors that are exported at once: few enough to stay in a core's cache between two passes, many
/// enough to make the cost of a call negligible.
const AT_ONCE: usize = 256;

/// How a framework exports many tensors at once.
#[pyclass(module = "ingot._native", frozen)]
pub(crate) struct Export {
    /// The classes of tensors whose values are where the framework's protocol finds them. Others are not exported here.
    plain: Vec<Py<PyType>>,
    style: Style,
}

enum Style {
    Dlpack(ByDlpack),
    Buffer(ByBuffer),
}

/// By DLPack, if the framework's storages confirm that the values are there.
struct ByDlpack {
    /// `places(tensors)` returns the storages of the tensors, whose `len` is in bytes, and the number of elements in
    /// the storage before each tensor; or None if DLPack would describe one of them wrongly.
    places: Py<PyAny>,
    /// `stored(tensors)` returns whether files support the dtypes of all these tensors and their values are as stored.
    /// It is called for tensors whose dtype DLPack may report wrongly.
    stored: Py<PyAny>,
    /// `capsule(tensor)`, unless the framework has a C function for it.
    capsule: Py<PyAny>,
    exchange: Option<Exchange>,
}

/// By the buffer protocol.
struct ByBuffer {
    /// `code(dtype)` returns the dtype's code in files, or None if its buffers have another layout than files.
    code: Py<PyAny>,
}

#[pymethods]
impl Export {
    /// For frameworks that export DLPack. `exchange` is `__dlpack_c_exchange_api__` of the tensor class, if it has one.
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
    /// Return the tensors of these items, `None` for each that cannot be exported in place; empty if none can.
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
        // `collect` does not reserve the capacity for an iterator of results.
        let mut all = Vec::with_capacity(items.len());
        for ((_, tensor), (storage, first)) in items.iter().zip(places) {
            all.push(self.export(tensor, &storage, &first)?);
        }
        let is_doubtful = |taken: &Option<T>| taken.as_ref().is_some_and(|taken| is_doubtful(taken.dtype()));
        let asked = items.iter().zip(&all).filter(|(_, taken)| is_doubtful(taken));
        let asked: Vec<_> = asked.map(|((_, tensor), _)| tensor).collect();
        if asked.is_empty() || self.stored.bind(py).call1((asked,))?.is_truthy()? {
            Ok(all)
        } else {
            Ok(Vec::new())
        }
    }

    /// Return `tensor`, which begins after `first` elements of `storage`; `None` if it cannot be exported in place.
    fn export<T: Take>(
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

/// Return whether DLPack may report this dtype for another one: it reports integers narrower than a byte as bytes, and
/// lazily conjugated complex tensors with the values before the conjugation.
fn is_doubtful(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::I8 | Dtype::U8 | Dtype::C64)
}

impl ByBuffer {
    fn all<T: Take>(&self, py: Python<'_>, items: &[Item<'_>]) -> PyResult<Vec<Option<T>>> {
        let mut all = Vec::with_capacity(items.len());
        // Most arrays have the dtype of the one before.
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

/// Return the result of `made` for each item and its exported tensor, in order. The tensor is `None` if `export` cannot
/// export it in place.
pub(crate) fn each<'i, 'py, T: Take, R>(
    export: Option<&Bound<'py, Export>>,
    items: &'i [Item<'py>],
    mut made: impl FnMut(&'i Item<'py>, Option<T>) -> PyResult<R>,
) -> PyResult<Vec<R>> {
    let mut all = Vec::with_capacity(items.len());
    for items in items.chunks(AT_ONCE) {
        let mut exported = exported(export, items)?.into_iter();
        for item in items {
            all.push(made(item, exported.next().flatten())?);
        }
    }
    Ok(all)
}

/// Return the tensors of these items, as far as `export` can export them in place; empty if it can export none.
fn exported<T: Take>(export: Option<&Bound<'_, Export>>, items: &[Item<'_>]) -> PyResult<Vec<Option<T>>> {
    let Some(export) = export else {
        return Ok(Vec::new());
    };
    match export.get().all(export.py(), items) {
        Err(fault) if is_refusal(export.py(), &fault) => Ok(Vec::new()),
        taken => taken,
    }
}

/// Return whether an exception only means that the exporter cannot export the tensor, for which `payload` has a better
/// message. Ctrl-C and exhausted memory are other exceptions.
fn is_refusal(py: Python<'_>, fault: &PyErr) -> bool {
    fault.is_instance_of::<PyException>(py) && !fault.is_instance_of::<PyMemoryError>(py)
}

/// Return all items of a mapping from names to tensors.
pub(crate) fn items<'py>(tensors: &Bound<'py, PyAny>) -> PyResult<Vec<Item<'py>>> {
    if let Ok(tensors) = tensors.cast::<PyDict>() {
        return Ok(tensors.iter().collect());
    }
    let items = tensors.cast::<PyMapping>()?.items()?;
    items.iter().map(|item| item.extract()).collect()
}
