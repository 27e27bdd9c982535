//! Files that are filled tensor by tensor.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use ingot_format::{Dtype, Index, Quoted, Spec};
use ingot_io::Error;
use pyo3::prelude::*;

use crate::errors::{about_tensor, raise};
use crate::index;
use crate::intake::{Exporter, borrowed};
use crate::open::Archive;
use crate::place::file_path;
use crate::produced::Raised;
use crate::serialize::{format_of, layout_options, save_options};
use crate::watch::Signals;

/// A file whose tensors are declared, and then written in any order. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Writer {
    /// `None` once closed. Whoever writes holds a share of it.
    writer: RwLock<Option<Arc<ingot_io::Writer>>>,
}

#[pymethods]
impl Writer {
    #[staticmethod]
    #[pyo3(signature = (path, specs, metadata, format, *, reserve = 0, align = 8, durable = true, force = false))]
    #[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
    fn create(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        specs: Vec<(String, String, Vec<u64>)>,
        metadata: Option<&Bound<'_, PyAny>>,
        format: &str,
        reserve: u64,
        align: u64,
        durable: bool,
        force: bool,
    ) -> PyResult<Writer> {
        let path = file_path(path)?;
        let format = format_of(format)?;
        let pairs = crate::intake::metadata_of_new(metadata)?;
        let layout = layout_options(reserve, align)?;
        let options = save_options(durable, true, force);
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
    #[pyo3(signature = (path, *, durable = true))]
    fn join(py: Python<'_>, path: &Bound<'_, PyAny>, durable: bool) -> PyResult<Writer> {
        let path = file_path(path)?;
        let options = save_options(durable, true, false);
        Signals::detach(py, |signals| ingot_io::Writer::join(&path, &options, signals)).map(Writer::of)
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
        let index: Vec<Index> = index::parts(index)?;
        let items = [(name.clone(), tensor.clone())];
        let exporter = Exporter {
            export: None,
            payload,
            raised: Raised::default(),
        };
        for (name, part) in exporter.take(&items)? {
            let written = Signals::detach(py, |signals| {
                writer.write(name, &index, part.dtype, &part.shape, &part.payload(), signals)
            });
            written.map_err(|fault| exporter.raised.take().unwrap_or(fault))?;
        }
        Ok(())
    }

    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let writer = self.opened(py)?;
        Signals::detach(py, |signals| writer.commit(signals))
    }

    fn close(&self, py: Python<'_>) {
        let writer = self.writer.write().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(writer));
    }
}

/// A file of another format. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Quarry(ingot_io::Quarry);

#[pymethods]
impl Quarry {
    #[staticmethod]
    fn open(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<Quarry> {
        let path = file_path(path)?;
        Signals::detach(py, |_| ingot_io::Quarry::open(&path)).map(Quarry)
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
        let index = index::parts(index)?;
        Signals::detach(py, |signals| {
            self.0.copy(position, &writer, name, &index, signals)
        })
    }

    fn agrees(
        &self,
        py: Python<'_>,
        position: u64,
        archive: &Archive,
        name: &str,
        begin: u64,
        nbytes: u64,
    ) -> PyResult<bool> {
        let checkpoint = archive.opened(py)?;
        Signals::detach(py, |_| {
            let tensor = checkpoint.find(name)?;
            self.0.agrees(position, &tensor, begin, nbytes)
        })
    }
}

impl Writer {
    fn of(writer: ingot_io::Writer) -> Writer {
        Writer {
            writer: RwLock::new(Some(Arc::new(writer))),
        }
    }

    fn opened(&self, py: Python<'_>) -> PyResult<Arc<ingot_io::Writer>> {
        let writer = self.writer.read().unwrap_or_else(PoisonError::into_inner);
        writer.clone().ok_or_else(|| closed(py))
    }
}

/// A file to which tensors are appended. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Appender {
    /// `None` once closed.
    appender: Mutex<Option<ingot_io::Appender>>,
}

#[pymethods]
impl Appender {
    #[staticmethod]
    #[pyo3(signature = (path, reserve, metadata, *, durable = true, force = false))]
    fn create(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        reserve: u64,
        metadata: Option<&Bound<'_, PyAny>>,
        durable: bool,
        force: bool,
    ) -> PyResult<Appender> {
        let path = file_path(path)?;
        let pairs = crate::intake::metadata_of_new(metadata)?;
        let options = save_options(durable, true, force);
        let appender = Signals::detach(py, |signals| {
            let pairs = pairs.as_deref().map(borrowed);
            ingot_io::Appender::create(&path, reserve, pairs.as_deref(), &options, signals)
        })?;
        Ok(Appender {
            appender: Mutex::new(Some(appender)),
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
        let exporter = Exporter {
            export: None,
            payload,
            raised: Raised::default(),
        };
        for (name, new) in exporter.take(&items)? {
            let appended = self.with(py, |appender, signals| {
                appender.append(name, new.dtype, &new.shape, &new.payload(), signals)
            });
            appended.map_err(|fault| exporter.raised.take().unwrap_or(fault))?;
        }
        Ok(())
    }

    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |appender, signals| appender.commit(signals))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            drop(
                self.appender
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take(),
            );
        });
    }
}

impl Appender {
    /// Calls `work` when nobody else does, without holding the interpreter while it waits.
    fn with(
        &self,
        py: Python<'_>,
        work: impl Send + FnOnce(&mut ingot_io::Appender, &Signals) -> Result<(), Error>,
    ) -> PyResult<()> {
        Signals::detach(py, |signals| {
            let mut appender = self.appender.lock().unwrap_or_else(PoisonError::into_inner);
            match &mut *appender {
                Some(appender) => work(appender, signals),
                None => Err(Error::Closed { path: None }),
            }
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

fn closed(py: Python<'_>) -> PyErr {
    raise(py, &Error::Closed { path: None })
}
