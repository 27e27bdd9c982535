//! Files of any content, which are renamed to their final names once they are complete.

use std::ffi::{OsStr, OsString};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ingot_format::{Dtype, to_u64};
use ingot_io::binding::{Pieces, save_pieces};
use ingot_io::{Failure, Payload};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

use crate::paths::file_path;
use crate::serialize::save_options;
use crate::tensor::Imported;
use crate::watch::Signals;

/// Write a file of these pieces. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, pieces, *, durable = true, overwrite = false, replace_read_only = false, progress = None))]
pub(crate) fn replace_file(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    pieces: Vec<Bound<'_, PyAny>>,
    durable: bool,
    overwrite: bool,
    replace_read_only: bool,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<()> {
    let path = file_path(path)?;
    let options = save_options(durable, overwrite, replace_read_only);
    let held: Vec<Imported> = pieces.iter().map(imported).collect::<PyResult<_>>()?;
    Signals::telling(progress).run(py, |signals| {
        let contents: Vec<Payload<'_>> = held.iter().map(Imported::payload).collect();
        save_pieces(&path, Ok(Pieces::of_bytes(&contents)), &options, signals)
    })
}

/// Return the bytes of a buffer as a payload.
pub(crate) fn imported(piece: &Bound<'_, PyAny>) -> PyResult<Imported> {
    let buffer = PyUntypedBuffer::get(piece)?;
    Imported::from_buffer(Dtype::U8, vec![to_u64(buffer.len_bytes())], buffer)
}

/// Check whether a file may be written to `path`. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, *, overwrite = false, replace_read_only = false))]
pub(crate) fn check_destination(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    overwrite: bool,
    replace_read_only: bool,
) -> PyResult<()> {
    let path = file_path(path)?;
    let options = save_options(false, overwrite, replace_read_only);
    Signals::detach(py, |signals| {
        ingot_io::binding::check_destination(&path, &options, signals)
    })
}

/// A temporary file that callers fill before it is renamed. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct TemporaryFile {
    temporary_path: OsString,
    /// `None` once closed.
    file: Mutex<Option<ingot_io::binding::TemporaryFile>>,
}

#[pymethods]
impl TemporaryFile {
    #[staticmethod]
    #[pyo3(signature = (path, *, durable = true, overwrite = false, replace_read_only = false))]
    fn create(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        durable: bool,
        overwrite: bool,
        replace_read_only: bool,
    ) -> PyResult<TemporaryFile> {
        let path = file_path(path)?;
        let options = save_options(durable, overwrite, replace_read_only);
        let file = Signals::detach(py, |signals| {
            ingot_io::binding::TemporaryFile::create(&path, &options, signals)
        })?;
        Ok(TemporaryFile {
            temporary_path: file.temporary_path().unwrap_or_default().into_os_string(),
            file: Mutex::new(Some(file)),
        })
    }

    #[getter]
    fn temporary_path(&self) -> &OsStr {
        &self.temporary_path
    }

    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        Signals::detach(py, |signals| {
            // The lock is released first, because a child after a fork would wait for it forever.
            let mut file = self.locked().take().ok_or(Failure::Closed)?;
            let committed = file.commit(signals);
            *self.locked() = Some(file);
            committed
        })
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.locked().take()));
    }
}

impl TemporaryFile {
    fn locked(&self) -> MutexGuard<'_, Option<ingot_io::binding::TemporaryFile>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
