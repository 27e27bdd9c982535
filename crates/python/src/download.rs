//! Files behind URLs, fetched to be kept.

use std::ffi::OsString;
use std::num::NonZeroUsize;

use ingot_io::{DownloadOptions, Existing};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::hash::sha256;
use crate::open::file_path;
use crate::remote::remote_options;
use crate::serialize::save_options;
use crate::watch::Signals;

/// Path, size, bytes that were fetched, SHA-256 if that was compared.
type Downloaded = (OsString, u64, u64, Option<String>);

/// Fetches what is behind a URL. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (url, path, *, storage_options, expected_sha256, overwrite, durable, threads, progress))]
#[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
pub(crate) fn download(
    py: Python<'_>,
    url: &str,
    path: &Bound<'_, PyAny>,
    storage_options: Option<&Bound<'_, PyDict>>,
    expected_sha256: Option<&str>,
    overwrite: bool,
    durable: bool,
    threads: Option<NonZeroUsize>,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<Downloaded> {
    let path = file_path(path)?;
    let options = remote_options(storage_options)?;
    let how = DownloadOptions {
        threads,
        existing: if overwrite {
            Existing::Replace
        } else {
            Existing::Refuse
        },
        durable: save_options(durable, true, false).durable,
        sha256: expected_sha256.map(|hex| sha256(py, hex)).transpose()?,
    };
    let done = Signals::telling(progress).run(py, |signals| {
        ingot_io::download(url, &path, &options, &how, signals)
    })?;
    Ok((
        done.path.into_os_string(),
        done.nbytes,
        done.fetched_nbytes,
        done.sha256.map(|digest| digest.to_string()),
    ))
}
