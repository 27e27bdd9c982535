//! Open files and checkpoints.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf, absolute};
use std::sync::{Arc, PoisonError, RwLock};

use ingot_format::{Leniency, Limits, natural_order};
use ingot_io::binding::{
    Alias, Origin, Proof, REMOTE_HEADER_NBYTES, Request, ShardHeader, ShardHeaders, dequantise, read_to,
    remapped, warm_tensors,
};
use ingot_io::{
    Backend, CheckpointOptions, Dtype, Error, Failure, Job, OpenOptions, Reach, ReadOptions, Tensor,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};

use crate::destination::Destinations;
use crate::device::{Devices, Gpu};
use crate::errors::{class_of, raise};
use crate::hash::{self, sha256};
use crate::header::{FileHeader, TensorInfo, file_header, texts};
use crate::index;
use crate::intake::borrowed;
use crate::object::ObjectSource;
use crate::paths::file_path;
use crate::prefetch::Stream;
use crate::read::{self, Wanted, chosen, find, found, index_of, selected, tensor_name, whole, whole_jobs};
use crate::remap::{NewTensor, assembled};
use crate::remote::remote_options;
use crate::shards::{self, ShardIndex};
use crate::tensor::{BufferSource, memoryview};
use crate::watch::Signals;
use crate::wrap::Wrap;

/// An open file, bytes in memory, or the open files of a checkpoint. Only closing changes it, and any thread may use it.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Checkpoint {
    /// `None` once closed. Each read holds a reference, so closing neither waits for reads nor breaks them.
    checkpoint: RwLock<Option<Arc<ingot_io::Checkpoint>>>,
    path: Option<PathBuf>,
    /// `path` as an absolute path, for files of this machine: the process may change its directory.
    at: Option<PathBuf>,
    shards: Vec<PathBuf>,
    format: &'static str,
    backend: &'static str,
    why: String,
    /// The tensors whose parts ranks slice one by one.
    joins: Joins,
}

/// The dimension along which a tensor is joined from parts, and their sizes, by the name of the tensor.
type Joins = BTreeMap<String, (usize, Vec<u64>)>;

#[pymethods]
impl Checkpoint {
    #[staticmethod]
    #[pyo3(signature = (path, backend = "auto", leniency = "accept", max_header_size = None, confine = false, lent = false))]
    fn open(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        backend: &str,
        leniency: &str,
        max_header_size: Option<u64>,
        confine: bool,
        lent: bool,
    ) -> PyResult<Checkpoint> {
        let path = file_path(path)?;
        let mut options = CheckpointOptions::default();
        options.open.backend = backend_of(backend)?;
        options.open.limits = limits(leniency, max_header_size)?;
        options.is_one_of_many = lent;
        if confine {
            options.reach = Reach::Confined;
        }
        Checkpoint::at_path(py, &path, &options)
    }

    /// Open a path, with the headers that another process read.
    #[staticmethod]
    fn open_with(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        backend: &str,
        headers: Headers,
    ) -> PyResult<Checkpoint> {
        let path = file_path(path)?;
        let mut options = CheckpointOptions::default();
        options.open.backend = backend_of(backend)?;
        options.headers = shard_headers(headers);
        Checkpoint::at_path(py, &path, &options)
    }

    /// Open a URL, with the headers that another process read.
    #[staticmethod]
    fn open_url_with(
        py: Python<'_>,
        url: &str,
        storage_options: Option<&Bound<'_, PyDict>>,
        headers: Headers,
    ) -> PyResult<Checkpoint> {
        let (options, headers) = (remote_options(storage_options)?, shard_headers(headers));
        let limits = remote_limits("accept", None)?;
        let open = |signals: &Signals| {
            let opened = ingot_io::Checkpoint::open_url_with(url, &options, &limits, headers, signals);
            Checkpoint::of(opened?)
        };
        Signals::default().run(py, open)
    }

