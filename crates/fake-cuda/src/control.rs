//! Functions with which tests control the simulator and inspect it. They do not count as calls of the driver.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use crate::codes::INVALID_VALUE;
pub use crate::counters::Counters;
use crate::link::Link;
use crate::simulator::{Mistake, code, held};

/// Resets the simulator to `devices` devices. `seed` decides the order in which queued work runs.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_reset(seed: u64, devices: usize) {
    held().reset(seed, devices);
}

/// Makes one later call fail with `error`: the next one if `number` is 1. Some errors persist on the device whose
/// context is current, or on all devices if no context is current.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_fail(number: u64, error: c_int) {
    held().get().planned = (number > 0).then_some((number, error));
}

/// Limits the number of bytes that can be pinned.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_pin_limit(nbytes: usize) {
    held().get().pin_limit = nbytes;
}

/// Sets the error code of pinning beyond the limit. The default is out of memory.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_pin_code(error: c_int) {
    held().get().pin_code = error;
}

/// Makes copies complete when they are queued, as on an infinitely fast link.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_instant(is_instant: bool) {
    held().get().is_instant = is_instant;
}

/// Makes copies take the time of a link with this many bytes per second. They move no bytes, and device memory has none.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_link(nbytes_per_second: f64) {
    held().get().link = Some(Link::new(nbytes_per_second));
}

/// Makes registering memory fail with `error`; 0 ends that.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_register_code(error: c_int) {
    held().get().register_code = (error != 0).then_some(error);
}

/// Plants a mistake in the simulator: 1, threads do not wait for events; 2, created streams do not wait for events; 3,
/// the legacy stream does not wait for events; 4, events are recorded on the legacy stream. 0 removes the mistake.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_mistake(number: usize) {
    let mistake = number.checked_sub(1).and_then(|rank| Mistake::ALL.get(rank));
    held().get().mistake = mistake.copied();
}

/// Sets an attribute of a device.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_attribute(ordinal: usize, attribute: c_int, value: c_int) -> c_int {
    code(held().get().set_attribute(ordinal, attribute, value))
}

/// Writes the counters since the reset to `into`.
///
/// # Safety
/// `into` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_counters(into: *mut Counters) {
    let counters = held().get().counters;
    // SAFETY: the contract above.
    unsafe { into.write(counters) };
}

/// Begins or ends a capture on a stream of a device, in global mode. Ending a capture that a call has invalidated
/// returns 901.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_capture(stream: *mut c_void, ordinal: usize, is_capturing: bool) -> c_int {
    let mut held = held();
    let simulator = held.get();
    let stream = simulator.stream(stream.addr(), ordinal);
    code(stream.and_then(|stream| simulator.capture(stream, is_capturing)))
}

/// Begins or ends an endless kernel on a stream of a device. No later work of the stream runs until the kernel ends.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_busy(stream: *mut c_void, ordinal: usize, is_busy: bool) -> c_int {
    let mut held = held();
    let simulator = held.get();
    let stream = simulator.stream(stream.addr(), ordinal);
    code(stream.and_then(|stream| simulator.set_busy(stream, is_busy)))
}

/// Runs all queued work: first the work of the legacy streams, then the rest.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_finish() -> c_int {
    code(held().get().finish_all())
}

/// Destroys the primary context of a device and everything in it, as `cudaDeviceReset` does.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_device_reset(ordinal: usize) -> c_int {
    code(held().get().reset_device(ordinal))
}

/// Makes every later call for a device fail with the persistent error `error`.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_lose(ordinal: usize, error: c_int) -> c_int {
    code(held().get().lose(ordinal, error))
}

/// Allocates memory on a device. Reuses freed memory first. Returns 0 if there is no memory.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_allocate(ordinal: usize, nbytes: usize) -> u64 {
    let allocated = held().get().allocate(ordinal, nbytes);
    allocated
        .ok()
        .and_then(|address| u64::try_from(address).ok())
        .unwrap_or(0)
}

/// Queues the release of device memory on a stream, as the allocators of frameworks do. The released memory is
/// overwritten.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_free_in_order(stream: *mut c_void, ordinal: usize, address: u64) -> c_int {
    let mut held = held();
    let simulator = held.get();
    let stream = simulator.stream(stream.addr(), ordinal);
    let address = usize::try_from(address).map_err(|_| INVALID_VALUE);
    code(stream.and_then(|stream| simulator.queue_free(stream, address?)))
}

/// Queues a write to device memory, as by its previous owner.
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

/// Reads device memory as it is now, without running queued work. Returns whether the memory is allocated.
///
/// # Safety
/// `into` must have room for `nbytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_read(address: u64, into: *mut u8, nbytes: usize) -> bool {
    // SAFETY: the contract above.
    let into = unsafe { std::slice::from_raw_parts_mut(into, nbytes) };
    usize::try_from(address).is_ok_and(|address| held().get().peek(address, into))
}

/// Writes device memory at once. Returns whether the memory is allocated.
///
/// # Safety
/// `from` must have `nbytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_write(address: u64, from: *const u8, nbytes: usize) -> bool {
    // SAFETY: the contract above.
    let from = unsafe { std::slice::from_raw_parts(from, nbytes) };
    usize::try_from(address).is_ok_and(|address| held().get().poke(address, from))
}
