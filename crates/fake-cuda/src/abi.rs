//! The functions of the driver, under its names.
//!
//! Each function converts its arguments to numbers, calls the simulator, and returns a code.
#![allow(unsafe_code)]
#![allow(non_snake_case, reason = "the names are the driver's")]
#![allow(
    missing_docs,
    clippy::missing_safety_doc,
    reason = "the driver documents its functions"
)]

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::thread;
use std::time::Duration;

use crate::codes::{
    BUSY, CONTEXT_IS_DESTROYED, INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, NOT_READY, SUCCESS, words,
};
use crate::simulator::{Mode, Outcome, Simulator, code, held};
use crate::streams::Way;

thread_local! {
    /// The current context of this thread.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// The calls that this thread may make while another thread captures.
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// Runs `work` as one call of the driver.
fn called(name: &'static str, work: impl FnOnce(&mut Simulator) -> Outcome) -> c_int {
    let mut held = held();
    let simulator = held.get();
    let begun = simulator.call(name, MODE.get(), CURRENT.get());
    code(begun.and_then(|()| work(simulator)))
}

/// The same for a call that needs a current context; `work` gets the context's device.
fn within(name: &'static str, work: impl FnOnce(&mut Simulator, usize) -> Outcome) -> c_int {
    called(name, |simulator| {
        let ordinal = simulator.current(CURRENT.get())?;
        work(simulator, ordinal)
    })
}

/// The same for a call that waits. During the wait, other threads can make calls.
fn waiting(name: &'static str, work: impl Fn(&mut Simulator, usize) -> Outcome) -> c_int {
    let mut outcome = within(name, &work);
    while outcome == BUSY {
        thread::sleep(Duration::from_millis(1));
        let mut held = held();
        let simulator = held.get();
        let current = simulator.current(CURRENT.get());
        outcome = code(current.and_then(|ordinal| work(simulator, ordinal)));
    }
    outcome
}

/// Writes a result to the caller's memory.
///
/// # Safety
/// `place` is null or writable.
unsafe fn answer<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the contract above.
    unsafe { place.write(value) };
    Ok(())
}

fn handle(number: usize) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(number)
}

