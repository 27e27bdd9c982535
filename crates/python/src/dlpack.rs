//! DLPack: the structures through which frameworks exchange tensors, capsules of them, and tables of C functions.
//!
//! dlpack.h 1.3 defines the structures. Every framework accepts the unversioned capsule. If a framework has a table of
//! C functions, it is used, which saves a capsule and a call of Python for each tensor. `unsafe` is allowed in this
//! file because the structures contain pointers.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

use ingot_format::{Dtype, to_u64, to_usize};
use ingot_io::binding::Buffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

const CAPSULE_NAME: &CStr = c"dltensor";
const EXCHANGE_NAME: &CStr = c"dlpack_exchange_api";

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    device_type: i32,
    device_id: i32,
}

/// `kDLCPU`, and `kDLCUDA`.
const CPU: i32 = 1;
const CUDA: i32 = 2;
/// `kDLCUDAHost` and `kDLROCMHost`: host memory that is pinned for these devices.
const PINNED_CUDA: i32 = 3;
const PINNED_ROCM: i32 = 11;

/// The address of the first byte of a buffer, and its device.
fn place(buffer: &Buffer) -> (*mut c_void, DlDevice) {
    let (start, device_type, device_id) = match buffer {
        Buffer::Host(region) => (region.as_ptr().cast(), CPU, 0),
        Buffer::Device(region) => {
            // The host never dereferences it.
            let address = to_usize(region.address()).unwrap_or(0);
            (ptr::without_provenance_mut(address), CUDA, region.ordinal())
        }
    };
    let device = DlDevice {
        device_type,
        device_id,
    };
    (start, device)
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct DlDataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

impl DlDataType {
    /// Return the dtype; `None` for a type that files do not have.
    pub(crate) fn known(self) -> Option<Dtype> {
        Dtype::ALL.iter().copied().find(|&dtype| dl_dtype(dtype) == self)
    }
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

/// The version in the versioned structures.
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

/// `DLPackExchangeAPI`, up to the last function that is called here.
#[repr(C)]
struct DlExchangeApi {
    version: DlVersion,
    prev_api: *const c_void,
    managed_tensor_allocator: *const c_void,
    managed_tensor_from_py_object_no_sync: *const c_void,
    managed_tensor_to_py_object_no_sync: Option<ToPyObject>,
    dltensor_from_py_object_no_sync: Option<FromPyObject>,
}

/// Return DLPack's form of a dtype: code, bits, and the number of elements in a unit.
pub(crate) const fn dl_dtype(dtype: Dtype) -> DlDataType {
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
        // Packed: a unit is a byte with two elements.
        Dtype::F4 => (17, 4, 2),
        // A new dtype of ingot-format is exported as raw bytes until it has a line here.
        _ => (1, 8, 1),
    };
    DlDataType { code, bits, lanes }
}

/// Return whether [`Dims::of`] returns a shape, without making it: this runs for every tensor.
pub(crate) fn has_storage_shape(dtype: Dtype, shape: &[u64]) -> bool {
    let lanes = u64::from(dl_dtype(dtype).lanes);
    let fills_bytes = lanes == 1 || shape.last().is_some_and(|last| last % lanes == 0);
    fills_bytes && shape.iter().all(|&dim| i64::try_from(dim).is_ok())
}

/// A tensor that is exported to a framework: the structure that the framework points to, and the owner of the memory.
#[repr(C)]
struct Exported<M> {
    /// The first field, so that a pointer to it is a pointer to the whole.
    managed: M,
    /// Shape, then strides.
    dims: Dims,
    group: NonNull<Group<M>>,
    /// Whether the tensor was freed. Readable as long as the group exists.
    is_freed: AtomicBool,
}

/// Tensors over one memory, which is freed with the last of them. So small tensors need no allocation of their own: 20,000
/// are made in 11.8 ms instead of 12.2, and freed in 3.3 instead of 4.3 (2026-11, torch).
struct Group<M> {
    /// The number of tensors that are not freed, plus one while [`Exports`] can still add tensors.
    left: AtomicUsize,
    /// Keeps the memory alive.
    buffer: Buffer,
    /// Filled from the front. Only the holder of a pointer to an element uses the element.
    places: Box<[UnsafeCell<MaybeUninit<Exported<M>>>]>,
}

/// Exports tensors over one memory, one after the other.
pub(crate) struct Exports<M> {
    group: NonNull<Group<M>>,
    used: usize,
}

/// A structure of DLPack through which a tensor is exported.
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
            deleter: Some(delete::<DlManagedTensorVersioned>),
            flags: 0,
            dl_tensor,
        }
    }

    fn tensor(&mut self) -> &mut DlTensor {
        &mut self.dl_tensor
    }
}

