//! Open checkpoints of many files. What can be asked of one is what can be asked of a single file.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use ingot_format::Entry;
use ingot_io::{CheckpointOptions, Error, Opened, Reach, ReadOptions, Tensor};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::errors::raise;
use crate::index;
use crate::open::{Archive, TensorInfo, counts, file_path, options, texts};
use crate::watch::Signals;
use crate::wrap::Wrap;

/// All shards of a checkpoint, open. It never changes but for being closed, and any thread may use it.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Checkpoint {
    /// `None` once closed, as an `Archive`'s.
    checkpoint: RwLock<Option<Arc<ingot_io::Checkpoint>>>,
    path: PathBuf,
    shards: Vec<PathBuf>,
    format: &'static str,
    backend: &'static str,
    why: String,
}

/// An `Archive` or a `Checkpoint`: whatever the path leads to.
#[pyfunction]
#[pyo3(signature = (path, backend = "auto", strict = false, max_header_size = None, confine = false))]
pub(crate) fn open<'py>(
    py: Python<'py>,
    path: &Bound<'py, PyAny>,
    backend: &str,
    strict: bool,
    max_header_size: Option<u64>,
    confine: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let path = file_path(path)?;
    let options = CheckpointOptions {
        open: options(backend, strict, max_header_size)?,
        reach: if confine {
            Reach::Confined
        } else {
            Reach::FollowLinks
        },
    };
    let opened = py.detach(|| ingot_io::open(&path, &options));
    match opened.map_err(|error| raise(py, &error))? {
        Opened::File(archive) => Ok(Bound::new(py, Archive::of(archive))?.into_any()),
        Opened::Checkpoint(checkpoint) => Ok(Bound::new(py, Checkpoint::of(py, checkpoint)?)?.into_any()),
    }
}

#[pymethods]
impl Checkpoint {
    /// The index.
    #[getter]
    fn path(&self) -> OsString {
        self.path.clone().into_os_string()
    }

    /// The paths of all shards, in the order of their names.
    #[getter]
    fn shards(&self) -> Vec<OsString> {
        self.shards
            .iter()
            .map(|path| path.clone().into_os_string())
            .collect()
    }

    #[getter]
    fn format(&self) -> &'static str {
        self.format
    }

    #[getter]
    fn backend(&self) -> &'static str {
        self.backend
    }

    #[getter]
    fn why(&self) -> &str {
        &self.why
    }

    #[getter]
    fn closed(&self) -> bool {
        self.checkpoint
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .is_none()
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.opened(py)?.len())
    }

    fn __contains__(&self, py: Python<'_>, name: &Bound<'_, PyAny>) -> PyResult<bool> {
        let checkpoint = self.opened(py)?;
        // A name that is no string, or no valid one, is in no file.
        Ok(name
            .extract::<&str>()
            .is_ok_and(|name| checkpoint.index().find(name).is_some()))
    }

    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.opened(py)?.names_by_name())
    }

    fn offset_names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let checkpoint = self.opened(py)?;
        let tensors = all(py, &checkpoint)?;
        PyList::new(py, tensors.iter().map(|tensor| tensor.entry().name))
    }

    /// The metadata of the index, by Python's own reader: any JSON, which has been read once and found to be sound.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let checkpoint = self.opened(py)?;
        let Some(text) = checkpoint.index().metadata() else {
            return Ok(None);
        };
        py.import("json")?.call_method1("loads", (text,)).map(Some)
    }

    /// The metadata of each shard, by the name that the index has for it.
    fn shard_metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.opened(py)?;
        let all = PyDict::new(py);
        let shards = shards(py, &checkpoint)?;
        for (name, shard) in checkpoint.index().shards().iter().zip(shards) {
            all.set_item(name, texts(py, shard.header())?)?;
        }
        Ok(all)
    }

    /// What the index says of the bytes of all tensors, and those that there are, once all shards are open and where
    /// the two differ.
    fn wrong_total(&self, py: Python<'_>) -> PyResult<Option<(u64, u64)>> {
        Ok(self.opened(py)?.wrong_total())
    }

    fn parameter_count<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.opened(py)?;
        let headers = shards(py, &checkpoint)?
            .into_iter()
            .map(ingot_io::Archive::header);
        counts(py, ingot_io::parameter_count(headers))
    }

    fn info(&self, py: Python<'_>, name: &str) -> PyResult<TensorInfo> {
        let checkpoint = self.opened(py)?;
        TensorInfo::of(py, find(py, &checkpoint, name)?.entry())
    }

    /// The path of the shard that the tensor is in.
    fn shard_of(&self, py: Python<'_>, name: &str) -> PyResult<OsString> {
        let checkpoint = self.opened(py)?;
        let number = checkpoint.shard_number(name).map_err(|error| raise(py, &error))?;
        Ok(checkpoint.shard_path(number).into_os_string())
    }

    #[pyo3(signature = (names, wrap, *, threads = None, progress = None))]
    fn tensors<'py>(
        &self,
        py: Python<'py>,
        names: Option<&Bound<'py, PyAny>>,
        wrap: &Wrap,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.opened(py)?;
        let wanted = match names {
            None => all(py, &checkpoint)?,
            Some(names) => named(py, &checkpoint, names)?,
        };
        // All refusals come before the first byte is read.
        for tensor in &wanted {
            wrap.accepts(py, tensor.archive().path(), tensor.entry())?;
        }
        let options = ReadOptions { threads };
        let regions = Signals::telling(progress)
            .run(py, |signals| ingot_io::read_tensors(&wanted, &options, signals))?;
        let tensors = PyDict::new(py);
        let mut shared = None;
        for (tensor, region) in wanted.iter().zip(&regions) {
            let (path, entry) = (tensor.archive().path(), tensor.entry());
            let wrapped = wrap.wrap(py, path, region, entry, &mut shared)?;
            tensors.set_item(PyString::new(py, entry.name), wrapped)?;
        }
        Ok(tensors)
    }

    fn tensor<'py>(&self, py: Python<'py>, name: &str, wrap: &Wrap) -> PyResult<Bound<'py, PyAny>> {
        let checkpoint = self.opened(py)?;
        let tensor = find(py, &checkpoint, name)?;
        let (path, entry) = (tensor.archive().path(), tensor.entry());
        wrap.accepts(py, path, entry)?;
        let region = Signals::detach(py, |signals| tensor.read(&ReadOptions::default(), signals))?;
        wrap.wrap(py, path, &region, entry, &mut None)
    }

    fn select<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        index: &Bound<'py, PyAny>,
        wrap: &Wrap,
    ) -> PyResult<Bound<'py, PyAny>> {
        let checkpoint = self.opened(py)?;
        let tensor = find(py, &checkpoint, name)?;
        let (path, entry) = (tensor.archive().path(), tensor.entry());
        wrap.accepts(py, path, entry)?;
        let index = index::parts(index)?;
        let (shape, region) = Signals::detach(py, |signals| tensor.select(&index, signals))?;
        let part = Entry {
            shape: &shape,
            ..*entry
        };
        wrap.accepts(py, path, &part)?;
        wrap.wrap(py, path, &region, &part, &mut None)
    }

    /// A second handle to the same open files, closed on its own.
    fn share(&self, py: Python<'_>) -> PyResult<Checkpoint> {
        Ok(Checkpoint {
            checkpoint: RwLock::new(Some(self.opened(py)?)),
            path: self.path.clone(),
            shards: self.shards.clone(),
            format: self.format,
            backend: self.backend,
            why: self.why.clone(),
        })
    }

    fn close(&self) {
        self.checkpoint
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }
}

