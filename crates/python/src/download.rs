//! Downloads of files behind URLs.

use std::ffi::OsString;
use std::num::NonZeroUsize;

use ingot_io::{DownloadOptions, Downloaded, SaveOptions};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::hash::sha256;
use crate::paths::file_path;
use crate::remote::remote_options;
use crate::serialize::save_options;
use crate::watch::Signals;

/// Path, size, bytes that were downloaded, and the SHA-256 if it was compared.
type FileFacts = (OsString, u64, u64, Option<String>);

/// The result for the whole download, and for each file of a model of many files.
type Fetched = (FileFacts, Vec<FileFacts>);

/// Download a file or a model. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (url, path, *, storage_options, expected_sha256, overwrite, replace_read_only, durable, threads, progress))]
#[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
pub(crate) fn download(
    py: Python<'_>,
    url: &str,
    path: &Bound<'_, PyAny>,
    storage_options: Option<&Bound<'_, PyDict>>,
    expected_sha256: Option<&str>,
    overwrite: bool,
    replace_read_only: bool,
    durable: bool,
    threads: Option<NonZeroUsize>,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<Fetched> {
    let path = file_path(path)?;
    let options = remote_options(storage_options)?;
    let save = save_options(durable, overwrite, replace_read_only);
    let how = wanted(py, expected_sha256, save)?.threads(threads);
    let mut done = Signals::telling(progress).run(py, |signals| {
        ingot_io::download(url, &path, &options, &how, signals)
    })?;
    let files = std::mem::take(&mut done.files).into_iter().map(facts).collect();
    Ok((facts(done), files))
}

/// Return the files that `download` would write. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (url, path, *, storage_options, expected_sha256, overwrite, replace_read_only))]
pub(crate) fn planned_download(
    py: Python<'_>,
    url: &str,
    path: &Bound<'_, PyAny>,
    storage_options: Option<&Bound<'_, PyDict>>,
    expected_sha256: Option<&str>,
    overwrite: bool,
    replace_read_only: bool,
) -> PyResult<Vec<(OsString, u64)>> {
    let path = file_path(path)?;
    let options = remote_options(storage_options)?;
    let how = wanted(
        py,
        expected_sha256,
        save_options(true, overwrite, replace_read_only),
    )?;
    let files = Signals::default().run(py, |signals| {
        ingot_io::binding::planned_download(url, &path, &options, &how, signals)
    })?;
    Ok(files
        .into_iter()
        .map(|(path, nbytes)| (path.into_os_string(), nbytes))
        .collect())
}

/// The arguments of a download, real or planned.
fn wanted(py: Python<'_>, expected_sha256: Option<&str>, save: SaveOptions) -> PyResult<DownloadOptions> {
    Ok(DownloadOptions::new()
        .save(save)
        .sha256(expected_sha256.map(|hex| sha256(py, hex)).transpose()?))
}

fn facts(done: Downloaded) -> FileFacts {
    (
        done.path.into_os_string(),
        done.nbytes,
        done.fetched_nbytes,
        done.sha256.map(|digest| digest.to_string()),
    )
}
