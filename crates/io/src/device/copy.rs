//! Copies between a slot of the ring and a device.

use std::ops::Range;

use ingot_format::to_u64;

/// A range of a slot, and the memory of a device that it is copied to or from. [`DeviceDest`](super::DeviceDest) and
/// [`DeviceBytes`](super::DeviceBytes) make copies; their constructors require that memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(super) begin: usize,
    pub(super) address: u64,
    pub(super) nbytes: usize,
}

impl Copy {
    /// The range of the slot.
    pub(crate) fn bytes(&self) -> Range<usize> {
        self.begin..self.begin + self.nbytes
    }

    /// Include the bytes of a copy that follows this one in the slot and on the device.
    pub(crate) fn extend(&mut self, next: &Copy) {
        self.nbytes += next.nbytes;
    }

    /// Return the same bytes in copies of at most `most` bytes.
    pub(crate) fn parts(&self, most: usize) -> impl Iterator<Item = Copy> + use<> {
        let Copy {
            begin,
            address,
            nbytes,
        } = *self;
        (0..nbytes).step_by(most).map(move |at| Copy {
            begin: begin + at,
            address: address + to_u64(at),
            nbytes: most.min(nbytes - at),
        })
    }

    /// Return the copy of the same bytes from the start of a slot.
    pub(crate) fn at_start(self) -> Copy {
        Copy { begin: 0, ..self }
    }
}
