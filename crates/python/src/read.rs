//! Reading tensors: the names and parts that a caller selects, and the tensors or the memory of the caller that they become.

use std::sync::Arc;

use ingot_format::{Dtype, Entry, Index, Quoted};
use ingot_io::binding::{Buffer, Onto, Part, Proof, read_to};
use ingot_io::{Checkpoint, Error, Job, ReadOptions, Tensor};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};

use crate::destination::{Destination, Destinations, Held};
use crate::device::{Devices, Gpu, onto_region};
use crate::errors::{about_tensor, class_of, raise};
use crate::index;
use crate::watch::Signals;
use crate::wrap::{Shared, Wrap, paused_collector};

/// The requested tensors, in columns, so that no object is needed for each of many tensors.
#[derive(FromPyObject)]
pub(crate) struct Wanted<'py> {
    #[pyo3(item(0))]
    names: Vec<Bound<'py, PyString>>,
    /// An index for each, or None for a whole tensor; None if all are requested whole.
    #[pyo3(item(1))]
    indices: Option<Vec<Option<Bound<'py, PyAny>>>>,
    #[pyo3(item(2))]
    dtypes: Option<Codes>,
}

/// The value of `ingot._read.select.OF_DESTINATIONS`: convert each tensor to the dtype of its destination.
const OF_DESTINATIONS: &str = "destinations";

/// Codes of dtypes to convert to.
#[derive(FromPyObject)]
enum Codes {
    /// The same for all.
    All(String),
    /// One for each.
    Each(Vec<String>),
}

impl Wanted<'_> {
    /// Fail if a column has another length, since the tensors without a value would be read whole or unconverted.
    fn check(&self) -> PyResult<()> {
        let indices = self.indices.as_ref().map(Vec::len);
        let dtypes = match &self.dtypes {
            Some(Codes::Each(codes)) => Some(codes.len()),
            _ => None,
        };
        if [indices, dtypes]
            .into_iter()
            .flatten()
            .all(|len| len == self.names.len())
        {
            Ok(())
        } else {
            Err(PyValueError::new_err(
                "names, indices and dtypes differ in length",
            ))
        }
    }

    fn index(&self, rank: usize) -> PyResult<Vec<Index>> {
        let index = self
            .indices
            .as_ref()
            .and_then(|indices| indices.get(rank)?.as_ref());
        let name = self.names[rank].to_str()?;
        Ok(index_of(name, index)?.unwrap_or_default())
    }

    /// `None` for the stored dtype.
    fn dtype(&self, rank: usize) -> Option<Dtype> {
        match self.dtypes.as_ref()? {
            Codes::All(code) => Dtype::from_code(code),
            Codes::Each(codes) => Dtype::from_code(codes.get(rank)?),
        }
    }
}

/// Convert an argument to the name of a tensor. The error mentions `keys()`, since some callers pass a position.
pub(crate) fn tensor_name<'a>(given: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    match given.cast::<PyString>() {
        Ok(name) => name.to_str(),
        Err(_) => Err(PyTypeError::new_err(format!(
            "expected the name of a tensor as a str, found {} — `keys()` lists the names",
            class_of(given)
        ))),
    }
}

pub(crate) fn find<'a>(py: Python<'_>, checkpoint: &'a Checkpoint, name: &str) -> PyResult<Tensor<'a>> {
    if checkpoint.index().is_none() {
        return checkpoint.find(name).map_err(|error| raise(py, &error));
    }
    // The shard may have to be opened.
    found(py, checkpoint, &[name]).map(|mut tensors| tensors.swap_remove(0))
}

/// Return the tensors of these names.
pub(crate) fn found<'a>(
    py: Python<'_>,
    checkpoint: &'a Checkpoint,
    names: &[&str],
) -> PyResult<Vec<Tensor<'a>>> {
    Signals::detach(py, |signals| checkpoint.find_all(names, signals))
}

