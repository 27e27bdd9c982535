//! By mappings.
#![allow(unsafe_code)]

use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

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

/// Gives all of it back. Says whether it did.
///
/// # Safety
/// It is what [`reserve`] gave, and nobody uses it any more.
pub(crate) unsafe fn release(address: usize, nbytes: usize) -> bool {
    // SAFETY: asks for a mapping that nobody uses any more: so the caller promised.
    unsafe { munmap(ptr::with_exposed_provenance_mut(address), nbytes) }.is_ok()
}