/// Shape and strides, stored inline for the usual ranks.
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
    /// `None` if the last dimension does not fill bytes, or if a dimension is too large for DLPack.
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

    /// The same with other strides, in elements. `None` if an element is smaller than a storage unit.
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
    /// The most tensors of a group. Larger groups would save nothing, and would keep more memory until their last tensor is freed.
    const MOST: usize = 512;

    fn new(buffer: &Buffer, most: usize) -> Exports<M> {
        let group = Box::new(Group {
            left: AtomicUsize::new(1),
            buffer: buffer.clone(),
            places: (0..most)
                .map(|_| UnsafeCell::new(MaybeUninit::uninit()))
                .collect(),
        });
        Exports {
            group: NonNull::from(Box::leak(group)),
            used: 0,
        }
    }

    /// Return `exports` with room for one more tensor over the memory of `buffer`. If it was full, a new group has
    /// twice the room, since a file with many tensors usually has more.
    fn over<'e>(exports: &'e mut Option<Exports<M>>, buffer: &Buffer) -> &'e mut Exports<M> {
        let mut most = 1;
        *exports = exports.take().filter(|before| {
            let is_same = before.group().buffer.shares_memory(buffer);
            let places = before.group().places.len();
            if is_same {
                most = Self::MOST.min(2 * places);
            }
            is_same && before.used < places
        });
        exports.get_or_insert_with(|| Exports::new(buffer, most))
    }

    fn group(&self) -> &Group<M> {
        // SAFETY: `as_ref` requires a pointer to an existing `Group` that is not written to: it comes from `new`,
        // `left` counts this `Exports`, and mutable fields are cells.
        unsafe { self.group.as_ref() }
    }

    /// Return a tensor over `buffer`, with elements of `dtype` and the shape in `dims`. Writing to it writes to the memory; a
    /// mapped file is not changed by that. The tensor's deleter frees it.
    fn export(&mut self, buffer: &Buffer, dtype: Dtype, dims: &Dims) -> PyResult<*mut M> {
        let (data, device) = place(buffer);
        let ndim = i32::try_from(dims.rank).map_err(|_| PyValueError::new_err("too many dimensions"))?;
        let place = self.group().places[self.used].get();
        // SAFETY: dereferencing `place` requires an existing element, which `group` keeps, that no other code uses:
        // `used` is incremented right below, so each element is used once. Without the increment,
        // `test_lending_survives_threads_that_free_in_any_order` crashes.
        let exported = unsafe {
            (*place).write(Exported {
                managed: M::new(DlTensor {
                    data,
                    device,
                    ndim,
                    dtype: dl_dtype(dtype),
                    shape: ptr::null_mut(),
                    strides: ptr::null_mut(),
                    byte_offset: 0,
                }),
                dims: dims.clone(),
                group: self.group,
                is_freed: AtomicBool::new(false),
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
        // SAFETY: `leave` requires a holder that `left` counts, once.
        unsafe { leave(self.group) };
    }
}

/// Decrement the count, and drop the group after the last.
///
/// # Safety
/// `group` is from [`Exports::new`]. Its `left` counts the caller once, and the caller does not use the group afterwards.
unsafe fn leave<M>(group: NonNull<Group<M>>) {
    // SAFETY: `as_ref` requires an existing group: `left` counts the caller.
    if unsafe { group.as_ref() }.left.fetch_sub(1, Ordering::Release) > 1 {
        return;
    }
    // Accesses of other threads to their tensors happen before the memory is freed.
    fence(Ordering::Acquire);
    // SAFETY: `from_raw` requires a pointer from a box, once: `new` leaked it, and the count reaches zero once.
    drop(unsafe { Box::from_raw(group.as_ptr()) });
}

/// Return a capsule over [`Exports::export`].
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    buffer: &Buffer,
    dtype: Dtype,
    dims: &Dims,
) -> PyResult<Bound<'py, PyAny>> {
    let managed = Exports::<DlManagedTensor>::new(buffer, 1).export(buffer, dtype, dims)?;
    // SAFETY: `PyCapsule_New` requires a pointer that is not null and a name that outlives the capsule: the pointer
    // comes from a box, the name is static. The destructor accepts exactly these capsules.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), CAPSULE_NAME.as_ptr(), Some(drop_capsule)) };
    // SAFETY: requires a new reference, or null with an exception set: `PyCapsule_New` returns one of the two.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    if capsule.is_err() {
        // SAFETY: `delete` requires a pointer from `Exports::export` that no other code frees: no capsule owns it.
        unsafe { delete(managed) };
    }
    capsule
}