/// Return the tensors of these names, or all tensors in the order of the data.
pub(crate) fn chosen<'a>(
    py: Python<'_>,
    checkpoint: &'a Checkpoint,
    names: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<Tensor<'a>>> {
    let Some(names) = names else {
        return Signals::detach(py, |signals| {
            checkpoint.prepare_all(signals)?;
            checkpoint.all()
        });
    };
    if names.is_instance_of::<PyString>() {
        // A str is an iterable of str: each letter would be a name.
        return Err(PyTypeError::new_err(
            "names must be an iterable of str, not a str",
        ));
    }
    let names = names.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    let names = names.iter().map(tensor_name).collect::<PyResult<Vec<_>>>()?;
    found(py, checkpoint, &names)
}

/// Return the number of bytes of the requested tensors.
pub(crate) fn nbytes(py: Python<'_>, checkpoint: &Checkpoint, wanted: &Wanted<'_>) -> PyResult<u64> {
    Ok(jobs(py, checkpoint, wanted)?.iter().map(Job::nbytes).sum())
}

/// Return the dtype code and the shape of each result, in the form of a header.
///
/// Fail before any bytes are read if the framework does not support one of the results.
pub(crate) fn outlines<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    wanted: &Wanted<'py>,
    wrap: &Wrap,
) -> PyResult<Vec<(&'static str, Bound<'py, PyTuple>)>> {
    let outline = |job: &Job<'_>| {
        wrap.accepts(py, job.tensor().archive().path(), &entry(job))?;
        Ok((job.dtype().code(), PyTuple::new(py, job.shape())?))
    };
    jobs(py, checkpoint, wanted)?.iter().map(outline).collect()
}

/// Return a tensor, on the device `onto` if it is given.
pub(crate) fn stored<'py>(
    py: Python<'py>,
    tensor: &Tensor<'_>,
    wrap: &Wrap,
    onto: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    if tensor.strides().is_some() {
        return selected(py, tensor, &[], wrap, onto);
    }
    let (path, entry) = (tensor.archive().path(), tensor.entry());
    wrap.accepts(py, path, entry)?;
    if onto.is_some() {
        return read_one(py, Job::from(*tensor), wrap, onto);
    }
    let region = Signals::detach(py, |signals| tensor.read(&ReadOptions::default(), signals))?;
    wrap.wrap(py, path, &Buffer::Host(region), entry, &mut Shared::default())
}

/// Return what `index` selects of a tensor, on the device `onto` if it is given.
pub(crate) fn selected<'py>(
    py: Python<'py>,
    tensor: &Tensor<'_>,
    index: &[Index],
    wrap: &Wrap,
    onto: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (path, entry) = (tensor.archive().path(), tensor.entry());
    wrap.accepts(py, path, entry)?;
    if onto.is_some() {
        let job = Job::new(*tensor, index, None).map_err(|error| raise(py, &error))?;
        return read_one(py, job, wrap, onto);
    }
    if wrap.takes_strides(py, entry.dtype)? {
        let view = tensor.strided(index).map_err(|error| raise(py, &error))?;
        if let Some(view) = view {
            return wrap.wrap_part(py, path, &view, entry);
        }
    }
    let (shape, region) = Signals::detach(py, |signals| tensor.select(index, signals))?;
    let part = Part {
        buffer: Buffer::Host(region),
        shape,
        strides: None,
    };
    wrap.wrap_part(py, path, &part, entry)
}

/// Return the tensor of one job, on the device `onto`.
fn read_one<'py>(
    py: Python<'py>,
    job: Job<'_>,
    wrap: &Wrap,
    onto: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (options, signals) = (ReadOptions::default(), Signals::default());
    wrapped(py, vec![job], wrap, onto, &options, signals)?.get_item(0)
}

/// Return jobs that read these tensors whole, each to its destination.
pub(crate) fn whole_jobs<'a>(
    tensors: &'a [Tensor<'a>],
    devices: Option<&'a Devices>,
) -> impl Iterator<Item = Job<'a>> {
    let tensors = tensors.iter().enumerate();
    tensors.map(move |(rank, tensor)| Job::from(*tensor).onto(device_of(devices, rank)))
}

/// Return the device of the tensor with this number; `None` for the host.
fn device_of(devices: Option<&Devices>, rank: usize) -> Option<&Onto> {
    devices?.device(rank).map(Arc::as_ref)
}

