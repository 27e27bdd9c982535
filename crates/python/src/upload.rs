//! Copying a file, or bytes, to a store.

use ingot_io::Payload;
use ingot_io::binding::{Pieces, UploadOptions, upload_file, upload_pieces};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::paths::file_path;
use crate::remote::remote_options;
use crate::watch::Signals;

/// Write a file, or bytes, to an object of a store, and return the number of bytes. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (source, url, *, is_content = false, overwrite = false, storage_options = None, progress = None))]
pub(crate) fn upload(
    py: Python<'_>,
    source: &Bound<'_, PyAny>,
    url: &str,
    is_content: bool,
    overwrite: bool,
    storage_options: Option<&Bound<'_, PyDict>>,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<u64> {
    let remote = remote_options(storage_options)?;
    let options = UploadOptions { overwrite, remote };
    let signals = Signals::telling(progress);
    if is_content {
        let content = source.cast::<PyBytes>()?.as_bytes();
        let payloads = [Payload::from(content)];
        let pieces = Pieces::of_bytes(&payloads);
        let nbytes = pieces.nbytes();
        signals.run(py, |signals| upload_pieces(url, Ok(pieces), &options, signals))?;
        return Ok(nbytes);
    }
    let path = file_path(source)?;
    signals.run(py, |signals| upload_file(&path, url, &options, signals))
}
