//! Tensors of a framework, shown where they lie, many at once.

use ingot_format::to_u64;
use pyo3::exceptions::{PyException, PyMemoryError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMapping};

use crate::dlpack::{Exchange, Take, taken};

/// A name and a tensor, of whatever types the caller gave.
pub(crate) type Item<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Tensors that are taken at once: few enough to be in the cache of a core from one look at them to the next, many enough
/// that the call does not count.
const AT_ONCE: usize = 256;

/// How a framework shows many tensors at once.
#[pyclass(module = "ingot._native", frozen)]
pub(crate) struct Export {
    /// `places(tensors)` gives the storages that the tensors lie in, whose `len` is in bytes, and how many elements come
    /// before each tensor's own there; or None where what DLPack shows of one of them would be wrong.
    places: Py<PyAny>,
    /// `capsule(tensor)`, where the framework has no C function that does the same.
    capsule: Py<PyAny>,
    exchange: Option<Exchange>,
}

#[pymethods]
impl Export {
    /// `exchange` is `__dlpack_c_exchange_api__` of the framework's class, where it has one.
    #[new]
    #[pyo3(signature = (places, capsule, exchange = None))]
    fn new(places: Py<PyAny>, capsule: Py<PyAny>, exchange: Option<&Bound<'_, PyAny>>) -> Export {
        Export {
            places,
            capsule,
            exchange: exchange.and_then(Exchange::of),
        }
    }
}

impl Export {
    /// `tensor`, which lies in `storage` after `first` elements of others; `None` where it cannot be taken as it is.
    fn one<T: Take>(
        &self,
        tensor: &Bound<'_, PyAny>,
        storage: &Bound<'_, PyAny>,
        first: u64,
    ) -> PyResult<Option<T>> {
        let nbytes = to_u64(storage.len()?);
        match self.exchange {
            Some(exchange) => Ok(exchange.take(tensor, storage, first, nbytes)),
            None => taken(&self.capsule.bind(tensor.py()).call1((tensor,))?, first, nbytes),
        }
    }

    /// The tensors of these items, `None` for those that cannot be taken as they are.
    fn all<T: Take>(&self, py: Python<'_>, items: &[Item<'_>]) -> PyResult<Vec<Option<T>>> {
        let tensors = PyList::new(py, items.iter().map(|(_, tensor)| tensor))?;
        let Some((storages, firsts)) = self
            .places
            .bind(py)
            .call1((&tensors,))?
            .extract::<Option<(Bound<'_, PyList>, Bound<'_, PyList>)>>()?
        else {
            return Ok(Vec::new());
        };
        let one = |((tensor, storage), first): ((_, _), Bound<'_, PyAny>)| {
            self.one(&tensor, &storage, first.extract()?)
        };
        tensors.iter().zip(storages).zip(firsts).map(one).collect()
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
