//! Wrapping bytes as tensors of a framework.

use std::path::Path;
use std::sync::Arc;

use ingot_format::{Dtype, Entry, to_u64};
use ingot_io::binding::{Buffer, Part};
use pyo3::exceptions::{PyException, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyString, PyTuple, PyType};

use crate::device::own_tensor;
use crate::dlpack::{Dims, DlManagedTensorVersioned, Exchange, Exports, capsule, has_storage_shape};
use crate::errors::refused;
use crate::tensor::Exporter;

/// The callables of a framework's module: one makes tensors, and one returns the framework's form of a dtype.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Wrap {
    style: Style,
    /// Whether tensors may have other strides than C order.
    strided: bool,
    make: Py<PyAny>,
    resolve: Py<PyAny>,
    /// The answer of `resolve` for each dtype, in the order of [`Dtype::ALL`].
    known: [PyOnceLock<Known>; Dtype::ALL.len()],
}

#[derive(Clone, Copy)]
enum Style {
    /// `make(capsule)`, unless the framework has a C function that does the same.
    Dlpack(Option<Exchange>),
    /// `make(shape, dtype, buffer, offset)`, with the strides in bytes if the elements are not in C order.
    Buffer,
}

/// Objects that consecutive tensors over one memory share.
#[derive(Default)]
pub(crate) struct Shared<'py> {
    /// The object that exports the memory, and the address of the memory.
    exporter: Option<(usize, Bound<'py, Exporter>)>,
    exports: Option<Exports<DlManagedTensorVersioned>>,
}

/// A framework's form of a dtype.
enum Known {
    /// Supported, with this dtype argument.
    Natively(Py<PyAny>),
    /// As raw bytes, to be finished by this callable: `finish(bytes, shape)`.
    Finished(Py<PyAny>),
}

#[pymethods]
impl Wrap {
    /// For frameworks that import DLPack. `exchange` is `__dlpack_c_exchange_api__` of its tensor class, if it has one.
    /// `strided` is whether its tensors may have any strides.
    #[staticmethod]
    #[pyo3(signature = (make, resolve, exchange = None, *, strided = false))]
    fn dlpack(
        make: Py<PyAny>,
        resolve: Py<PyAny>,
        exchange: Option<&Bound<'_, PyAny>>,
        strided: bool,
    ) -> Wrap {
        let exchange = exchange.and_then(Exchange::of);
        Wrap::new(Style::Dlpack(exchange), strided, make, resolve)
    }

    /// For frameworks that take the buffer protocol. `strided` is whether `make` takes strides.
    #[staticmethod]
    #[pyo3(signature = (make, resolve, *, strided = false))]
    fn buffer(make: Py<PyAny>, resolve: Py<PyAny>, strided: bool) -> Wrap {
        Wrap::new(Style::Buffer, strided, make, resolve)
    }
}

impl Wrap {
    fn new(style: Style, strided: bool, make: Py<PyAny>, resolve: Py<PyAny>) -> Wrap {
        Wrap {
            style,
            strided,
            make,
            resolve,
            known: [const { PyOnceLock::new() }; Dtype::ALL.len()],
        }
    }

    /// Fail if the framework cannot hold the tensor `entry` of the file at `path`. Called before its bytes are read.
    pub(crate) fn accepts(&self, py: Python<'_>, path: Option<&Path>, entry: &Entry<'_>) -> PyResult<()> {
        let known = self
            .known(py, entry.dtype)
            .map_err(|refusal| dtype_refused(py, path, entry, refusal))?;
        let takes_any_shape = matches!((self.style, known), (Style::Buffer, Known::Finished(_)));
        if !takes_any_shape && !has_storage_shape(entry.dtype, entry.shape) {
            let reason = format!(
                "the last dimension of shape {:?} does not fill bytes of {}, and a framework can only hold whole \
                 ones — read it with get_slice or as bytes",
                entry.shape, entry.dtype
            );
            let found = PyString::new(py, entry.dtype.code());
            return Err(refused(path, entry, DTYPE_CODE, &found, &reason));
        }
        Ok(())
    }

