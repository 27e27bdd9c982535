//! Memory of callers as the destination of reads.
//!
//! `unsafe` is allowed in this file because the memory belongs to a framework.
#![allow(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use ingot_format::Dtype;
use ingot_io::binding::{Dest, Target};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyRuntimeError};
use pyo3::prelude::*;

use crate::dlpack::{DlView, Take, dl_dtype};
use crate::export::{self, Export, items};
use crate::tensor::{Owner, Shape, logical};
use crate::wrap::paused_collector;

/// The destinations of one read, which are checked together. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Destinations {
    /// `None` once they have been filled.
    held: Mutex<Option<Vec<Held>>>,
}

/// One destination.
pub(crate) enum Held {
    Exported(Destination),
    Object(ObjectMemory),
}

impl Held {
    /// `None` for a dtype that no file has.
    pub(crate) fn dtype(&self) -> Option<Dtype> {
        match self {
            Held::Exported(destination) => Some(destination.dtype),
            Held::Object((code, ..)) => Dtype::from_code(code),
        }
    }
}

/// The code of a dtype, memory for elements of it (a DLPack capsule or a buffer), and whether the memory is a tensor
/// without dimensions, which Python's buffers cannot describe.
type ObjectMemory = (String, Py<PyAny>, bool);

#[pymethods]
impl Destinations {
    #[new]
    #[pyo3(signature = (tensors, memory, export = None))]
    fn new(
        tensors: &Bound<'_, PyAny>,
        memory: &Bound<'_, PyAny>,
        export: Option<&Bound<'_, Export>>,
    ) -> PyResult<Destinations> {
        let items = items(tensors)?;
        let _pause = paused_collector(memory.py(), items.len())?;
        let held = export::each(export, &items, |(name, tensor), exported| match exported {
            Some(exported) => Ok(Some(Held::Exported(exported))),
            None => {
                let given = memory.call1((name, tensor))?.extract::<Option<ObjectMemory>>()?;
                Ok(given.map(Held::Object))
            }
        })?;
        let held = held.into_iter().flatten().collect();
        let held = Mutex::new(Some(held));
        Ok(Destinations { held })
    }

    fn __len__(&self) -> usize {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.as_ref().map_or(0, Vec::len)
    }
}

impl Destinations {
    pub(crate) fn take(&self) -> PyResult<Vec<Held>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.take()
            .ok_or_else(|| PyRuntimeError::new_err("the destinations have been filled"))
    }
}

const _: fn() = || {
    fn crosses_threads<T: Send + Sync>() {}
    crosses_threads::<Destination>();
};

/// Memory of a framework as a destination.
pub(crate) struct Destination {
    dtype: Dtype,
    shape: Shape,
    /// The elements; `None` if some of them overlap, or after they became a target. The lifetime is extended: `_owner`
    /// keeps the memory, and only borrows of a `Destination` leave it.
    memory: Option<Dest<'static>>,
    _owner: Owner,
}

impl Destination {
    /// Return the elements of a DLPack capsule or of a buffer as elements of `dtype`, regardless of the object's own
    /// format. Fail if they are on another device, not writable, or of another size. For a buffer with `is_scalar`,
    /// only the first element counts.
    pub(crate) fn new(dtype: Dtype, memory: &Bound<'_, PyAny>, is_scalar: bool) -> PyResult<Destination> {
        // SAFETY: `of_view` requires an owner of the elements: the capsule keeps its tensor.
        let view = DlView::by(memory, |view| unsafe {
            Destination::of_view(dtype, view, memory)
        });
        view.unwrap_or_else(|| Destination::from_buffer(dtype, memory, is_scalar))
    }

    /// # Safety
    /// The contract is the one of [`Take::take`], without the dtype.
    unsafe fn of_view(dtype: Dtype, view: &DlView<'_>, owner: &Bound<'_, PyAny>) -> PyResult<Destination> {
        if !view.is_on_cpu {
            return Err(PyBufferError::new_err("the destination is not in CPU memory"));
        }
        let itemsize = view.itemsize().unwrap_or(0);
        let owner = Owner::Object(owner.clone().unbind());
        if view.is_c_order() {
            // SAFETY: the contract above is the same.
            return unsafe { Destination::of(dtype, view.start, itemsize, view.sizes, None, owner) };
        }
        let strides = view.strides.iter().map(|&stride| {
            isize::try_from(stride)
                .ok()?
                .checked_mul(isize::try_from(itemsize).ok()?)
        });
        let strides = strides.collect::<Option<Vec<_>>>().ok_or_else(impossible)?;
        // SAFETY: the contract above is the same.
        unsafe { Destination::of(dtype, view.start, itemsize, view.sizes, Some(&strides), owner) }
    }

