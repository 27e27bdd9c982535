//! Memory that is passed from and to Python, always as an object that owns it: by DLPack and by the buffer protocol.
//!
//! `unsafe` is allowed in this file because the memory belongs to Python objects.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::sync::Arc;

use ingot_format::{Dtype, to_u64, to_usize};
use ingot_io::binding::{Bytes, DeviceBytes, DeviceStream, Dim, Footprint, Memory, ReadAt};
use ingot_io::{Payload, Produce, Region};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView, PySlice};
use smallvec::SmallVec;

use crate::dlpack::{DlView, Take, dl_dtype};

/// A tensor that a framework exported: dtype, shape and the source of its bytes.
pub(crate) struct Imported {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    held: Held,
    _owner: Owner,
}

/// The source of the bytes. The lifetimes are extended: `_owner` keeps the memory, and only borrows of an `Imported`
/// leave it.
enum Held {
    Bytes(Bytes<'static>),
    Device(DeviceBytes),
    Produced(Box<dyn Produce + Send>),
}

const _: fn() = || {
    fn crosses_threads<T: Send + Sync>() {}
    crosses_threads::<Imported>();
    crosses_threads::<Owner>();
    crosses_threads::<Region>();
};

/// Keeps imported memory alive.
pub(crate) enum Owner {
    /// A capsule, or the memory of a framework.
    Object(#[allow(dead_code, reason = "held, not read")] Py<PyAny>),
    Buffer(#[allow(dead_code, reason = "held, not read")] PyUntypedBuffer),
    /// The producer of the bytes owns the object.
    Producer,
}

impl Imported {
    /// Return a tensor whose bytes are fetched during the save.
    pub(crate) fn produced(dtype: Dtype, shape: Vec<u64>, producer: Box<dyn Produce + Send>) -> Imported {
        Imported {
            dtype,
            shape,
            held: Held::Produced(producer),
            _owner: Owner::Producer,
        }
    }

    /// Return the bytes, as long as `self` exists.
    pub(crate) fn payload(&self) -> Payload<'_> {
        match &self.held {
            Held::Bytes(bytes) => Payload::Bytes(bytes.clone()),
            Held::Device(bytes) => Payload::Device(bytes),
            Held::Produced(producer) => Payload::Produced(&**producer),
        }
    }

    /// Return the memory of the bytes, to detect tensors that overlap; `None` if they are not in host memory.
    pub(crate) fn footprint(&self) -> Option<Footprint> {
        match &self.held {
            Held::Bytes(bytes) => Some(bytes.footprint()),
            Held::Device(_) | Held::Produced(_) => None,
        }
    }

    /// Return the tensor in a DLPack capsule; `None` if its elements cannot be written in place: they are on another
    /// device, of a dtype that no file has, strided and smaller than a byte, or at null.
    pub(crate) fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Option<Imported>> {
        // SAFETY: `take` requires an owner of the elements: the capsule keeps its tensor.
        DlView::by(capsule, |view| unsafe { Imported::take(view, capsule) })
            .ok_or_else(|| PyBufferError::new_err("expected a DLPack capsule that was not used before"))
    }

    /// Return the elements of a tensor of `dtype` and `shape` in a DLPack capsule on the device of `stream`; `None` if
    /// they are not in C order or not on this device.
    pub(crate) fn on_device(
        dtype: Dtype,
        shape: Vec<u64>,
        stream: &DeviceStream,
        capsule: &Bound<'_, PyAny>,
    ) -> Option<Imported> {
        let expected = to_usize(ingot_format::nbytes(dtype, &shape).ok()?)?;
        let bytes = DlView::by(capsule, |view| {
            let count = view.sizes.iter().try_fold(view.itemsize()?, |nbytes, &size| {
                nbytes.checked_mul(usize::try_from(size).ok()?)
            });
            let fits = view.gpu == Some(stream.ordinal()) && view.is_c_order() && count == Some(expected);
            // SAFETY: `DeviceBytes::new` requires memory that stays allocated as long as the result exists: the
            // tensor's, which `_owner` keeps. Borrows of `self` end before `self`.
            fits.then(|| unsafe { DeviceBytes::new(stream, to_u64(view.start.addr()), expected) })
        });
        Some(Imported {
            dtype,
            shape,
            held: Held::Device(bytes.flatten()?),
            _owner: Owner::Object(capsule.clone().unbind()),
        })
    }

    /// Return the elements of `buffer` in C order, to be stored as `dtype` with `shape`. Fail if the buffer does not
    /// have exactly the bytes that these need.
    pub(crate) fn from_buffer(dtype: Dtype, shape: Vec<u64>, buffer: PyUntypedBuffer) -> PyResult<Imported> {
        let nbytes = buffer.len_bytes();
        // A shape without a size is refused when the file is laid out, with the rule that it breaks.
        if let Ok(expected) = ingot_format::nbytes(dtype, &shape)
            && to_u64(nbytes) != expected
        {
            return Err(PyValueError::new_err(format!(
                "shape {shape:?} of {dtype} needs {expected} bytes, the buffer has {nbytes}"
            )));
        }
        let start = buffer.buf_ptr().cast::<u8>().cast_const();
        let bytes = if buffer.is_c_contiguous() {
            // SAFETY: `Bytes::new` requires `nbytes` readable bytes as long as the result lives, or null: an exported
            // buffer has them and does not move (PEP 3118). `_owner` keeps it exported. Borrows of `self` end before
            // `self`.
            unsafe { Bytes::new(start, nbytes) }
        } else if buffer
            .suboffsets()
            .is_some_and(|offsets| offsets.iter().any(|&offset| offset >= 0))
        {
            return Err(PyBufferError::new_err("the buffer consists of pointers"));
        } else {
            let dims: Vec<Dim> = buffer
                .shape()
                .iter()
                .zip(buffer.strides())
                .map(|(&count, &stride)| Dim { count, stride })
                .collect();
            // SAFETY: `Bytes::strided` requires the same of every element within the dimensions: they are the buffer's.
            unsafe { Bytes::strided(start, buffer.item_size(), &dims) }
        };
        Ok(Imported {
            dtype,
            shape,
            held: Held::Bytes(bytes.ok_or_else(|| PyValueError::new_err(NO_MEMORY))?),
            _owner: Owner::Buffer(buffer),
        })
    }
}

impl Take for Imported {
    unsafe fn take(view: &DlView<'_>, owner: &Bound<'_, PyAny>) -> Option<Imported> {
        let dtype = view.dtype.known().filter(|_| view.is_on_cpu)?;
        let (shape, nbytes) = logical(dtype, view.sizes)?;
        let bytes = if view.is_c_order() {
            // SAFETY: `Bytes::new` requires `nbytes` readable bytes as long as the result lives, or null: by the
            // contract above, a tensor of that size in C order is there. `_owner` keeps it. Borrows of `self` end
            // before `self`. That no other code writes to them during that time cannot be proven, and is not required.
            unsafe { Bytes::new(view.start, nbytes) }
        } else {
            let itemsize = view.itemsize()?;
            let dim = |(&size, &stride): (&i64, &i64)| {
                let (count, stride) = (usize::try_from(size).ok()?, isize::try_from(stride).ok()?);
                let stride = stride.checked_mul(isize::try_from(itemsize).ok()?)?;
                Some(Dim { count, stride })
            };
            let dims = view.sizes.iter().zip(view.strides).map(dim);
            let dims = dims.collect::<Option<Vec<_>>>()?;
            // SAFETY: `Bytes::strided` requires the same of every element within the dimensions: they are the tensor's.
            unsafe { Bytes::strided(view.start, itemsize, &dims) }
        };
        Some(Imported {
            dtype,
            shape: shape.into_vec(),
            held: Held::Bytes(bytes?),
            _owner: Owner::Object(owner.clone().unbind()),
        })
    }

