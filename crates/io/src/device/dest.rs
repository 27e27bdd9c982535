//! Memory of a device that is filled with bytes of a file.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use ingot_format::{to_u64, to_usize};

use super::Device;
use super::copy::Copy;

/// Memory of a device that stays allocated for `'a`, and that only its holder fills.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceDest<'a> {
    pub(crate) device: &'a Device,
    pub(crate) address: u64,
    len: usize,
    /// The block of fresh memory that contains it: gaps between two parts of one block may be written to as well.
    pub(crate) block: Option<usize>,
    owner: PhantomData<&'a mut [u8]>,
}

impl<'a> DeviceDest<'a> {
    /// `len` bytes at `address`, in memory of the caller or in a fresh block.
    ///
    /// # Safety
    /// - They stay allocated on `device` until all bytes that were sent to them have arrived: at the latest after
    ///   [`Device::finish`].
    /// - For `'a`, other code uses them only in the order of a stream. The device's copies wait for this stream
    ///   ([`DeviceStream::begin`](super::stream::DeviceStream::begin)) before the first byte is sent, and it waits for
    ///   the copies ([`DeviceStream::hold`](super::stream::DeviceStream::hold)) after the last. In a fresh block this is
    ///   true of every byte.
    pub(crate) unsafe fn new(
        device: &'a Device,
        address: u64,
        len: usize,
        block: Option<usize>,
    ) -> DeviceDest<'a> {
        DeviceDest {
            device,
            address,
            len,
            block,
            owner: PhantomData,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address after the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.address + to_u64(self.len)
    }

    /// Returns the same memory with more bytes, which the contract of `new` includes.
    pub(crate) fn reaching(self, end: u64) -> DeviceDest<'a> {
        let len = end.checked_sub(self.address).and_then(to_usize);
        DeviceDest {
            len: len.unwrap_or(self.len),
            ..self
        }
    }

    /// Returns the copy to all of it, from position `at` of a slot.
    pub(crate) fn copied_from(&self, begin: usize) -> Copy {
        Copy {
            begin,
            address: self.address,
            nbytes: self.len,
        }
    }

    /// Splits it after `at` bytes, or at its end if it is shorter.
    pub(crate) fn split_at(self, at: usize) -> (DeviceDest<'a>, DeviceDest<'a>) {
        let at = at.min(self.len);
        let part = |address, len| DeviceDest { address, len, ..self };
        let rest = part(self.address + to_u64(at), self.len - at);
        (part(self.address, at), rest)
    }
}
