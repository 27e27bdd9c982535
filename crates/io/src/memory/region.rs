//! Memory that outlives its maker, and where in it a tensor's bytes are.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ingot_format::Dtype;
use memmap2::{MmapMut, MmapRaw};

use super::block::Block;
use super::pages::Pages;

/// Memory that outlives whoever made it: tensors share it, and it goes when the last of them does. It is never
/// moved or resized.
#[derive(Debug)]
pub struct Memory {
    held: Held,
    /// Bytes of the pages before the first that is used, which is at most their number.
    skip: usize,
    len: usize,
}

#[derive(Debug)]
enum Held {
    Pages(Pages),
    /// Of a file.
    Mapping(FileMapping),
}

/// A mapped file, which counts.
#[derive(Debug)]
struct FileMapping(MmapRaw);

static MAPPED_FILES: AtomicUsize = AtomicUsize::new(0);

/// How many files are mapped by this process.
pub(crate) fn mapped_files() -> usize {
    MAPPED_FILES.load(Ordering::Relaxed)
}

impl FileMapping {
    fn new(pages: MmapMut) -> FileMapping {
        MAPPED_FILES.fetch_add(1, Ordering::Relaxed);
        FileMapping(MmapRaw::from(pages))
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        MAPPED_FILES.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Memory {
    /// The first byte. Readable and writable for [`Memory::len`] bytes as long as `self` lives; what may be
    /// written or read at the same time is up to whoever holds a region of it.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        let start = match &self.held {
            Held::Pages(pages) => pages.as_mut_ptr(),
            Held::Mapping(mapping) => mapping.0.as_mut_ptr(),
        };
        start.wrapping_add(self.skip)
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
        //   mapped file still has these bytes nobody can prove, see the head of source/mapped.rs; nor that no other
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
            held: Held::Mapping(FileMapping::new(pages)),
        }
    }
}

impl From<Block> for Memory {
    fn from(block: Block) -> Memory {
        let (pages, used) = block.into_pages();
        Memory {
            held: Held::Pages(pages),
            skip: used.start,
            len: used.len(),
        }
    }
}

/// A tensor's bytes in memory, which they keep alive.
#[derive(Clone, Debug)]
pub struct Region {
    memory: Arc<Memory>,
    at: usize,
    nbytes: usize,
}

impl Region {
    /// `nbytes` bytes from `at` on, cut at the end of the memory.
    pub(crate) fn new(memory: Arc<Memory>, at: usize, nbytes: usize) -> Region {
        let at = at.min(memory.len());
        let nbytes = nbytes.min(memory.len() - at);
        Region { memory, at, nbytes }
    }

    /// The first byte: readable and writable for [`Region::len`] bytes as long as the region lives.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr().wrapping_add(self.at)
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nbytes
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nbytes == 0
    }

    /// The memory that the bytes lie in; many regions may share one.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Where in the memory they begin.
    #[must_use]
    pub fn at(&self) -> usize {
        self.at
    }

    /// A copy of the bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.nbytes];
        self.memory.copy_to(self.at, &mut copy);
        copy
    }

    pub(crate) fn aligned_to(&self, alignment: usize) -> bool {
        self.as_ptr().addr().is_multiple_of(alignment)
    }
}

/// Where elements of this dtype have to begin: at a multiple of their own size.
pub(crate) fn alignment(dtype: Dtype) -> usize {
    match dtype.bits() {
        64 => 8,
        32 => 4,
        16 => 2,
        _ => 1,
    }
}
