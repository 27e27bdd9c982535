//! Statistics of the values of tensors.

use std::num::NonZeroUsize;

use ingot_inspect::Number;
use ingot_io::ReadOptions;
use pyo3::prelude::*;

use crate::open::Checkpoint;
use crate::read::chosen;
use crate::watch::Signals;

/// A number that is an `int` for an integer dtype and a `float` for any other.
#[derive(IntoPyObject)]
pub(crate) enum Value {
    Integer(i128),
    Float(f64),
}

impl From<Number> for Value {
    fn from(number: Number) -> Value {
        match number {
            Number::Integer(value) => Value::Integer(value),
            Number::Float(value) => Value::Float(value),
        }
    }
}

/// The statistics of one tensor, which are a `dict` in Python.
#[derive(IntoPyObject)]
pub(crate) struct Statistics {
    count: u64,
    zeros: u64,
    nans: u64,
    infinities: u64,
    malformed: u64,
    min: Option<Value>,
    max: Option<Value>,
    mean: Option<f64>,
    std: Option<f64>,
    bins: Vec<u64>,
}

impl From<ingot_inspect::Statistics> for Statistics {
    fn from(found: ingot_inspect::Statistics) -> Statistics {
        Statistics {
            count: found.count,
            zeros: found.zeros,
            nans: found.nans,
            infinities: found.infinities,
            malformed: found.malformed,
            min: found.range.map(|(low, _)| low.into()),
            max: found.range.map(|(_, high)| high.into()),
            mean: found.mean,
            std: found.deviation,
            bins: found.bins,
        }
    }
}

/// Return the statistics of these tensors, or of all in data order; None for a dtype without values.
#[pyfunction]
#[pyo3(signature = (checkpoint, names = None, *, bins = 0, threads = None, progress = None))]
pub(crate) fn statistics(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    names: Option<&Bound<'_, PyAny>>,
    bins: usize,
    threads: Option<NonZeroUsize>,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<Vec<Option<Statistics>>> {
    let checkpoint = checkpoint.opened(py)?;
    let tensors = chosen(py, &checkpoint, names)?;
    let options = ReadOptions::new().threads(threads);
    let found = Signals::telling(progress).run(py, |signals| {
        ingot_inspect::statistics(&tensors, bins, &options, signals)
    })?;
    Ok(found
        .into_iter()
        .map(|found| found.map(Statistics::from))
        .collect())
}
