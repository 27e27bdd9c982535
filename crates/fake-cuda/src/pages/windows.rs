//! By reserved addresses, which never get memory.
#![allow(unsafe_code)]

use std::ptr;

use windows_sys::Win32::System::Memory::{
    MEM_RELEASE, MEM_RESERVE, PAGE_NOACCESS, VirtualAlloc, VirtualFree,
};

/// The address of `nbytes` bytes that nobody can touch; 0 where there are none.
pub(crate) fn reserve(nbytes: usize) -> usize {
    // SAFETY: asks for nothing where the system chooses the place.
    let start = unsafe { VirtualAlloc(ptr::null(), nbytes, MEM_RESERVE, PAGE_NOACCESS) };
    start.expose_provenance()
}

/// Gives all of it back. Says whether it did.
///
/// # Safety
/// It is what [`reserve`] gave, and nobody uses it any more.
pub(crate) unsafe fn release(address: usize, _: usize) -> bool {
    // SAFETY: asks for the start of reserved addresses that nobody uses any more: so the caller promised.
    unsafe { VirtualFree(ptr::with_exposed_provenance_mut(address), 0, MEM_RELEASE) != 0 }
}
