//! Distances between the values of tensors.

use std::num::NonZeroUsize;

use ingot_io::ReadOptions;
use pyo3::prelude::*;

use crate::open::Checkpoint;
use crate::read::chosen;
use crate::statistics::Value;
use crate::watch::Signals;

/// The distance between two tensors whose values differ: its fields in order, which are a `tuple` in Python.
pub(crate) type Distance = (Option<u64>, Option<Value>, Option<f64>, Option<f64>);

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
    Ok(found.into_iter().map(|found| found.map(fields)).collect())
}

fn fields(found: ingot_inspect::Distance) -> Distance {
    let max_abs = found.max_abs.map(Value::from);
    (found.different, max_abs, found.relative_l2, found.cosine)
}
