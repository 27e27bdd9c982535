//! Parts of tensors: what is asked for, and memory of the caller that it goes to.

use std::sync::Arc;

use ingot_format::{Dtype, Entry, Index, Quoted};
use ingot_io::binding::{Proof, read_to};
use ingot_io::{Checkpoint, Job, ReadOptions};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

use crate::chosen::found;
use crate::collector::Pause;
use crate::destination::{Destination, Destinations, Held};
use crate::device::Homes;
use crate::errors::{about_tensor, raise};
use crate::index;
use crate::watch::Signals;
use crate::wrap::{Shared, Wrap};

/// What is asked for, a column for each question, so that of many tensors no object is made for each.
#[derive(FromPyObject)]
pub(crate) struct Wanted<'py> {
    #[pyo3(item(0))]
    names: Vec<Bound<'py, PyString>>,
    /// An index for each, or None for all of it; None where all are wanted whole.
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
    /// Fails where a column is for another number of tensors: those that it lacks would come whole or unconverted.
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

    /// `None` for what is stored.
    fn dtype(&self, rank: usize) -> Option<Dtype> {
        match self.dtypes.as_ref()? {
            Codes::All(code) => Dtype::from_code(code),
            Codes::Each(codes) => Dtype::from_code(codes.get(rank)?),
        }
    }
}

/// Bytes of the tensors that are asked for.
pub(crate) fn nbytes(py: Python<'_>, checkpoint: &Checkpoint, wanted: &Wanted<'_>) -> PyResult<u64> {
    Ok(jobs(py, checkpoint, wanted)?.iter().map(Job::nbytes).sum())
}

/// What the tensors that are asked for will be: of each the code of its dtype, and its shape as a header would say it.
///
/// Fails where the framework takes no such tensor, before any of its bytes are read.
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

/// The tensors that are asked for, in that order.
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
    let homes = Homes::of(onto, jobs.len())?;
    let jobs = jobs.into_iter().enumerate();
    let jobs = jobs.map(|(rank, job)| job.onto(homes.device(rank).map(Arc::as_ref)));
    let jobs: Vec<Job<'_>> = jobs.collect();
    let buffers = signals.run(py, |signals| read_to(&jobs, options, signals))?;
    let _pause = Pause::for_objects(py, jobs.len())?;
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

/// Reads the tensors that are asked for into `destinations`, one for each. If there is a `proof` they are whole, and each
/// is wanted once.
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
    // Zipped this way round, so that the list is used again for what is made of it.
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

fn destination(py: Python<'_>, job: &Job<'_>, held: Held) -> PyResult<Destination> {
    match held {
        Held::Shown(destination) => Ok(destination),
        Held::Given((code, memory, is_scalar)) => {
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
    // Not collected: vectors of results grow step by step, which takes longer than all else here.
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

/// What stands between the brackets; `None` for all of a tensor.
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
