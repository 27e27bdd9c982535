//! What Python puts between the brackets.

use ingot_format::Index;
use pyo3::exceptions::{PyNotImplementedError, PyOverflowError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyEllipsis, PyInt, PyList, PyRange, PySlice, PyTuple};

/// The index, in parts. Fails with `NotImplementedError` for what only the framework itself can make sense of,
/// such as masks and arrays.
pub(crate) fn parts(index: &Bound<'_, PyAny>) -> PyResult<Vec<Index>> {
    match index.cast::<PyTuple>() {
        Ok(parts) => parts.iter().map(|part| one(&part)).collect(),
        Err(_) => Ok(vec![one(index)?]),
    }
}

fn one(part: &Bound<'_, PyAny>) -> PyResult<Index> {
    if part.is_none() {
        return Ok(Index::NewAxis);
    }
    if part.is_instance_of::<PyEllipsis>() {
        return Ok(Index::Rest);
    }
    if let Ok(slice) = part.cast::<PySlice>() {
        let bound = |name| -> PyResult<Option<i64>> {
            let bound = slice.getattr(name)?;
            if bound.is_none() {
                Ok(None)
            } else {
                clipped(&bound).map(Some)
            }
        };
        return Ok(Index::Span {
            start: bound("start")?,
            stop: bound("stop")?,
            step: bound("step")?,
        });
    }
    if let Ok(list) = part.cast::<PyList>() {
        return picked(list).map(Index::Pick);
    }
    integer(part).map(Index::At)
}

/// The places of a list, which may hold ranges among its integers: each stands for all of its own.
fn picked(list: &Bound<'_, PyList>) -> PyResult<Vec<i64>> {
    let mut places = Vec::with_capacity(list.len());
    for one in list {
        match one.cast::<PyRange>() {
            Ok(range) => places.extend(of_range(range)?),
            Err(_) => places.push(integer(&one)?),
        }
    }
    Ok(places)
}

fn of_range<'py>(range: &Bound<'py, PyRange>) -> PyResult<impl Iterator<Item = i64> + use<'py>> {
    let bound = |name| range.getattr(name)?.extract::<i64>();
    let (start, step, count) = (bound("start")?, bound("step")?, range.len()?);
    // Every place of a range lies before its stop, which fits.
    let places = std::iter::successors(Some(start), move |place| place.checked_add(step));
    Ok(places.take(count))
}

/// An integer, or what counts as one: Python's and numpy's, but neither bools, which numpy reads as masks, nor
/// arrays.
fn integer(number: &Bound<'_, PyAny>) -> PyResult<i64> {
    let for_the_framework = || PyNotImplementedError::new_err("an index for the framework");
    if number.is_instance_of::<PyBool>() || number.hasattr("__len__")? || !number.hasattr("__index__")? {
        return Err(for_the_framework());
    }
    let number = match number.cast::<PyInt>() {
        Ok(number) => number.clone().into_any(),
        // Zero-dimensional arrays of the wrong type, and numpy's bools, say here that they are none.
        Err(_) => number
            .call_method0("__index__")
            .map_err(|_| for_the_framework())?,
    };
    clipped(&number)
}

/// The integer, or the nearest that 64 bits hold: no dimension is that long, so both mean the same.
fn clipped(number: &Bound<'_, PyAny>) -> PyResult<i64> {
    // Python's own words for what is no integer: a TypeError.
    let number = number.py().import("operator")?.call_method1("index", (number,))?;
    match number.extract::<i64>() {
        Err(fault) if fault.is_instance_of::<PyOverflowError>(number.py()) => {
            Ok(if number.lt(0)? { i64::MIN } else { i64::MAX })
        }
        extracted => extracted,
    }
}
