//! Conversion of Python's indices.

use ingot_format::{Index, Places, Quoted};
use pyo3::exceptions::{PyNotImplementedError, PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyEllipsis, PyInt, PyList, PyRange, PySlice, PyTuple};

/// Return the parts of the index. Fail with `NotImplementedError` for indices that only the framework supports, such as
/// masks and arrays.
fn parts(index: &Bound<'_, PyAny>) -> PyResult<Vec<Index>> {
    match index.cast::<PyTuple>() {
        Ok(parts) => parts.iter().map(|part| index_part(&part)).collect(),
        Err(_) => Ok(vec![index_part(index)?]),
    }
}

/// Return the index of the tensor `name`. The name is only for the error about a wrong type.
pub(crate) fn of_tensor(name: &str, index: &Bound<'_, PyAny>) -> PyResult<Vec<Index>> {
    parts(index).map_err(|fault| {
        let py = index.py();
        if fault.is_instance_of::<PyTypeError>(py) {
            PyTypeError::new_err(format!("tensor {}: index: {}", Quoted(name), fault.value(py)))
        } else {
            fault
        }
    })
}

fn index_part(part: &Bound<'_, PyAny>) -> PyResult<Index> {
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
                return Ok(None);
            }
            clipped(&bound)
                .map(Some)
                .map_err(|fault| not_of_ints(slice, fault))
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
    // Frameworks accept a range as a list too.
    if let Ok(range) = part.cast::<PyRange>() {
        return Ok(Index::Pick(vec![of_range(range)?]));
    }
    integer(part).map(Index::At)
}

fn not_of_ints(slice: &Bound<'_, PySlice>, fault: PyErr) -> PyErr {
    if !fault.is_instance_of::<PyTypeError>(slice.py()) {
        return fault;
    }
    match slice.repr() {
        Ok(shown) => PyTypeError::new_err(format!("a slice must have ints or None, found {shown}")),
        Err(fault) => fault,
    }
}

/// Return the positions in a list, which may contain ranges among its integers: each stands for all its positions.
fn picked(list: &Bound<'_, PyList>) -> PyResult<Vec<Places>> {
    let place = |one: Bound<'_, PyAny>| match one.cast::<PyRange>() {
        Ok(range) => of_range(range),
        Err(_) => integer(&one).map(Places::from),
    };
    list.iter().map(place).collect()
}

/// Convert a range from its first item, its last item and its step, since `len` fails above 64 bits.
fn of_range(range: &Bound<'_, PyRange>) -> PyResult<Places> {
    if !range.is_truthy()? {
        return Ok(Places {
            start: 0,
            count: 0,
            step: 1,
        });
    }
    let (start, last) = (clipped(&range.get_item(0)?)?, clipped(&range.get_item(-1)?)?);
    let step = clipped(&range.getattr("step")?)?;
    let turns = last.abs_diff(start) / step.unsigned_abs();
    Ok(Places {
        start,
        count: turns.saturating_add(1),
        step,
    })
}

/// Return an integer, of Python or NumPy. Bools, which NumPy reads as masks, and arrays do not count as integers.
fn integer(number: &Bound<'_, PyAny>) -> PyResult<i64> {
    let for_the_framework = || PyNotImplementedError::new_err("an index for the framework");
    if number.is_instance_of::<PyBool>() || number.hasattr("__len__")? || !number.hasattr("__index__")? {
        return Err(for_the_framework());
    }
    let number = match number.cast::<PyInt>() {
        Ok(number) => number.clone().into_any(),
        // Zero-dimensional arrays of another type, and NumPy's bools, raise here.
        Err(_) => number
            .call_method0("__index__")
            .map_err(|_| for_the_framework())?,
    };
    clipped(&number)
}

/// Return the integer, or the nearest one that fits into 64 bits: no dimension is that long, so both mean the same.
fn clipped(number: &Bound<'_, PyAny>) -> PyResult<i64> {
    // Python's own message: a TypeError.
    let number = number.py().import("operator")?.call_method1("index", (number,))?;
    match number.extract::<i64>() {
        Err(fault) if fault.is_instance_of::<PyOverflowError>(number.py()) => {
            Ok(if number.lt(0)? { i64::MIN } else { i64::MAX })
        }
        extracted => extracted,
    }
}
