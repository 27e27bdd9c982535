//! What tests ask of the simulator, and tell it. None of it counts as a call of the driver.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use crate::codes::INVALID_VALUE;
pub use crate::counters::Counters;
use crate::simulator::{Mistake, code, held};

/// Forgets everything, and begins anew with so many devices. The order in which work is carried out is that of the seed.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_reset(seed: u64, devices: usize) {
    held().reset(seed, devices);
}

/// Has the call of this number from now on fail with `error`: 1 is the next one. Some errors stay with the device whose
/// context is current, or with all devices where none is.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_fail(number: u64, error: c_int) {
    held().get().planned = (number > 0).then_some((number, error));
}

/// Lets no more than so many bytes be pinned.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_pin_limit(nbytes: usize) {
    held().get().pin_limit = nbytes;
}

/// Sets the code that pinning gives beyond the limit. At first it is that of no memory.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_pin_code(error: c_int) {
    held().get().pin_code = error;
}

/// Makes a mistake from now on: 1, threads do not wait for events; 2, streams that were created wait for none; 3, the
/// legacy stream waits for none; 4, events are recorded on the legacy stream. 0 makes none.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_mistake(number: usize) {
    let mistake = number.checked_sub(1).and_then(|rank| Mistake::ALL.get(rank));
    held().get().mistake = mistake.copied();
}

/// Has an attribute of a device be `value`.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_attribute(ordinal: usize, attribute: c_int, value: c_int) -> c_int {
    code(held().get().set_attribute(ordinal, attribute, value))
}

/// What was counted since the reset.
///
/// # Safety
/// `into` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_counters(into: *mut Counters) {
    let counters = held().get().counters;
    // SAFETY: the contract above.
    unsafe { into.write(counters) };
}

/// Begins or ends a capture on a stream of a device, in global mode. Ending one that a call has broken gives 901.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_capture(stream: *mut c_void, ordinal: usize, is_capturing: bool) -> c_int {
    let mut held = held();
    let simulator = held.get();
    let stream = simulator.stream(stream.addr(), ordinal);
    code(stream.and_then(|stream| simulator.capture(stream, is_capturing)))
}

/// Begins or ends a kernel on a stream of a device that runs until it is ended: nothing is done there meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_busy(stream: *mut c_void, ordinal: usize, is_busy: bool) -> c_int {
    let mut held = held();
    let simulator = held.get();
    let stream = simulator.stream(stream.addr(), ordinal);
    code(stream.and_then(|stream| simulator.set_busy(stream, is_busy)))
}

/// Has all done that is queued: first what the legacy streams have, then the rest.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_finish() -> c_int {
    code(held().get().finish_all())
}

/// Destroys the primary context of a device with all that it has, as `cudaDeviceReset` does.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_device_reset(ordinal: usize) -> c_int {
    code(held().get().reset_device(ordinal))
}

/// Has every later call for a device fail with `error`, which is one that stays.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_lose(ordinal: usize, error: c_int) -> c_int {
    code(held().get().lose(ordinal, error))
}

/// Allocates memory of a device; 0 where there is none. Memory that was freed is handed out again first.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_allocate(ordinal: usize, nbytes: usize) -> u64 {
    let allocated = held().get().allocate(ordinal, nbytes);
    allocated
        .ok()
        .and_then(|address| u64::try_from(address).ok())
        .unwrap_or(0)
}

/// Gives memory of a device back in the order of a stream, as allocators of frameworks do. It is overwritten then.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_free_in_order(stream: *mut c_void, ordinal: usize, address: u64) -> c_int {
    let mut held = held();
    let simulator = held.get();
    let stream = simulator.stream(stream.addr(), ordinal);
    let address = usize::try_from(address).map_err(|_| INVALID_VALUE);
    code(stream.and_then(|stream| simulator.queue_free(stream, address?)))
}

/// Queues a write to memory of a device: what its owner before still does with it.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_old_owner(
    stream: *mut c_void,
    ordinal: usize,
    address: u64,
    nbytes: usize,
    byte: u8,
) -> c_int {
    let mut held = held();
    let simulator = held.get();
    let stream = simulator.stream(stream.addr(), ordinal);
    let address = usize::try_from(address).map_err(|_| INVALID_VALUE);
    code(stream.and_then(|stream| simulator.queue_fill(stream, address?, nbytes, byte)))
}

/// Reads memory of a device as it is now: nothing is carried out. Whether it is allocated.
///
/// # Safety
/// `into` has room for `nbytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_read(address: u64, into: *mut u8, nbytes: usize) -> bool {
    // SAFETY: the contract above.
    let into = unsafe { std::slice::from_raw_parts_mut(into, nbytes) };
    usize::try_from(address).is_ok_and(|address| held().get().peek(address, into))
}

/// Writes memory of a device at once. Whether it is allocated.
///
/// # Safety
/// `from` has `nbytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_write(address: u64, from: *const u8, nbytes: usize) -> bool {
    // SAFETY: the contract above.
    let from = unsafe { std::slice::from_raw_parts(from, nbytes) };
    usize::try_from(address).is_ok_and(|address| held().get().poke(address, from))
}
