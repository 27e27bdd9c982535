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

/// The statistics of one tensor.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Statistics(ingot_inspect::Statistics);

#[pymethods]
impl Statistics {
    #[getter]
    fn count(&self) -> u64 {
        self.0.count
    }

    #[getter]
    fn zeros(&self) -> u64 {
        self.0.zeros
    }

    #[getter]
    fn nans(&self) -> u64 {
        self.0.nans
    }

    #[getter]
    fn infinities(&self) -> u64 {
        self.0.infinities
    }

    #[getter]
    fn malformed(&self) -> u64 {
        self.0.malformed
    }

    #[getter]
    fn min(&self) -> Option<Value> {
        self.0.range.map(|(low, _)| low.into())
    }

    #[getter]
    fn max(&self) -> Option<Value> {
        self.0.range.map(|(_, high)| high.into())
    }

    #[getter]
    fn mean(&self) -> Option<f64> {
        self.0.mean
    }

    #[getter]
    fn std(&self) -> Option<f64> {
        self.0.deviation
    }

    #[getter]
    fn bins(&self) -> Vec<u64> {
        self.0.bins.clone()
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
    Ok(found.into_iter().map(|found| found.map(Statistics)).collect())
}
