//! Tensors on their way to a file: names, and bytes where they lie.

use ingot_format::{Dtype, Quoted, SHARED_KEY, to_u64};
use ingot_io::RECORD_KEYS;
use pyo3::exceptions::{PyBufferError, PyException, PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyList, PyMapping, PyString, PyTuple};

use crate::dlpack::Exchange;
use crate::errors::about_tensor;
use crate::produced::{Producer, Raised};
use crate::tensor::Imported;

/// A name and a tensor, of whatever types the caller gave.
pub(crate) type Item<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Tensors that `export` takes at once: few enough to be in the cache of a core from one look at them to the next, many
/// enough that the call does not count.
const AT_ONCE: usize = 256;

/// How a framework's module hands over its tensors.
pub(crate) struct Exporter<'a, 'py> {
    /// Quick, and only of use for tensors in memory.
    pub(crate) export: Option<&'a Bound<'py, Export>>,
    /// `payload(name, tensor)` gives a capsule, or `(dtype, shape, buffer)`, or `(dtype, shape, fetch)` with a function
    /// that gives the bytes from `begin` to `end`, for any tensor.
    pub(crate) payload: &'a Bound<'py, PyAny>,
    /// Takes what those functions raise.
    pub(crate) raised: Raised,
}

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
    fn one(
        &self,
        tensor: &Bound<'_, PyAny>,
        storage: &Bound<'_, PyAny>,
        first: u64,
    ) -> PyResult<Option<Imported>> {
        let shown = self
            .exchange
            .and_then(|exchange| Imported::by(exchange, tensor, storage));
        let imported = match shown {
            Some(imported) => Some(imported),
            None => Imported::from_capsule(&self.capsule.bind(tensor.py()).call1((tensor,))?)?,
        };
        let nbytes = to_u64(storage.len()?);
        Ok(imported.filter(|imported| {
            let skipped = first.checked_mul(imported.dtype.bits().div_ceil(8));
            skipped.is_some_and(|skipped| imported.lies_within(skipped, nbytes))
        }))
    }

    /// The tensors of these items, `None` for those that cannot be taken as they are.
    fn all(&self, py: Python<'_>, items: &[Item<'_>]) -> PyResult<Vec<Option<Imported>>> {
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

impl Exporter<'_, '_> {
    /// The tensors of these items; their names stay with the items.
    pub(crate) fn take<'a>(&self, items: &'a [Item<'_>]) -> PyResult<Vec<(&'a str, Imported)>> {
        let mut taken = Vec::with_capacity(items.len());
        for items in items.chunks(AT_ONCE) {
            let mut quickly = self.quickly(items)?.into_iter();
            for (name, tensor) in items {
                let name = tensor_name(name)?;
                let imported = match quickly.next().flatten() {
                    Some(imported) => imported,
                    None => self.slowly(name, tensor)?,
                };
                taken.push((name, imported));
            }
        }
        Ok(taken)
    }

    /// The tensors of these items, as far as `export` can take them; nothing where it can take none.
    fn quickly(&self, items: &[Item<'_>]) -> PyResult<Vec<Option<Imported>>> {
        let Some(export) = self.export else {
            return Ok(Vec::new());
        };
        match export.get().all(export.py(), items) {
            Err(fault) if is_refusal(export.py(), &fault) => Ok(Vec::new()),
            taken => taken,
        }
    }

    fn slowly(&self, name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<Imported> {
        let py = tensor.py();
        let payload = self.payload.call1((name, tensor))?;
        if payload.is_instance_of::<PyCapsule>() {
            return Imported::from_capsule(&payload)?.ok_or_else(|| {
                let message = format!(
                    "tensor {}: its elements cannot be read from where they lie",
                    Quoted(name)
                );
                about_tensor(py, "SaveError", "no-values", name, &message)
            });
        }
        let (code, shape, buffer): (String, Bound<'_, PyAny>, Bound<'_, PyAny>) =
            payload.cast::<PyTuple>()?.extract()?;
        let refuse = |code: &str, reason: String| {
            let message = format!("tensor {}: {reason}", Quoted(name));
            about_tensor(py, "SaveError", code, name, &message)
        };
        let dtype = Dtype::from_code(&code)
            .ok_or_else(|| refuse("unknown-dtype", format!("unknown dtype {}", Quoted(&code))))?;
        let shape: Vec<u64> = shape.extract().map_err(|_| {
            refuse(
                "invalid-shape",
                format!("expected a shape of integers from 0 to 2^64 - 1, found {shape}"),
            )
        })?;
        if buffer.is_callable() {
            // A shape without a size is refused when the file is laid out, with the rule that it breaks.
            let nbytes = ingot_format::nbytes(dtype, &shape).unwrap_or(0);
            let producer = Producer::new(buffer.unbind(), nbytes, self.raised.clone());
            return Ok(Imported::produced(dtype, shape, Box::new(producer)));
        }
        Imported::from_buffer(dtype, shape, &buffer).map_err(|fault| {
            let reason = fault.value(py).to_string();
            match () {
                () if fault.is_instance_of::<PyBufferError>(py) => refuse("not-contiguous", reason),
                () if fault.is_instance_of::<PyValueError>(py) => refuse("size-mismatch", reason),
                () => fault,
            }
        })
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

fn tensor_name<'a>(name: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    let py = name.py();
    let Ok(text) = name.cast::<PyString>() else {
        let class = name.get_type().name()?;
        return Err(PyTypeError::new_err(format!(
            "tensor names must be strings, found {} of type {class}",
            name.repr()?
        )));
    };
    text.to_str().map_err(|_| {
        // A lone surrogate, which UTF-8 cannot spell.
        let shown = name.repr().map(|repr| repr.to_string()).unwrap_or_default();
        let message = format!("tensor {shown}: the name is not valid Unicode");
        about_tensor(py, "SaveError", "invalid-unicode", &shown, &message)
    })
}

/// Metadata of a new file as pairs of strings; `None` where there is none. Records of tensors that were copied along
/// with the rest are left out: they speak of others. `views` is the record of those that share memory.
pub(crate) fn metadata_of_new(
    metadata: Option<&Bound<'_, PyAny>>,
    views: Option<String>,
) -> PyResult<Option<Vec<(String, String)>>> {
    let mut pairs = self::metadata(metadata)?;
    if let Some(pairs) = &mut pairs {
        pairs.retain(|pair| !RECORD_KEYS.contains(&&*pair.0));
    }
    if let Some(views) = views {
        pairs.get_or_insert_default().push((SHARED_KEY.to_owned(), views));
    }
    Ok(pairs)
}

/// Metadata as pairs of strings; `None` where there is none. `_serialize.texts` has checked it.
pub(crate) fn metadata(metadata: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<(String, String)>>> {
    let Some(metadata) = metadata.filter(|metadata| !metadata.is_none()) else {
        return Ok(None);
    };
    let pair = |(key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| Ok((key.extract()?, value.extract()?));
    let pairs: PyResult<_> = metadata.cast::<PyDict>()?.iter().map(pair).collect();
    pairs.map(Some)
}

/// The same pairs, for those who only read them.
pub(crate) fn borrowed(pairs: &[(String, String)]) -> Vec<(&str, &str)> {
    pairs
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect()
}
