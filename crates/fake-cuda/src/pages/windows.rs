//! Reserves addresses that never get memory.
#![allow(unsafe_code)]

use std::ptr;

use windows_sys::Win32::System::Memory::{MEM_RESERVE, PAGE_NOACCESS, VirtualAlloc};

/// Returns the address of `nbytes` inaccessible bytes, or 0 on failure.
pub(crate) fn reserve(nbytes: usize) -> usize {
    // SAFETY: requires nothing if the system chooses the address.
    let start = unsafe { VirtualAlloc(ptr::null(), nbytes, MEM_RESERVE, PAGE_NOACCESS) };
    start.expose_provenance()
}