/// The C functions of a framework that import and export tensors without capsules and calls of Python.
#[derive(Clone, Copy)]
pub(crate) struct Exchange {
    to_py_object: ToPyObject,
    from_py_object: Option<FromPyObject>,
}

impl Exchange {
    /// Return the functions of `__dlpack_c_exchange_api__` of a framework's class; `None` for other objects, and for other
    /// versions.
    pub(crate) fn of(capsule: &Bound<'_, PyAny>) -> Option<Exchange> {
        // SAFETY: requires an object, and a name that is a C string.
        if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), EXCHANGE_NAME.as_ptr()) } == 0 {
            return None;
        }
        // SAFETY: requires a valid capsule of this name, which was just checked.
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

    /// Return a `T` for `tensor`, an object of the framework that has these functions. The tensor begins after `first` elements
    /// of `storage`, which has `nbytes` bytes. `None` if the functions fail: the caller then uses a capsule, for which the
    /// framework reports a better error.
    pub(crate) fn take<T: Take>(
        self,
        tensor: &Bound<'_, PyAny>,
        storage: &Bound<'_, PyAny>,
        first: u64,
        nbytes: u64,
    ) -> Option<T> {
        let from_py_object = self.from_py_object?;
        let mut view = MaybeUninit::uninit();
        // SAFETY: `dltensor_from_py_object_no_sync` requires an object, room for a tensor, and the interpreter, which
        // `tensor` proves to be held.
        if unsafe { from_py_object(tensor.as_ptr().cast(), view.as_mut_ptr()) } != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: requires an initialised tensor: a return value of 0 means that it was written.
        let view = unsafe { view.assume_init_ref() };
        // SAFETY: requires a tensor as DLPack describes: its pointers belong to the object, which is held here, and so
        // is the interpreter (DLPack's contract).
        let view = unsafe { DlView::of(view) };
        if !view.is_within(first, nbytes) {
            return None;
        }
        // SAFETY: `take` requires an owner of the elements, which is the storage. Neither the tensor nor a capsule of
        // it would do: after `tensor.data = other`, only the storage keeps the elements. Not provable: that no other
        // thread assigns `data` or resizes the storage between the two reads. Frameworks require the same of their
        // callers.
        unsafe { T::take(&view, storage) }
    }

    /// Return the framework's tensor for the structure of [`Exports::export`]. `None` if the function fails: the caller then
    /// uses a [`capsule`], for which the framework reports a better error. Pass `exports` on to the next tensor over the same
    /// memory.
    pub(crate) fn import<'py>(
        self,
        py: Python<'py>,
        buffer: &Buffer,
        dtype: Dtype,
        dims: &Dims,
        exports: &mut Option<Exports<DlManagedTensorVersioned>>,
    ) -> Option<Bound<'py, PyAny>> {
        let exports = Exports::over(exports, buffer);
        let managed = exports.export(buffer, dtype, dims).ok()?;
        let mut made = ptr::null_mut();
        // SAFETY: `managed_tensor_to_py_object_no_sync` requires a tensor that it may own, which is `managed`, room for
        // an object, and the interpreter, which `py` proves to be held.
        let code = unsafe { (self.to_py_object)(managed, &raw mut made) };
        if code == 0 {
            // SAFETY: requires a new reference, or null: a framework that returns 0 has stored one.
            return unsafe { Bound::from_owned_ptr_or_opt(py, made.cast()) };
        }
        // DLPack does not specify whether a framework that fails to import a tensor has freed it.
        //
        // SAFETY: dereferencing requires an existing `Exported`: `exports` counts its group, which keeps the element
        // even after `delete`, and `delete` does not drop the flag.
        let is_freed = unsafe { &(*managed.cast::<Exported<DlManagedTensorVersioned>>()).is_freed };
        if !is_freed.load(Ordering::Acquire) {
            // SAFETY: `delete` requires a pointer from `Exports::export` that no other code frees. The framework has
            // failed, so it keeps nothing, and the flag shows that it has not freed the tensor.
            unsafe { delete(managed) };
        }
        drop(PyErr::take(py));
        None
    }
}

