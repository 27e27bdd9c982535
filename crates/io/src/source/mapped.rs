//! Memory that tensors lie in, and a file mapped into such memory.
//!
//! One of the files in which `unsafe` is allowed, because mapping a file is: another process may shorten the
//! file, and touching the pages that are gone then kills the process with SIGBUS. FORMAT.md, "Mapped files", says
//! what that means for users. No Rust reference into a mapping is ever made: the bytes leave as pointers in an
//! exported buffer or by copy, so that a process that writes to the file cannot break what the compiler assumes.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use memmap2::{MmapMut, MmapOptions, MmapRaw};

use super::{FileSource, Source};
use crate::block::Block;

/// Memory that outlives whoever made it: tensors share it, and it goes when the last of them does. It is never
/// moved or resized.
#[derive(Debug)]
pub struct Memory {
    pages: MmapRaw,
    /// Bytes of the pages before the first that is used, which is at most their number.
    skip: usize,
    len: usize,
}

impl Memory {
    /// The first byte. Readable and writable for [`Memory::len`] bytes as long as `self` lives; what may be
    /// written or read at the same time is up to whoever holds a region of it.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.pages.as_mut_ptr().wrapping_add(self.skip)
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes from `at` on into `dest`, as many as there are; says how many.
    pub fn copy_to(&self, at: usize, dest: &mut [u8]) -> usize {
        let count = dest.len().min(self.len().saturating_sub(at));
        if count == 0 {
            return 0;
        }
        let from = self.as_ptr().wrapping_add(at);
        // SAFETY: `copy_nonoverlapping` asks for
        // - a source readable for `count` bytes: `at + count` is at most `len`, and `self` keeps the pages. That a
        //   mapped file still has these bytes nobody can prove, see the head of this file; nor that no other
        //   thread writes to them just now, which would copy some old and some new bytes;
        // - a destination writable for `count` bytes: `dest` is at least that long;
        // - no overlap: `dest` is an exclusive reference, and none is ever made into the pages.
        unsafe { std::ptr::copy_nonoverlapping(from, dest.as_mut_ptr(), count) };
        count
    }
}

impl From<MmapMut> for Memory {
    fn from(pages: MmapMut) -> Memory {
        Memory {
            skip: 0,
            len: pages.len(),
            pages: MmapRaw::from(pages),
        }
    }
}

impl From<Block> for Memory {
    fn from(block: Block) -> Memory {
        let (pages, used) = block.into_pages();
        Memory {
            pages: MmapRaw::from(pages),
            skip: used.start,
            len: used.len(),
        }
    }
}

/// A file mapped privately: writing to the memory copies the page and never reaches the file.
#[derive(Debug)]
pub(crate) struct MappedSource {
    file: FileSource,
    memory: Arc<Memory>,
}

impl MappedSource {
    /// Maps the whole of `file`; gives the file back when that cannot be done.
    pub(crate) fn new(file: FileSource) -> Result<MappedSource, (FileSource, io::Error)> {
        // SAFETY: `map_copy` asks that the file is not changed by others as long as a slice of the mapping is
        // held. None is ever made: `Memory` takes the pages over at once and gives out only a pointer. Not
        // provable: a process that shortens the file makes pages go away, and touching one of those is a SIGBUS,
        // never wrong bytes.
        //
        // Without reserving swap for pages that might be written to: the system would refuse files that are larger
        // than its memory, though hardly anybody writes to such tensors.
        let pages = unsafe { MmapOptions::new().no_reserve_swap().map_copy(file.file()) };
        match pages {
            Ok(pages) => Ok(MappedSource {
                file,
                memory: Arc::new(Memory::from(pages)),
            }),
            Err(fault) => Err((file, fault)),
        }
    }
}

impl Source for MappedSource {
    fn nbytes(&self) -> u64 {
        self.file.nbytes()
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        // From the file, not from the mapping: where another process shortened it, this is a short read, and
        // copying from the pages that are gone would be a SIGBUS.
        self.file.read_at(position, dest)
    }

    fn memory(&self) -> Option<&Arc<Memory>> {
        Some(&self.memory)
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        self.file.nbytes_now()
    }
}
