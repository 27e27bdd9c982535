//! Memory that crosses into Python and out of it, always as an object that owns it: DLPack capsules and the
//! buffer protocol.
//!
//! The DLPack structures are those of dlpack.h 1.3. The unversioned capsule is what every framework takes. One that has a
//! table of C functions is asked by that, which spares a capsule and a call of Python for each tensor.
//! One of the files in which `unsafe` is allowed.
#![allow(unsafe_code)]

use std::cell::{Cell, UnsafeCell};
use std::ffi::{CStr, c_int, c_void};
use std::mem::{self, MaybeUninit};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use ingot_format::{Dtype, to_u64, to_usize};
use ingot_io::{Bytes, Dim, Footprint, Memory, Payload, Region, Source, Strided, StridedDest, Target};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::produced::Producer;

const CAPSULE_NAME: &CStr = c"dltensor";
const EXCHANGE_NAME: &CStr = c"dlpack_exchange_api";

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    device_type: i32,
    device_id: i32,
}

/// `kDLCPU`.
const CPU: i32 = 1;

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
pub(crate) struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct DlManagedTensor {
    dl_tensor: DlTensor,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

/// `DLPackVersion`.
#[repr(C)]
struct DlVersion {
    major: u32,
    minor: u32,
}

/// The version that the structures with a version have.
const VERSION: DlVersion = DlVersion { major: 1, minor: 3 };

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub(crate) struct DlManagedTensorVersioned {
    version: DlVersion,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensorVersioned)>,
    flags: u64,
    dl_tensor: DlTensor,
}

/// `DLPackManagedTensorToPyObjectNoSync`.
type ToPyObject = unsafe extern "C" fn(*mut DlManagedTensorVersioned, *mut *mut c_void) -> c_int;

/// `DLPackDLTensorFromPyObjectNoSync`.
type FromPyObject = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// `DLPackExchangeAPI`, as far as the last function that is called here.
#[repr(C)]
struct DlExchangeApi {
    version: DlVersion,
    prev_api: *const c_void,
    managed_tensor_allocator: *const c_void,
    managed_tensor_from_py_object_no_sync: *const c_void,
    managed_tensor_to_py_object_no_sync: Option<ToPyObject>,
    dltensor_from_py_object_no_sync: Option<FromPyObject>,
}

/// How DLPack names a dtype: code, bits, and how many elements make one of its units.
const fn dl_dtype(dtype: Dtype) -> DlDataType {
    let (code, bits, lanes) = match dtype {
        Dtype::I8 => (0, 8, 1),
        Dtype::I16 => (0, 16, 1),
        Dtype::I32 => (0, 32, 1),
        Dtype::I64 => (0, 64, 1),
        Dtype::U8 => (1, 8, 1),
        Dtype::U16 => (1, 16, 1),
        Dtype::U32 => (1, 32, 1),
        Dtype::U64 => (1, 64, 1),
        Dtype::F16 => (2, 16, 1),
        Dtype::F32 => (2, 32, 1),
        Dtype::F64 => (2, 64, 1),
        Dtype::BF16 => (4, 16, 1),
        Dtype::C64 => (5, 64, 1),
        Dtype::BOOL => (6, 8, 1),
        Dtype::F8_E4M3 => (10, 8, 1),
        Dtype::F8_E4M3FNUZ => (11, 8, 1),
        Dtype::F8_E5M2 => (12, 8, 1),
        Dtype::F8_E5M2FNUZ => (13, 8, 1),
        Dtype::F8_E8M0 => (14, 8, 1),
        Dtype::F6_E2M3 => (15, 6, 1),
        Dtype::F6_E3M2 => (16, 6, 1),
        // Packed: a unit is a byte with two of them.
        Dtype::F4 => (17, 4, 2),
        // A dtype that ingot-format gains is raw bytes until it has a line here.
        _ => (1, 8, 1),
    };
    DlDataType { code, bits, lanes }
}

/// Whether [`Dims::of`] gives something: without making it, since every tensor is asked.
pub(crate) fn has_storage_shape(dtype: Dtype, shape: &[u64]) -> bool {
    let lanes = u64::from(dl_dtype(dtype).lanes);
    let fills_bytes = lanes == 1 || shape.last().is_some_and(|last| last % lanes == 0);
    fills_bytes && shape.iter().all(|&dim| i64::try_from(dim).is_ok())
}

