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
use ingot_io::{
    Bytes, Dim, Footprint, Memory, Payload, Produce, Region, Source, Strided, StridedDest, Target,
};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::dlpack::{CAPSULE_NAME, CPU, DlDataType, DlManagedTensor, DlTensor, Exchange, dl_dtype, numbers};

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
    Strided(Strided<'static>),
    Produced(Box<dyn Produce + Send>),
}

const _: fn() = || {
    fn crosses_threads<T: Send + Sync>() {}
    crosses_threads::<Imported>();
    crosses_threads::<Destination>();
    crosses_threads::<Owner>();
    crosses_threads::<Region>();
};

/// What keeps imported memory alive.
enum Owner {
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
            Held::Bytes(bytes) => Payload::Bytes(*bytes),
            Held::Strided(strided) => Payload::Strided(strided.clone()),
            Held::Produced(producer) => Payload::Produced(&**producer),
        }
    }

    /// The memory that the bytes lie in, for finding tensors that share some; `None` when they are elsewhere.
    pub(crate) fn footprint(&self) -> Option<Footprint> {
        match &self.held {
            Held::Bytes(bytes) => Some(Footprint::new(bytes.addr(), bytes.len(), &[])),
            Held::Strided(strided) => Some(strided.footprint()),
            Held::Produced(_) => None,
        }
    }

    /// Whether all elements are among `nbytes` bytes of memory, of which the first `skipped` come before the first element.
    /// Not asked of negative strides, which DLPack gives and no framework with such memory has.
    pub(crate) fn lies_within(&self, skipped: u64, nbytes: u64) -> bool {
        let taken = match &self.held {
            Held::Bytes(bytes) => bytes.len(),
            Held::Strided(strided) => strided.footprint().extent().len(),
            Held::Produced(_) => 0,
        };
        taken == 0
            || skipped
                .checked_add(to_u64(taken))
                .is_some_and(|end| end <= nbytes)
    }

    /// The tensor in a DLPack capsule; `None` where its elements cannot be written from where they lie: on another
    /// device, of a dtype that no file has, strided and smaller than a byte, nowhere.
    pub(crate) fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Option<Imported>> {
        // SAFETY: asks for an object, and a name that is a C string.
        if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), CAPSULE_NAME.as_ptr()) } == 0 {
            return Err(PyBufferError::new_err(
                "expected a DLPack capsule that was not used before",
            ));
        }
        // SAFETY: asks for a valid capsule of this name, which was just checked.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), CAPSULE_NAME.as_ptr()) };
        // SAFETY: a valid capsule of this name holds a `DLManagedTensor` (DLPack's contract), which lives as long as
        // the capsule, and that is borrowed here.
        let tensor = unsafe { &(*managed.cast::<DlManagedTensor>()).dl_tensor };
        // SAFETY: `of` asks for an owner of the elements: the capsule keeps its tensor.
        Ok(unsafe { Imported::of(tensor, capsule) })
    }

    /// The same of `tensor`, an object of the framework whose functions these are. Its elements lie in `storage`. `None` also
    /// where the framework does not say.
    pub(crate) fn by(
        exchange: Exchange,
        tensor: &Bound<'_, PyAny>,
        storage: &Bound<'_, PyAny>,
    ) -> Option<Imported> {
        // SAFETY: `of` asks for an owner of the elements, which the storage is; the tensor would not do, nor would a capsule of
        // it: `tensor.data = other` leaves nothing else that holds them. That no other thread does that, or resizes the
        // storage, between the look at one and at the other nobody can prove; frameworks ask the same of their callers.
        exchange.borrow(tensor, |tensor| unsafe { Imported::of(tensor, storage) })?
    }

    /// # Safety
    /// `tensor` is as DLPack describes, and its elements are readable for as long as there is `owner`.
    unsafe fn of(tensor: &DlTensor, owner: &Bound<'_, PyAny>) -> Option<Imported> {
        let dtype = Dtype::ALL
            .iter()
            .copied()
            .find(|&dtype| dl_dtype(dtype) == tensor.dtype)?;
        let rank = usize::try_from(tensor.ndim).unwrap_or(0);
        // SAFETY: DLPack says that `shape` has `ndim` numbers.
        let sizes = unsafe { numbers(tensor.shape, rank) };
        // SAFETY: DLPack says that `strides` has `ndim` numbers, or is null for C order.
        let strides = unsafe { numbers(tensor.strides, rank) };
        if tensor.device.device_type != CPU {
            return None;
        }
        let (shape, nbytes) = logical(dtype, sizes)?;
        let start = start_of(tensor);
        let held = if is_c_order(sizes, strides) {
            // SAFETY: `Bytes::new` asks for `nbytes` readable bytes for as long as the result lives, or for null: a tensor of
            // that size in C order lies there, as the contract above says. `_owner` keeps it; what borrows `self` goes
            // before. That nobody writes to them meanwhile cannot be proven and is not asked for.
            Held::Bytes(unsafe { Bytes::new(start, nbytes) }?)
        } else {
            let (itemsize, dims) = strided(tensor.dtype, sizes, strides)?;
            // SAFETY: `Strided::new` asks for the same of every element that the dimensions lead to: they are those of
            // the tensor.
            Held::Strided(unsafe { Strided::new(start, itemsize, &dims) }?)
        };
        Some(Imported {
            dtype,
            shape,
            held,
            _owner: Owner::Object(owner.clone().unbind()),
        })
    }

    /// The elements of `buffer` in C order, to be stored as `dtype` with `shape`. Fails when it does not have just the
    /// bytes that those need.
    pub(crate) fn from_buffer(
        dtype: Dtype,
        shape: Vec<u64>,
        buffer: &Bound<'_, PyAny>,
    ) -> PyResult<Imported> {
        let buffer = PyUntypedBuffer::get(buffer)?;
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
        let held = if buffer.is_c_contiguous() {
            // SAFETY: `Bytes::new` asks for `nbytes` readable bytes for as long as the result lives, or for null: an exported
            // buffer has them and does not move (PEP 3118). `_owner` keeps it exported; what borrows `self` goes before.
            let bytes = unsafe { Bytes::new(start, nbytes) };
            Held::Bytes(bytes.ok_or_else(|| PyValueError::new_err(NO_MEMORY))?)
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
            // SAFETY: `Strided::new` asks for the same of every element that the dimensions lead to: they are those of
            // the buffer.
            let strided = unsafe { Strided::new(start, buffer.item_size(), &dims) };
            Held::Strided(strided.ok_or_else(|| PyValueError::new_err(NO_MEMORY))?)
        };
        Ok(Imported {
            dtype,
            shape,
            held,
            _owner: Owner::Buffer(buffer),
        })
    }
}

