//! Copies between a slot of the ring and a device.

use std::ops::Range;

/// A range of a slot, and the memory of a device that it is copied to or from. [`DeviceDest`](super::DeviceDest) and
/// [`DeviceBytes`](super::DeviceBytes) make copies; their constructors require that memory.
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