/// A tensor on its way to a framework: what it is given a pointer to, and what keeps that alive.
#[repr(C)]
struct Exported<M> {
    /// First, so that a pointer to it is a pointer to the whole.
    managed: M,
    /// Shape, then strides.
    dims: Dims,
    group: NonNull<Group<M>>,
}

/// Tensors over one memory, which goes with the last of them. That way many small ones are not each an allocation of their
/// own: 20,000 are made in 11.8 ms instead of 12.2, and freed in 3.3 instead of 4.3 (2026-11, torch).
struct Group<M> {
    /// Tensors that are not freed, and one more as long as [`Exports`] adds some.
    left: AtomicUsize,
    memory: Arc<Memory>,
    /// Filled from the front. Whoever has a pointer to one is the only one who looks at it.
    places: Box<[UnsafeCell<MaybeUninit<Exported<M>>>]>,
}

/// Where tensors over one memory are exported from, one after the other.
pub(crate) struct Exports<M> {
    group: NonNull<Group<M>>,
    used: usize,
}

/// One of the structures that frameworks take a tensor by.
pub(crate) trait Managed {
    fn new(tensor: DlTensor) -> Self;
    fn tensor(&mut self) -> &mut DlTensor;
}

impl Managed for DlManagedTensor {
    fn new(dl_tensor: DlTensor) -> DlManagedTensor {
        DlManagedTensor {
            dl_tensor,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete::<DlManagedTensor>),
        }
    }

    fn tensor(&mut self) -> &mut DlTensor {
        &mut self.dl_tensor
    }
}

impl Managed for DlManagedTensorVersioned {
    fn new(dl_tensor: DlTensor) -> DlManagedTensorVersioned {
        DlManagedTensorVersioned {
            version: VERSION,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete_noted),
            flags: 0,
            dl_tensor,
        }
    }

    fn tensor(&mut self) -> &mut DlTensor {
        &mut self.dl_tensor
    }
}

/// Shape and strides, in place for the ranks that nearly all tensors have.
#[derive(Clone)]
pub(crate) struct Dims {
    rank: usize,
    numbers: Numbers,
    is_c_order: bool,
}

#[derive(Clone)]
enum Numbers {
    Inline([i64; 2 * Dims::INLINE_RANK]),
    Boxed(Box<[i64]>),
}

impl Dims {
    const INLINE_RANK: usize = 4;

    /// The shape in units that a framework stores: packed dtypes count bytes along the last dimension.
    ///
    /// `None` where the last dimension does not fill bytes, or a dimension passes what DLPack can count.
    pub(crate) fn of(dtype: Dtype, shape: &[u64]) -> Option<Dims> {
        let rank = shape.len();
        let numbers = if rank <= Dims::INLINE_RANK {
            Numbers::Inline([0; 2 * Dims::INLINE_RANK])
        } else {
            Numbers::Boxed(vec![0; 2 * rank].into_boxed_slice())
        };
        let mut dims = Dims {
            rank,
            numbers,
            is_c_order: true,
        };
        let (sizes, strides) = dims.split_mut();
        for (size, &dim) in sizes.iter_mut().zip(shape) {
            *size = i64::try_from(dim).ok()?;
        }
        let lanes = i64::from(dl_dtype(dtype).lanes);
        if lanes > 1 {
            let last = sizes.last_mut()?;
            if *last % lanes != 0 {
                return None;
            }
            *last /= lanes;
        }
        let mut stride = 1_i64;
        for (&mut size, place) in sizes.iter_mut().zip(strides).rev() {
            *place = stride;
            // Cannot overflow for a tensor that has bytes; for an empty one the strides do not matter.
            stride = stride.saturating_mul(size.max(1));
        }
        Some(dims)
    }

    /// The same with other strides, in elements. `None` for elements that are no units.
    pub(crate) fn strided(dtype: Dtype, shape: &[u64], strides: &[u64]) -> Option<Dims> {
        let mut dims = Dims::of(dtype, shape).filter(|_| dl_dtype(dtype).lanes == 1)?;
        let (sizes, places) = dims.split_mut();
        let mut is_c_order = true;
        for ((&mut size, place), &stride) in sizes.iter_mut().zip(places).zip(strides) {
            // A dimension of one element keeps the stride of C order: no step is ever made along it.
            let stride = i64::try_from(stride).ok()?;
            if size > 1 && *place != stride {
                (*place, is_c_order) = (stride, false);
            }
        }
        dims.is_c_order = is_c_order;
        Some(dims)
    }

