//! Memory of a device that is filled with bytes of a file.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use ingot_format::to_u64;

use super::copy::Copy;
use super::stream::DeviceStream;

/// Memory of a device that stays allocated for `'a`, and that only its holder fills.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceDest<'a> {
    pub(crate) at: &'a DeviceStream,
    address: u64,
    len: usize,
    /// Bytes in front of it that nothing else fills: they are zeroed.
    pub(crate) gap: usize,
    /// The block of memory that contains it: neighbours in it are one copy.
    block: usize,
    owner: PhantomData<&'a mut [u8]>,
}

impl<'a> DeviceDest<'a> {
    /// `len` bytes at `address`: block number `block` of a plan.
    ///
    /// # Safety
    /// - They stay allocated on the device of `at` until all bytes that were sent to them have arrived: at the latest after
    ///   [`DeviceStream::finish`].
    /// - For `'a`, other code uses them only in the order of a stream. The device's copies wait for this stream
    ///   ([`DeviceStream::begin`]) before the first byte is sent, and it waits for the copies ([`DeviceStream::hold`])
    ///   after the last.
    pub(crate) unsafe fn new(at: &'a DeviceStream, address: u64, len: usize, block: usize) -> DeviceDest<'a> {
        DeviceDest {
            at,
            address,
            len,
            gap: 0,
            block,
            owner: PhantomData,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the same memory after a gap that is filled with it.
    pub(crate) fn after(self, gap: usize) -> DeviceDest<'a> {
        DeviceDest { gap, ..self }
    }

    /// Return whether `next` follows it, in one block.
    pub(crate) fn is_before(&self, next: &DeviceDest<'_>) -> bool {
        let end = self.address + to_u64(self.len);
        self.block == next.block && end + to_u64(next.gap) == next.address
    }

    /// Returns the copy to all of it and the gap in front of it, from position `begin` of a slot for the first byte.
    pub(crate) fn copied_from(&self, begin: usize) -> Copy {
        Copy {
            begin: begin - self.gap,
            address: self.address - to_u64(self.gap),
            nbytes: self.gap + self.len,
        }
    }

    /// Splits it after `at` bytes, or at its end if it is shorter.
    pub(crate) fn split_at(self, at: usize) -> (DeviceDest<'a>, DeviceDest<'a>) {
        let at = at.min(self.len);
        let first = DeviceDest { len: at, ..self };
        let rest = DeviceDest {
            address: self.address + to_u64(at),
            len: self.len - at,
            gap: 0,
            ..self
        };
        (first, rest)
    }
}