    /// Return the tensor `entry` of the file at `path` over `buffer`. Pass `shared` on to the next tensor over the same memory.
    pub(crate) fn wrap<'py>(
        &self,
        py: Python<'py>,
        path: Option<&Path>,
        buffer: &Buffer,
        entry: &Entry<'_>,
        shared: &mut Shared<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.wrap_unnamed(py, buffer, entry.dtype, entry.shape, shared)
            .map_err(|refusal| about(py, path, entry, refusal))
    }

    /// Return whether tensors of this dtype can be views whose elements are not in C order.
    pub(crate) fn takes_strides(&self, py: Python<'_>, dtype: Dtype) -> PyResult<bool> {
        Ok(self.strided && matches!(self.known(py, dtype)?, Known::Natively(_)))
    }

    /// Return a part of the tensor `entry` of the file at `path`. It may have strides if [`Wrap::takes_strides`].
    pub(crate) fn wrap_part<'py>(
        &self,
        py: Python<'py>,
        path: Option<&Path>,
        part: &Part,
        entry: &Entry<'_>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let entry = &Entry {
            shape: &part.shape,
            ..*entry
        };
        let (buffer, shared) = (&part.buffer, &mut Shared::default());
        let Some(strides) = &part.strides else {
            self.accepts(py, path, entry)?;
            return self.wrap(py, path, buffer, entry, shared);
        };
        let make = |units: Dims| match self.known(py, entry.dtype)? {
            Known::Natively(as_dtype) => self.make(py, buffer, entry.dtype, units, as_dtype.bind(py), shared),
            Known::Finished(_) => Err(PyValueError::new_err("a dtype without strides")),
        };
        Dims::strided(entry.dtype, entry.shape, strides)
            .ok_or_else(|| PyValueError::new_err("shape cannot be stored"))
            .and_then(make)
            .map_err(|refusal| about(py, path, entry, refusal))
    }

    fn wrap_unnamed<'py>(
        &self,
        py: Python<'py>,
        buffer: &Buffer,
        dtype: Dtype,
        shape: &[u64],
        shared: &mut Shared<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Buffer::Device(region) = buffer
            && let Some(tensor) = own_tensor(region)
        {
            return Ok(tensor.bind(py).clone());
        }
        let units = || Dims::of(dtype, shape).ok_or_else(|| PyValueError::new_err("shape cannot be stored"));
        match self.known(py, dtype)? {
            Known::Natively(as_dtype) => self.make(py, buffer, dtype, units()?, as_dtype.bind(py), shared),
            Known::Finished(finish) => {
                let nbytes = Dims::of(Dtype::U8, &[to_u64(buffer.len())])
                    .ok_or_else(|| PyValueError::new_err("tensor too large"))?;
                let Known::Natively(bytes) = self.known(py, Dtype::U8)? else {
                    return Err(PyValueError::new_err("a framework must take U8 as it is"));
                };
                let raw = self.make(py, buffer, Dtype::U8, nbytes, bytes.bind(py), shared)?;
                let shape = match self.style {
                    Style::Dlpack(_) => PyTuple::new(py, units()?.sizes())?,
                    Style::Buffer => PyTuple::new(py, shape)?,
                };
                finish.bind(py).call1((raw, shape))
            }
        }
    }

    fn make<'py>(
        &self,
        py: Python<'py>,
        buffer: &Buffer,
        dtype: Dtype,
        units: Dims,
        as_dtype: &Bound<'py, PyAny>,
        shared: &mut Shared<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let make = self.make.bind(py);
        match (self.style, buffer) {
            (Style::Dlpack(exchange), _) => {
                let made = exchange
                    .and_then(|exchange| exchange.import(py, buffer, dtype, &units, &mut shared.exports));
                made.map_or_else(|| make.call1((capsule(py, buffer, dtype, &units)?,)), Ok)
            }
            (Style::Buffer, Buffer::Device(_)) => {
                Err(PyValueError::new_err("a buffer is memory of the host"))
            }
            (Style::Buffer, Buffer::Host(region)) => {
                let address = region.memory().as_ptr().addr();
                let exporter = match &mut shared.exporter {
                    Some((of, exporter)) if *of == address => &*exporter,
                    _ => {
                        let exporter = Bound::new(py, Exporter::new(Arc::clone(region.memory())))?;
                        &shared.exporter.insert((address, exporter)).1
                    }
                };
                let sizes = PyTuple::new(py, units.sizes())?;
                if units.is_c_order() {
                    return make.call1((sizes, as_dtype, exporter, region.at()));
                }
                let strides = PyTuple::new(py, units.strides_in_bytes(dtype))?;
                make.call1((sizes, as_dtype, exporter, region.at(), strides))
            }
        }
    }

    fn known(&self, py: Python<'_>, dtype: Dtype) -> PyResult<&Known> {
        // The number of a variant is its index in the table.
        self.known[dtype as usize].get_or_try_init(py, || {
            let answer = self.resolve.bind(py).call1((dtype.code(),))?;
            // Classes are callable too, and numpy uses classes as dtypes.
            let finishes = answer.is_callable() && !answer.is_instance_of::<PyType>();
            Ok(if finishes {
                Known::Finished(answer.unbind())
            } else {
                Known::Natively(answer.unbind())
            })
        })
    }
}