/// Return the tensors of these names, or all tensors. `read` returns their bytes.
pub(crate) fn whole<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    names: Option<&Bound<'py, PyAny>>,
    wrap: &Wrap,
    onto: Option<&Bound<'py, PyAny>>,
    progress: Option<Bound<'py, PyAny>>,
    read: impl Send + FnOnce(&[Tensor<'_>], Option<&Devices>, &Signals) -> Result<Vec<Buffer>, Error>,
) -> PyResult<Bound<'py, PyDict>> {
    let wanted = chosen(py, checkpoint, names)?;
    // All refusals come before the first byte is read.
    for tensor in &wanted {
        wrap.accepts(py, tensor.archive().path(), tensor.entry())?;
    }
    let devices = onto.map(|onto| Devices::of(onto, wanted.len())).transpose()?;
    let buffers = Signals::telling(progress).run(py, |signals| read(&wanted, devices.as_ref(), signals))?;
    let _pause = paused_collector(py, wanted.len())?;
    let tensors = PyDict::new(py);
    let mut shared = Shared::default();
    for (tensor, buffer) in wanted.iter().zip(&buffers) {
        let (path, entry) = (tensor.archive().path(), tensor.entry());
        let wrapped = wrap.wrap(py, path, buffer, entry, &mut shared)?;
        tensors.set_item(PyString::new(py, entry.name), wrapped)?;
    }
    Ok(tensors)
}

/// Return the requested tensors in their order.
pub(crate) fn take<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    wanted: &Wanted<'py>,
    wrap: &Wrap,
    onto: Option<&Bound<'py, PyAny>>,
    options: &ReadOptions,
    signals: Signals,
) -> PyResult<Bound<'py, PyList>> {
    wrapped(py, jobs(py, checkpoint, wanted)?, wrap, onto, options, signals)
}

/// Return the tensors of these jobs, on the devices `onto`.
pub(crate) fn wrapped<'py>(
    py: Python<'py>,
    jobs: Vec<Job<'_>>,
    wrap: &Wrap,
    onto: Option<&Bound<'py, PyAny>>,
    options: &ReadOptions,
    signals: Signals,
) -> PyResult<Bound<'py, PyList>> {
    // All refusals come before the first byte is read.
    for job in &jobs {
        wrap.accepts(py, job.tensor().archive().path(), &entry(job))?;
    }
    let devices = onto.map(|onto| Devices::of(onto, jobs.len())).transpose()?;
    let jobs = jobs.into_iter().enumerate();
    let jobs = jobs.map(|(rank, job)| job.onto(device_of(devices.as_ref(), rank)));
    let jobs: Vec<Job<'_>> = jobs.collect();
    let buffers = signals.run(py, |signals| read_to(&jobs, options, signals))?;
    let _pause = paused_collector(py, jobs.len())?;
    let tensors = PyList::empty(py);
    let mut shared = Shared::default();
    for (job, buffer) in jobs.iter().zip(&buffers) {
        let path = job.tensor().archive().path();
        let tensor = wrap.wrap(py, path, buffer, &entry(job), &mut shared)?;
        tensors.append(tensor)?;
    }
    Ok(tensors)
}

/// The entry that a header would have for the result of a job.
fn entry<'j>(job: &'j Job<'_>) -> Entry<'j> {
    Entry {
        dtype: job.dtype(),
        shape: job.shape(),
        ..*job.tensor().entry()
    }
}

/// Read the requested tensors into `destinations`, one for each. With a `proof`, all are whole, and each is requested
/// once.
pub(crate) fn fill<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    wanted: &Wanted<'py>,
    destinations: &Destinations,
    proof: Option<Proof>,
    options: &ReadOptions,
    signals: Signals,
) -> PyResult<()> {
    let held = destinations.take()?;
    let jobs = match &wanted.dtypes {
        Some(Codes::All(word)) if word == OF_DESTINATIONS => {
            jobs_as(py, checkpoint, wanted, |rank| held.get(rank)?.dtype())?
        }
        _ => jobs(py, checkpoint, wanted)?,
    };
    // Zipped in this order, so that the list's memory is reused for the result.
    let held = held.into_iter().zip(&jobs);
    let mut destinations = held
        .map(|(held, job)| destination(py, job, held))
        .collect::<PyResult<Vec<_>>>()?;
    let mut targets = Vec::with_capacity(destinations.len());
    for (job, destination) in jobs.iter().zip(&mut destinations) {
        targets.push(destination.target().ok_or_else(|| {
            refuse(
                py,
                job,
                "destination-overlap",
                "elements of the destination share memory with each other",
            )
        })?);
    }
    signals.run(py, |signals| match &proof {
        None => ingot_io::binding::fill(&jobs, targets, options, signals),
        Some(proof) => checkpoint.fill_proven(&jobs, targets, proof, options, signals),
    })
}