    pub(crate) fn is_c_order(&self) -> bool {
        self.is_c_order
    }

    pub(crate) fn strides_in_bytes(&self, dtype: Dtype) -> Vec<i64> {
        let width = i64::from(dl_dtype(dtype).bits) / 8;
        let numbers: &[i64] = match &self.numbers {
            Numbers::Inline(numbers) => numbers,
            Numbers::Boxed(numbers) => numbers,
        };
        let strides = numbers[self.rank..2 * self.rank].iter();
        strides.map(|stride| stride * width).collect()
    }

    /// The shape in storage units.
    pub(crate) fn sizes(&self) -> &[i64] {
        match &self.numbers {
            Numbers::Inline(numbers) => &numbers[..self.rank],
            Numbers::Boxed(numbers) => &numbers[..self.rank],
        }
    }

    /// Shape, and the strides of C order in elements.
    fn split_mut(&mut self) -> (&mut [i64], &mut [i64]) {
        let numbers: &mut [i64] = match &mut self.numbers {
            Numbers::Inline(numbers) => numbers,
            Numbers::Boxed(numbers) => numbers,
        };
        let (sizes, strides) = numbers.split_at_mut(self.rank);
        (sizes, &mut strides[..self.rank])
    }
}

impl<M: Managed> Exports<M> {
    /// As many tensors as one group has at most: more would spare nothing, and keep more until the last of them is gone.
    const MOST: usize = 512;

    fn new(memory: &Arc<Memory>, most: usize) -> Exports<M> {
        let group = Box::new(Group {
            left: AtomicUsize::new(1),
            memory: Arc::clone(memory),
            places: (0..most)
                .map(|_| UnsafeCell::new(MaybeUninit::uninit()))
                .collect(),
        });
        Exports {
            group: NonNull::from(Box::leak(group)),
            used: 0,
        }
    }

    /// `exports` with a place for one more tensor over `memory`: twice as many as before where it was full, since
    /// where there were many there are more.
    fn over<'e>(exports: &'e mut Option<Exports<M>>, memory: &Arc<Memory>) -> &'e mut Exports<M> {
        let mut most = 1;
        *exports = exports.take().filter(|before| {
            let is_same = Arc::ptr_eq(&before.group().memory, memory);
            let places = before.group().places.len();
            if is_same {
                most = Self::MOST.min(2 * places);
            }
            is_same && before.used < places
        });
        exports.get_or_insert_with(|| Exports::new(memory, most))
    }

    fn group(&self) -> &Group<M> {
        // SAFETY: `as_ref` asks for a pointer to a `Group` that is there, and not written to: it is from `new`, `left` counts
        // this `Exports`, and what changes in it is in cells.
        unsafe { self.group.as_ref() }
    }

    /// A tensor over `region`, to be read as `dtype` with the shape in `dims`. Writing to it writes to the region, which for
    /// a mapped file never reaches the file. Its deleter frees it.
    fn export(&mut self, region: &Region, dtype: Dtype, dims: &Dims) -> PyResult<*mut M> {
        let ndim = i32::try_from(dims.rank).map_err(|_| PyValueError::new_err("too many dimensions"))?;
        let place = self.group().places[self.used].get();
        // SAFETY: dereferencing `place` asks for a place that is there, which `group` keeps, and that nobody else looks at:
        // `used` is counted up right below, so each comes once. Tried: where it is not,
        // `test_threads_free_them_in_any_order` crashes.
        let exported = unsafe {
            (*place).write(Exported {
                managed: M::new(DlTensor {
                    data: region.as_ptr().cast(),
                    device: DlDevice {
                        device_type: CPU,
                        device_id: 0,
                    },
                    ndim,
                    dtype: dl_dtype(dtype),
                    shape: ptr::null_mut(),
                    strides: ptr::null_mut(),
                    byte_offset: 0,
                }),
                dims: dims.clone(),
                group: self.group,
            })
        };
        self.used += 1;
        self.group().left.fetch_add(1, Ordering::Relaxed);
        // The group stays where it is, so pointers into it hold until `delete` frees the tensor.
        let (sizes, strides) = exported.dims.split_mut();
        let (shape, strides) = (sizes.as_mut_ptr(), strides.as_mut_ptr());
        let tensor = exported.managed.tensor();
        tensor.shape = shape;
        tensor.strides = strides;
        Ok(ptr::from_mut(exported).cast())
    }
}