fn ordinal_of(device: c_int) -> Outcome<usize> {
    usize::try_from(device).map_err(|_| INVALID_DEVICE)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    called("cuInit", |simulator| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if simulator.devices() == 0 {
            return Err(NO_DEVICE);
        }
        simulator.initialize();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: c_int, name: *mut *const c_char) -> c_int {
    let found = words(error).ok_or(INVALID_VALUE);
    // SAFETY: the caller's contract.
    code(found.and_then(|(found, _)| unsafe { answer(name, found.as_ptr()) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> c_int {
    let found = words(error).ok_or(INVALID_VALUE);
    // SAFETY: the caller's contract.
    code(found.and_then(|(_, found)| unsafe { answer(text, found.as_ptr()) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    called("cuDeviceGet", |simulator| {
        let is_there = ordinal_of(ordinal)? < simulator.devices();
        if !is_there {
            return Err(INVALID_DEVICE);
        }
        // SAFETY: the caller's contract.
        unsafe { answer(device, ordinal) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    called("cuDeviceGetAttribute", |simulator| {
        let found = simulator.attribute(ordinal_of(device)?, attribute)?;
        // SAFETY: the caller's contract.
        unsafe { answer(value, found) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int {
    called("cuDevicePrimaryCtxRetain", |simulator| {
        let retained = simulator.retain(ordinal_of(device)?)?;
        // SAFETY: the caller's contract.
        unsafe { answer(context, handle(retained)) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    called("cuDevicePrimaryCtxRelease_v2", |simulator| {
        simulator.release(ordinal_of(device)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
    called("cuCtxSetCurrent", |simulator| {
        let context = context.addr();
        if context != 0 {
            simulator.ordinal_of(context).ok_or(CONTEXT_IS_DESTROYED)?;
        }
        CURRENT.set(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    called("cuCtxGetCurrent", |simulator| {
        let current = simulator.ordinal_of(CURRENT.get()).map_or(0, |_| CURRENT.get());
        // SAFETY: the caller's contract.
        unsafe { answer(context, handle(current)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(place: *mut *mut c_void, nbytes: usize, _flags: c_uint) -> c_int {
    within("cuMemHostAlloc", |simulator, ordinal| {
        let address = simulator.pin(nbytes, ordinal)?;
        // SAFETY: the caller's contract.
        unsafe { answer(place, handle(address)) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(place: *mut c_void) -> c_int {
    called("cuMemFreeHost", |simulator| simulator.unpin(place.addr()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(place: *mut c_void, nbytes: usize, _flags: c_uint) -> c_int {
    within("cuMemHostRegister_v2", |simulator, ordinal| {
        simulator.register(place.expose_provenance(), nbytes, ordinal)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(place: *mut c_void) -> c_int {
    called("cuMemHostUnregister", |simulator| simulator.unpin(place.addr()))
}

fn at(address: u64) -> Outcome<usize> {
    usize::try_from(address).map_err(|_| INVALID_VALUE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(place: *mut u64, nbytes: usize) -> c_int {
    within("cuMemAlloc_v2", |simulator, ordinal| {
        let address = simulator.allocate(ordinal, nbytes)?;
        let address = u64::try_from(address).map_err(|_| INVALID_VALUE)?;
        // SAFETY: the caller's contract.
        unsafe { answer(place, address) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    within("cuMemFree_v2", |simulator, _| simulator.free(at(address)?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) -> c_int {
    within("cuStreamCreate", |simulator, ordinal| {
        // Streams that synchronise with the legacy stream are not simulated.
        if flags != 1 {
            return Err(INVALID_VALUE);
        }
        let created = simulator.create_stream(ordinal);
        // SAFETY: the caller's contract.
        unsafe { answer(stream, handle(created)) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> c_int {
    waiting("cuStreamDestroy_v2", |simulator, _| {
        simulator.destroy_stream(stream.addr())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> c_int {
    waiting("cuStreamSynchronize", |simulator, ordinal| {
        let stream = simulator.stream(stream.addr(), ordinal)?;
        simulator.drain(stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) -> c_int {
    within("cuStreamWaitEvent", |simulator, ordinal| {
        let stream = simulator.stream(stream.addr(), ordinal)?;
        simulator.wait(stream, event.addr())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_int) -> c_int {
    within("cuStreamIsCapturing", |simulator, ordinal| {
        let stream = simulator.stream(stream.addr(), ordinal)?;
        // SAFETY: the caller's contract.
        unsafe { answer(status, simulator.capture_status(stream)) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_int) -> c_int {
    within("cuStreamBeginCapture_v2", |simulator, ordinal| {
        // Captures in other modes are not simulated.
        if mode != Mode::Global.number() {
            return Err(INVALID_VALUE);
        }
        let stream = simulator.stream(stream.addr(), ordinal)?;
        simulator.capture(stream, true)
    })
}

/// Ends a capture. The graph is null: this driver does not record work in graphs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> c_int {
    within("cuStreamEndCapture", |simulator, ordinal| {
        let stream = simulator.stream(stream.addr(), ordinal)?;
        // SAFETY: the caller's contract.
        unsafe { answer(graph, std::ptr::null_mut()) }?;
        simulator.capture(stream, false)
    })
}

/// Sets the capture mode of the thread, and returns the previous mode to the caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    called("cuThreadExchangeStreamCaptureMode", |_| {
        if mode.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's contract.
        let wanted = Mode::of(unsafe { mode.read() }).ok_or(INVALID_VALUE)?;
        // SAFETY: the caller's contract.
        unsafe { answer(mode, MODE.replace(wanted).number()) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _flags: c_uint) -> c_int {
    within("cuEventCreate", |simulator, ordinal| {
        let created = simulator.create_event(ordinal);
        // SAFETY: the caller's contract.
        unsafe { answer(event, handle(created)) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> c_int {
    within("cuEventDestroy_v2", |simulator, _| {
        simulator.destroy_event(event.addr())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> c_int {
    within("cuEventRecord", |simulator, ordinal| {
        let stream = simulator.stream(stream.addr(), ordinal)?;
        simulator.record(event.addr(), stream, ordinal)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: *mut c_void) -> c_int {
    within("cuEventQuery", |simulator, _| {
        match simulator.query(event.addr())? {
            true => Ok(()),
            false => Err(NOT_READY),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: *mut c_void) -> c_int {
    waiting("cuEventSynchronize", |simulator, _| {
        simulator.finish_event(event.addr())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    nbytes: usize,
    stream: *mut c_void,
) -> c_int {
    within("cuMemcpyHtoDAsync_v2", |simulator, ordinal| {
        let stream = simulator.stream(stream.addr(), ordinal)?;
        simulator.copy(from.expose_provenance(), at(to)?, nbytes, Way::In, stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    nbytes: usize,
    stream: *mut c_void,
) -> c_int {
    within("cuMemcpyDtoHAsync_v2", |simulator, ordinal| {
        let stream = simulator.stream(stream.addr(), ordinal)?;
        simulator.copy(at(from)?, to.expose_provenance(), nbytes, Way::Out, stream)
    })
}

const _: () = assert!(SUCCESS == 0);