    fn lend(dtype: Dtype, buffer: &Bound<'_, PyAny>) -> PyResult<Imported> {
        let buffer = PyUntypedBuffer::get(buffer)?;
        let shape = buffer.shape().iter().copied().map(to_u64).collect();
        Imported::from_buffer(dtype, shape, buffer)
    }

    fn dtype(&self) -> Dtype {
        self.dtype
    }
}

/// The error for elements at null, or for more bytes than there are addresses.
const NO_MEMORY: &str = "its elements have no memory";

/// The number of elements along each dimension. Without memory of its own for few dimensions, since there may be many
/// tensors.
pub(crate) type Shape = SmallVec<[u64; 4]>;

/// Return the shape in elements, and the bytes, of a tensor with `sizes` in storage units.
pub(crate) fn logical(dtype: Dtype, sizes: &[i64]) -> Option<(Shape, usize)> {
    let mut shape = sizes
        .iter()
        .map(|&size| u64::try_from(size).ok())
        .collect::<Option<Shape>>()?;
    let lanes = u64::from(dl_dtype(dtype).lanes);
    if lanes > 1 {
        let last = shape.last_mut()?;
        *last = last.checked_mul(lanes)?;
    }
    let nbytes = ingot_format::nbytes(dtype, &shape).ok().and_then(to_usize)?;
    Some((shape, nbytes))
}

/// Memory that contains tensors, for frameworks that support the buffer protocol: writable bytes.
#[pyclass(frozen, name = "Buffer", module = "ingot._native")]
pub(crate) struct Exporter {
    memory: Arc<Memory>,
}

impl Exporter {
    pub(crate) fn new(memory: Arc<Memory>) -> Exporter {
        Exporter { memory }
    }
}

/// Return the bytes of a region as a memoryview.
pub(crate) fn memoryview<'py>(py: Python<'py>, region: &Region) -> PyResult<Bound<'py, PyAny>> {
    let buffer = Bound::new(py, Exporter::new(Arc::clone(region.memory())))?;
    let end = region.at() + region.len();
    let within = py.get_type::<PySlice>().call1((region.at(), end))?;
    PyMemoryView::from(&buffer)?.get_item(within)
}