    fn from_buffer(dtype: Dtype, memory: &Bound<'_, PyAny>, is_scalar: bool) -> PyResult<Destination> {
        let buffer = PyUntypedBuffer::get(memory)?;
        if buffer.readonly() {
            return Err(PyBufferError::new_err("the destination may not be written to"));
        }
        let rank = if is_scalar { 0 } else { buffer.dimensions() };
        let sizes = buffer.shape().iter().map(|&size| i64::try_from(size).ok());
        let sizes = sizes.take(rank).collect::<Option<Vec<_>>>().unwrap_or_default();
        let strides: Vec<isize> = buffer.strides().iter().copied().take(rank).collect();
        let strides = (!buffer.is_c_contiguous()).then_some(&*strides);
        let (start, itemsize) = (buffer.buf_ptr().cast(), buffer.item_size());
        let owner = Owner::Buffer(buffer);
        // SAFETY: `of` requires elements that the owner keeps: the buffer protocol guarantees them for this shape and
        // these strides as long as the buffer is exported, and the buffer was checked to be writable above.
        unsafe { Destination::of(dtype, start, itemsize, &sizes, strides, owner) }
    }

    /// Without `strides`, which are in bytes, the elements are in C order.
    ///
    /// # Safety
    /// The elements are mapped for reading and writing as long as `owner` exists.
    unsafe fn of(
        dtype: Dtype,
        start: *mut u8,
        itemsize: usize,
        sizes: &[i64],
        strides: Option<&[isize]>,
        owner: Owner,
    ) -> PyResult<Destination> {
        let unit = dl_dtype(dtype);
        let expected = usize::from(unit.bits) * usize::from(unit.lanes) / 8;
        let (shape, nbytes) = logical(dtype, sizes).ok_or_else(impossible)?;
        if itemsize != expected {
            return Err(PyBufferError::new_err(format!(
                "the destination has elements of another size: expected {expected} bytes, found {itemsize}"
            )));
        }
        if start.is_null() && nbytes > 0 {
            return Err(PyBufferError::new_err("the destination has no memory"));
        }
        let sizes = sizes.iter().filter(|_| strides.is_some());
        let sizes = sizes.map(|&size| usize::try_from(size).ok());
        let sizes = sizes.collect::<Option<Vec<_>>>().ok_or_else(impossible)?;
        let memory = match strides {
            // SAFETY: `Dest::strided` requires
            // - elements that are writable as long as the result lives: the contract above guarantees it as long as
            // `owner` exists. `owner` is stored beside the result, and only `target` returns the result, for no longer
            // than `self` is borrowed. The size of an element was checked, and `from_buffer` checked that the buffer is
            // writable; DLPack does not report that. Without either check `test_load_file_rejects_invalid_memory`
            // fails;
            // - no other code that writes to them. Nobody can prove that no other thread of the program does. The
            // consequence is a mixture of both writers' bytes.
            Some(strides) => unsafe { Dest::strided(start, itemsize, &sizes, strides) },
            // SAFETY: as above, for `nbytes` bytes of elements in C order.
            None => unsafe { Dest::new(start, nbytes) },
        };
        Ok(Destination {
            dtype,
            shape,
            memory,
            _owner: owner,
        })
    }

    /// Return the elements to fill; `None` if some of them overlap.
    pub(crate) fn target(&mut self) -> Option<Target<'_>> {
        Some(Target {
            dtype: self.dtype,
            shape: &self.shape,
            memory: self.memory.take()?,
        })
    }
}

impl Take for Destination {
    unsafe fn take(view: &DlView<'_>, owner: &Bound<'_, PyAny>) -> Option<Destination> {
        // SAFETY: the contract above is the same. Memory that is rejected here comes again, as a capsule or a buffer,
        // to `Destination::new`, which reports why.
        unsafe { Destination::of_view(view.dtype.known()?, view, owner) }.ok()
    }

    fn lend(dtype: Dtype, buffer: &Bound<'_, PyAny>) -> PyResult<Destination> {
        Destination::from_buffer(dtype, buffer, false)
    }

    fn dtype(&self) -> Dtype {
        self.dtype
    }
}

fn impossible() -> PyErr {
    PyBufferError::new_err("the destination has a shape that no memory can hold")
}
