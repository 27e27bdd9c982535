//! Open checkpoints of many files. What can be asked of one is what can be asked of a single file.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use ingot_format::Entry;
use ingot_io::{CheckpointOptions, Error, Opened, Reach, ReadOptions, ShardPlace, Tensor};
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
        Opened::Checkpoint(checkpoint) => Ok(Bound::new(py, Checkpoint::of(checkpoint))?.into_any()),
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
        let names = PyList::empty(py);
        for name in self.opened(py)?.names() {
            names.append(name)?;
        }
        Ok(names)
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
        for (name, shard) in checkpoint.index().shards().iter().zip(checkpoint.shards()) {
            all.set_item(name, texts(py, shard.header())?)?;
        }
        Ok(all)
    }

    /// The bytes of all tensors, and what the index says of them where that is wrong.
    fn total_nbytes(&self, py: Python<'_>) -> PyResult<(u64, Option<u64>)> {
        let checkpoint = self.opened(py)?;
        Ok((checkpoint.nbytes(), checkpoint.wrong_total()))
    }

    fn parameter_count<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.opened(py)?;
        counts(
            py,
            ingot_io::parameter_count(checkpoint.shards().iter().map(ingot_io::Archive::header)),
        )
    }

    fn info(&self, py: Python<'_>, name: &str) -> PyResult<TensorInfo> {
        let checkpoint = self.opened(py)?;
        TensorInfo::of(py, find(py, &checkpoint, name)?.entry())
    }

    /// The path of the shard that the tensor is in.
    fn shard_of(&self, py: Python<'_>, name: &str) -> PyResult<OsString> {
        let checkpoint = self.opened(py)?;
        let shard = find(py, &checkpoint, name)?.archive();
        Ok(shard.path().unwrap_or(&self.path).as_os_str().to_owned())
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
        let places = match names {
            None => checkpoint.all_places().collect(),
            Some(names) => places(py, &checkpoint, names)?,
        };
        let wanted = places.iter().filter_map(|&place| checkpoint.tensor(place));
        // All refusals come before the first byte is read.
        for tensor in wanted.clone() {
            wrap.accepts(py, tensor.archive().path(), tensor.entry())?;
        }
        let options = ReadOptions { threads };
        let regions =
            Signals::telling(progress).run(py, |signals| checkpoint.regions(&places, &options, signals))?;
        let tensors = PyDict::new(py);
        let mut shared = None;
        for (tensor, region) in wanted.zip(&regions) {
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
    fn of(checkpoint: ingot_io::Checkpoint) -> Checkpoint {
        let first = checkpoint.shards().first();
        Checkpoint {
            path: checkpoint.path().to_owned(),
            shards: checkpoint
                .shards()
                .iter()
                .filter_map(ingot_io::Archive::path)
                .map(Path::to_owned)
                .collect(),
            format: first.map_or("safetensors", |shard| shard.header().format().name()),
            backend: first.map_or("pread", ingot_io::Archive::backend),
            why: first.map_or("no file to read", ingot_io::Archive::why).to_owned(),
            checkpoint: RwLock::new(Some(Arc::new(checkpoint))),
        }
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
    checkpoint.find(name).map_err(|error| raise(py, &error))
}

fn places(
    py: Python<'_>,
    checkpoint: &ingot_io::Checkpoint,
    names: &Bound<'_, PyAny>,
) -> PyResult<Vec<ShardPlace>> {
    if names.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err(
            "expected a sequence of names, found a single string",
        ));
    }
    let mut places = Vec::new();
    for name in names.try_iter()? {
        let name = name?;
        let name = name.extract::<&str>()?;
        match checkpoint.place(name) {
            Some(place) => places.push(place),
            // It has the words for what is not there.
            None => drop(find(py, checkpoint, name)?),
        }
    }
    Ok(places)
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
