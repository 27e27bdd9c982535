//! Objects of stores: written from memory or from files, and removed.

use ingot_format::to_u64;
use ingot_io::Payload;
use ingot_io::binding::{Pieces, UploadOptions, upload_pieces};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::paths::file_path;
use crate::remote::remote_options;
use crate::temporary_file::imported;
use crate::tensor::Imported;
use crate::watch::Signals;

/// Write an object that consists of these pieces. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (url, pieces, *, overwrite = false, storage_options = None))]
pub(crate) fn replace_object(
    py: Python<'_>,
    url: &str,
    pieces: Vec<Bound<'_, PyAny>>,
    overwrite: bool,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let remote = remote_options(storage_options)?;
    let options = UploadOptions { overwrite, remote };
    let held: Vec<Imported> = pieces.iter().map(imported).collect::<PyResult<_>>()?;
    Signals::default().run(py, |signals| {
        let contents: Vec<Payload<'_>> = held.iter().map(Imported::payload).collect();
        upload_pieces(url, Ok(Pieces::of_bytes(&contents)), &options, signals)
    })
}

/// Write an object with the bytes of a file, and return its size. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, url, *, overwrite, storage_options, progress = None))]
pub(crate) fn upload_file(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    url: &str,
    overwrite: bool,
    storage_options: Option<&Bound<'_, PyDict>>,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<u64> {
    let path = file_path(path)?;
    let remote = remote_options(storage_options)?;
    let options = UploadOptions { overwrite, remote };
    Signals::telling(progress).run(py, |signals| {
        ingot_io::binding::upload_file(&path, url, &options, signals)
    })
}

/// Check that a new object can be written. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (url, nbytes, storage_options = None))]
pub(crate) fn check_upload(
    py: Python<'_>,
    url: &str,
    nbytes: u64,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let options = remote_options(storage_options)?;
    Signals::default().run(py, |signals| {
        ingot_io::binding::check_upload(url, nbytes, &options, signals)
    })
}

/// Remove objects, and return how many are removed. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (urls, storage_options = None))]
pub(crate) fn remove_objects(
    py: Python<'_>,
    urls: Vec<String>,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<u64> {
    let options = remote_options(storage_options)?;
    let removed = Signals::default().run(py, |signals| {
        ingot_io::binding::remove_objects(&urls, &options, signals)
    })?;
    Ok(to_u64(removed))
}
