//! By reserved addresses, which never get memory.
#![allow(unsafe_code)]

use std::ptr;

use windows_sys::Win32::System::Memory::{MEM_RESERVE, PAGE_NOACCESS, VirtualAlloc};

/// The address of `nbytes` bytes that nobody can touch; 0 where there are none.
pub(crate) fn reserve(nbytes: usize) -> usize {
    // SAFETY: asks for nothing where the system chooses the place.
    let start = unsafe { VirtualAlloc(ptr::null(), nbytes, MEM_RESERVE, PAGE_NOACCESS) };
    start.expose_provenance()
}