    /// Open a URL.
    #[staticmethod]
    #[pyo3(signature = (url, storage_options = None, leniency = "accept", max_header_size = None, *, progress = None))]
    fn open_url(
        py: Python<'_>,
        url: &str,
        storage_options: Option<&Bound<'_, PyDict>>,
        leniency: &str,
        max_header_size: Option<u64>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Checkpoint> {
        let options = remote_options(storage_options)?;
        let limits = remote_limits(leniency, max_header_size)?;
        let open = |signals: &Signals| {
            Checkpoint::of(ingot_io::Checkpoint::open_url(url, &options, &limits, signals)?)
        };
        Signals::telling(progress).run(py, open)
    }

    #[staticmethod]
    #[pyo3(signature = (data, leniency = "accept", max_header_size = None))]
    fn from_buffer(
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        leniency: &str,
        max_header_size: Option<u64>,
    ) -> PyResult<Checkpoint> {
        let source = BufferSource::new(data).map_err(|fault| buffer_expected(data, &fault))?;
        let options = OpenOptions::new().limits(limits(leniency, max_header_size)?);
        let source = Origin::Other(Box::new(source));
        Checkpoint::of_archive(py, || ingot_io::Archive::of(source, None, &options, None))
    }

    /// Open a `Reader` of `_read/source.py`, whose `name` is for the errors.
    #[staticmethod]
    #[pyo3(signature = (reader, leniency = "accept", max_header_size = None))]
    fn from_object(
        py: Python<'_>,
        reader: &Bound<'_, PyAny>,
        leniency: &str,
        max_header_size: Option<u64>,
    ) -> PyResult<Checkpoint> {
        let path: Option<String> = reader.getattr("name")?.extract()?;
        let source = Origin::Other(Box::new(ObjectSource::new(reader)?));
        let options = OpenOptions::new().limits(limits(leniency, max_header_size)?);
        let path = path.as_deref().map(Path::new);
        Checkpoint::of_archive(py, || ingot_io::Archive::of(source, path, &options, None))
    }

    /// Return the checkpoint with its weights dequantised as they are read, and the names that it lacks. `None` if no tensor
    /// is quantised.
    fn dequantized(
        &self,
        py: Python<'_>,
        config: Option<&str>,
        dtype: Option<&str>,
    ) -> PyResult<Option<(Checkpoint, Vec<String>)>> {
        let (checkpoint, dtype) = (self.opened(py)?, dtype.and_then(Dtype::from_code));
        let open = || match dequantise(checkpoint, config, dtype)? {
            None => Ok(None),
            Some(found) => Ok(Some((Checkpoint::of(found.checkpoint)?, found.removed))),
        };
        py.detach(open).map_err(|error| raise(py, &error))
    }

    /// Return a checkpoint of tensors that are put together from parts of these. See `_native.pyi`.
    fn remapped(
        &self,
        py: Python<'_>,
        tensors: Vec<NewTensor>,
        metadata: Vec<(String, String)>,
        joins: Joins,
    ) -> PyResult<Checkpoint> {
        let checkpoint = self.opened(py)?;
        let tensors = tensors.into_iter();
        let tensors = tensors.map(|tensor| assembled(py, &checkpoint, tensor));
        let tensors = tensors.collect::<PyResult<Vec<_>>>()?;
        let made = py.detach(|| Checkpoint::of(remapped(checkpoint, tensors, &borrowed(&metadata))?));
        let made = made.map_err(|error| raise(py, &error))?;
        Ok(Checkpoint { joins, ..made })
    }

    /// Return the tensors whose parts ranks slice one by one. See `_native.pyi`.
    fn joins(&self) -> Joins {
        self.joins.clone()
    }

    #[getter]
    fn path(&self) -> Option<OsString> {
        self.path.clone().map(PathBuf::into_os_string)
    }

    /// The absolute path of a file or an index of this machine, at the time of opening.
    #[getter]
    fn at(&self) -> Option<OsString> {
        self.at.clone().map(PathBuf::into_os_string)
    }

    /// The paths of all files, in the order of their names; none for bytes in memory.
    #[getter]
    fn shards(&self) -> Vec<OsString> {
        let shards = self.shards.iter().cloned();
        shards.map(PathBuf::into_os_string).collect()
    }

    /// The total size of all files in bytes.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        let checkpoint = self.opened(py)?;
        let files = py.detach(|| checkpoint.all_files());
        let files = files.map_err(|error| raise(py, &error))?;
        Ok(files.iter().map(|file| file.header().file_nbytes()).sum())
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
        // A name that is not a valid string is in no file.
        let Ok(name) = name.extract::<&str>() else {
            return Ok(false);
        };
        if checkpoint.contains(name) {
            return Ok(true);
        }
        Signals::detach(py, |signals| checkpoint.is_alias(name, signals))
    }

    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.opened(py)?.names_by_name())
    }

    #[pyo3(signature = (known = None))]
    fn offset_names<'py>(
        &self,
        py: Python<'py>,
        known: Option<&Bound<'py, PyList>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let checkpoint = self.opened(py)?;
        let tensors = chosen(py, &checkpoint, None)?;
        let mut known = known.into_iter().flatten();
        let names = tensors.iter().map(|tensor| {
            let name = tensor.entry().name;
            let same = known
                .next()
                .and_then(|known| known.cast_into_exact::<PyString>().ok());
            same.filter(|same| same.to_str().is_ok_and(|same| same == name))
                .unwrap_or_else(|| PyString::new(py, name))
        });
        PyList::new(py, names)
    }

    /// Return the names of the stored tensors in the order of their data, and then the aliases.
    fn all_names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let checkpoint = self.opened(py)?;
        let tensors = chosen(py, &checkpoint, None)?;
        let aliases = Signals::detach(py, |signals| checkpoint.aliases(signals))?;
        let stored = tensors.iter().map(|tensor| tensor.entry().name);
        let names = stored.chain(aliases.iter().map(|alias| &*alias.name));
        PyList::new(py, names.collect::<Vec<_>>())
    }

    /// Return the metadata of the index, or of the file if there is no index.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let checkpoint = self.opened(py)?;
        match checkpoint.index() {
            Some(index) => shards::metadata(py, index),
            None => Ok(texts(py, file(py, &checkpoint)?.header())?.map(Bound::into_any)),
        }
    }

    /// Return the metadata of each file, by its name in the index, or by its file name.
    fn shard_metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.opened(py)?;
        let files = files(py, &checkpoint)?;
        let all = PyDict::new(py);
        for (name, file) in checkpoint.file_names().zip(files) {
            all.set_item(name, texts(py, file.header())?)?;
        }
        Ok(all)
    }

    /// Return the aliases, each with the name of its tensor, and with shape, strides and first element if it is a part.
    fn shared<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.opened(py)?;
        let (files, aliases) = Signals::detach(py, |signals| {
            let aliases = checkpoint.aliases(signals)?;
            Ok((checkpoint.all_files()?, aliases))
        })?;
        let all = PyDict::new(py);
        for Alias {
            name,
            file,
            number,
            part,
        } in aliases
        {
            let of = files[*file].header().entry(*number).map(|entry| entry.name);
            let part = part
                .as_ref()
                .map(|part| (part.shape(), part.stride(), part.begin()));
            all.set_item(name, (of, part))?;
        }
        Ok(all)
    }

    /// Return the path of the file that has the tensor.
    fn shard_of(&self, py: Python<'_>, name: &Bound<'_, PyAny>) -> PyResult<Option<OsString>> {
        let (checkpoint, name) = (self.opened(py)?, tensor_name(name)?);
        let number = Signals::detach(py, |signals| checkpoint.file_of(name, signals))?;
        if checkpoint.index().is_none() {
            find(py, &checkpoint, name)?;
        }
        Ok(checkpoint.file_path(number).map(PathBuf::into_os_string))
    }

    /// Return the total of bytes in the index and the real total, if all shards are open and the two differ.
    fn wrong_total(&self, py: Python<'_>) -> PyResult<Option<(u64, u64)>> {
        Ok(self.opened(py)?.wrong_total())
    }

    fn parameter_count<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.opened(py)?;
        let counts = Signals::detach(py, |signals| {
            checkpoint.prepare_all(signals)?;
            checkpoint.parameter_count()
        })?;
        let pairs = PyDict::new(py);
        for (dtype, count) in counts {
            pairs.set_item(dtype.code(), count)?;
        }
        Ok(pairs)
    }

    fn info(&self, py: Python<'_>, name: &Bound<'_, PyAny>) -> PyResult<TensorInfo> {
        let (checkpoint, name) = (self.opened(py)?, tensor_name(name)?);
        TensorInfo::of(py, find(py, &checkpoint, name)?.entry())
    }

    /// Return the entries of all tensors, in the order of the data or in the natural order of their names. One call for each
    /// of 500,000 tensors takes three times as long.
    #[pyo3(signature = (*, natural = false))]
    fn infos(&self, py: Python<'_>, natural: bool) -> PyResult<Vec<TensorInfo>> {
        let checkpoint = self.opened(py)?;
        let tensors = Signals::detach(py, |signals| {
            checkpoint.prepare_all(signals)?;
            if natural {
                checkpoint.all_in_natural_order()
            } else {
                checkpoint.all()
            }
        })?;
        tensors
            .iter()
            .map(|tensor| TensorInfo::of(py, tensor.entry()))
            .collect()
    }

    /// Return the tensors that a lenient reader left out, each with the exception that reading it raises.
    fn unsound<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.opened(py)?;
        let files = files(py, &checkpoint)?;
        let all = PyDict::new(py);
        for file in files {
            for (tensor, fault) in file.header().all_left_out() {
                if all.contains(tensor)? {
                    continue;
                }
                let error = Failure::Header(fault.clone()).about(file.path(), None);
                all.set_item(tensor, raise(py, &error).into_value(py))?;
            }
        }
        Ok(all)
    }

    /// Whether there is an index.
    #[getter]
    fn is_sharded(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.opened(py)?.index().is_some())
    }

    /// Return the index, if there is one.
    fn index(&self, py: Python<'_>) -> PyResult<Option<ShardIndex>> {
        Ok(self.opened(py)?.index().cloned().map(ShardIndex::from))
    }

    /// Compare each file with its recorded digests. Return its name and the arguments for `ingot.Verification`.
    #[pyo3(signature = (expected_sha256 = None, *, progress = None))]
    fn verify<'py>(
        &self,
        py: Python<'py>,
        expected_sha256: Option<&str>,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<(String, Bound<'py, PyDict>)>> {
        let checkpoint = self.opened(py)?;
        let expected = expected_sha256.map(|hex| sha256(py, hex)).transpose()?;
        let compare = |signals: &Signals| checkpoint.verify(expected, signals);
        let reports = Signals::telling(progress).run(py, compare)?;
        let named = checkpoint.file_names().zip(&reports);
        named
            .map(|(name, report)| Ok((name.into_owned(), hash::facts(py, report)?)))
            .collect()
    }

    /// Return the header of each file, in the order of their names.
    fn headers<'py>(&self, py: Python<'py>) -> PyResult<Vec<FileHeader<'py>>> {
        let checkpoint = self.opened(py)?;
        let files = py.detach(|| checkpoint.all_files());
        let files = files.map_err(|error| raise(py, &error))?;
        let named = checkpoint.file_names().zip(files);
        named
            .map(|(name, file)| file_header(py, &name, file.header()))
            .collect()
    }

    #[pyo3(signature = (names, wrap, kept, expected_sha256, *, onto = None, threads = None, progress = None))]
    #[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
    fn proven<'py>(
        &self,
        py: Python<'py>,
        names: Option<&Bound<'py, PyAny>>,
        wrap: &Wrap,
        kept: bool,
        expected_sha256: Option<&str>,
        onto: Option<&Bound<'py, PyAny>>,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.opened(py)?;
        let proof = proof(py, kept, expected_sha256)?;
        let options = ReadOptions::new().threads(threads);
        let read = |wanted: &[Tensor<'_>], devices: Option<&Devices>, signals: &Signals| {
            let jobs: Vec<Job<'_>> = whole_jobs(wanted, devices).collect();
            checkpoint.proven(&jobs, &proof, &options, signals)
        };
        whole(py, &checkpoint, names, wrap, onto, progress, read)
    }

    /// Compare tensors with their digests, and return a copy of them. See `_native.pyi`.
    #[pyo3(signature = (names, kept, expected_sha256, *, threads = None, progress = None))]
    fn proven_copy(
        &self,
        py: Python<'_>,
        names: &Bound<'_, PyAny>,
        kept: bool,
        expected_sha256: Option<&str>,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Checkpoint> {
        let checkpoint = self.opened(py)?;
        let proof = proof(py, kept, expected_sha256)?;
        let wanted = chosen(py, &checkpoint, Some(names))?;
        let options = ReadOptions::new().threads(threads);
        let copy = |signals: &Signals| checkpoint.proven_copy(&wanted, &proof, &options, signals);
        let copy = Signals::telling(progress).run(py, copy)?;
        Checkpoint::of_archive(py, || Ok(copy))
    }

    #[pyo3(signature = (names, wrap, *, onto = None, threads = None, progress = None))]
    fn tensors<'py>(
        &self,
        py: Python<'py>,
        names: Option<&Bound<'py, PyAny>>,
        wrap: &Wrap,
        onto: Option<&Bound<'py, PyAny>>,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let checkpoint = self.opened(py)?;
        let options = ReadOptions::new().threads(threads);
        let read = |wanted: &[Tensor<'_>], devices: Option<&Devices>, signals: &Signals| {
            read_to(whole_jobs(wanted, devices), &options, signals)
        };
        whole(py, &checkpoint, names, wrap, onto, progress, read)
    }

    #[pyo3(signature = (name, wrap, *, onto = None))]
    fn tensor<'py>(
        &self,
        py: Python<'py>,
        name: &Bound<'py, PyAny>,
        wrap: &Wrap,
        onto: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (checkpoint, name) = (self.opened(py)?, tensor_name(name)?);
        let tensor = find(py, &checkpoint, name)?;
        read::stored(py, &tensor, wrap, onto)
    }

    #[pyo3(signature = (name, index, wrap, *, onto = None))]
    fn select<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        index: &Bound<'py, PyAny>,
        wrap: &Wrap,
        onto: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let checkpoint = self.opened(py)?;
        let tensor = find(py, &checkpoint, name)?;
        let index = index::of_tensor(tensor.entry().name, index)?;
        selected(py, &tensor, &index, wrap, onto)
    }

    /// Return bytes `begin..end` of a tensor, counted from its first byte, as a memoryview.
    fn tensor_bytes<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        begin: i64,
        end: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let checkpoint = self.opened(py)?;
        let tensor = find(py, &checkpoint, name)?;
        let job = Job::bytes(tensor, begin..end).map_err(|error| raise(py, &error))?;
        let regions = Signals::detach(py, |signals| {
            ingot_io::read([&job], &ReadOptions::default(), signals)
        })?;
        memoryview(py, &regions[0])
    }

    /// Start to read tensors in the background: pairs of a name and an index, or None for the whole tensor.
    #[pyo3(signature = (requests, ahead, threads = None, *, onto = None))]
    fn stream(
        &self,
        py: Python<'_>,
        requests: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        ahead: u64,
        threads: Option<NonZeroUsize>,
        onto: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Stream> {
        let checkpoint = self.opened(py)?;
        let names = requests
            .iter()
            .map(|(name, _)| tensor_name(name))
            .collect::<PyResult<Vec<_>>>()?;
        found(py, &checkpoint, &names)?;
        let devices = onto.map(|onto| Devices::of(onto, names.len())).transpose()?;
        let request = |(rank, (name, index)): (usize, (&&str, &(_, Bound<'_, PyAny>)))| {
            Ok(Request {
                onto: devices.as_ref().and_then(|devices| devices.device(rank)).cloned(),
                tensor: checkpoint.id(name).map_err(|error| raise(py, &error))?,
                index: index_of(name, Some(&index.1))?,
            })
        };
        let requests = names
            .iter()
            .zip(&requests)
            .enumerate()
            .map(request)
            .collect::<PyResult<_>>()?;
        Ok(Stream::new(checkpoint, requests, devices, ahead, threads))
    }

    /// Read the bytes of these tensors, or of all, into the page cache, and return their number.
    #[pyo3(signature = (names = None, *, threads = None, progress = None))]
    fn warm(
        &self,
        py: Python<'_>,
        names: Option<&Bound<'_, PyAny>>,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let checkpoint = self.opened(py)?;
        let wanted = chosen(py, &checkpoint, names)?;
        let options = ReadOptions::new().threads(threads);
        Signals::telling(progress).run(py, |signals| warm_tensors(&wanted, &options, signals))
    }

    #[pyo3(signature = (wanted, wrap, *, onto = None, threads = None, progress = None))]
    fn parts<'py>(
        &self,
        py: Python<'py>,
        wanted: Wanted<'py>,
        wrap: &Wrap,
        onto: Option<&Bound<'py, PyAny>>,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let checkpoint = self.opened(py)?;
        let signals = Signals::telling(progress);
        let options = ReadOptions::new().threads(threads);
        read::take(py, &checkpoint, &wanted, wrap, onto, &options, signals)
    }

    /// Return the size in bytes of the tensors that `parts` and `fill` read for `wanted`.
    fn parts_nbytes(&self, py: Python<'_>, wanted: Wanted<'_>) -> PyResult<u64> {
        read::nbytes(py, &*self.opened(py)?, &wanted)
    }

    /// Return the dtype code and the shape of each tensor that `parts` reads for `wanted`.
    fn outlines<'py>(
        &self,
        py: Python<'py>,
        wanted: Wanted<'py>,
        wrap: &Wrap,
    ) -> PyResult<Vec<(&'static str, Bound<'py, PyTuple>)>> {
        read::outlines(py, &*self.opened(py)?, &wanted, wrap)
    }

    #[pyo3(signature = (wanted, destinations, *, kept = false, expected_sha256 = None, threads = None, progress = None))]
    #[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
    fn fill<'py>(
        &self,
        py: Python<'py>,
        wanted: Wanted<'py>,
        destinations: &Destinations,
        kept: bool,
        expected_sha256: Option<&str>,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let checkpoint = self.opened(py)?;
        let signals = Signals::telling(progress);
        let proof = proof(py, kept, expected_sha256)?;
        read::fill(
            py,
            &checkpoint,
            &wanted,
            destinations,
            (proof != Proof::default()).then_some(proof),
            &ReadOptions::new().threads(threads),
            signals,
        )
    }

    #[pyo3(signature = (wanted, gpu, memory, *, threads = None, progress = None))]
    fn fill_on<'py>(
        &self,
        py: Python<'py>,
        wanted: Wanted<'py>,
        gpu: &Gpu,
        memory: Vec<Bound<'py, PyAny>>,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let checkpoint = self.opened(py)?;
        let options = ReadOptions::new().threads(threads);
        let signals = Signals::telling(progress);
        read::fill_on(py, &checkpoint, &wanted, gpu, &memory, &options, signals)
    }

    /// Return a second handle to the same open files, which is closed separately.
    fn share(&self, py: Python<'_>) -> PyResult<Checkpoint> {
        Ok(Checkpoint {
            checkpoint: RwLock::new(Some(self.opened(py)?)),
            path: self.path.clone(),
            at: self.at.clone(),
            shards: self.shards.clone(),
            format: self.format,
            backend: self.backend,
            why: self.why.clone(),
            joins: self.joins.clone(),
        })
    }

    /// Return the headers, for other processes that open the same files; `None` if they read the headers as fast themselves.
    fn shard_headers(&self, py: Python<'_>) -> PyResult<Option<Headers>> {
        let checkpoint = self.opened(py)?;
        let headers = Signals::default().run(py, |signals: &Signals| checkpoint.shard_headers(signals))?;
        Ok(headers.map(|headers| {
            let files = headers.files.into_iter();
            let files = files.map(|header| (header.nbytes, header.version, header.bytes));
            (headers.index, files.collect())
        }))
    }

    fn is_replaced(&self, py: Python<'_>) -> PyResult<bool> {
        let checkpoint = self.opened(py)?;
        Ok(py.detach(|| checkpoint.is_replaced()))
    }

    fn identity(&self, py: Python<'_>) -> PyResult<Option<(String, bool)>> {
        let checkpoint = self.opened(py)?;
        py.detach(|| checkpoint.identity())
            .map_err(|error| raise(py, &error))
    }

    fn close(&self) {
        self.checkpoint
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }
}

