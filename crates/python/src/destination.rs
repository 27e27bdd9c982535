//! Memory of callers that tensors are read into.
//!
//! One of the files in which `unsafe` is allowed, because the memory belongs to a framework.
#![allow(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use ingot_format::Dtype;
use ingot_io::binding::{Dest, Target};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyRuntimeError};
use pyo3::prelude::*;

use crate::dlpack::{Shown, Take, dl_dtype};
use crate::export::{self, Export, items};
use crate::tensor::{Owner, logical};
use crate::wrap::paused_collector;

/// Tensors that a file is to be read into, which are looked at all at once. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Destinations {
    /// `None` once they are filled.
    held: Mutex<Option<Vec<Held>>>,
}

/// One of them.
pub(crate) enum Held {
    Shown(Destination),
    Given(Given),
}

impl Held {
    /// `None` for a dtype that no file has.
    pub(crate) fn dtype(&self) -> Option<Dtype> {
        match self {
            Held::Shown(destination) => Some(destination.dtype),
            Held::Given((code, ..)) => Dtype::from_code(code),
        }
    }
}

/// The code of a dtype, memory for elements of it (a DLPack capsule or a buffer), and whether its one element is a tensor
/// without dimensions: Python has no such buffers.
type Given = (String, Py<PyAny>, bool);

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
        let held = export::each(export, &items, |(name, tensor), shown| match shown {
            Some(shown) => Ok(Some(Held::Shown(shown))),
            None => {
                let given = memory.call1((name, tensor))?.extract::<Option<Given>>()?;
                Ok(given.map(Held::Given))
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

/// Memory of a framework that a tensor shall be read into.
pub(crate) struct Destination {
    dtype: Dtype,
    shape: Vec<u64>,
    /// The elements; `None` where some of them share memory with each other, and once they are a target. The lifetime is
    /// stretched: `_owner` keeps them, and nothing leaves a `Destination` but what borrows it.
    memory: Option<Dest<'static>>,
    _owner: Owner,
}

impl Destination {
    /// The elements of a DLPack capsule or of a buffer, which are `dtype` whatever that says they are. Fails for what
    /// is on another device, may not be written to or holds elements of another size. Of a buffer that `is_scalar` only
    /// the first element counts.
    pub(crate) fn new(dtype: Dtype, memory: &Bound<'_, PyAny>, is_scalar: bool) -> PyResult<Destination> {
        // SAFETY: `shown` asks for an owner of the elements: the capsule keeps its tensor.
        let shown = Shown::by(memory, |shown| unsafe {
            Destination::shown(dtype, shown, memory)
        });
        shown.unwrap_or_else(|| Destination::from_buffer(dtype, memory, is_scalar))
    }

    /// # Safety
    /// As for [`Take::take`], but for the dtype.
    unsafe fn shown(dtype: Dtype, shown: &Shown<'_>, owner: &Bound<'_, PyAny>) -> PyResult<Destination> {
        if !shown.is_on_cpu {
            return Err(PyBufferError::new_err(
                "the destination is not in the memory of the CPU",
            ));
        }
        let itemsize = shown.itemsize().unwrap_or(0);
        let owner = Owner::Object(owner.clone().unbind());
        if shown.is_c_order() {
            // SAFETY: the contract above is the same.
            return unsafe { Destination::of(dtype, shown.start, itemsize, shown.sizes, None, owner) };
        }
        let strides = shown.strides.iter().map(|&stride| {
            isize::try_from(stride)
                .ok()?
                .checked_mul(isize::try_from(itemsize).ok()?)
        });
        let strides = strides.collect::<Option<Vec<_>>>().ok_or_else(impossible)?;
        // SAFETY: the contract above is the same.
        unsafe { Destination::of(dtype, shown.start, itemsize, shown.sizes, Some(&strides), owner) }
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
        // SAFETY: `of` asks for elements that the owner keeps: the buffer protocol promises them for this shape and these
        // strides as long as the buffer is exported, and that they may be written to was asked above.
        unsafe { Destination::of(dtype, start, itemsize, &sizes, strides, owner) }
    }

    /// Without `strides`, which are in bytes, the elements lie in C order.
    ///
    /// # Safety
    /// The elements are mapped for reading and writing for as long as there is `owner`.
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
            // SAFETY: `Dest::strided` asks for
            // - elements that are writable for as long as the result lives: the contract above, for as long as there is
            //   `owner`, which goes with the result, and only `target` gives that away, for no longer than `self` is borrowed.
            //   The size of an element was checked, and `from_buffer` asked whether they may be written to; DLPack has no
            //   word for that. Tried: without either check `test_load_file_rejects_invalid_memory` fails;
            // - nobody else who writes to them. That no other thread of the program does nobody can prove; the consequence
            //   are bytes of both.
            Some(strides) => unsafe { Dest::strided(start, itemsize, &sizes, strides) },
            // SAFETY: as above, of `nbytes` bytes of elements in C order.
            None => unsafe { Dest::new(start, nbytes) },
        };
        Ok(Destination {
            dtype,
            shape,
            memory,
            _owner: owner,
        })
    }

    /// The elements, to be filled; `None` where some of them share memory with each other.
    pub(crate) fn target(&mut self) -> Option<Target<'_>> {
        Some(Target {
            dtype: self.dtype,
            shape: &self.shape,
            memory: self.memory.take()?,
        })
    }
}

impl Take for Destination {
    unsafe fn take(shown: &Shown<'_>, owner: &Bound<'_, PyAny>) -> Option<Destination> {
        // SAFETY: the contract above is the same. What is refused is asked for in another way, and refused there.
        unsafe { Destination::shown(shown.dtype.known()?, shown, owner) }.ok()
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