/// New objects after which the collector runs (`gc.get_threshold()`).
const COLLECTED_OBJECTS: usize = 700;

/// Pause Python's garbage collector until the result is dropped, if making `count` objects would start it.
///
/// New tensors are no garbage, but the collector examines all of them repeatedly: making 200,000 tensors takes 0.22 s without it
/// and 0.33 to 0.42 s with it, and every fifth of consecutive loads of 20,000 tensors takes 0.1 s longer (2026-11).
pub(crate) fn paused_collector(py: Python<'_>, count: usize) -> PyResult<Option<PausedCollector<'_>>> {
    if count < COLLECTED_OBJECTS {
        return Ok(None);
    }
    let gc = py.import("gc")?;
    if !gc.call_method0("isenabled")?.is_truthy()? {
        return Ok(None);
    }
    gc.call_method0("disable")?;
    Ok(Some(PausedCollector(gc)))
}

/// Enables the collector when dropped.
pub(crate) struct PausedCollector<'py>(Bound<'py, PyModule>);

impl Drop for PausedCollector<'_> {
    fn drop(&mut self) {
        if let Err(fault) = self.0.call_method0("enable") {
            fault.write_unraisable(self.0.py(), Some(&self.0));
        }
    }
}

/// The code of an exception for a dtype that a framework lacks.
const DTYPE_CODE: &str = "dtype-not-in-framework";

/// Return a framework's refusal of a dtype as an exception about the tensor.
fn dtype_refused(py: Python<'_>, path: Option<&Path>, entry: &Entry<'_>, refusal: PyErr) -> PyErr {
    if !refusal.is_instance_of::<PyException>(py) {
        // For example Ctrl-C while a framework is imported.
        return refusal;
    }
    let found = PyString::new(py, entry.dtype.code());
    let named = refused(path, entry, DTYPE_CODE, &found, &text(py, &refusal));
    named.set_cause(py, Some(refusal));
    named
}

/// Return a framework's error about a shape as an exception about the tensor. Errors of ours name the tensor already.
fn about(py: Python<'_>, path: Option<&Path>, entry: &Entry<'_>, refusal: PyErr) -> PyErr {
    let class = refusal.get_type(py);
    if class.is(py.get_type::<PyValueError>()) || class.is(py.get_type::<PyRuntimeError>()) {
        shape_refused(py, path, entry, refusal)
    } else {
        refusal
    }
}

/// Return a framework's refusal of a shape, such as NumPy's of more than 64 dimensions, as an exception about the tensor.
fn shape_refused(py: Python<'_>, path: Option<&Path>, entry: &Entry<'_>, refusal: PyErr) -> PyErr {
    let reason = format!("the framework cannot hold its shape: {}", text(py, &refusal));
    match PyTuple::new(py, entry.shape) {
        Ok(shape) => {
            let named = refused(path, entry, "shape-not-in-framework", &shape, &reason);
            named.set_cause(py, Some(refusal));
            named
        }
        Err(failure) => failure,
    }
}

fn text(py: Python<'_>, refusal: &PyErr) -> String {
    refusal
        .value(py)
        .str()
        .map(|text| text.to_string())
        .unwrap_or_default()
}
