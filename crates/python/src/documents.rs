//! Files beside a model, and documents of the Hub about a model, behind URLs.

use std::ffi::OsString;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::header::{FileHeader, file_header};
use crate::open::remote_limits;
use crate::remote::remote_options;
use crate::shards;
use crate::watch::Signals;

/// Return the URL and the contents of the file `name` in the folder of `url`, if it has at most `most` bytes.
#[pyfunction]
#[pyo3(signature = (url, name, most, storage_options = None, *, progress = None))]
pub(crate) fn fetch_beside<'py>(
    py: Python<'py>,
    url: &str,
    name: &str,
    most: u64,
    storage_options: Option<&Bound<'py, PyDict>>,
    progress: Option<Bound<'py, PyAny>>,
) -> PyResult<(OsString, Bound<'py, PyBytes>)> {
    let options = remote_options(storage_options)?;
    let fetch = |signals: &Signals| ingot_io::binding::fetch_beside(url, name, most, &options, signals);
    let (shown, bytes) = Signals::telling(progress).run(py, fetch)?;
    Ok((shown.into_os_string(), PyBytes::new(py, &bytes)))
}

/// Return the first bytes of the file behind a URL, and its size. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (url, most, storage_options = None))]
pub(crate) fn fetch_start<'py>(
    py: Python<'py>,
    url: &str,
    most: u64,
    storage_options: Option<&Bound<'py, PyDict>>,
) -> PyResult<(Bound<'py, PyBytes>, u64)> {
    let options = remote_options(storage_options)?;
    let fetch = |signals: &Signals| ingot_io::binding::fetch_start(url, most, &options, signals);
    let (bytes, nbytes) = Signals::default().run(py, fetch)?;
    Ok((PyBytes::new(py, &bytes), nbytes))
}

/// Return the name, the size, the `ETag` and the age in seconds of each object. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (url, storage_options = None))]
pub(crate) fn list_objects(
    py: Python<'_>,
    url: &str,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Vec<(String, u64, String, f64)>> {
    let options = remote_options(storage_options)?;
    let list = |signals: &Signals| ingot_io::binding::list_objects(url, &options, signals);
    let found = Signals::default().run(py, list)?;
    let facts = found
        .into_iter()
        .map(|one| (one.name, one.nbytes, one.tag, one.age.as_secs_f64()));
    Ok(facts.collect())
}

/// The metadata of an index, and the headers of its shards.
type ModelHeaders<'py> = (Option<Bound<'py, PyAny>>, Vec<FileHeader<'py>>);

/// Return the metadata of the index and the headers of all shards, if the Hub has them in one document.
#[pyfunction]
#[pyo3(signature = (url, storage_options = None, max_header_size = None, *, progress = None))]
pub(crate) fn hub_headers<'py>(
    py: Python<'py>,
    url: &str,
    storage_options: Option<&Bound<'py, PyDict>>,
    max_header_size: Option<u64>,
    progress: Option<Bound<'py, PyAny>>,
) -> PyResult<Option<ModelHeaders<'py>>> {
    let options = remote_options(storage_options)?;
    let limits = remote_limits("accept", max_header_size)?;
    let fetch = |signals: &Signals| ingot_io::binding::hub_headers(url, &options, &limits, signals);
    let Some(found) = Signals::telling(progress).run(py, fetch)? else {
        return Ok(None);
    };
    let metadata = found.metadata().map(|text| shards::loads(py, text)).transpose()?;
    let headers = found.iter().map(|(shard, header)| file_header(py, shard, header));
    Ok(Some((metadata, headers.collect::<PyResult<_>>()?)))
}

/// Return the name of the file behind a URL.
#[pyfunction]
pub(crate) fn url_file_name(url: &str) -> String {
    ingot_io::binding::url_file_name(url)
}
