//! Memory for what is read.

use std::io;
use std::ops::Range;

use ingot_format::to_u64;
use memmap2::MmapMut;

use super::dest::Dest;
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
    pages: MmapMut,
    used: Range<usize>,
}

impl Block {
    /// `nbytes` bytes, which cost nothing before they are touched.
    pub(crate) fn allocate(nbytes: usize) -> Result<Block, Failure> {
        if nbytes < HUGE_PAGE_NBYTES {
            // A mapping has at least one byte.
            return Block::of(nbytes.max(1), |_| 0..nbytes, nbytes);
        }
        let block = Block::of(
            nbytes + HUGE_PAGE_NBYTES,
            |pages| {
                let begin = pages.as_ptr().align_offset(HUGE_PAGE_NBYTES);
                begin..begin + nbytes
            },
            nbytes,
        )?;
        #[cfg(target_os = "linux")]
        {
            let whole = nbytes - nbytes % HUGE_PAGE_NBYTES;
            // A kernel without huge pages loses nothing, so the answer does not matter.
            let _ = block
                .pages
                .advise_range(memmap2::Advice::HugePage, block.used.start, whole);
        }
        Ok(block)
    }

    fn of(
        mapped: usize,
        used: impl FnOnce(&MmapMut) -> Range<usize>,
        nbytes: usize,
    ) -> Result<Block, Failure> {
        let refused = |source: io::Error| Failure::OutOfMemory {
            nbytes: to_u64(nbytes),
            source: Some(source),
        };
        let pages = MmapMut::map_anon(mapped).map_err(refused)?;
        Ok(Block {
            used: used(&pages),
            pages,
        })
    }

    /// All of it, to be filled.
    pub(crate) fn dest(&mut self) -> Dest<'_> {
        Dest::untouched(&mut self.pages[self.used.clone()])
    }

    /// The mapping, and which of its bytes are the block.
    pub(crate) fn into_pages(self) -> (MmapMut, Range<usize>) {
        (self.pages, self.used)
    }
}
