//! The memory of slots: one mapping of huge pages, which is pinned slot by slot.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use crate::pages::{HUGE_PAGE_NBYTES, Pages};

/// The size of a page of a file in the cache, and the largest block that disks have. Direct reads begin and end at
/// multiples of it, in the file and in memory.
pub(super) const PAGE_NBYTES: usize = 4096;

/// Memory for some slots of one size. Children of a fork do not have it, so that the system never moves a pinned page.
#[derive(Debug)]
pub(super) struct Arena {
    pages: Pages,
    /// The position of the first slot: the border of a huge page.
    begin: usize,
    slot_nbytes: usize,
}

/// The place of one slot, which belongs to its holder alone.
#[derive(Debug)]
pub(super) struct Place {
    arena: Arc<Arena>,
    rank: usize,
}

impl Arena {
    /// Open an arena and return its places, the first one last.
    pub(super) fn open(slot_nbytes: usize, count: usize) -> io::Result<Vec<Place>> {
        let nbytes = slot_nbytes.saturating_mul(count);
        let pages = Pages::allocate(nbytes.saturating_add(HUGE_PAGE_NBYTES))?;
        let begin = pages.as_mut_ptr().align_offset(HUGE_PAGE_NBYTES);
        pages.want_huge(begin..begin + nbytes);
        pages.keep_from_children();
        let arena = Arc::new(Arena {
            pages,
            begin,
            slot_nbytes,
        });
        let place = |rank| Place {
            arena: Arc::clone(&arena),
            rank,
        };
        Ok((0..count).rev().map(place).collect())
    }
}

impl Place {
    /// The first byte, at the border of a page.
    pub(super) fn start(&self) -> *mut u8 {
        let at = self.arena.begin + self.rank * self.arena.slot_nbytes;
        self.arena.pages.as_mut_ptr().wrapping_add(at)
    }

    /// The bytes of the place.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `from_raw_parts_mut` requires
        // - that many bytes of one allocation, readable and writable: `open` allocated them, and `arena` keeps them;
        // - no other access while the slice lives: each place is made once, and `self` is borrowed exclusively. The owner
        //   of the place ensures that no copy of a device uses them.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.arena.slot_nbytes) }
    }

    /// Request memory for all pages, as pinning needs it. This is faster than the driver's own faults.
    pub(super) fn touch(&mut self) {
        self.bytes()
            .iter_mut()
            .step_by(PAGE_NBYTES)
            .for_each(|byte| *byte = 0);
    }

    /// Keep the memory for ever: a device may still use it.
    pub(super) fn leak(&self) {
        std::mem::forget(Arc::clone(&self.arena));
    }
}