/// Free a tensor of [`Exports::export`]. Frameworks call this from any thread, with or without the interpreter, when their last
/// tensor over it is freed; nothing here needs Python.
///
/// # Safety
/// `managed` comes from [`Exports::export`] and is not used afterwards.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    let exported = managed.cast::<Exported<M>>();
    // SAFETY: requires an existing `Exported`: `managed` is the first field of the one that `export` wrote, with C
    // layout, and by the contract above it was not freed.
    let group = unsafe { (*exported).group };
    // SAFETY: as above.
    unsafe { &(*exported).is_freed }.store(true, Ordering::Release);
    // SAFETY: `drop_in_place` requires the same, exclusive access, and that the value is not used again: the contract
    // above.
    unsafe { ptr::drop_in_place(exported) };
    // SAFETY: `leave` requires a holder that `left` counts, once: `export` counted this tensor, which is dropped now.
    unsafe { leave(group) };
}

/// Free the tensor of a capsule that no framework consumed. A framework that consumes a capsule renames it.
///
/// # Safety
/// Python calls this with a capsule from [`capsule`] that is being freed.
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: requires an object, which Python passes.
    if unsafe { ffi::PyCapsule_IsValid(capsule, CAPSULE_NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: requires a valid capsule of this name, which the line above checked.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, CAPSULE_NAME.as_ptr()) };
    // SAFETY: the pointer is the one that `capsule` stored, and no framework consumed it, as the name shows.
    unsafe { delete(managed.cast::<DlManagedTensor>()) };
}

/// A tensor as DLPack describes it.
pub(crate) struct DlView<'a> {
    /// The first element; null if there is no memory. It need not be at the start of the memory.
    pub(crate) start: *mut u8,
    pub(crate) dtype: DlDataType,
    /// The shape in storage units of the framework.
    pub(crate) sizes: &'a [i64],
    /// The strides in the same units; `None` if the elements are in C order.
    pub(crate) strides: &'a [i64],
    pub(crate) is_on_cpu: bool,
    /// The number of the GPU with the memory; `None` for other devices.
    pub(crate) gpu: Option<i32>,
}

/// Memory or a destination that is made from a tensor without a copy.
pub(crate) trait Take: Sized {
    /// Return `None` for a tensor that cannot be used in place.
    ///
    /// # Safety
    /// As long as `owner` exists, the elements of `view` are mapped for reading, and for writing if they are written
    /// to.
    unsafe fn take(view: &DlView<'_>, owner: &Bound<'_, PyAny>) -> Option<Self>;

    /// As `take`, for the elements of a buffer, which are `dtype` regardless of the buffer's own format. Fail if the buffer cannot
    /// be used in place.
    fn lend(dtype: Dtype, buffer: &Bound<'_, PyAny>) -> PyResult<Self>;

    fn dtype(&self) -> Dtype;
}

/// Return the `T` of the tensor in `capsule`, which begins after the first `first` elements of a storage of `nbytes`; `None` for
/// a tensor that cannot be used in place.
pub(crate) fn taken<T: Take>(capsule: &Bound<'_, PyAny>, first: u64, nbytes: u64) -> PyResult<Option<T>> {
    let take = |view: &DlView<'_>| {
        if !view.is_within(first, nbytes) {
            return None;
        }
        // SAFETY: `take` requires an owner of the elements: the capsule keeps its tensor.
        unsafe { T::take(view, capsule) }
    };
    DlView::by(capsule, take)
        .ok_or_else(|| PyBufferError::new_err("expected a DLPack capsule that was not used before"))
}

