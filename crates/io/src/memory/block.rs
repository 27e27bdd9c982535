//! Memory for what is read.

use std::io;
use std::ops::Range;

use ingot_format::to_u64;

use super::dest::Dest;
use super::pages::Pages;
use crate::error::Failure;

/// What a huge page takes on the machines that have them.
pub(crate) const HUGE_PAGE_NBYTES: usize = 2 << 20;

/// Private memory of our own, zero until it is written to.
///
/// What reading a warm file into memory costs is finding and zeroing that memory, not the copying: a block of whole
/// huge pages costs one fault where small pages cost 512. So a large block begins on the border of a huge page; and
/// only huge pages that it fills are asked for, so that it takes no more memory than it has bytes.
#[derive(Debug)]
pub(crate) struct Block {
    pages: Pages,
    used: Range<usize>,
    /// Whether nobody has written to it.
    is_untouched: bool,
}

impl Block {
    /// `nbytes` bytes, which cost nothing before they are touched.
    pub(crate) fn allocate(nbytes: usize) -> Result<Block, Failure> {
        if nbytes < HUGE_PAGE_NBYTES {
            // There are no pages of no bytes.
            return Block::of(nbytes.max(1), |_| 0..nbytes, nbytes);
        }
        let block = Block::of(
            nbytes + HUGE_PAGE_NBYTES,
            |pages| {
                let begin = pages.as_mut_ptr().align_offset(HUGE_PAGE_NBYTES);
                begin..begin + nbytes
            },
            nbytes,
        )?;
        let whole = nbytes - nbytes % HUGE_PAGE_NBYTES;
        block.pages.want_huge(block.used.start..block.used.start + whole);
        Ok(block)
    }

    fn of(
        allocated: usize,
        used: impl FnOnce(&Pages) -> Range<usize>,
        nbytes: usize,
    ) -> Result<Block, Failure> {
        let refused = |source: io::Error| Failure::OutOfMemory {
            nbytes: to_u64(nbytes),
            source: Some(source),
        };
        let pages = Pages::allocate(allocated).map_err(refused)?;
        Ok(Block {
            used: used(&pages),
            pages,
            is_untouched: true,
        })
    }

    /// All of it, to be filled.
    pub(crate) fn dest(&mut self) -> Dest<'_> {
        let bytes = &mut self.pages.bytes_mut()[self.used.clone()];
        if std::mem::take(&mut self.is_untouched) {
            Dest::untouched(bytes)
        } else {
            Dest::from(bytes)
        }
    }

    /// The pages, and which of their bytes are the block.
    pub(crate) fn into_pages(self) -> (Pages, Range<usize>) {
        (self.pages, self.used)
    }
}
