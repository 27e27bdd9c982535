//! The driver of NVIDIA's GPUs, with the functions that copies need. It is loaded when a device is first used, never
//! before.
//!
//! These are functions of the CUDA driver API with versioned names, which newer drivers keep:
//! <https://docs.nvidia.com/cuda/cuda-driver-api/>
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::process;
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use super::fault::DeviceFault;

/// Where the driver is, in the order of the search.
const LIBRARIES: &[&str] = if cfg!(windows) {
    &["nvcuda.dll"]
} else {
    &["libcuda.so.1", "libcuda.so"]
};

/// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTREGISTER_PORTABLE`: the memory is pinned for all contexts.
const PORTABLE: c_uint = 1;
/// `CU_STREAM_NON_BLOCKING`: work on this stream does not wait for the default stream.
const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`: the event only orders work, and records no time.
const UNTIMED: c_uint = 2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: calls of this thread do not break a capture by another thread.
const RELAXED: c_int = 2;
/// `CU_STREAM_LEGACY`: the default stream, which frameworks pass as a null stream.
const LEGACY: *mut c_void = ptr::without_provenance_mut(1);
/// `CU_DEVICE_ATTRIBUTE_INTEGRATED`: whether the device shares the memory of the host.
pub(super) const INTEGRATED: c_int = 18;
/// `CUDA_SUCCESS` and `CUDA_ERROR_NOT_READY`.
const SUCCESS: c_int = 0;
const NOT_READY: c_int = 600;

/// An object of the driver: a context, a stream or an event.
macro_rules! handles {
    ($($(#[$about:meta])* $name:ident)*) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) struct $name(*mut c_void);

        // SAFETY: the address is never dereferenced here, and the driver accepts its objects from every thread.
        unsafe impl Send for $name {}
        // SAFETY: as for `Send`.
        unsafe impl Sync for $name {}
    )*};
}

handles! {
    /// A `CUcontext`.
    Context
    /// A `CUstream`.
    Stream
    /// A `CUevent`.
    Event
}

impl Stream {
    /// The stream at the address that a framework passes. Null is the default stream.
    pub(crate) fn of_framework(stream: *mut c_void) -> Stream {
        Stream(if stream.is_null() { LEGACY } else { stream })
    }
}

/// The functions of the driver, each with its symbol.
macro_rules! calls {
    ($($name:ident = $symbol:literal ($($argument:ident: $type:ty),*);)*) => {
        #[derive(Debug)]
        struct Calls {
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        #[allow(dead_code, reason = "`words` and `is_done` need the codes of their functions")]
        impl Calls {
            /// # Safety
            /// `library` is the driver, or a library whose functions with these symbols have the same types and
            /// behaviour.
            unsafe fn of(library: &Library) -> Result<Calls, DeviceFault> {
                Ok(Calls {
                    $($name: {
                        // SAFETY: `get` requires that the symbol has this type, which this function's contract
                        // guarantees.
                        let found = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                        *found.map_err(|_| DeviceFault::Symbol { symbol: $symbol })?
                    },)*
                })
            }

            $(
                /// # Safety
                /// The function's own conditions.
                unsafe fn $name(&self, $($argument: $type),*) -> Result<(), DeviceFault> {
                    // SAFETY: this function's contract has the same conditions.
                    let code = unsafe { (self.$name)($($argument),*) };
                    self.check($symbol, code)
                }
            )*
        }
    };
}

calls! {
    init = "cuInit" (flags: c_uint);
    error_name = "cuGetErrorName" (code: c_int, name: *mut *const c_char);
    error_text = "cuGetErrorString" (code: c_int, text: *mut *const c_char);
    device = "cuDeviceGet" (device: *mut c_int, ordinal: c_int);
    attribute = "cuDeviceGetAttribute" (value: *mut c_int, attribute: c_int, device: c_int);
    retain = "cuDevicePrimaryCtxRetain" (context: *mut *mut c_void, device: c_int);
    release = "cuDevicePrimaryCtxRelease_v2" (device: c_int);
    set_current = "cuCtxSetCurrent" (context: *mut c_void);
    current = "cuCtxGetCurrent" (context: *mut *mut c_void);
    allocate = "cuMemHostAlloc" (start: *mut *mut c_void, nbytes: usize, flags: c_uint);
    free = "cuMemFreeHost" (start: *mut c_void);
    register = "cuMemHostRegister_v2" (start: *mut c_void, nbytes: usize, flags: c_uint);
    unregister = "cuMemHostUnregister" (start: *mut c_void);
    create_stream = "cuStreamCreate" (stream: *mut *mut c_void, flags: c_uint);
    destroy_stream = "cuStreamDestroy_v2" (stream: *mut c_void);
    finish = "cuStreamSynchronize" (stream: *mut c_void);
    wait = "cuStreamWaitEvent" (stream: *mut c_void, event: *mut c_void, flags: c_uint);
    capturing = "cuStreamIsCapturing" (stream: *mut c_void, status: *mut c_int);
    exchange_mode = "cuThreadExchangeStreamCaptureMode" (mode: *mut c_int);
    create_event = "cuEventCreate" (event: *mut *mut c_void, flags: c_uint);
    destroy_event = "cuEventDestroy_v2" (event: *mut c_void);
    record = "cuEventRecord" (event: *mut c_void, stream: *mut c_void);
    query_event = "cuEventQuery" (event: *mut c_void);
    copy_in = "cuMemcpyHtoDAsync_v2" (to: u64, from: *const c_void, nbytes: usize, stream: *mut c_void);
    copy_out = "cuMemcpyDtoHAsync_v2" (to: *mut c_void, from: u64, nbytes: usize, stream: *mut c_void);
}

impl Calls {
    fn check(&self, call: &'static str, code: c_int) -> Result<(), DeviceFault> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(DeviceFault::Call {
            call,
            code,
            name: self.words(self.error_name, code),
            text: self.words(self.error_text, code),
        })
    }

    /// Return the text of one of the two functions for a code.
    fn words(&self, of: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int, code: c_int) -> String {
        let mut words = ptr::null();
        // SAFETY: both require memory for a pointer.
        let found = unsafe { of(code, &raw mut words) };
        if found != SUCCESS || words.is_null() {
            return "an unknown error".to_owned();
        }
        // SAFETY: `from_ptr` requires a string that ends with a zero: the driver's own, which it never frees.
        let words = unsafe { CStr::from_ptr(words) };
        words.to_string_lossy().into_owned()
    }
}

/// The process that used a device first: a child of a fork cannot use the driver.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// Return whether this process has used a device. The child of one that has must not take locks that were held when it was
/// forked.
pub(super) fn is_in_use() -> bool {
    PROCESS.get() == Some(&process::id())
}

/// Fail in the child of a process that used a device.
pub(super) fn refuse_child() -> Result<(), DeviceFault> {
    if *PROCESS.get_or_init(process::id) == process::id() {
        Ok(())
    } else {
        Err(DeviceFault::Forked)
    }
}

/// The driver, initialised.
#[derive(Debug)]
pub(crate) struct Driver {
    calls: Calls,
    /// Keeps the functions loaded.
    _library: Library,
}

impl Driver {
    /// Loads the driver of this machine, or the library at `path`, which must behave like the driver.
    ///
    /// # Errors
    /// There is no driver, or it does not start.
    pub(crate) fn load(path: Option<&Path>) -> Result<Driver, DeviceFault> {
        // SAFETY: `Library::new` requires that the library's initialisation does no harm: the library is the driver,
        // which every program with a GPU loads, or the one that the caller named.
        let open = |name: &Path| unsafe { Library::new(name) };
        let mut reasons = Vec::new();
        let names = LIBRARIES.iter().map(Path::new);
        let names: Vec<&Path> = path.map_or_else(|| names.collect(), |path| vec![path]);
        let library = names.iter().find_map(|name| match open(name) {
            Ok(library) => Some(library),
            Err(reason) => {
                reasons.push(reason.to_string());
                None
            }
        });
        let library = library.ok_or_else(|| DeviceFault::NoDriver {
            reason: reasons.join("; "),
        })?;
        // SAFETY: requires the driver, as above.
        let calls = unsafe { Calls::of(&library) }?;
        let driver = Driver {
            calls,
            _library: library,
        };
        // SAFETY: `cuInit` requires zero.
        unsafe { driver.calls.init(0) }?;
        Ok(driver)
    }

    /// Run `work` in the relaxed capture mode, in which no call of this thread breaks a capture of another thread, and restore
    /// the thread's mode. Every group of calls is made this way.
    pub(crate) fn relaxed<R>(&self, work: impl FnOnce() -> Result<R, DeviceFault>) -> Result<R, DeviceFault> {
        let before = self.exchange_mode(RELAXED)?;
        let outcome = work();
        let restored = self.exchange_mode(before);
        let made = outcome?;
        restored?;
        Ok(made)
    }

    /// Set the capture mode of this thread, and return the mode before.
    fn exchange_mode(&self, mode: c_int) -> Result<c_int, DeviceFault> {
        let mut mode = mode;
        // SAFETY: requires a valid mode in writable memory.
        unsafe { self.calls.exchange_mode(&raw mut mode) }?;
        Ok(mode)
    }

    /// Retain the primary context of a device, which frameworks use too. It must be released once.
    pub(crate) fn retain(&self, ordinal: i32) -> Result<(c_int, Context), DeviceFault> {
        let mut device = 0;
        // SAFETY: requires memory for the result.
        unsafe { self.calls.device(&raw mut device, ordinal) }?;
        let mut context = ptr::null_mut();
        // SAFETY: requires memory for the result, and the device that the call above returned.
        unsafe { self.calls.retain(&raw mut context, device) }?;
        Ok((device, Context(context)))
    }

    /// Return an attribute of a device. Drivers refuse attributes that they do not know.
    pub(crate) fn attribute(&self, device: c_int, attribute: c_int) -> Result<c_int, DeviceFault> {
        let mut value = 0;
        // SAFETY: requires memory for the result, and the device that `retain` returned.
        unsafe { self.calls.attribute(&raw mut value, attribute, device) }?;
        Ok(value)
    }

    pub(crate) fn release(&self, device: c_int) -> Result<(), DeviceFault> {
        // SAFETY: requires a device whose primary context the caller has retained.
        unsafe { self.calls.release(device) }
    }

    /// Run `work` with `context` as the current one of this thread, and restore the caller's context. No capture of another
    /// thread is broken.
    pub(crate) fn within<R>(
        &self,
        context: Context,
        work: impl FnOnce() -> Result<R, DeviceFault>,
    ) -> Result<R, DeviceFault> {
        self.relaxed(|| self.with_current(context, work))
    }

    fn with_current<R>(
        &self,
        context: Context,
        work: impl FnOnce() -> Result<R, DeviceFault>,
    ) -> Result<R, DeviceFault> {
        let mut before = ptr::null_mut();
        // SAFETY: requires memory for the result.
        unsafe { self.calls.current(&raw mut before) }?;
        if before == context.0 {
            return work();
        }
        self.make_current(context.0)?;
        let outcome = work();
        let restored = self.make_current(before);
        let made = outcome?;
        restored?;
        Ok(made)
    }

    fn make_current(&self, context: *mut c_void) -> Result<(), DeviceFault> {
        // SAFETY: requires a context or null: a retained context, or the one that was current.
        unsafe { self.calls.set_current(context) }
    }

    /// Memory that devices copy from and to while the processor does other things.
    pub(crate) fn allocate(&self, nbytes: usize) -> Result<*mut u8, DeviceFault> {
        let mut start = ptr::null_mut();
        // SAFETY: requires memory for the result, and a current context; any context will do.
        unsafe { self.calls.allocate(&raw mut start, nbytes, PORTABLE) }?;
        Ok(start.cast())
    }

    /// Free memory of [`Driver::allocate`].
    ///
    /// # Safety
    /// No code and no copy uses the memory any more.
    pub(crate) unsafe fn free(&self, start: *mut u8) -> Result<(), DeviceFault> {
        // SAFETY: requires memory of `cuMemHostAlloc` that no code uses, which this function's contract guarantees.
        unsafe { self.calls.free(start.cast()) }
    }

    /// Pin memory for all devices.
    ///
    /// # Safety
    /// The `nbytes` bytes at `start` stay mapped until they are unregistered.
    pub(crate) unsafe fn register(&self, start: *mut u8, nbytes: usize) -> Result<(), DeviceFault> {
        // SAFETY: requires memory that stays mapped, which this function's contract guarantees.
        unsafe { self.calls.register(start.cast(), nbytes, PORTABLE) }
    }

    /// Unpin memory of [`Driver::register`].
    ///
    /// # Safety
    /// No copy uses the memory any more.
    pub(crate) unsafe fn unregister(&self, start: *mut u8) -> Result<(), DeviceFault> {
        // SAFETY: requires registered memory that no copy uses, which this function's contract guarantees.
        unsafe { self.calls.unregister(start.cast()) }
    }

    pub(crate) fn create_stream(&self) -> Result<Stream, DeviceFault> {
        let mut stream = ptr::null_mut();
        // SAFETY: requires memory for the result.
        unsafe { self.calls.create_stream(&raw mut stream, NON_BLOCKING) }?;
        Ok(Stream(stream))
    }

    /// Queued work still finishes.
    pub(crate) fn destroy_stream(&self, stream: Stream) -> Result<(), DeviceFault> {
        // SAFETY: requires a stream that is not used again: `Device` calls this once, when it is dropped.
        unsafe { self.calls.destroy_stream(stream.0) }
    }

    /// Wait until all work queued on the stream is done.
    pub(crate) fn finish(&self, stream: Stream) -> Result<(), DeviceFault> {
        // SAFETY: requires a stream of the current context.
        unsafe { self.calls.finish(stream.0) }
    }

    /// Make later work on `stream` wait for `event`.
    pub(crate) fn wait(&self, stream: Stream, event: Event) -> Result<(), DeviceFault> {
        // SAFETY: requires a stream and an event, which `Device` and its caller have.
        unsafe { self.calls.wait(stream.0, event.0, 0) }
    }

    /// Return whether work on the stream is being recorded into a graph.
    pub(crate) fn is_capturing(&self, stream: Stream) -> Result<bool, DeviceFault> {
        let mut status = 0;
        // SAFETY: requires a stream, and memory for the result.
        unsafe { self.calls.capturing(stream.0, &raw mut status) }?;
        Ok(status != 0)
    }

    pub(crate) fn create_event(&self) -> Result<Event, DeviceFault> {
        let mut event = ptr::null_mut();
        // SAFETY: requires memory for the result.
        unsafe { self.calls.create_event(&raw mut event, UNTIMED) }?;
        Ok(Event(event))
    }

    pub(crate) fn destroy_event(&self, event: Event) -> Result<(), DeviceFault> {
        // SAFETY: requires an event that is not used again: `Device` calls this once for each.
        unsafe { self.calls.destroy_event(event.0) }
    }

    /// Record the work that is queued on `stream` so far in `event`.
    pub(crate) fn record(&self, event: Event, stream: Stream) -> Result<(), DeviceFault> {
        // SAFETY: requires an event and a stream of one context.
        unsafe { self.calls.record(event.0, stream.0) }
    }

    /// Return whether all work that was recorded in the event is done.
    pub(crate) fn is_done(&self, event: Event) -> Result<bool, DeviceFault> {
        // SAFETY: requires an event.
        let code = unsafe { (self.calls.query_event)(event.0) };
        match code {
            NOT_READY => Ok(false),
            code => self.calls.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Queue a copy to the memory of a device.
    ///
    /// # Safety
    /// - The `nbytes` bytes at `from` stay readable and unchanged until the copy is done.
    /// - `to` is the address of `nbytes` bytes on the device. They stay allocated until the copy is done, and other
    ///   code uses them only in the order of `stream`.
    pub(crate) unsafe fn copy_in(
        &self,
        from: *const u8,
        to: u64,
        nbytes: usize,
        stream: Stream,
    ) -> Result<(), DeviceFault> {
        // SAFETY: this function's contract has the same requirements.
        unsafe { self.calls.copy_in(to, from.cast(), nbytes, stream.0) }
    }
    /// Queue a copy from the memory of a device.
    ///
    /// # Safety
    /// - `to` is the address of `nbytes` bytes that no other code uses until the copy is done.
    /// - The `nbytes` bytes at `from` stay allocated on the device until then.
    pub(crate) unsafe fn copy_out(
        &self,
        to: *mut u8,
        from: u64,
        nbytes: usize,
        stream: Stream,
    ) -> Result<(), DeviceFault> {
        // SAFETY: this function's contract has the same requirements.
        unsafe { self.calls.copy_out(to.cast(), from, nbytes, stream.0) }
    }
}
