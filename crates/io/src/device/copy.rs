//! What crosses between a slot of the ring and a device.

use std::ops::Range;

/// Bytes of a slot, and the memory of a device that they go to or come from. [`DeviceDest`](super::DeviceDest) and
/// [`DeviceBytes`](super::DeviceBytes) make them, which were promised that memory.
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
