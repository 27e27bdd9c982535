//! What a slot of the ring is sent as.

use std::ops::Range;

/// Bytes of a slot, and the memory of a device that they go to. [`DeviceDest`](super::DeviceDest) makes them, which was promised
/// that memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(super) begin: usize,
    pub(super) address: u64,
    pub(super) nbytes: usize,
}

impl Copy {
    pub(super) fn bytes(&self) -> Range<usize> {
        self.begin..self.begin + self.nbytes
    }
}