/// The index, and for each file its size, its version and its header.
type Headers = (Option<Vec<u8>>, Vec<(u64, String, Vec<u8>)>);

fn shard_headers((index, files): Headers) -> ShardHeaders {
    let files = files.into_iter();
    let files = files.map(|(nbytes, version, bytes)| ShardHeader {
        nbytes,
        version,
        bytes,
    });
    let files = files.collect();
    ShardHeaders { index, files }
}

fn backend_of(name: &str) -> PyResult<Backend> {
    Backend::from_name(name).ok_or_else(|| {
        PyValueError::new_err(format!(
            "unknown backend {name:?}: expected \"auto\", \"mmap\" or \"pread\""
        ))
    })
}

/// Return the limits of a reader.
fn limits(leniency: &str, max_header_size: Option<u64>) -> PyResult<Limits> {
    Ok(Limits {
        header_nbytes: max_header_size.unwrap_or(Limits::HEADER_NBYTES),
        leniency: leniency_of(leniency)?,
    })
}

/// Return the limits of a reader of URLs, which accepts shorter headers by default.
pub(crate) fn remote_limits(leniency: &str, max_header_size: Option<u64>) -> PyResult<Limits> {
    limits(leniency, max_header_size.or(Some(REMOTE_HEADER_NBYTES)))
}

