//! Open files.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use ingot_format::{Entry, Leniency, Limits};
use ingot_io::{Backend, Error, OpenOptions, Proof, ReadOptions, Region, Tensor};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::errors::raise;
use crate::hash::sha256;
use crate::index;
use crate::parts::{self, Memory, Wanted};
use crate::prefetch::{Stream, request};
use crate::tensor::BufferSource;
use crate::watch::Signals;
use crate::wrap::Wrap;

/// An open file, or one in memory. It never changes but for being closed, and any thread may use it.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Archive {
    /// `None` once closed. Whoever reads holds a share of it, so closing waits for nobody and harms nobody.
    archive: RwLock<Option<Arc<ingot_io::Archive>>>,
    path: Option<PathBuf>,
    format: &'static str,
    backend: &'static str,
    why: String,
}

/// What a header says of one tensor.
#[pyclass(frozen, get_all, module = "ingot._native")]
pub(crate) struct TensorInfo {
    name: String,
    dtype: &'static str,
    shape: Py<PyTuple>,
    begin: u64,
    end: u64,
    nbytes: u64,
}

impl TensorInfo {
    fn of(py: Python<'_>, entry: &Entry<'_>) -> PyResult<TensorInfo> {
        Ok(TensorInfo {
            name: entry.name.to_owned(),
            dtype: entry.dtype.code(),
            shape: PyTuple::new(py, entry.shape)?.unbind(),
            begin: entry.begin,
            end: entry.end,
            nbytes: entry.nbytes(),
        })
    }
}

#[pymethods]
impl TensorInfo {
    fn __repr__(&self) -> String {
        format!(
            "TensorInfo(name={:?}, dtype={:?}, shape={}, begin={}, end={}, nbytes={})",
            self.name, self.dtype, self.shape, self.begin, self.end, self.nbytes
        )
    }
}

#[pymethods]
impl Archive {
    #[staticmethod]
    #[pyo3(signature = (path, backend = "auto", strict = false, max_header_size = None))]
    fn open(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        backend: &str,
        strict: bool,
        max_header_size: Option<u64>,
    ) -> PyResult<Archive> {
        let path = file_path(path)?;
        let backend = Backend::from_name(backend).ok_or_else(|| {
            PyValueError::new_err(format!(
                "unknown backend {backend:?}: expected \"auto\", \"mmap\" or \"pread\""
            ))
        })?;
        let options = OpenOptions {
            backend,
            limits: limits(strict, max_header_size),
        };
        let archive = py.detach(|| ingot_io::Archive::open(&path, &options));
        archive.map(Archive::of).map_err(|error| raise(py, &error))
    }

    #[staticmethod]
    #[pyo3(signature = (data, strict = false, max_header_size = None))]
    fn from_buffer(
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        strict: bool,
        max_header_size: Option<u64>,
    ) -> PyResult<Archive> {
        let source = BufferSource::new(data).map_err(|fault| buffer_expected(data, &fault))?;
        let limits = limits(strict, max_header_size);
        let archive = py.detach(|| ingot_io::Archive::from_source(Box::new(source), &limits));
        archive.map(Archive::of).map_err(|error| raise(py, &error))
    }