/// What is said of elements at null, or of more than there are addresses.
const NO_MEMORY: &str = "its elements have no memory";

/// Memory of a framework that a tensor shall be read into.
pub(crate) struct Destination {
    dtype: Dtype,
    shape: Vec<u64>,
    start: *mut u8,
    itemsize: usize,
    sizes: Vec<usize>,
    /// In bytes.
    strides: Vec<isize>,
    _owner: Owner,
}

// SAFETY: the memory behind `start` is owned by `_owner`, which is `Send` and `Sync` itself. Only `target` gives access
// to it, and only for whoever was promised to be alone.
unsafe impl Send for Destination {}
// SAFETY: as for `Send`.
unsafe impl Sync for Destination {}

impl Destination {
    /// The elements of a DLPack capsule or of a buffer, which are `dtype` whatever that says they are. Fails for what
    /// is on another device, may not be written to or holds elements of another size. Of a buffer that `is_scalar` only
    /// the first element counts.
    pub(crate) fn new(dtype: Dtype, memory: &Bound<'_, PyAny>, is_scalar: bool) -> PyResult<Destination> {
        // SAFETY: asks for an object, and a name that is a C string.
        if unsafe { ffi::PyCapsule_IsValid(memory.as_ptr(), CAPSULE_NAME.as_ptr()) } == 0 {
            Destination::from_buffer(dtype, memory, is_scalar)
        } else {
            Destination::from_capsule(dtype, memory)
        }
    }

    fn from_capsule(dtype: Dtype, capsule: &Bound<'_, PyAny>) -> PyResult<Destination> {
        // SAFETY: asks for a valid capsule of this name, which `new` checked.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), CAPSULE_NAME.as_ptr()) };
        // SAFETY: a valid capsule of this name holds a `DLManagedTensor` (DLPack's contract), which lives as long as
        // the capsule, and that is borrowed here.
        let tensor = unsafe { &(*managed.cast::<DlManagedTensor>()).dl_tensor };
        if tensor.device.device_type != CPU {
            return Err(PyBufferError::new_err(
                "the destination is not in the memory of the CPU",
            ));
        }
        let rank = usize::try_from(tensor.ndim).unwrap_or(0);
        // SAFETY: DLPack says that `shape` has `ndim` numbers.
        let sizes = unsafe { numbers(tensor.shape, rank) };
        // SAFETY: DLPack says that `strides` has `ndim` numbers, or is null for C order.
        let strides = unsafe { numbers(tensor.strides, rank) };
        let itemsize = usize::from(tensor.dtype.bits) * usize::from(tensor.dtype.lanes) / 8;
        let start = start_of(tensor);
        let strides = strides.iter().map(|&stride| {
            isize::try_from(stride)
                .ok()?
                .checked_mul(isize::try_from(itemsize).ok()?)
        });
        let strides = strides.collect::<Option<Vec<_>>>();
        let owner = Owner::Object(capsule.clone().unbind());
        Destination::of(dtype, start, itemsize, sizes, strides, owner)
    }

    fn from_buffer(dtype: Dtype, memory: &Bound<'_, PyAny>, is_scalar: bool) -> PyResult<Destination> {
        let buffer = PyUntypedBuffer::get(memory)?;
        if buffer.readonly() {
            return Err(PyBufferError::new_err("the destination may not be written to"));
        }
        let rank = if is_scalar { 0 } else { buffer.dimensions() };
        let sizes = buffer.shape().iter().map(|&size| i64::try_from(size).ok());
        let sizes = sizes.take(rank).collect::<Option<Vec<_>>>().unwrap_or_default();
        let strides = buffer.strides().iter().copied().take(rank).collect();
        let (start, itemsize) = (buffer.buf_ptr().cast(), buffer.item_size());
        let owner = Owner::Buffer(buffer);
        Destination::of(dtype, start, itemsize, &sizes, Some(strides), owner)
    }

