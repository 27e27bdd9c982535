//! Memory of a device that is filled with bytes of a file.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use ingot_format::{to_u64, to_usize};

use super::Device;
use super::copy::Copy;

/// Memory of a device that stays allocated for `'a`, and that only the holder fills.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceDest<'a> {
    pub(crate) device: &'a Device,
    pub(crate) address: u64,
    len: usize,
    /// The block of fresh memory that it is a part of: gaps between two parts of one block may be written to as well.
    pub(crate) block: Option<usize>,
    owner: PhantomData<&'a mut [u8]>,
}

impl<'a> DeviceDest<'a> {
    /// `len` bytes from `address` on, of the caller's or of a fresh block.
    ///
    /// # Safety
    /// - They are allocated on `device` until all bytes that were sent to them have arrived: at the latest after
    ///   [`Device::finish`].
    /// - Nobody else uses them for `'a`, but in the order of a stream that the device's copies wait for
    ///   ([`DeviceStream::begin`](super::stream::DeviceStream::begin)) before the first byte is sent, and that waits for them ([`DeviceStream::hold`](super::stream::DeviceStream::hold)) after the last. Of a
    ///   fresh block this holds for every byte.
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

    /// Where the last byte ends.
    pub(crate) fn end(&self) -> u64 {
        self.address + to_u64(self.len)
    }

    /// The same with more bytes, which the caller of `new` promised.
    pub(crate) fn reaching(self, end: u64) -> DeviceDest<'a> {
        let len = end.checked_sub(self.address).and_then(to_usize);
        DeviceDest {
            len: len.unwrap_or(self.len),
            ..self
        }
    }

    /// All of it, from the bytes of a slot that begin there.
    pub(crate) fn copied_from(&self, begin: usize) -> Copy {
        Copy {
            begin,
            address: self.address,
            nbytes: self.len,
        }
    }

    /// The first `at` bytes, or all where there are no more, and the rest.
    pub(crate) fn split_at(self, at: usize) -> (DeviceDest<'a>, DeviceDest<'a>) {
        let at = at.min(self.len);
        let part = |address, len| DeviceDest { address, len, ..self };
        let rest = part(self.address + to_u64(at), self.len - at);
        (part(self.address, at), rest)
    }
}
