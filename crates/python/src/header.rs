//! Headers: what Python sees of them, and which ones are taken.

use ingot_format::{Entry, Header, Leniency, Limits};
use ingot_io::REMOTE_HEADER_NBYTES;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

/// What a file is called, its metadata, and its tensors in the order of their data.
pub(crate) type FileHeader<'py> = (String, Option<Bound<'py, PyDict>>, Vec<TensorInfo>);

/// What a header says of one tensor.
#[pyclass(frozen, get_all, module = "ingot._native")]
pub(crate) struct TensorInfo {
    // As Python's own objects, which are made once and not each time that they are asked for.
    name: Py<PyString>,
    dtype: Py<PyString>,
    shape: Py<PyTuple>,
    begin: u64,
    end: u64,
    nbytes: u64,
}

impl TensorInfo {
    pub(crate) fn of(py: Python<'_>, entry: &Entry<'_>) -> PyResult<TensorInfo> {
        Ok(TensorInfo {
            name: PyString::new(py, entry.name).unbind(),
            dtype: PyString::intern(py, entry.dtype.code()).unbind(),
            shape: PyTuple::new(py, entry.shape)?.unbind(),
            begin: entry.begin,
            end: entry.end,
            nbytes: entry.nbytes(),
        })
    }
}

#[pymethods]
impl TensorInfo {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (name, dtype) = (self.name.bind(py).repr()?, self.dtype.bind(py).repr()?);
        let (begin, end, nbytes) = (self.begin, self.end, self.nbytes);
        let shape = &self.shape;
        Ok(format!(
            "TensorInfo(name={name}, dtype={dtype}, shape={shape}, begin={begin}, end={end}, nbytes={nbytes})"
        ))
    }
}

/// The metadata of a file as a dict.
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

/// What Python sees of a header.
pub(crate) fn file_header<'py>(py: Python<'py>, name: &str, header: &Header) -> PyResult<FileHeader<'py>> {
    let infos = header.entries().map(|entry| TensorInfo::of(py, &entry));
    Ok((
        name.to_owned(),
        texts(py, header)?,
        infos.collect::<PyResult<_>>()?,
    ))
}

pub(crate) fn limits(strict: bool, max_header_size: Option<u64>) -> Limits {
    Limits {
        header_nbytes: max_header_size.unwrap_or(Limits::HEADER_NBYTES),
        leniency: if strict {
            Leniency::Refuse
        } else {
            Leniency::Accept
        },
    }
}

/// Those of files behind URLs, whose headers are shorter where nobody says otherwise.
pub(crate) fn remote_limits(strict: bool, max_header_size: Option<u64>) -> Limits {
    limits(strict, max_header_size.or(Some(REMOTE_HEADER_NBYTES)))
}
