//! Memory of a device that a framework allocated.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use ingot_format::to_u64;

/// A block of memory of a device, which stays allocated as long as its owner.
#[derive(Clone)]
pub struct DeviceBlock {
    address: u64,
    nbytes: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

impl DeviceBlock {
    /// `nbytes` bytes from `address` on.
    ///
    /// # Safety
    /// They are allocated on the device that the block is used with, and for nobody else, until the last clone of `owner`
    /// is dropped.
    pub unsafe fn new(address: u64, nbytes: usize, owner: Arc<dyn Any + Send + Sync>) -> DeviceBlock {
        DeviceBlock {
            address,
            nbytes,
            owner,
        }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn len(&self) -> usize {
        self.nbytes
    }
}

impl fmt::Debug for DeviceBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBlock({:#x}, {} bytes)", self.address, self.nbytes)
    }
}

/// A tensor's bytes in memory of a device, which they keep allocated.
#[derive(Clone, Debug)]
pub struct DeviceRegion {
    ordinal: i32,
    block: DeviceBlock,
    at: usize,
    nbytes: usize,
}

impl DeviceRegion {
    pub(crate) fn new(ordinal: i32, block: DeviceBlock, at: usize, nbytes: usize) -> DeviceRegion {
        DeviceRegion {
            ordinal,
            block,
            at,
            nbytes,
        }
    }

    /// The number of the device.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The address of the first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.address + to_u64(self.at)
    }

    /// The block that the bytes lie in; many regions may share one.
    #[must_use]
    pub fn block(&self) -> &DeviceBlock {
        &self.block
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

    /// What keeps the block allocated.
    #[must_use]
    pub fn owner(&self) -> &Arc<dyn Any + Send + Sync> {
        &self.block.owner
    }
}
