//! Where in memory a tensor's bytes are.

use std::sync::Arc;

use crate::source::Memory;

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
