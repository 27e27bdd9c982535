//! Reserves addresses with mappings.
#![allow(unsafe_code)]

use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Returns the address of `nbytes` inaccessible bytes, or 0 on failure.
pub(crate) fn reserve(nbytes: usize) -> usize {
    // SAFETY: requires that a mapping at the address may be replaced. None is: the system chooses the address.
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
