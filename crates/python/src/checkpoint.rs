//! Open checkpoints of many files. What can be asked of one is what can be asked of a single file.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use ingot_format::Entry;
use ingot_io::{CheckpointOptions, Error, Opened, Reach};
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
        TensorInfo::of(py, &find(py, &checkpoint, name)?.2)
    }

    /// The path of the shard that the tensor is in.
    fn shard_of(&self, py: Python<'_>, name: &str) -> PyResult<Option<OsString>> {
        let checkpoint = self.opened(py)?;
        let (_, shard, _) = find(py, &checkpoint, name)?;
        Ok(shard.path().map(|path| path.as_os_str().to_owned()))
    }

    #[pyo3(signature = (names, wrap))]
    fn tensors<'py>(
        &self,
        py: Python<'py>,
        names: Option<&Bound<'py, PyAny>>,
        wrap: &Wrap,
    ) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.opened(py)?;
        let numbers = match names {
            None => (0..checkpoint.len()).collect(),
            Some(names) => numbers(py, &checkpoint, names)?,
        };
        let entries = numbers
            .iter()
            .filter_map(|&number| Some(checkpoint.entry(number)?.1));
        // All refusals come before the first byte is read.
        for entry in entries.clone() {
            wrap.accepts(py, &entry)?;
        }
        let regions = Signals::detach(py, |signals| checkpoint.regions(&numbers, signals))?;
        let tensors = PyDict::new(py);
        let mut shared = None;
        for (entry, region) in entries.zip(&regions) {
            let tensor = wrap.wrap(py, region, &entry, &mut shared)?;
            tensors.set_item(PyString::new(py, entry.name), tensor)?;
        }
        Ok(tensors)
    }

    fn tensor<'py>(&self, py: Python<'py>, name: &str, wrap: &Wrap) -> PyResult<Bound<'py, PyAny>> {
        let checkpoint = self.opened(py)?;
        let (_, shard, entry) = find(py, &checkpoint, name)?;
        wrap.accepts(py, &entry)?;
        let region = Signals::detach(py, |signals| shard.read_watched(name, signals))?;
        wrap.wrap(py, &region, &entry, &mut None)
    }

    fn select<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        index: &Bound<'py, PyAny>,
        wrap: &Wrap,
    ) -> PyResult<Bound<'py, PyAny>> {
        let checkpoint = self.opened(py)?;
        let (_, shard, entry) = find(py, &checkpoint, name)?;
        wrap.accepts(py, &entry)?;
        let index = index::parts(index)?;
        let (shape, region) = Signals::detach(py, |signals| shard.select(name, &index, signals))?;
        let part = Entry {
            shape: &shape,
            ..entry
        };
        wrap.accepts(py, &part)?;
        wrap.wrap(py, &region, &part, &mut None)
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

/// A tensor's number, its shard, and what that says of it.
fn find<'a>(
    py: Python<'_>,
    checkpoint: &'a ingot_io::Checkpoint,
    name: &str,
) -> PyResult<(usize, &'a ingot_io::Archive, Entry<'a>)> {
    let number = checkpoint.find(name).map_err(|error| raise(py, &error))?;
    match checkpoint.entry(number) {
        Some((shard, entry)) => Ok((number, shard, entry)),
        None => Err(closed(py, None)),
    }
}

fn numbers(
    py: Python<'_>,
    checkpoint: &ingot_io::Checkpoint,
    names: &Bound<'_, PyAny>,
) -> PyResult<Vec<usize>> {
    if names.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err(
            "expected a sequence of names, found a single string",
        ));
    }
    let number = |name: PyResult<Bound<'_, PyAny>>| Ok(find(py, checkpoint, name?.extract::<&str>()?)?.0);
    names.try_iter()?.map(number).collect()
}
