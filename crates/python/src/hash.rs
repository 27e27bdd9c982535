//! Hashes of files.

use std::path::Path;

use ingot_format::{Limits, Quoted};
use ingot_inspect::Definition;
use ingot_io::binding::ReadAt;
use ingot_io::{Algorithm, Compared, Digest, Error, Report};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::exception;
use crate::object::ObjectSource;
use crate::paths::{file_path, is_remote};
use crate::remote::remote_options;
use crate::tensor::BufferSource;
use crate::watch::Signals;

/// Return the hash of a file; `None` for an unknown algorithm. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, definition, progress = None, storage_options = None))]
pub(crate) fn hash(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    definition: &str,
    progress: Option<Bound<'_, PyAny>>,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Option<String>> {
    let definition = Definition::from_name(definition);
    match path.extract::<&str>() {
        Ok(url) if is_remote(url) => {
            let options = remote_options(storage_options)?;
            taken(py, definition, progress, |definition, signals| {
                ingot_inspect::hash_url(url, definition, &options, signals)
            })
        }
        _ => {
            let path = file_path(path)?;
            taken(py, definition, progress, |definition, signals| {
                ingot_inspect::hash(&path, definition, signals)
            })
        }
    }
}

/// The same for a buffer, or for a `Reader` of `_read/source.py`. Errors name it `name`.
#[pyfunction]
#[pyo3(signature = (object, name, definition, progress = None))]
pub(crate) fn hash_object(
    py: Python<'_>,
    object: &Bound<'_, PyAny>,
    name: &str,
    definition: &str,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<Option<String>> {
    let source: Box<dyn ReadAt> = if object.hasattr("ask")? {
        Box::new(ObjectSource::new(object)?)
    } else {
        Box::new(BufferSource::new(object)?)
    };
    let definition = Definition::from_name(definition);
    taken(py, definition, progress, |definition, signals| {
        ingot_inspect::hash_source(&*source, Path::new(name), definition, &Limits::default(), signals)
    })
}

fn taken(
    py: Python<'_>,
    definition: Option<Definition>,
    progress: Option<Bound<'_, PyAny>>,
    take: impl FnOnce(Definition, &Signals) -> Result<String, Error> + Send,
) -> PyResult<Option<String>> {
    let run = |definition| Signals::telling(progress).run(py, |signals| take(definition, signals));
    definition.map(run).transpose()
}

/// Call `take` with all bytes behind a URL, in order. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (url, take, storage_options = None))]
pub(crate) fn read_url(
    py: Python<'_>,
    url: &str,
    take: Py<PyAny>,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let options = remote_options(storage_options)?;
    let mut raised = None;
    let mut call = |bytes: &[u8]| {
        if raised.is_none() {
            raised = Python::attach(|py| take.call1(py, (PyBytes::new(py, bytes),)).err());
        }
    };
    Signals::detach(py, |signals| {
        ingot_io::binding::read_url(url, &options, &mut call, signals)
    })?;
    raised.map_or(Ok(()), Err)
}

/// Return the digest in the name of a blob. See `_native.pyi`.
#[pyfunction]
pub(crate) fn blob_digest(path: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    Ok(ingot_io::binding::blob_digest(&file_path(path)?))
}

/// Return the names that `hash` accepts.
#[pyfunction]
pub(crate) fn hashes() -> Vec<&'static str> {
    Definition::all().map(|pair| pair.0).collect()
}

/// Parse the digest that a caller expects.
pub(crate) fn sha256(py: Python<'_>, hex: &str) -> PyResult<Digest> {
    let hex_alone = hex.strip_prefix("0x").unwrap_or(hex);
    Digest::from_hex(Algorithm::Sha256, hex_alone).map_or_else(
        || {
            let message = format!(
                "expected_sha256 {} is not a SHA-256: expected 64 hexadecimal digits",
                Quoted(hex)
            );
            let facts = PyDict::new(py);
            facts.set_item("code", "invalid-sha256")?;
            facts.set_item("found", hex)?;
            Err(exception(py, "OptionError", &message, Some(&facts))?)
        },
        Ok,
    )
}

pub(crate) fn facts<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let facts = PyDict::new(py);
    facts.set_item("ok", report.is_ok())?;
    facts.set_item("algorithm", report.algorithm.map(Algorithm::name))?;
    facts.set_item("checked", report.checked)?;
    let bad: Vec<(&str, String, String)> = report
        .bad
        .iter()
        .map(|row| {
            (
                row.tensor.as_str(),
                row.expected.to_string(),
                row.found.to_string(),
            )
        })
        .collect();
    facts.set_item("bad", bad)?;
    facts.set_item("unchecked", &report.unchecked)?;
    facts.set_item("missing", &report.missing)?;
    facts.set_item("modelspec", report.model_spec.as_ref().map(compared))?;
    facts.set_item("file", report.file.as_ref().map(compared))?;
    Ok(facts)
}

fn compared(pair: &Compared) -> (&str, String, bool) {
    (&pair.expected, pair.found.to_string(), pair.is_same())
}