impl<M> Drop for Exports<M> {
    fn drop(&mut self) {
        // SAFETY: `leave` asks for one that `left` counts, once.
        unsafe { leave(self.group) };
    }
}

/// Counts one off, and drops the group after the last.
///
/// # Safety
/// `group` is from [`Exports::new`]. Its `left` counts whoever calls this, once, and that does not look at it afterwards.
unsafe fn leave<M>(group: NonNull<Group<M>>) {
    // SAFETY: `as_ref` asks for a group that is there: `left` counts the caller.
    if unsafe { group.as_ref() }.left.fetch_sub(1, Ordering::Release) > 1 {
        return;
    }
    // What the others did to their tensors comes before the memory goes.
    fence(Ordering::Acquire);
    // SAFETY: `from_raw` asks for a pointer from a box, once: `new` leaked it, and the count reaches nothing once.
    drop(unsafe { Box::from_raw(group.as_ptr()) });
}

/// A capsule over [`Exports::export`].
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    region: &Region,
    dtype: Dtype,
    dims: &Dims,
) -> PyResult<Bound<'py, PyAny>> {
    let managed = Exports::<DlManagedTensor>::new(region.memory(), 1).export(region, dtype, dims)?;
    // SAFETY: `PyCapsule_New` asks for a pointer that is not null and a name that outlives the capsule: the
    // pointer comes from a box, the name is static. The destructor takes just such capsules.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), CAPSULE_NAME.as_ptr(), Some(drop_capsule)) };
    // SAFETY: `PyCapsule_New` gives a new reference, or null with an exception set; both are what is asked for.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    if capsule.is_err() {
        // SAFETY: `delete` asks for a pointer from `Exports::export` that nobody else frees: no capsule took it.
        unsafe { delete(managed) };
    }
    capsule
}

/// The C functions of a framework, by which it takes and shows tensors without capsules and calls.
#[derive(Clone, Copy)]
pub(crate) struct Exchange {
    to_py_object: ToPyObject,
    from_py_object: Option<FromPyObject>,
}