impl<'a> DlView<'a> {
    /// # Safety
    /// `tensor` is as DLPack describes for `'a`.
    unsafe fn of(tensor: &'a DlTensor) -> DlView<'a> {
        let rank = usize::try_from(tensor.ndim).unwrap_or(0);
        // SAFETY: DLPack says that `shape` has `ndim` numbers.
        let sizes = unsafe { numbers(tensor.shape, rank) };
        // SAFETY: DLPack says that `strides` has `ndim` numbers, or is null for C order.
        let strides = unsafe { numbers(tensor.strides, rank) };
        let at = to_usize(tensor.byte_offset).unwrap_or(usize::MAX);
        DlView {
            start: if tensor.data.is_null() {
                ptr::null_mut()
            } else {
                tensor.data.cast::<u8>().wrapping_add(at)
            },
            dtype: tensor.dtype,
            sizes,
            strides,
            is_on_cpu: matches!(tensor.device.device_type, CPU | PINNED_CUDA | PINNED_ROCM),
            gpu: (tensor.device.device_type == CUDA).then_some(tensor.device.device_id),
        }
    }

    /// Call `look` with the tensor in a capsule; `None` for other objects, and for a capsule that was used before.
    pub(crate) fn by<T>(capsule: &Bound<'_, PyAny>, look: impl FnOnce(&DlView<'_>) -> T) -> Option<T> {
        // SAFETY: requires an object, and a name that is a C string.
        if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), CAPSULE_NAME.as_ptr()) } == 0 {
            return None;
        }
        // SAFETY: requires a valid capsule of this name, which was just checked.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), CAPSULE_NAME.as_ptr()) };
        // SAFETY: a valid capsule of this name holds a `DLManagedTensor` (DLPack's contract), which lives as long as
        // the capsule, and that is borrowed here.
        let tensor = unsafe { &(*managed.cast::<DlManagedTensor>()).dl_tensor };
        // SAFETY: requires a tensor as DLPack describes, which the same contract guarantees.
        Some(look(&unsafe { DlView::of(tensor) }))
    }

    /// Return the bytes of an element; `None` for elements that do not fill bytes.
    pub(crate) fn itemsize(&self) -> Option<usize> {
        let nbits = usize::from(self.dtype.bits) * usize::from(self.dtype.lanes);
        nbits.is_multiple_of(8).then_some(nbits / 8)
    }

    /// Return whether the elements are contiguous.
    pub(crate) fn is_c_order(&self) -> bool {
        if self.strides.is_empty() || self.sizes.contains(&0) {
            return true;
        }
        let mut expected = 1_i64;
        self.sizes.iter().zip(self.strides).rev().all(|(&size, &stride)| {
            // The stride of a dimension with one element is never used.
            let fits = size == 1 || stride == expected;
            expected = expected.saturating_mul(size);
            fits
        })
    }

    /// Return whether all elements are within `nbytes` bytes of memory, if `first` elements precede the first of them. Negative
    /// strides are not supported: DLPack allows them, but no framework with such memory has them.
    pub(crate) fn is_within(&self, first: u64, nbytes: u64) -> bool {
        if self.sizes.contains(&0) {
            return true;
        }
        let count = || {
            let count = |count: u64, &size: &i64| count.checked_mul(u64::try_from(size).ok()?);
            let count = match self.strides {
                [] => self.sizes.iter().try_fold(1, count)?,
                strides => self
                    .sizes
                    .iter()
                    .zip(strides)
                    .try_fold(1_u64, |reach, (&size, &stride)| {
                        let steps = u64::try_from(size).ok()?.checked_sub(1)?;
                        reach.checked_add(steps.checked_mul(stride.unsigned_abs())?)
                    })?,
            };
            first.checked_add(count)?.checked_mul(to_u64(self.itemsize()?))
        };
        count().is_some_and(|end| end <= nbytes)
    }
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
