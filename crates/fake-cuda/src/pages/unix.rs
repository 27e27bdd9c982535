//! By mappings.
#![allow(unsafe_code)]

use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

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