impl Exchange {
    /// Those of `__dlpack_c_exchange_api__` of a framework's class; `None` for what is something else, or of another
    /// version than is known here.
    pub(crate) fn of(capsule: &Bound<'_, PyAny>) -> Option<Exchange> {
        // SAFETY: asks for an object, and a name that is a C string.
        if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), EXCHANGE_NAME.as_ptr()) } == 0 {
            return None;
        }
        // SAFETY: asks for a valid capsule of this name, which was just checked.
        let api = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE_NAME.as_ptr()) };
        // SAFETY: a valid capsule of this name holds a `DLPackExchangeAPI`, which begins with its version in every
        // version, and stays for as long as the process (DLPack's contract).
        let version = unsafe { &*api.cast::<DlVersion>() };
        if version.major != VERSION.major {
            return None;
        }
        // SAFETY: as above, and a table of this major version has these fields.
        let api = unsafe { &*api.cast::<DlExchangeApi>() };
        Some(Exchange {
            to_py_object: api.managed_tensor_to_py_object_no_sync?,
            from_py_object: api.dltensor_from_py_object_no_sync,
        })
    }

    /// Gives `look` the tensor that `object` is, with a shape that holds for as long as `look` runs. `None` where the
    /// framework has no such function, or fails, for reasons that it says better when it is asked for a capsule.
    fn borrow<T>(self, object: &Bound<'_, PyAny>, look: impl FnOnce(&DlTensor) -> T) -> Option<T> {
        let from_py_object = self.from_py_object?;
        let mut tensor = MaybeUninit::uninit();
        // SAFETY: `dltensor_from_py_object_no_sync` asks for an object, a place for a tensor, and the interpreter, which
        // `object` says is held.
        if unsafe { from_py_object(object.as_ptr().cast(), tensor.as_mut_ptr()) } != 0 {
            drop(PyErr::take(object.py()));
            return None;
        }
        // SAFETY: asks for a tensor that was written, which 0 says. What it points to belongs to the object, which is held
        // here, as is the interpreter (DLPack's contract).
        Some(look(unsafe { tensor.assume_init_ref() }))
    }

    /// What the framework makes of [`Exports::export`]; `None` where it fails, for reasons that it says better by way of a
    /// [`capsule`]. `exports` is what the tensor before this one left.
    pub(crate) fn import<'py>(
        self,
        py: Python<'py>,
        region: &Region,
        dtype: Dtype,
        dims: &Dims,
        exports: &mut Option<Exports<DlManagedTensorVersioned>>,
    ) -> Option<Bound<'py, PyAny>> {
        let managed = Exports::over(exports, region.memory())
            .export(region, dtype, dims)
            .ok()?;
        let mut made = ptr::null_mut();
        FREED.set(ptr::null());
        // SAFETY: `managed_tensor_to_py_object_no_sync` asks for a tensor that it may have, which `managed` is, a place
        // for an object, and the interpreter, which `py` says is held.
        let code = unsafe { (self.to_py_object)(managed, &raw mut made) };
        if code == 0 {
            // SAFETY: asks for a new reference, or null: it is what a framework that answers 0 has put there.
            return unsafe { Bound::from_owned_ptr_or_opt(py, made.cast()) };
        }
        drop(PyErr::take(py));
        if FREED.get() != managed.cast_const().cast() {
            // SAFETY: `delete` asks for a pointer from `Exports::export` that nobody else frees. The framework has failed, on this
            // thread, so it holds nothing; and it has not freed this, which `delete_noted` would have noted.
            unsafe { delete(managed) };
        }
        None
    }
}

thread_local! {
    /// What [`delete_noted`] freed last on this thread.
    static FREED: Cell<*const c_void> = const { Cell::new(ptr::null()) };
}

/// Frees what [`Exports::export`] made. Frameworks call it from any thread, with or without the interpreter, when the
/// last tensor over the memory is gone; nothing here needs Python.
///
/// # Safety
/// `managed` comes from [`Exports::export`] and is not used afterwards.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    let exported = managed.cast::<Exported<M>>();
    // SAFETY: asks for an `Exported` that is there: `managed` is the first field of the one that `export` wrote, whose
    // layout is C's, and the contract above says that it was not freed.
    let group = unsafe { (*exported).group };
    // SAFETY: `drop_in_place` asks for the same, that nobody else has it, and that it is not used again: the contract.
    unsafe { ptr::drop_in_place(exported) };
    // SAFETY: `leave` asks for one that `left` counts, once: `export` did for this tensor, and it is dropped.
    unsafe { leave(group) };
}

/// The same, for whoever wants to know. DLPack does not say whether a framework that fails to take a tensor has freed it.
///
/// # Safety
/// As for [`delete`].
unsafe extern "C" fn delete_noted(managed: *mut DlManagedTensorVersioned) {
    FREED.set(managed.cast_const().cast());
    // SAFETY: the contract above is the same.
    unsafe { delete(managed) };
}

/// Frees the tensor of a capsule that no framework took. One that did has renamed the capsule.
///
/// # Safety
/// Python calls it with a capsule from [`capsule`] that is going away.
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: asks for an object, which Python gave.
    if unsafe { ffi::PyCapsule_IsValid(capsule, CAPSULE_NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: asks for a valid capsule of this name, which the line above checked.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, CAPSULE_NAME.as_ptr()) };
    // SAFETY: the pointer is the one that `capsule` put there, and no framework took it over: the name says so.
    unsafe { delete(managed.cast::<DlManagedTensor>()) };
}

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
    Produced(Producer),
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
    pub(crate) fn produced(dtype: Dtype, shape: Vec<u64>, producer: Producer) -> Imported {
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
            Held::Produced(producer) => Payload::Produced(producer),
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

/// # Safety
/// `first` is null, or points to `count` numbers that stay there for `'a`.
unsafe fn numbers<'a>(first: *const i64, count: usize) -> &'a [i64] {
    if first.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: the contract above is the one of `from_raw_parts`.
    unsafe { std::slice::from_raw_parts(first, count) }
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