    #[getter]
    fn path(&self) -> Option<OsString> {
        self.path.clone().map(PathBuf::into_os_string)
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
        self.archive
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .is_none()
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.opened(py)?.header().len())
    }

    fn __contains__(&self, py: Python<'_>, name: &Bound<'_, PyAny>) -> PyResult<bool> {
        let archive = self.opened(py)?;
        // A name that is no string, or no valid one, is in no file.
        Ok(name
            .extract::<&str>()
            .is_ok_and(|name| archive.header().find(name).is_some()))
    }

    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.opened(py)?.header().names_by_name())
    }

    fn offset_names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.opened(py)?.header().names())
    }

    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let archive = self.opened(py)?;
        let Some(metadata) = archive.header().metadata() else {
            return Ok(None);
        };
        let pairs = PyDict::new(py);
        for (key, value) in metadata.iter() {
            pairs.set_item(key, value)?;
        }
        Ok(Some(pairs))
    }

    fn info(&self, py: Python<'_>, name: &str) -> PyResult<TensorInfo> {
        let archive = self.opened(py)?;
        TensorInfo::of(py, find(py, &archive, name)?.entry())
    }

    /// That of all tensors, in the order of the data. Of 500,000 tensors one by one takes three times as long.
    fn infos(&self, py: Python<'_>) -> PyResult<Vec<TensorInfo>> {
        let archive = self.opened(py)?;
        let entries = archive.header().entries();
        entries.map(|entry| TensorInfo::of(py, &entry)).collect()
    }

    #[pyo3(signature = (names, wrap, kept, expected_sha256, *, threads = None, progress = None))]
    #[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
    fn proven<'py>(
        &self,
        py: Python<'py>,
        names: Option<&Bound<'py, PyAny>>,
        wrap: &Wrap,
        kept: bool,
        expected_sha256: Option<&str>,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let archive = self.opened(py)?;
        let proof = Proof {
            kept,
            sha256: expected_sha256.map(|hex| sha256(py, hex)).transpose()?,
        };
        let options = ReadOptions { threads };
        let regions =
            |numbers: &[usize], signals: &Signals| archive.proven(numbers, &proof, &options, signals);
        whole(py, &archive, names, wrap, progress, regions)
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
        let archive = self.opened(py)?;
        let options = ReadOptions { threads };
        let regions = |numbers: &[usize], signals: &Signals| archive.regions(numbers, &options, signals);
        whole(py, &archive, names, wrap, progress, regions)
    }

    fn tensor<'py>(&self, py: Python<'py>, name: &str, wrap: &Wrap) -> PyResult<Bound<'py, PyAny>> {
        let archive = self.opened(py)?;
        let tensor = find(py, &archive, name)?;
        wrap.accepts(py, archive.path(), tensor.entry())?;
        let region = Signals::detach(py, |signals| tensor.read(&ReadOptions::default(), signals))?;
        wrap.wrap(py, archive.path(), &region, tensor.entry(), &mut None)
    }

    fn select<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        index: &Bound<'py, PyAny>,
        wrap: &Wrap,
    ) -> PyResult<Bound<'py, PyAny>> {
        let archive = self.opened(py)?;
        let tensor = find(py, &archive, name)?;
        wrap.accepts(py, archive.path(), tensor.entry())?;
        let index = index::parts(index)?;
        let (shape, region) = Signals::detach(py, |signals| tensor.select(&index, signals))?;
        let part = Entry {
            shape: &shape,
            ..*tensor.entry()
        };
        wrap.accepts(py, archive.path(), &part)?;
        wrap.wrap(py, archive.path(), &region, &part, &mut None)
    }

    /// Starts to read tensors in the background: pairs of a name and what to take of it, None for all.
    #[pyo3(signature = (requests, ahead, threads = None))]
    fn stream(
        &self,
        py: Python<'_>,
        requests: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        ahead: u64,
        threads: Option<NonZeroUsize>,
    ) -> PyResult<Stream> {
        let archive = self.opened(py)?;
        let requests = requests
            .into_iter()
            .map(|(name, index)| request(find(py, &archive, name.extract()?)?.number(), &index))
            .collect::<PyResult<_>>()?;
        Ok(Stream::new(archive, requests, ahead, threads))
    }

    /// Brings the bytes of these tensors, or of all, into the system's cache; says how many.
    #[pyo3(signature = (names = None, *, threads = None, progress = None))]
    fn warm(
        &self,
        py: Python<'_>,
        names: Option<&Bound<'_, PyAny>>,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let archive = self.opened(py)?;
        let numbers = chosen(py, &archive, names)?;
        let options = ReadOptions { threads };
        Signals::telling(progress).run(py, |signals| archive.warm(&numbers, &options, signals))
    }

    #[pyo3(signature = (wanted, wrap, *, threads = None, progress = None))]
    fn parts<'py>(
        &self,
        py: Python<'py>,
        wanted: Vec<Wanted<'py>>,
        wrap: &Wrap,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let archive = self.opened(py)?;
        let signals = Signals::telling(progress);
        parts::take(py, &archive, &wanted, wrap, &ReadOptions { threads }, signals)
    }

    #[pyo3(signature = (wanted, memories, *, threads = None, progress = None))]
    fn fill<'py>(
        &self,
        py: Python<'py>,
        wanted: Vec<Wanted<'py>>,
        memories: Vec<Memory<'py>>,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let archive = self.opened(py)?;
        let signals = Signals::telling(progress);
        parts::fill(py, &archive, &wanted, memories, &ReadOptions { threads }, signals)
    }

    /// A second handle to the same open file, closed on its own.
    fn share(&self, py: Python<'_>) -> PyResult<Archive> {
        Ok(Archive {
            archive: RwLock::new(Some(self.opened(py)?)),
            path: self.path.clone(),
            format: self.format,
            backend: self.backend,
            why: self.why.clone(),
        })
    }

    fn close(&self) {
        self.archive
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }
}

