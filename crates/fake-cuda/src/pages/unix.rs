//! By mappings.
#![allow(unsafe_code)]

use std::ptr;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// The address of `nbytes` bytes that nobody can touch; 0 where there are none.
pub(crate) fn reserve(nbytes: usize) -> usize {
    // SAFETY: asks for a place that may be replaced, and there is none: the system chooses.
    let start = unsafe {
        mmap_anonymous(
            ptr::null_mut(),
            nbytes,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    };
    start.map_or(0, |start| start.addr())
}

/// Opens whole pages, or closes them. Says whether it did.
///
/// # Safety
/// They are of what [`reserve`] gave, and nobody uses them who is not to.
pub(crate) unsafe fn allow(address: usize, nbytes: usize, is_open: bool) -> bool {
    let flags = match is_open {
        true => MprotectFlags::READ | MprotectFlags::WRITE,
        false => MprotectFlags::empty(),
    };
    // SAFETY: asks that nobody is kept from memory that he uses: so the caller promised.
    unsafe { mprotect(ptr::with_exposed_provenance_mut(address), nbytes, flags) }.is_ok()
}

/// Gives all of it back. Says whether it did.
///
/// # Safety
/// It is what [`reserve`] gave, and nobody uses it any more.
pub(crate) unsafe fn release(address: usize, nbytes: usize) -> bool {
    // SAFETY: asks for a mapping that nobody uses any more: so the caller promised.
    unsafe { munmap(ptr::with_exposed_provenance_mut(address), nbytes) }.is_ok()
}
