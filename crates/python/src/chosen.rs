//! The tensors that a caller selects by name.

use ingot_io::{Checkpoint, Tensor};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::errors::{class_of, raise};
use crate::watch::Signals;

/// Return the only file.
pub(crate) fn file<'a>(py: Python<'_>, checkpoint: &'a Checkpoint) -> PyResult<&'a ingot_io::Archive> {
    checkpoint.file(0).map_err(|error| raise(py, &error))
}

/// Return all files, opened in parallel.
pub(crate) fn files<'a>(py: Python<'_>, checkpoint: &'a Checkpoint) -> PyResult<Vec<&'a ingot_io::Archive>> {
    Signals::detach(py, |signals| {
        checkpoint.prepare_all(signals)?;
        checkpoint.all_files()
    })
}

/// Convert an argument to the name of a tensor. The error mentions `keys()`, since some callers pass a position.
pub(crate) fn tensor_name<'a>(given: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    match given.cast::<PyString>() {
        Ok(name) => name.to_str(),
        Err(_) => Err(PyTypeError::new_err(format!(
            "expected the name of a tensor as a str, found {} — `keys()` lists the names",
            class_of(given)
        ))),
    }
}

pub(crate) fn find<'a>(py: Python<'_>, checkpoint: &'a Checkpoint, name: &str) -> PyResult<Tensor<'a>> {
    if checkpoint.index().is_some() {
        // The shard may have to be opened.
        Signals::detach(py, |signals| checkpoint.prepare(&[name], signals))?;
    }
    checkpoint.find(name).map_err(|error| raise(py, &error))
}

/// Return the tensors of these names.
pub(crate) fn found<'a>(
    py: Python<'_>,
    checkpoint: &'a Checkpoint,
    names: &[&str],
) -> PyResult<Vec<Tensor<'a>>> {
    Signals::detach(py, |signals| checkpoint.find_all(names, signals))
}

/// Return the tensors of these names, or all tensors in the order of the data.
pub(crate) fn chosen<'a>(
    py: Python<'_>,
    checkpoint: &'a Checkpoint,
    names: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<Tensor<'a>>> {
    let Some(names) = names else {
        return Signals::detach(py, |signals| {
            checkpoint.prepare_all(signals)?;
            checkpoint.all()
        });
    };
    if names.is_instance_of::<PyString>() {
        // A str is an iterable of str: each letter would be a name.
        return Err(PyTypeError::new_err(
            "names must be an iterable of str, not a str",
        ));
    }
    let names = names.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    let names = names.iter().map(tensor_name).collect::<PyResult<Vec<_>>>()?;
    found(py, checkpoint, &names)
}
