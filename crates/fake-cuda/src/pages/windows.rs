//! By reserved addresses, which get memory when they are opened first.
#![allow(unsafe_code)]

use std::ptr;

use windows_sys::Win32::System::Memory::{
    MEM_COMMIT, MEM_RELEASE, MEM_RESERVE, PAGE_NOACCESS, PAGE_READWRITE, VirtualAlloc, VirtualFree,
    VirtualProtect,
};

/// The address of `nbytes` bytes that nobody can touch; 0 where there are none.
pub(crate) fn reserve(nbytes: usize) -> usize {
    // SAFETY: asks for nothing where the system chooses the place.
    let start = unsafe { VirtualAlloc(ptr::null(), nbytes, MEM_RESERVE, PAGE_NOACCESS) };
    start.expose_provenance()
}

/// Opens whole pages, or closes them. Says whether it did.
///
/// # Safety
/// They are of what [`reserve`] gave, and nobody uses them who is not to.
pub(crate) unsafe fn allow(address: usize, nbytes: usize, is_open: bool) -> bool {
    if nbytes == 0 {
        // The system takes no pages at all for a mistake.
        return true;
    }
    let pages = ptr::with_exposed_provenance_mut(address);
    if is_open {
        // SAFETY: asks for reserved pages: so the caller promised. Those that have memory keep what is in it.
        return !unsafe { VirtualAlloc(pages, nbytes, MEM_COMMIT, PAGE_READWRITE) }.is_null();
    }
    let mut before = 0;
    // SAFETY: asks for pages that have memory, which opening them gave, and that nobody is kept from what he uses: so the
    // caller promised; and for a number that may be written, which `before` is.
    unsafe { VirtualProtect(pages, nbytes, PAGE_NOACCESS, &raw mut before) != 0 }
}

/// Gives all of it back. Says whether it did.
///
/// # Safety
/// It is what [`reserve`] gave, and nobody uses it any more.
pub(crate) unsafe fn release(address: usize, _: usize) -> bool {
    // SAFETY: asks for the start of reserved addresses that nobody uses any more: so the caller promised.
    unsafe { VirtualFree(ptr::with_exposed_provenance_mut(address), 0, MEM_RELEASE) != 0 }
}
