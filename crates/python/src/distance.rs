//! Distances between the values of tensors.

use std::num::NonZeroUsize;

use ingot_io::ReadOptions;
use pyo3::prelude::*;

use crate::open::Checkpoint;
use crate::read::chosen;
use crate::statistics::Value;
use crate::watch::Signals;

/// The distance between two tensors whose values differ.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Distance(ingot_inspect::Distance);

#[pymethods]
impl Distance {
    #[getter]
    fn different(&self) -> Option<u64> {
        self.0.different
    }

    #[getter]
    fn max_abs(&self) -> Option<Value> {
        self.0.max_abs.map(Value::from)
    }

    #[getter]
    fn relative_l2(&self) -> Option<f64> {
        self.0.relative_l2
    }

    #[getter]
    fn cosine(&self) -> Option<f64> {
        self.0.cosine
    }
}

/// Return the distances of the tensors with these names in two files; None if all their values are equal.
#[pyfunction]
#[pyo3(signature = (one, two, names, *, threads = None, progress = None))]
pub(crate) fn distances(
    py: Python<'_>,
    one: &Checkpoint,
    two: &Checkpoint,
    names: &Bound<'_, PyAny>,
    threads: Option<NonZeroUsize>,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<Vec<Option<Distance>>> {
    let (one, two) = (one.opened(py)?, two.opened(py)?);
    let (ours, theirs) = (chosen(py, &one, Some(names))?, chosen(py, &two, Some(names))?);
    let pairs: Vec<_> = ours
        .into_iter()
        .zip(theirs)
        .map(|(one, two)| [one, two])
        .collect();
    let options = ReadOptions::new().threads(threads);
    let found =
        Signals::telling(progress).run(py, |signals| ingot_inspect::distances(&pairs, &options, signals))?;
    Ok(found.into_iter().map(|found| found.map(Distance)).collect())
}