/// Return the leniency of this name.
pub(crate) fn leniency_of(name: &str) -> PyResult<Leniency> {
    match name {
        "refuse" => Ok(Leniency::Refuse),
        "accept" => Ok(Leniency::Accept),
        "salvage" => Ok(Leniency::Salvage),
        _ => Err(PyValueError::new_err(format!(
            "unknown leniency {name:?}: expected \"refuse\", \"accept\" or \"salvage\""
        ))),
    }
}

impl Checkpoint {
    fn at_path(py: Python<'_>, path: &Path, options: &CheckpointOptions) -> PyResult<Checkpoint> {
        let checkpoint = py.detach(|| Checkpoint::of(ingot_io::Checkpoint::open(path, options)?));
        checkpoint.map_err(|error| raise(py, &error))
    }

    /// Return the checkpoint of a single file.
    fn of_archive(
        py: Python<'_>,
        open: impl FnOnce() -> Result<ingot_io::Archive, Error> + Send,
    ) -> PyResult<Checkpoint> {
        let checkpoint = py.detach(|| Checkpoint::of(open()?.into()));
        checkpoint.map_err(|error| raise(py, &error))
    }

    pub(crate) fn of(checkpoint: ingot_io::Checkpoint) -> Result<Checkpoint, Error> {
        let (backend, why) = checkpoint.backend()?;
        let path = checkpoint.path();
        Ok(Checkpoint {
            path: path.map(ToOwned::to_owned),
            at: path.and_then(|path| absolute(path).ok()),
            shards: (0..checkpoint.files())
                .filter_map(|number| checkpoint.file_path(number))
                .collect(),
            format: checkpoint.format()?.name(),
            backend,
            why: why.into_owned(),
            joins: Joins::new(),
            checkpoint: RwLock::new(Some(Arc::new(checkpoint))),
        })
    }

