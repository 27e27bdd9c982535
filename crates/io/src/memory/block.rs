//! Memory for data that is read.

use std::ops::Range;

use ingot_format::to_u64;

use super::dest::Dest;
use crate::error::Failure;
use crate::pages::{HUGE_PAGE_NBYTES, Pages};

/// Private memory of our own, zero until it is written to.
///
/// Reading a warm file into memory costs page faults, not copying: a block of whole huge pages costs one fault where small
/// pages cost 512. So a large block begins at the border of a huge page; and only huge pages that it fills are requested, so
/// that it takes no more memory than it has bytes.
#[derive(Debug)]
pub(crate) struct Block {
    pages: Pages,
    used: Range<usize>,
    /// Whether no code has written to it yet.
    is_untouched: bool,
}

impl Block {
    /// Allocate `nbytes` bytes, which cost nothing before they are touched.
    pub(crate) fn allocate(nbytes: usize) -> Result<Block, Failure> {
        let border = if nbytes < HUGE_PAGE_NBYTES {
            0
        } else {
            HUGE_PAGE_NBYTES
        };
        // An empty block has no pages.
        let pages = Pages::allocate(nbytes.max(1) + border).map_err(|source| Failure::OutOfMemory {
            nbytes: to_u64(nbytes),
            source: Some(source),
        })?;
        let mut begin = 0;
        if border > 0 {
            begin = pages.as_mut_ptr().align_offset(border);
            pages.want_huge(begin..begin + nbytes - nbytes % border);
        }
        Ok(Block {
            used: begin..begin + nbytes,
            pages,
            is_untouched: true,
        })
    }

    /// The first byte: readable and writable for [`Block::len`] bytes as long as `self` lives.
    pub(super) fn as_mut_ptr(&self) -> *mut u8 {
        self.pages.as_mut_ptr().wrapping_add(self.used.start)
    }

    /// The size in bytes.
    pub(super) fn len(&self) -> usize {
        self.used.len()
    }

    /// Return all of it as a destination.
    pub(crate) fn dest(&mut self) -> Dest<'_> {
        let bytes = &mut self.pages.bytes_mut()[self.used.clone()];
        if std::mem::take(&mut self.is_untouched) {
            Dest::untouched(bytes)
        } else {
            Dest::from(bytes)
        }
    }
}
