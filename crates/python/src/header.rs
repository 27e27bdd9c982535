//! Headers as Python objects.

use ingot_format::{Entry, Header};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};

/// The name of a file, its metadata, and its tensors in the order of their data.
pub(crate) type FileHeader<'py> = (String, Option<Bound<'py, PyDict>>, Vec<TensorInfo>);

/// The entry of a header for one tensor.
///
/// Compared by value, hashable, and picklable.
///
/// Parameters
/// ----------
/// name : str
///     The name of the tensor.
/// dtype : str
///     The code of the dtype, such as ``"BF16"``.
/// shape : sequence of int
///     The shape in the header, as a tuple.
/// begin, end : int
///     The range of its bytes, counted from the start of the data section of its file.
/// parameter_count : int, optional
///     The number of parameters that it holds: by default the number of its elements; `ingot.inspect` documents the
///     exceptions.
///
/// Attributes
/// ----------
/// nbytes : int
///     ``end - begin``.
///
/// Raises
/// ------
/// ValueError
///     If `end` is before `begin`.
/// OverflowError
///     If a number is negative or has more than 64 bits, or if the number of elements has.
///
/// Examples
/// --------
/// >>> info = ingot.open("model.safetensors").info("wte")
/// >>> info.dtype, info.shape, info.nbytes, info.parameter_count
/// ('F32', (8, 4), 128, 32)
#[pyclass(frozen, get_all, module = "ingot")]
pub(crate) struct TensorInfo {
    // The Python objects, created once and not on each access.
    name: Py<PyString>,
    dtype: Py<PyString>,
    shape: Py<PyTuple>,
    begin: u64,
    end: u64,
    parameter_count: u64,
}

/// The fields of a `TensorInfo`.
type Fields<'py> = (
    &'py Bound<'py, PyString>,
    &'py Bound<'py, PyString>,
    &'py Bound<'py, PyTuple>,
    u64,
    u64,
    u64,
);

impl TensorInfo {
    pub(crate) fn of(py: Python<'_>, entry: &Entry<'_>) -> PyResult<TensorInfo> {
        Ok(TensorInfo {
            name: PyString::new(py, entry.name).unbind(),
            dtype: PyString::intern(py, entry.dtype.code()).unbind(),
            shape: PyTuple::new(py, entry.shape)?.unbind(),
            begin: entry.begin,
            end: entry.end,
            parameter_count: entry.shape.iter().product(),
        })
    }

    fn fields<'py>(&'py self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let fields: Fields<'py> = (
            self.name.bind(py),
            self.dtype.bind(py),
            self.shape.bind(py),
            self.begin,
            self.end,
            self.parameter_count,
        );
        fields.into_pyobject(py)
    }
}

#[pymethods]
impl TensorInfo {
    #[new]
    #[pyo3(signature = (name, dtype, shape, begin, end, parameter_count = None))]
    fn new(
        name: Py<PyString>,
        dtype: Py<PyString>,
        shape: Vec<u64>,
        begin: u64,
        end: u64,
        parameter_count: Option<u64>,
        py: Python<'_>,
    ) -> PyResult<TensorInfo> {
        let elements = || shape.iter().try_fold(1_u64, |count, dim| count.checked_mul(*dim));
        let parameter_count = parameter_count
            .or_else(elements)
            .ok_or_else(|| PyOverflowError::new_err(format!("shape {shape:?} has too many elements")))?;
        if end < begin {
            return Err(PyValueError::new_err(format!(
                "end {end} is before begin {begin}"
            )));
        }
        Ok(TensorInfo {
            name,
            dtype,
            shape: PyTuple::new(py, shape)?.unbind(),
            begin,
            end,
            parameter_count,
        })
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.end - self.begin
    }

    fn __eq__(&self, py: Python<'_>, other: &TensorInfo) -> PyResult<bool> {
        self.fields(py)?.eq(other.fields(py)?)
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        self.fields(py)?.hash()
    }

    fn __reduce__<'py>(
        slf: &'py Bound<'py, Self>,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyType>, Bound<'py, PyTuple>)> {
        Ok((slf.get_type(), slf.get().fields(py)?))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (name, dtype) = (self.name.bind(py).repr()?, self.dtype.bind(py).repr()?);
        let (shape, begin, end, count) = (&self.shape, self.begin, self.end, self.parameter_count);
        Ok(format!(
            "TensorInfo(name={name}, dtype={dtype}, shape={shape}, begin={begin}, end={end}, \
             parameter_count={count})"
        ))
    }
}

/// Return the metadata of a file as a dict.
pub(crate) fn texts<'py>(py: Python<'py>, header: &Header) -> PyResult<Option<Bound<'py, PyDict>>> {
    let Some(metadata) = header.metadata() else {
        return Ok(None);
    };
    let pairs = PyDict::new(py);
    for (key, value) in metadata.iter() {
        pairs.set_item(key, value)?;
    }
    Ok(Some(pairs))
}

/// Return a header as Python objects.
pub(crate) fn file_header<'py>(py: Python<'py>, name: &str, header: &Header) -> PyResult<FileHeader<'py>> {
    let infos = header.entries().map(|entry| TensorInfo::of(py, &entry));
    Ok((
        name.to_owned(),
        texts(py, header)?,
        infos.collect::<PyResult<_>>()?,
    ))
}