    /// Close the handle and return the checkpoint. Fail if it is closed, or in use by another handle or a read.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<ingot_io::Checkpoint> {
        let mut checkpoint = self.checkpoint.write().unwrap_or_else(PoisonError::into_inner);
        let taken = checkpoint.take().and_then(Arc::into_inner);
        taken.ok_or_else(|| self.closed_error(py))
    }

    fn closed_error(&self, py: Python<'_>) -> PyErr {
        raise(py, &Failure::Closed.about(self.path.as_deref(), None))
    }

    pub(crate) fn opened(&self, py: Python<'_>) -> PyResult<Arc<ingot_io::Checkpoint>> {
        let checkpoint = self.checkpoint.read().unwrap_or_else(PoisonError::into_inner);
        checkpoint.clone().ok_or_else(|| self.closed_error(py))
    }
}

/// Return the names in natural order.
#[pyfunction]
pub(crate) fn in_natural_order<'py>(
    py: Python<'py>,
    names: Vec<Bound<'py, PyString>>,
) -> PyResult<Bound<'py, PyList>> {
    let mut texts = names
        .iter()
        .map(|name| name.to_str())
        .collect::<PyResult<Vec<_>>>()?;
    py.detach(|| texts.sort_by(|one, other| natural_order(one, other)));
    PyList::new(py, texts)
}