impl Checkpoint {
    /// The first shard is opened for what it says of all.
    fn of(py: Python<'_>, checkpoint: ingot_io::Checkpoint) -> PyResult<Checkpoint> {
        let count = checkpoint.index().shards().len();
        let first = match count {
            0 => None,
            _ => Some(
                py.detach(|| checkpoint.shard(0))
                    .map_err(|error| raise(py, &error))?,
            ),
        };
        Ok(Checkpoint {
            path: checkpoint.path().to_owned(),
            shards: (0..count).map(|number| checkpoint.shard_path(number)).collect(),
            format: first.map_or("safetensors", |shard| shard.header().format().name()),
            backend: first.map_or("pread", ingot_io::Archive::backend),
            why: first.map_or("no file to read", ingot_io::Archive::why).to_owned(),
            checkpoint: RwLock::new(Some(Arc::new(checkpoint))),
        })
    }

    fn opened(&self, py: Python<'_>) -> PyResult<Arc<ingot_io::Checkpoint>> {
        let checkpoint = self.checkpoint.read().unwrap_or_else(PoisonError::into_inner);
        checkpoint
            .clone()
            .ok_or_else(|| closed(py, Some(self.path.clone())))
    }
}

fn closed(py: Python<'_>, path: Option<PathBuf>) -> PyErr {
    raise(py, &Error::Closed { path })
}

fn find<'a>(py: Python<'_>, checkpoint: &'a ingot_io::Checkpoint, name: &str) -> PyResult<Tensor<'a>> {
    py.detach(|| checkpoint.find(name))
        .map_err(|error| raise(py, &error))
}

fn shards<'a>(py: Python<'_>, checkpoint: &'a ingot_io::Checkpoint) -> PyResult<Vec<&'a ingot_io::Archive>> {
    py.detach(|| checkpoint.all_shards())
        .map_err(|error| raise(py, &error))
}

fn all<'a>(py: Python<'_>, checkpoint: &'a ingot_io::Checkpoint) -> PyResult<Vec<Tensor<'a>>> {
    py.detach(|| checkpoint.all()).map_err(|error| raise(py, &error))
}

fn named<'a>(
    py: Python<'_>,
    checkpoint: &'a ingot_io::Checkpoint,
    names: &Bound<'_, PyAny>,
) -> PyResult<Vec<Tensor<'a>>> {
    if names.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err(
            "expected a sequence of names, found a single string",
        ));
    }
    let objects = names.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    let names = objects
        .iter()
        .map(|name| name.extract::<&str>())
        .collect::<Result<Vec<_>, _>>()?;
    py.detach(|| checkpoint.find_all(&names))
        .map_err(|error| raise(py, &error))
}

/// An index by itself, without its shards.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct ShardIndex {
    index: ingot_format::ShardIndex,
}

#[pymethods]
impl ShardIndex {
    #[staticmethod]
    fn read(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<ShardIndex> {
        let path = file_path(path)?;
        let index = py.detach(|| ingot_io::read_index(&path));
        index
            .map(|index| ShardIndex { index })
            .map_err(|error| raise(py, &error))
    }

    fn __len__(&self) -> usize {
        self.index.len()
    }

    #[getter]
    fn shards(&self) -> Vec<&str> {
        self.index.shards().iter().map(String::as_str).collect()
    }

    fn shard_of(&self, name: &str) -> Option<&str> {
        self.index.shard_of(name)
    }
}
