//! Hashes of files.

use std::borrow::Cow;

use ingot_format::{Limits, Quoted};
use ingot_io::{
    Algorithm, Backend, Checkpoint, CheckpointOptions, Compared, Definition, Digest, Error, OpenOptions,
    REMOTE_HEADER_NBYTES, Reach, Report,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::exception;
use crate::paths::file_path;
use crate::remote::{Location, remote_options};
use crate::watch::Signals;

/// The hash of a file; `None` for a name that is not one of ours. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, definition, progress = None, storage_options = None))]
pub(crate) fn hash(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    definition: &str,
    progress: Option<Bound<'_, PyAny>>,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Option<String>> {
    let location = Location::of(path, storage_options)?;
    let Some(definition) = Definition::from_name(definition) else {
        return Ok(None);
    };
    let take = |signals: &Signals| match &location {
        Location::File(path) => ingot_io::hash(path, definition, signals),
        Location::Url(url, options) => ingot_io::hash_url(url, definition, options, signals),
    };
    Signals::telling(progress).run(py, take).map(Some)
}

/// Calls `take` with all bytes behind a URL, in their order. See `_native.pyi`.
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
        ingot_io::read_url(url, &options, &mut call, signals)
    })?;
    raised.map_or(Ok(()), Err)
}

/// The digest in the name of a blob. See `_native.pyi`.
#[pyfunction]
pub(crate) fn blob_digest(path: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    Ok(ingot_io::blob_digest(&file_path(path)?))
}

/// The names that `hash` takes.
#[pyfunction]
pub(crate) fn hashes() -> Vec<&'static str> {
    Definition::all().map(|pair| pair.0).collect()
}

/// What the digests of each file of a checkpoint say of it, as its name and arguments for `ingot.Verification`. See
/// `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, expected_sha256 = None, progress = None, storage_options = None))]
pub(crate) fn verify<'py>(
    py: Python<'py>,
    path: &Bound<'py, PyAny>,
    expected_sha256: Option<&str>,
    progress: Option<Bound<'py, PyAny>>,
    storage_options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Vec<(String, Bound<'py, PyDict>)>> {
    let location = Location::of(path, storage_options)?;
    let expected = expected_sha256.map(|hex| sha256(py, hex)).transpose()?;
    let limits = Limits {
        header_nbytes: REMOTE_HEADER_NBYTES,
        ..Limits::default()
    };
    let open = |signals: &Signals| match &location {
        Location::File(path) => {
            // Never through a mapping, so that a file that is shortened meanwhile is an error, not the end of the process.
            let open = OpenOptions {
                backend: Backend::Pread,
                ..OpenOptions::default()
            };
            let reach = Reach::default();
            Checkpoint::open(path, &CheckpointOptions { open, reach })
        }
        Location::Url(url, options) => Checkpoint::open_url(url, options, &limits, signals),
    };
    let compare = |signals: &Signals| {
        let checkpoint = open(signals)?;
        let reports = checkpoint.verify(expected, signals)?;
        let names = checkpoint.file_names().map(Cow::into_owned);
        Ok::<_, Error>(names.zip(reports).collect::<Vec<_>>())
    };
    let reports = Signals::telling(progress).run(py, compare)?;
    let told = |(name, report)| Ok((name, facts(py, &report)?));
    reports.into_iter().map(told).collect()
}

/// The digest that a caller expects.
pub(crate) fn sha256(py: Python<'_>, hex: &str) -> PyResult<Digest> {
    let hex_alone = hex.strip_prefix("0x").unwrap_or(hex);
    Digest::from_hex(Algorithm::Sha256, hex_alone).map_or_else(
        || {
            let message = format!(
                "expected_sha256 {} is no SHA-256: expected 64 hexadecimal digits",
                Quoted(hex)
            );
            let facts = PyDict::new(py);
            facts.set_item("code", "unknown-expected_sha256")?;
            facts.set_item("found", hex)?;
            Err(exception(py, "OptionError", &message, Some(&facts))?)
        },
        Ok,
    )
}

fn facts<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
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