/// Return the only file.
fn file<'a>(py: Python<'_>, checkpoint: &'a ingot_io::Checkpoint) -> PyResult<&'a ingot_io::Archive> {
    checkpoint.file(0).map_err(|error| raise(py, &error))
}

/// Return all files, opened in parallel.
fn files<'a>(py: Python<'_>, checkpoint: &'a ingot_io::Checkpoint) -> PyResult<Vec<&'a ingot_io::Archive>> {
    Signals::detach(py, |signals| {
        checkpoint.prepare_all(signals)?;
        checkpoint.all_files()
    })
}

fn proof(py: Python<'_>, kept: bool, expected_sha256: Option<&str>) -> PyResult<Proof> {
    let sha256 = expected_sha256.map(|hex| sha256(py, hex)).transpose()?;
    Ok(Proof { kept, sha256 })
}

fn buffer_expected(data: &Bound<'_, PyAny>, fault: &PyErr) -> PyErr {
    if fault.is_instance_of::<PyTypeError>(data.py()) {
        let (class, is_path) = (class_of(data), data.is_instance_of::<PyString>());
        let hint = if is_path || data.hasattr("__fspath__").unwrap_or(false) {
            " — `load_file` and `safe_open` take the path of a file"
        } else {
            ""
        };
        return PyTypeError::new_err(format!("expected bytes or another buffer, found {class}{hint}"));
    }
    fault.clone_ref(data.py())
}