#[pymethods]
impl Exporter {
    fn __len__(&self) -> usize {
        self.memory.len()
    }

    /// # Safety
    /// Python calls it with a `Py_buffer` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = &slf.get().memory;
        let nbytes = ffi::Py_ssize_t::try_from(memory.len())
            .map_err(|_| PyBufferError::new_err("the memory is too large for a buffer"))?;
        // SAFETY: `PyBuffer_FillInfo` requires
        // - a `Py_buffer` to fill: Python passes `view`;
        // - `nbytes` readable and writable bytes as long as the object lives: `Memory` is never moved or resized,
        //   and the object keeps it.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), memory.as_ptr().cast(), nbytes, 0, flags) };
        if filled == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}

/// The bytes of a Python object as a source to read from. They may change at any time, so they are only copied, and the
/// header is checked in a copy.
pub(crate) struct BufferSource {
    buffer: PyUntypedBuffer,
}

impl BufferSource {
    /// Holds the memory of `object`.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<BufferSource> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("the buffer is not in C order"));
        }
        Ok(BufferSource { buffer })
    }
}

impl std::fmt::Debug for BufferSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BufferSource({} bytes)", self.buffer.len_bytes())
    }
}

impl ReadAt for BufferSource {
    fn backend(&self) -> (&'static str, &'static str) {
        ("memory", "bytes in memory")
    }

    fn nbytes(&self) -> u64 {
        to_u64(self.buffer.len_bytes())
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> std::io::Result<usize> {
        let start = self.buffer.buf_ptr().cast::<u8>().cast_const();
        // SAFETY: `Bytes::new` requires memory that is readable as long as the bytes live: the buffer is exported until
        // `self` is dropped, and an exported buffer does not move (PEP 3118).
        let bytes = unsafe { Bytes::new(start, self.buffer.len_bytes()) };
        let (Some(bytes), Some(at)) = (bytes, to_usize(position)) else {
            return Ok(0);
        };
        Ok(bytes.copy_into(at, dest))
    }
}

/// Return a `bytes` object of `len` bytes, which `fill` writes. Unlike [`PyBytes::new_with`], this does not zero the
/// memory first, which takes a second for a few GiB while no other thread of the program can run.
pub(crate) fn bytes_of<'py>(
    py: Python<'py>,
    len: usize,
    fill: impl FnOnce(&mut Room<'_>) -> PyResult<()>,
) -> PyResult<Bound<'py, PyBytes>> {
    let count =
        ffi::Py_ssize_t::try_from(len).map_err(|_| PyMemoryError::new_err("too large for a bytes object"))?;
    // SAFETY: `PyBytes_FromStringAndSize` requires a length that is not negative, which `try_from` of a usize
    // guarantees; null is allowed, and leaves the bytes uninitialised.
    let object = unsafe { ffi::PyBytes_FromStringAndSize(ptr::null(), count) };
    // SAFETY: requires an owned reference, or null with an exception set: the call above returns one of the two.
    let object = unsafe { Bound::from_owned_ptr_or_err(py, object) }?;
    // SAFETY: requires a bytes object, which was just created.
    let start = unsafe { ffi::PyBytes_AsString(object.as_ptr()) };
    // SAFETY: `from_raw_parts_mut` requires
    // - a non-null pointer to `len` bytes in one allocation: those of the object, which `object` keeps past the slice;
    // - initialised elements: a `MaybeUninit` may be anything;
    // - no other access while the slice lives: no other code has the object yet, and it is returned after the last use.
    // The empty bytes object is shared, but a slice of it has no bytes.
    let rest = unsafe { std::slice::from_raw_parts_mut(start.cast::<MaybeUninit<u8>>(), len) };
    let mut room = Room { rest };
    fill(&mut room)?;
    // The previous contents of the memory must not become visible to Python.
    room.next(len);
    Ok(object.cast_into::<PyBytes>()?)
}

/// The part of a `bytes` object that is not written yet.
pub(crate) struct Room<'a> {
    rest: &'a mut [MaybeUninit<u8>],
}

impl<'a> Room<'a> {
    /// Return the next `len` bytes, or all if fewer are left, as zeros. Zeroing is cheap for a piece that fits into a
    /// core's cache, where it is about to be written anyway.
    pub(crate) fn next(&mut self, len: usize) -> &'a mut [u8] {
        let rest = mem::take(&mut self.rest);
        let (part, rest) = rest.split_at_mut(len.min(rest.len()));
        self.rest = rest;
        part.fill(MaybeUninit::new(0));
        // SAFETY: `from_raw_parts_mut` requires
        // - that many initialised bytes: `part` is a slice of them, all written by the line above;
        // - no other access for `'a`: `part` was borrowed for that long, and is not used again.
        unsafe { std::slice::from_raw_parts_mut(part.as_mut_ptr().cast::<u8>(), part.len()) }
    }
}
