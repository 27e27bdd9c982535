//! Files that are filled tensor by tensor.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use ingot_format::{Dtype, Index, Quoted, Spec};
use ingot_io::{EditError, Error, Failure};
use pyo3::prelude::*;

use crate::errors::{about_tensor, raise};
use crate::index;
use crate::intake::{Exporter, borrowed};
use crate::open::Checkpoint;
use crate::paths::file_path;
use crate::read::tensor_name;
use crate::serialize::{format_of, layout_options, save_options};
use crate::watch::Signals;

/// A file whose tensors are declared, and then written in any order. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Writer {
    /// Each write holds a reference, so that `close` need not wait for it.
    writer: RwLock<Held<Arc<ingot_io::Writer>>>,
}

/// A writer that is open, or was closed.
enum Held<T> {
    Open(T),
    /// In a forked process with the path of the file, which is the parent's.
    Closed(Option<PathBuf>),
}

impl<T> Held<T> {
    fn open(&self) -> Result<&T, Error> {
        match self {
            Held::Open(held) => Ok(held),
            Held::Closed(path) => Err(closed(path.as_deref())),
        }
    }

    fn open_mut(&mut self) -> Result<&mut T, Error> {
        match self {
            Held::Open(held) => Ok(held),
            Held::Closed(path) => Err(closed(path.as_deref())),
        }
    }

    /// Closes the file in a forked process, which would else keep the parent's lock on the file after the parent has
    /// ended.
    fn disown(&mut self, path: impl FnOnce(&T) -> &Path) {
        if let Held::Open(held) = self {
            *self = Held::Closed(Some(path(held).to_owned()));
        }
    }
}

fn closed(parents: Option<&Path>) -> Error {
    match parents {
        None => Failure::Closed.into(),
        Some(path) => EditError::Forked.about(path),
    }
}

#[pymethods]
impl Writer {
    #[staticmethod]
    #[pyo3(signature = (
        path, specs, metadata, format, *, records = BTreeMap::new(), reserve = 0, align = 8, durable = true, overwrite = false,
        replace_read_only = false,
    ))]
    #[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
    fn create(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        specs: Vec<(String, String, Vec<u64>)>,
        metadata: Option<&Bound<'_, PyAny>>,
        format: &str,
        records: BTreeMap<String, String>,
        reserve: u64,
        align: u64,
        durable: bool,
        overwrite: bool,
        replace_read_only: bool,
    ) -> PyResult<Writer> {
        let path = file_path(path)?;
        let format = format_of(format)?;
        let pairs = crate::intake::metadata_of_new(metadata, records)?;
        let layout = layout_options(reserve, align)?;
        let options = save_options(durable, overwrite, replace_read_only);
        let specs = specs
            .iter()
            .map(|spec| declared(py, spec))
            .collect::<PyResult<Vec<_>>>()?;
        let writer = Signals::detach(py, |signals| {
            let pairs = pairs.as_deref().map(borrowed);
            ingot_io::Writer::create(
                &path,
                &specs,
                pairs.as_deref(),
                format,
                &layout,
                &options,
                signals,
            )
        })?;
        Ok(Writer::of(writer))
    }

    #[staticmethod]
    #[pyo3(signature = (path, *, finish = false, durable = true))]
    fn join(py: Python<'_>, path: &Bound<'_, PyAny>, finish: bool, durable: bool) -> PyResult<Writer> {
        let path = file_path(path)?;
        let options = save_options(durable, true, false);
        let join = |signals: &Signals| ingot_io::Writer::join(&path, finish, &options, signals);
        Signals::detach(py, join).map(Writer::of)
    }

    fn names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let writer = self.opened(py)?;
        Ok(writer.header().names().map(ToOwned::to_owned).collect())
    }

    fn write(
        &self,
        name: &Bound<'_, PyAny>,
        tensor: &Bound<'_, PyAny>,
        index: &Bound<'_, PyAny>,
        payload: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = name.py();
        let writer = self.opened(py)?;
        let index: Vec<Index> = index::of_tensor(tensor_name(name)?, index)?;
        let items = [(name.clone(), tensor.clone())];
        let exporter = Exporter::new(None, payload);
        for (name, part) in exporter.take(&items)? {
            let written = Signals::detach(py, |signals| {
                writer.write(name, &index, part.dtype, &part.shape, &part.payload(), signals)
            });
            written.map_err(|fault| exporter.raised.or(fault))?;
        }
        Ok(())
    }

    #[getter]
    fn temporary_path(&self, py: Python<'_>) -> PyResult<OsString> {
        Ok(self.opened(py)?.temporary_path().into_os_string())
    }

    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let writer = self.opened(py)?;
        Signals::detach(py, |signals| writer.commit(signals))
    }

    fn close(&self, py: Python<'_>) {
        let mut held = self.writer.write().unwrap_or_else(PoisonError::into_inner);
        let writer = std::mem::replace(&mut *held, Held::Closed(None));
        drop(held);
        py.detach(|| drop(writer));
    }

    fn disown(&self) {
        // If another thread of the parent had locked it, it stays locked in the fork.
        if let Ok(mut held) = self.writer.try_write() {
            held.disown(|writer| writer.path());
        }
    }
}