impl Archive {
    fn of(archive: ingot_io::Archive) -> Archive {
        Archive {
            path: archive.path().map(ToOwned::to_owned),
            format: archive.header().format().name(),
            backend: archive.backend(),
            why: archive.why().to_owned(),
            archive: RwLock::new(Some(Arc::new(archive))),
        }
    }

    pub(crate) fn opened(&self, py: Python<'_>) -> PyResult<Arc<ingot_io::Archive>> {
        let archive = self.archive.read().unwrap_or_else(PoisonError::into_inner);
        archive.clone().ok_or_else(|| {
            raise(
                py,
                &Error::Closed {
                    path: self.path.clone(),
                },
            )
        })
    }
}

/// The tensors of these names, or all, of which `regions` gives the bytes.
fn whole<'py>(
    py: Python<'py>,
    archive: &ingot_io::Archive,
    names: Option<&Bound<'py, PyAny>>,
    wrap: &Wrap,
    progress: Option<Bound<'py, PyAny>>,
    regions: impl Send + FnOnce(&[usize], &Signals) -> Result<Vec<Region>, Error>,
) -> PyResult<Bound<'py, PyDict>> {
    let numbers = chosen(py, archive, names)?;
    let entries = numbers
        .iter()
        .filter_map(|&number| archive.header().entry(number));
    // All refusals come before the first byte is read.
    for entry in entries.clone() {
        wrap.accepts(py, archive.path(), &entry)?;
    }
    let regions = Signals::telling(progress).run(py, |signals| regions(&numbers, signals))?;
    let tensors = PyDict::new(py);
    let mut shared = None;
    for (entry, region) in entries.zip(&regions) {
        let tensor = wrap.wrap(py, archive.path(), region, &entry, &mut shared)?;
        tensors.set_item(PyString::new(py, entry.name), tensor)?;
    }
    Ok(tensors)
}

fn limits(strict: bool, max_header_size: Option<u64>) -> Limits {
    Limits {
        header_nbytes: max_header_size.unwrap_or(Limits::HEADER_NBYTES),
        leniency: if strict {
            Leniency::Refuse
        } else {
            Leniency::Accept
        },
    }
}

/// What `os.fsencode` makes of a path: `str`, `bytes` and `os.PathLike`, also names that are not UTF-8.
pub(crate) fn file_path(path: &Bound<'_, PyAny>) -> PyResult<PathBuf> {
    let encoded = path.py().import("os")?.call_method1("fsencode", (path,))?;
    let bytes = encoded.cast::<PyBytes>()?.as_bytes();
    // As `open()` does. The system would see a shorter path.
    if bytes.contains(&0) {
        return Err(PyValueError::new_err("embedded null byte in the path"));
    }
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        Ok(PathBuf::from(std::ffi::OsStr::from_bytes(bytes)))
    }
    #[cfg(not(unix))]
    {
        // There os.fsencode gives UTF-8.
        Ok(PathBuf::from(String::from_utf8_lossy(bytes).into_owned()))
    }
}

fn buffer_expected(data: &Bound<'_, PyAny>, fault: &PyErr) -> PyErr {
    if fault.is_instance_of::<PyTypeError>(data.py()) {
        let class = data
            .get_type()
            .name()
            .map(|name| name.to_string())
            .unwrap_or_default();
        return PyTypeError::new_err(format!("expected bytes or another buffer, found {class}"));
    }
    fault.clone_ref(data.py())
}

fn find<'a>(py: Python<'_>, archive: &'a ingot_io::Archive, name: &str) -> PyResult<Tensor<'a>> {
    archive.find(name).map_err(|error| raise(py, &error))
}

/// The places of these names, or of all, in the header's order of data.
pub(crate) fn chosen(
    py: Python<'_>,
    archive: &ingot_io::Archive,
    names: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<usize>> {
    let Some(names) = names else {
        return Ok((0..archive.header().len()).collect());
    };
    if names.is_instance_of::<PyString>() {
        // A str is an iterable of str, so it would be taken for the names of its letters.
        return Err(PyTypeError::new_err(
            "names must be an iterable of str, not a str",
        ));
    }
    let number = |name: PyResult<Bound<'_, PyAny>>| Ok(find(py, archive, name?.extract::<&str>()?)?.number());
    names.try_iter()?.map(number).collect()
}
