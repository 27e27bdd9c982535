//! How bytes become a framework's tensors.

use ingot_format::{Dtype, Entry, to_u64};
use ingot_io::Region;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

use crate::errors::about_tensor;
use crate::tensor::{Buffer, Dims, capsule, has_storage_shape};

/// What a framework's module hands over: a callable that makes tensors, and one that says how it knows a dtype.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Wrap {
    style: Style,
    make: Py<PyAny>,
    resolve: Py<PyAny>,
    /// What `resolve` said of each dtype, by its place in [`Dtype::ALL`].
    known: [PyOnceLock<Known>; Dtype::ALL.len()],
}

#[derive(Clone, Copy)]
enum Style {
    /// `make(capsule)`.
    Dlpack,
    /// `make(shape, dtype, buffer, offset)`.
    Buffer,
}

/// How a framework takes a dtype.
enum Known {
    /// Straight, with this as the dtype argument.
    Natively(Py<PyAny>),
    /// As raw bytes, to be finished by this callable: `finish(bytes, shape)`.
    Finished(Py<PyAny>),
}

#[pymethods]
impl Wrap {
    /// For frameworks that import DLPack.
    #[staticmethod]
    fn dlpack(make: Py<PyAny>, resolve: Py<PyAny>) -> Wrap {
        Wrap::new(Style::Dlpack, make, resolve)
    }

    /// For frameworks that take the buffer protocol.
    #[staticmethod]
    fn buffer(make: Py<PyAny>, resolve: Py<PyAny>) -> Wrap {
        Wrap::new(Style::Buffer, make, resolve)
    }
}

impl Wrap {
    fn new(style: Style, make: Py<PyAny>, resolve: Py<PyAny>) -> Wrap {
        Wrap {
            style,
            make,
            resolve,
            known: [const { PyOnceLock::new() }; Dtype::ALL.len()],
        }
    }

    /// Fails when the framework does not take tensors like `entry`, before any of its bytes are read.
    pub(crate) fn accepts(&self, py: Python<'_>, entry: &Entry<'_>) -> PyResult<()> {
        let known = self
            .known(py, entry.dtype)
            .map_err(|refusal| name_tensor(py, refusal, entry.name))?;
        let takes_any_shape = matches!((self.style, known), (Style::Buffer, Known::Finished(_)));
        if !takes_any_shape && !has_storage_shape(entry.dtype, entry.shape) {
            let message = format!(
                "tensor {}: the last dimension of shape {:?} does not fill bytes of {}, and a framework can only \
                 hold whole ones — read it with get_slice or as bytes",
                ingot_format::Quoted(entry.name),
                entry.shape,
                entry.dtype
            );
            return Err(about_tensor(
                py,
                "DtypeError",
                "dtype-not-in-framework",
                entry.name,
                &message,
            ));
        }
        Ok(())
    }

    /// The tensor over `region`. `shared` is the buffer made for the region before, to be used again when it is
    /// over the same memory.
    pub(crate) fn wrap<'py>(
        &self,
        py: Python<'py>,
        region: &Region,
        dtype: Dtype,
        shape: &[u64],
        shared: &mut Option<(usize, Bound<'py, Buffer>)>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let units = || Dims::of(dtype, shape).ok_or_else(|| PyValueError::new_err("shape cannot be stored"));
        match self.known(py, dtype)? {
            Known::Natively(as_dtype) => self.make(py, region, dtype, units()?, as_dtype.bind(py), shared),
            Known::Finished(finish) => {
                let nbytes = Dims::of(Dtype::U8, &[to_u64(region.len())])
                    .ok_or_else(|| PyValueError::new_err("tensor too large"))?;
                let Known::Natively(bytes) = self.known(py, Dtype::U8)? else {
                    return Err(PyValueError::new_err("a framework must take U8 as it is"));
                };
                let raw = self.make(py, region, Dtype::U8, nbytes, bytes.bind(py), shared)?;
                let shape = match self.style {
                    Style::Dlpack => PyTuple::new(py, units()?.sizes())?,
                    Style::Buffer => PyTuple::new(py, shape)?,
                };
                finish.bind(py).call1((raw, shape))
            }
        }
    }

    fn make<'py>(
        &self,
        py: Python<'py>,
        region: &Region,
        dtype: Dtype,
        units: Dims,
        as_dtype: &Bound<'py, PyAny>,
        shared: &mut Option<(usize, Bound<'py, Buffer>)>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let make = self.make.bind(py);
        match self.style {
            Style::Dlpack => make.call1((capsule(py, region.clone(), dtype, units)?,)),
            Style::Buffer => {
                let address = region.memory().as_ptr().addr();
                let buffer = match shared {
                    Some((of, buffer)) if *of == address => &*buffer,
                    _ => {
                        let buffer = Bound::new(py, Buffer::new(std::sync::Arc::clone(region.memory())))?;
                        &shared.insert((address, buffer)).1
                    }
                };
                make.call1((PyTuple::new(py, units.sizes())?, as_dtype, buffer, region.at()))
            }
        }
    }

    fn known(&self, py: Python<'_>, dtype: Dtype) -> PyResult<&Known> {
        let place = Dtype::ALL.iter().position(|&known| known == dtype).unwrap_or(0);
        self.known[place].get_or_try_init(py, || {
            let answer = self.resolve.bind(py).call1((dtype.code(),))?;
            // Classes are callable too, and are what numpy calls some of its dtypes.
            let finishes = answer.is_callable() && !answer.is_instance_of::<PyType>();
            Ok(if finishes {
                Known::Finished(answer.unbind())
            } else {
                Known::Natively(answer.unbind())
            })
        })
    }
}

/// Adds the tensor's name to a framework's refusal of its dtype.
fn name_tensor(py: Python<'_>, refusal: PyErr, tensor: &str) -> PyErr {
    let reason = refusal
        .value(py)
        .str()
        .map(|text| text.to_string())
        .unwrap_or_default();
    let message = format!("tensor {}: {reason}", ingot_format::Quoted(tensor));
    let named = about_tensor(py, "DtypeError", "dtype-not-in-framework", tensor, &message);
    named.set_cause(py, Some(refusal));
    named
}
