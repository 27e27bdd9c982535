//! Tensors to be saved: their names, and where their bytes are.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ingot_format::{Dtype, Quoted};
use ingot_io::binding::RECORD_KEYS;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyString, PyTuple};

use crate::device::{Current, Gpu};
use crate::errors::about_tensor;
use crate::export::{self, Export, Item};
use crate::produced::{Producer, Raised};
use crate::tensor::Imported;

/// The functions of a framework's module that export its tensors.
pub(crate) struct Exporter<'a, 'py> {
    /// Fast, and only for tensors in memory.
    pub(crate) export: Option<&'a Bound<'py, Export>>,
    /// `payload(name, tensor)` returns a capsule, `(dtype, shape, buffer)`, `(dtype, shape, (gpu, capsule))`, or
    /// `(dtype, shape, fetch)` with a function that returns the bytes from `begin` to `end`, for any tensor.
    pub(crate) payload: &'a Bound<'py, PyAny>,
    /// Receives the exceptions of these functions.
    pub(crate) raised: Raised,
    /// The devices of the tensors.
    devices: RefCell<Vec<(Py<Gpu>, Current)>>,
}

impl<'a, 'py> Exporter<'a, 'py> {
    pub(crate) fn new(
        export: Option<&'a Bound<'py, Export>>,
        payload: &'a Bound<'py, PyAny>,
    ) -> Exporter<'a, 'py> {
        Exporter {
            export,
            payload,
            raised: Raised::default(),
            devices: RefCell::default(),
        }
    }

    /// Return the tensors of these items; their names stay with the items. The values of tensors on devices are those
    /// after all work that the caller has queued by now.
    pub(crate) fn take<'i>(&self, items: &'i [Item<'py>]) -> PyResult<Vec<(&'i str, Imported)>> {
        let taken = export::each(self.export, items, |(name, tensor), exported| {
            let name = tensor_name(name)?;
            let imported = exported.map_or_else(|| self.slowly(name, tensor), Ok)?;
            Ok((name, imported))
        })?;
        let py = self.payload.py();
        let devices = self.devices.take();
        devices.iter().try_for_each(|(_, current)| current.begin(py))?;
        Ok(taken)
    }

    /// Return a tensor on `gpu`; `None` if the tensor in `capsule` is on another GPU.
    fn on_device(
        &self,
        dtype: Dtype,
        shape: Vec<u64>,
        gpu: &Bound<'_, Gpu>,
        capsule: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Imported>> {
        let known = self.devices.borrow().iter().position(|(known, _)| known.is(gpu));
        let number = match known {
            Some(number) => number,
            None => {
                let current = gpu.get().current(gpu.py())?.outgoing(gpu.py())?;
                current.refuse_capture(gpu.py())?;
                self.devices.borrow_mut().push((gpu.clone().unbind(), current));
                self.devices.borrow().len() - 1
            }
        };
        let devices = self.devices.borrow();
        let current = devices.get(number).map(|(_, current)| &current.at);
        Ok(current.and_then(|stream| Imported::on_device(dtype, shape, stream, capsule)))
    }

    fn slowly(&self, name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<Imported> {
        let py = tensor.py();
        let payload = self.payload.call1((name, tensor))?;
        if payload.is_instance_of::<PyCapsule>() {
            return Imported::from_capsule(&payload)?.ok_or_else(|| {
                let message = format!("tensor {}: its elements cannot be read in place", Quoted(name));
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
        if buffer.is_instance_of::<PyTuple>() {
            let (gpu, capsule): (Bound<'_, Gpu>, Bound<'_, PyAny>) = buffer.extract()?;
            let imported = self.on_device(dtype, shape, &gpu, &capsule)?;
            let elsewhere = || refuse("no-values", "its elements cannot be read in place".to_owned());
            return imported.ok_or_else(elsewhere);
        }
        let imported =
            PyUntypedBuffer::get(&buffer).and_then(|buffer| Imported::from_buffer(dtype, shape, buffer));
        imported.map_err(|fault| {
            let reason = fault.value(py).to_string();
            match () {
                () if fault.is_instance_of::<PyBufferError>(py) => refuse("not-contiguous", reason),
                () if fault.is_instance_of::<PyValueError>(py) => refuse("size-mismatch", reason),
                () => fault,
            }
        })
    }
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
        // A lone surrogate, which UTF-8 cannot encode.
        let shown = name.repr().map(|repr| repr.to_string()).unwrap_or_default();
        let message = format!("tensor {shown}: the name is not valid Unicode");
        about_tensor(py, "SaveError", "invalid-unicode", &shown, &message)
    })
}

/// Return the metadata of a new file as pairs of strings; `None` if there is none. Copied records about tensors are
/// left out, since they describe the tensors of another file. `records` are those of this file.
pub(crate) fn metadata_of_new(
    metadata: Option<&Bound<'_, PyAny>>,
    records: BTreeMap<String, String>,
) -> PyResult<Option<Vec<(String, String)>>> {
    let mut pairs = self::metadata(metadata)?;
    if let Some(pairs) = &mut pairs {
        pairs.retain(|pair| !RECORD_KEYS.contains(&&*pair.0));
    }
    if !records.is_empty() {
        pairs.get_or_insert_default().extend(records);
    }
    Ok(pairs)
}

/// Return metadata as pairs of strings; `None` if there is none. `ingot._base.checks.texts` has checked it.
pub(crate) fn metadata(metadata: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<(String, String)>>> {
    let Some(metadata) = metadata.filter(|metadata| !metadata.is_none()) else {
        return Ok(None);
    };
    let pair = |(key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| Ok((key.extract()?, value.extract()?));
    let pairs: PyResult<_> = metadata.cast::<PyDict>()?.iter().map(pair).collect();
    pairs.map(Some)
}

/// The same pairs, for code that only reads them.
pub(crate) fn borrowed(pairs: &[(String, String)]) -> Vec<(&str, &str)> {
    pairs
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect()
}
