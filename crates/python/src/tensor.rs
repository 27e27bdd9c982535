//! Memory that crosses into Python and out of it, always as an object that owns it: what DLPack shows, and the buffer
//! protocol.
//!
//! One of the files in which `unsafe` is allowed.
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

use crate::dlpack::{Shown, Take, dl_dtype};

/// A tensor that a framework exported: all that a file needs to know, and where its bytes come from.
pub(crate) struct Imported {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    held: Held,
    _owner: Owner,
}

/// Where the bytes come from. The lifetimes are stretched: `_owner` keeps the memory, and nothing leaves an `Imported`
/// but what borrows it.
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

/// What keeps imported memory alive.
pub(crate) enum Owner {
    /// A capsule, or the memory of a framework.
    Object(#[allow(dead_code, reason = "held, not read")] Py<PyAny>),
    Buffer(#[allow(dead_code, reason = "held, not read")] PyUntypedBuffer),
    /// What produces the bytes has the object.
    Producer,
}

impl Imported {
    /// A tensor whose bytes are fetched when they are written.
    pub(crate) fn produced(dtype: Dtype, shape: Vec<u64>, producer: Box<dyn Produce + Send>) -> Imported {
        Imported {
            dtype,
            shape,
            held: Held::Produced(producer),
            _owner: Owner::Producer,
        }
    }

    /// The bytes, for as long as `self` is there.
    pub(crate) fn payload(&self) -> Payload<'_> {
        match &self.held {
            Held::Bytes(bytes) => Payload::Bytes(bytes.clone()),
            Held::Device(bytes) => Payload::Device(bytes),
            Held::Produced(producer) => Payload::Produced(&**producer),
        }
    }

    /// The memory that the bytes lie in, for finding tensors that share some; `None` when they are elsewhere.
    pub(crate) fn footprint(&self) -> Option<Footprint> {
        match &self.held {
            Held::Bytes(bytes) => Some(bytes.footprint()),
            Held::Device(_) | Held::Produced(_) => None,
        }
    }

    /// The tensor in a DLPack capsule; `None` where its elements cannot be written from where they lie: on another
    /// device, of a dtype that no file has, strided and smaller than a byte, nowhere.
    pub(crate) fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Option<Imported>> {
        // SAFETY: `take` asks for an owner of the elements: the capsule keeps its tensor.
        Shown::by(capsule, |shown| unsafe { Imported::take(shown, capsule) })
            .ok_or_else(|| PyBufferError::new_err("expected a DLPack capsule that was not used before"))
    }

    /// The elements of a tensor of `dtype` and `shape` on the device of `stream`, which lies in a DLPack capsule in C order;
    /// `None` where it does not, or lies elsewhere.
    pub(crate) fn on_device(
        dtype: Dtype,
        shape: Vec<u64>,
        stream: &DeviceStream,
        capsule: &Bound<'_, PyAny>,
    ) -> Option<Imported> {
        let expected = to_usize(ingot_format::nbytes(dtype, &shape).ok()?)?;
        let bytes = Shown::by(capsule, |shown| {
            let count = shown.sizes.iter().try_fold(shown.itemsize()?, |nbytes, &size| {
                nbytes.checked_mul(usize::try_from(size).ok()?)
            });
            let fits = shown.gpu == Some(stream.ordinal()) && shown.is_c_order() && count == Some(expected);
            // SAFETY: `DeviceBytes::new` asks for memory that is allocated there for as long as the result is: that of the
            // tensor, which `_owner` keeps; what borrows `self` goes before.
            fits.then(|| unsafe { DeviceBytes::new(stream, to_u64(shown.start.addr()), expected) })
        });
        Some(Imported {
            dtype,
            shape,
            held: Held::Device(bytes.flatten()?),
            _owner: Owner::Object(capsule.clone().unbind()),
        })
    }

    /// The elements of `buffer` in C order, to be stored as `dtype` with `shape`. Fails when it does not have just the
    /// bytes that those need.
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
            // SAFETY: `Bytes::new` asks for `nbytes` readable bytes for as long as the result lives, or for null: an exported
            // buffer has them and does not move (PEP 3118). `_owner` keeps it exported; what borrows `self` goes before.
            unsafe { Bytes::new(start, nbytes) }
        } else if buffer
            .suboffsets()
            .is_some_and(|offsets| offsets.iter().any(|&offset| offset >= 0))
        {
            return Err(PyBufferError::new_err("the buffer is one of pointers"));
        } else {
            let dims: Vec<Dim> = buffer
                .shape()
                .iter()
                .zip(buffer.strides())
                .map(|(&count, &stride)| Dim { count, stride })
                .collect();
            // SAFETY: `Bytes::strided` asks for the same of every element to which the dimensions lead: they are the buffer's.
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
    unsafe fn take(shown: &Shown<'_>, owner: &Bound<'_, PyAny>) -> Option<Imported> {
        let dtype = shown.dtype.known().filter(|_| shown.is_on_cpu)?;
        let (shape, nbytes) = logical(dtype, shown.sizes)?;
        let bytes = if shown.is_c_order() {
            // SAFETY: `Bytes::new` asks for `nbytes` readable bytes for as long as the result lives, or for null: a tensor of
            // that size in C order lies there, as the contract above says. `_owner` keeps it; what borrows `self` goes
            // before. That nobody writes to them meanwhile cannot be proven and is not asked for.
            unsafe { Bytes::new(shown.start, nbytes) }
        } else {
            let itemsize = shown.itemsize()?;
            let dim = |(&size, &stride): (&i64, &i64)| {
                let (count, stride) = (usize::try_from(size).ok()?, isize::try_from(stride).ok()?);
                let stride = stride.checked_mul(isize::try_from(itemsize).ok()?)?;
                Some(Dim { count, stride })
            };
            let dims = shown.sizes.iter().zip(shown.strides).map(dim);
            let dims = dims.collect::<Option<Vec<_>>>()?;
            // SAFETY: `Bytes::strided` asks for the same of every element to which the dimensions lead: they are the tensor's.
            unsafe { Bytes::strided(shown.start, itemsize, &dims) }
        };
        Some(Imported {
            dtype,
            shape,
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

/// What is said of elements at null, or of more than there are addresses.
const NO_MEMORY: &str = "its elements have no memory";

/// The shape in elements, and the bytes, of a tensor with `sizes` in storage units.
pub(crate) fn logical(dtype: Dtype, sizes: &[i64]) -> Option<(Vec<u64>, usize)> {
    let mut shape = sizes
        .iter()
        .map(|&size| u64::try_from(size).ok())
        .collect::<Option<Vec<_>>>()?;
    let lanes = u64::from(dl_dtype(dtype).lanes);
    if lanes > 1 {
        let last = shape.last_mut()?;
        *last = last.checked_mul(lanes)?;
    }
    let nbytes = ingot_format::nbytes(dtype, &shape).ok().and_then(to_usize)?;
    Some((shape, nbytes))
}

/// Memory with tensors in it, for frameworks that take the buffer protocol: writable bytes.
#[pyclass(frozen, name = "Buffer", module = "ingot._native")]
pub(crate) struct Exporter {
    memory: Arc<Memory>,
}

impl Exporter {
    pub(crate) fn new(memory: Arc<Memory>) -> Exporter {
        Exporter { memory }
    }
}

/// The bytes of a region as a memoryview.
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
        // SAFETY: `PyBuffer_FillInfo` asks for
        // - a `Py_buffer` to fill: Python gave `view`;
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

/// The bytes of a Python object as a source to read from. They may change at any time, so they are only ever
/// copied, and the header is checked in its copy.
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
        // SAFETY: `Bytes::new` asks for memory that is readable as long as the bytes live: the buffer is exported until
        // `self` is dropped, and an exported buffer does not move (PEP 3118).
        let bytes = unsafe { Bytes::new(start, self.buffer.len_bytes()) };
        let (Some(bytes), Some(at)) = (bytes, to_usize(position)) else {
            return Ok(0);
        };
        Ok(bytes.copy_into(at, dest))
    }
}

/// A `bytes` object of `len` bytes, which `fill` writes. Unlike [`PyBytes::new_with`] this does not touch the memory first:
/// that takes a second for a few GiB, in which no other thread of the program could run.
pub(crate) fn bytes_of<'py>(
    py: Python<'py>,
    len: usize,
    fill: impl FnOnce(&mut Room<'_>) -> PyResult<()>,
) -> PyResult<Bound<'py, PyBytes>> {
    let count =
        ffi::Py_ssize_t::try_from(len).map_err(|_| PyMemoryError::new_err("too large for a bytes object"))?;
    // SAFETY: `PyBytes_FromStringAndSize` asks for a length that is not negative, which `try_from` of a usize gives; null
    // is allowed, and leaves the bytes as they are.
    let object = unsafe { ffi::PyBytes_FromStringAndSize(ptr::null(), count) };
    // SAFETY: asks for an owned reference, or null with an exception set: what the call above returns.
    let object = unsafe { Bound::from_owned_ptr_or_err(py, object) }?;
    // SAFETY: asks for a bytes object, which was just made.
    let start = unsafe { ffi::PyBytes_AsString(object.as_ptr()) };
    // SAFETY: `from_raw_parts_mut` asks for
    // - a non-null pointer to `len` bytes in one allocation: those of the object, which `object` keeps past the slice;
    // - initialised elements: a `MaybeUninit` may be anything;
    // - no other access while the slice lives: nobody else has the object yet, and it is returned after the last use. The
    //   empty object is everybody's, and a slice of it has no bytes.
    let rest = unsafe { std::slice::from_raw_parts_mut(start.cast::<MaybeUninit<u8>>(), len) };
    let mut room = Room { rest };
    fill(&mut room)?;
    // Python shall not see what was in the memory before.
    room.next(len);
    Ok(object.cast_into::<PyBytes>()?)
}

/// The part of a `bytes` object that nobody has written to yet.
pub(crate) struct Room<'a> {
    rest: &'a mut [MaybeUninit<u8>],
}

impl<'a> Room<'a> {
    /// The next `len` bytes, or all where there are no more. They are zeros: which costs little for as many as fit into the
    /// cache of a core, where they are about to be written anyway.
    pub(crate) fn next(&mut self, len: usize) -> &'a mut [u8] {
        let rest = mem::take(&mut self.rest);
        let (part, rest) = rest.split_at_mut(len.min(rest.len()));
        self.rest = rest;
        part.fill(MaybeUninit::new(0));
        // SAFETY: `from_raw_parts_mut` asks for
        // - that many initialised bytes: `part` is a slice of them, all written by the line above;
        // - no other access for `'a`: `part` was borrowed for that long, and is not used again.
        unsafe { std::slice::from_raw_parts_mut(part.as_mut_ptr().cast::<u8>(), part.len()) }
    }
}