/// Read the requested tensors into the memory of tensors on `gpu`, each in a capsule, in the order of the caller's current
/// stream.
pub(crate) fn fill_on<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    wanted: &Wanted<'py>,
    gpu: &Gpu,
    memory: &[Bound<'py, PyAny>],
    options: &ReadOptions,
    signals: Signals,
) -> PyResult<()> {
    let jobs = jobs(py, checkpoint, wanted)?;
    if jobs.len() != memory.len() {
        return Err(PyValueError::new_err(
            "the numbers of tensors and capsules differ",
        ));
    }
    let onto = gpu.onto(py)?;
    let region = |(job, capsule): (&Job<'_>, &Bound<'py, PyAny>)| onto_region(&onto, job.nbytes(), capsule);
    let regions = jobs.iter().zip(memory).map(region);
    let mut regions = regions.collect::<PyResult<Vec<_>>>()?;
    signals.run(py, |signals| {
        ingot_io::binding::fill_on(&onto, &jobs, &mut regions, options, signals)
    })
}

fn destination(py: Python<'_>, job: &Job<'_>, held: Held) -> PyResult<Destination> {
    match held {
        Held::Exported(destination) => Ok(destination),
        Held::Object((code, memory, is_scalar)) => {
            // A dtype that no file has differs from every job's, which the refusal then names.
            let dtype = Dtype::from_code(&code).unwrap_or(job.dtype());
            let destination = Destination::new(dtype, memory.bind(py), is_scalar);
            destination.map_err(|fault| {
                if fault.is_instance_of::<PyBufferError>(py) {
                    refuse(py, job, "destination", &fault.value(py).to_string())
                } else {
                    fault
                }
            })
        }
    }
}

fn jobs<'a>(py: Python<'_>, checkpoint: &'a Checkpoint, wanted: &Wanted<'_>) -> PyResult<Vec<Job<'a>>> {
    jobs_as(py, checkpoint, wanted, |rank| wanted.dtype(rank))
}

/// The jobs of `wanted`, each as the dtype that `dtype` returns for its rank.
fn jobs_as<'a>(
    py: Python<'_>,
    checkpoint: &'a Checkpoint,
    wanted: &Wanted<'_>,
    dtype: impl Fn(usize) -> Option<Dtype>,
) -> PyResult<Vec<Job<'a>>> {
    wanted.check()?;
    // `collect` of results would not reserve memory, and growing takes longer than all other work here.
    let mut names = Vec::with_capacity(wanted.names.len());
    for name in &wanted.names {
        names.push(name.to_str()?);
    }
    let mut jobs = Vec::with_capacity(names.len());
    for (rank, tensor) in found(py, checkpoint, &names)?.into_iter().enumerate() {
        let job = Job::new(tensor, &wanted.index(rank)?, dtype(rank));
        jobs.push(job.map_err(|error| raise(py, &error))?);
    }
    Ok(jobs)
}

/// Return the index in brackets; `None` for the whole tensor.
pub(crate) fn index_of(name: &str, index: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<Index>>> {
    let index = index.filter(|index| !index.is_none());
    index.map(|index| index::of_tensor(name, index)).transpose()
}

fn refuse(py: Python<'_>, job: &Job<'_>, code: &str, reason: &str) -> PyErr {
    let name = job.tensor().entry().name;
    about_tensor(
        py,
        "DestinationError",
        code,
        name,
        &format!("tensor {}: {reason}", Quoted(name)),
    )
}
