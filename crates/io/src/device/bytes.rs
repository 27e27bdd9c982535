//! Memory of a device whose bytes are saved.
#![allow(unsafe_code)]

use std::ops::Range;

use ingot_format::{StopFlag, to_u64};

use super::copy::Copy;
use super::fault::DeviceFault;
use super::ring::Lent;
use super::stream::DeviceStream;

/// Bytes in the memory of a device, which any thread copies to the host piece by piece.
#[derive(Clone, Debug)]
pub struct DeviceBytes {
    stream: DeviceStream,
    address: u64,
    nbytes: usize,
}

impl DeviceBytes {
    /// `nbytes` bytes at `address` on the device of `stream`, which is [outgoing](DeviceStream::outgoing). Call
    /// [`DeviceStream::begin`] after all work that writes them is queued, and before the first byte is copied.
    ///
    /// # Safety
    /// The bytes stay allocated as long as this object. It cannot be proven that no code writes to them in that time:
    /// the file then gets some of the old bytes and some of the new.
    pub unsafe fn new(stream: &DeviceStream, address: u64, nbytes: usize) -> DeviceBytes {
        DeviceBytes {
            stream: stream.clone(),
            address,
            nbytes,
        }
    }

    /// Bytes of it.
    pub(crate) fn len(&self) -> usize {
        self.nbytes
    }

    /// The stream in whose order the bytes are copied.
    pub(crate) fn stream(&self) -> &DeviceStream {
        &self.stream
    }

    /// Queue copies of these bytes to their positions in a slot of their stream.
    pub(crate) fn fetch(&self, slot: &mut Lent, copies: &[Copy]) -> Result<(), DeviceFault> {
        self.stream.fetch(slot, copies)
    }

    /// Wait until the copies to a slot have arrived. If that fails, the caller's stream waits for copies that still run.
    pub(crate) fn arrive(&self, slot: &mut Lent, stop: StopFlag<'_>) -> Result<(), DeviceFault> {
        slot.arrive(stop).inspect_err(|_| self.stream.settle())
    }

    /// Returns the copy of the bytes in `range` to position `at` of a slot.
    ///
    /// # Panics
    /// `range` is not within the bytes.
    pub(crate) fn copied_to(&self, at: usize, range: Range<usize>) -> Copy {
        assert!(range.end <= self.nbytes, "a copy is of bytes that there are");
        Copy {
            begin: at,
            address: self.address + to_u64(range.start),
            nbytes: range.len(),
        }
    }

    /// Call `take` with the bytes of `range`, in order, as many at a time as a slot holds.
    pub(crate) fn each<E: From<DeviceFault>>(
        &self,
        range: Range<usize>,
        stop: StopFlag<'_>,
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut begin = range.start;
        while begin < range.end {
            let end = range.end.min(begin + self.stream.device().chunk_nbytes());
            let mut slot = self.stream.lend(stop)?;
            self.fetch(&mut slot, &[self.copied_to(0, begin..end)])?;
            self.arrive(&mut slot, stop)?;
            take(&slot.bytes()[..end - begin])?;
            begin = end;
        }
        Ok(())
    }
}