/// A file of another format. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct ForeignFile(ingot_io::binding::ForeignFile);

#[pymethods]
impl ForeignFile {
    #[staticmethod]
    fn open(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<ForeignFile> {
        let path = file_path(path)?;
        Signals::detach(py, |_| ingot_io::binding::ForeignFile::open(&path)).map(ForeignFile)
    }

    fn copy(
        &self,
        py: Python<'_>,
        position: u64,
        writer: &Writer,
        name: &str,
        index: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let writer = writer.opened(py)?;
        let index = index::of_tensor(name, index)?;
        Signals::detach(py, |signals| {
            self.0.copy(position, &writer, name, &index, signals)
        })
    }

    fn agrees(
        &self,
        py: Python<'_>,
        position: u64,
        checkpoint: &Checkpoint,
        name: &str,
        begin: u64,
        nbytes: u64,
    ) -> PyResult<bool> {
        let checkpoint = checkpoint.opened(py)?;
        Signals::detach(py, |signals| {
            let tensor = checkpoint.find(name)?;
            self.0.agrees(position, &tensor, begin, nbytes, signals)
        })
    }
}

impl Writer {
    fn of(writer: ingot_io::Writer) -> Writer {
        Writer {
            writer: RwLock::new(Held::Open(Arc::new(writer))),
        }
    }

    fn opened(&self, py: Python<'_>) -> PyResult<Arc<ingot_io::Writer>> {
        let writer = self.writer.read().unwrap_or_else(PoisonError::into_inner);
        writer.open().cloned().map_err(|fault| raise(py, &fault))
    }
}

/// A file to which tensors are appended. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Appender {
    appender: Mutex<Held<ingot_io::Appender>>,
}

#[pymethods]
impl Appender {
    #[staticmethod]
    #[pyo3(signature = (
        path, reserve, metadata, *, durable = true, overwrite = false, replace_read_only = false,
    ))]
    fn create(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        reserve: u64,
        metadata: Option<&Bound<'_, PyAny>>,
        durable: bool,
        overwrite: bool,
        replace_read_only: bool,
    ) -> PyResult<Appender> {
        let path = file_path(path)?;
        let pairs = crate::intake::metadata_of_new(metadata, BTreeMap::new())?;
        let options = save_options(durable, overwrite, replace_read_only);
        let appender = Signals::detach(py, |signals| {
            let pairs = pairs.as_deref().map(borrowed);
            ingot_io::Appender::create(&path, reserve, pairs.as_deref(), &options, signals)
        })?;
        Ok(Appender {
            appender: Mutex::new(Held::Open(appender)),
        })
    }

    fn append(
        &self,
        name: &Bound<'_, PyAny>,
        tensor: &Bound<'_, PyAny>,
        payload: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = name.py();
        let items = [(name.clone(), tensor.clone())];
        let exporter = Exporter::new(None, payload);
        for (name, new) in exporter.take(&items)? {
            let appended = self.with(py, |appender, signals| {
                appender.append(name, new.dtype, &new.shape, &new.payload(), signals)
            });
            appended.map_err(|fault| exporter.raised.or(fault))?;
        }
        Ok(())
    }

    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |appender, signals| appender.commit(signals))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let mut held = self.appender.lock().unwrap_or_else(PoisonError::into_inner);
            *held = Held::Closed(None);
        });
    }

    fn disown(&self) {
        // As in `Writer::disown`.
        if let Ok(mut held) = self.appender.try_lock() {
            held.disown(ingot_io::Appender::path);
        }
    }
}

impl Appender {
    /// Calls `work`, one call at a time. The interpreter is released while a call waits.
    fn with(
        &self,
        py: Python<'_>,
        work: impl Send + FnOnce(&mut ingot_io::Appender, &Signals) -> Result<(), Error>,
    ) -> PyResult<()> {
        Signals::detach(py, |signals| {
            let mut appender = self.appender.lock().unwrap_or_else(PoisonError::into_inner);
            work(appender.open_mut()?, signals)
        })
    }
}

fn declared<'a>(py: Python<'_>, (name, code, shape): &'a (String, String, Vec<u64>)) -> PyResult<Spec<'a>> {
    let dtype = Dtype::from_code(code).ok_or_else(|| {
        let message = format!("tensor {}: unknown dtype {}", Quoted(name), Quoted(code));
        about_tensor(py, "SaveError", "unknown-dtype", name, &message)
    })?;
    Ok(Spec { name, dtype, shape })
}