    fn of(
        dtype: Dtype,
        start: *mut u8,
        itemsize: usize,
        sizes: &[i64],
        strides: Option<Vec<isize>>,
        owner: Owner,
    ) -> PyResult<Destination> {
        let unit = dl_dtype(dtype);
        let expected = usize::from(unit.bits) * usize::from(unit.lanes) / 8;
        let places = sizes.iter().map(|&size| usize::try_from(size).ok());
        let places = places.collect::<Option<Vec<_>>>();
        let (Some((shape, _)), Some(places), Some(strides)) = (logical(dtype, sizes), places, strides) else {
            return Err(PyBufferError::new_err(
                "the destination has a shape that no memory can hold",
            ));
        };
        if itemsize != expected {
            return Err(PyBufferError::new_err(format!(
                "the destination has elements of another size: expected {expected} bytes, found {itemsize}"
            )));
        }
        let strides = if strides.len() == places.len() {
            strides
        } else {
            c_strides(&places, itemsize)
        };
        if start.is_null() && !places.contains(&0) {
            return Err(PyBufferError::new_err("the destination has no memory"));
        }
        Ok(Destination {
            dtype,
            shape,
            start,
            itemsize,
            sizes: places,
            strides,
            _owner: owner,
        })
    }

    /// The elements, to be filled; `None` where some of them share memory with each other.
    pub(crate) fn target(&mut self) -> Option<Target<'_>> {
        // SAFETY: `StridedDest::new` asks for
        // - elements that are writable for as long as the result lives: DLPack and the buffer protocol promise them for
        //   this shape and these strides, `_owner` keeps them, and the result borrows `self`. `of` checked the size of
        //   an element, `from_buffer` that they may be written to; DLPack has no word for that;
        // - nobody else who writes to them. That no other thread of the program does nobody can prove; the consequence
        //   are bytes of both.
        let memory = unsafe { StridedDest::new(self.start, self.itemsize, &self.sizes, &self.strides) }?;
        Some(Target {
            dtype: self.dtype,
            shape: self.shape.clone(),
            memory,
        })
    }
}

/// The first element of `tensor`; null where it has no memory, also when the first element is not the first of that.
fn start_of(tensor: &DlTensor) -> *mut u8 {
    if tensor.data.is_null() {
        return ptr::null_mut();
    }
    let at = to_usize(tensor.byte_offset).unwrap_or(usize::MAX);
    tensor.data.cast::<u8>().wrapping_add(at)
}

/// The strides of elements that lie in C order, in bytes.
fn c_strides(sizes: &[usize], itemsize: usize) -> Vec<isize> {
    let mut stride = isize::try_from(itemsize).unwrap_or(isize::MAX);
    let mut strides = vec![0; sizes.len()];
    for (place, &size) in strides.iter_mut().zip(sizes).rev() {
        *place = stride;
        // Where this overflows the tensor has no elements: it has a size in memory.
        stride = stride.saturating_mul(isize::try_from(size.max(1)).unwrap_or(isize::MAX));
    }
    strides
}

/// Whether elements with these strides lie one after another. Strides may be missing, which means just that.
fn is_c_order(sizes: &[i64], strides: &[i64]) -> bool {
    if strides.is_empty() || sizes.contains(&0) {
        return true;
    }
    let mut expected = 1_i64;
    sizes.iter().zip(strides).rev().all(|(&size, &stride)| {
        // The stride of a dimension with one element is never used.
        let fits = size == 1 || stride == expected;
        expected = expected.saturating_mul(size);
        fits
    })
}

/// The bytes of an element, and where the others are from it, in bytes. `None` for those that do not fill bytes.
fn strided(dtype: DlDataType, sizes: &[i64], strides: &[i64]) -> Option<(usize, Vec<Dim>)> {
    let nbits = usize::from(dtype.bits) * usize::from(dtype.lanes);
    let itemsize = nbits / 8;
    let dim = |(&size, &stride): (&i64, &i64)| {
        Some(Dim {
            count: usize::try_from(size).ok()?,
            stride: isize::try_from(stride)
                .ok()?
                .checked_mul(isize::try_from(itemsize).ok()?)?,
        })
    };
    let dims = sizes.iter().zip(strides).map(dim).collect::<Option<_>>()?;
    (nbits % 8 == 0).then_some((itemsize, dims))
}

/// The shape in elements, and the bytes, of a tensor with `sizes` in storage units.
fn logical(dtype: Dtype, sizes: &[i64]) -> Option<(Vec<u64>, usize)> {
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
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Buffer {
    memory: Arc<Memory>,
}

impl Buffer {
    pub(crate) fn new(memory: Arc<Memory>) -> Buffer {
        Buffer { memory }
    }
}

#[pymethods]
impl Buffer {
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

impl Source for BufferSource {
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
