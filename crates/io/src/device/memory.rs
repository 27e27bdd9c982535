//! Memory of a device that a framework allocated.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use ingot_format::to_u64;

/// Memory of a device, which stays allocated as long as the region exists.
#[derive(Clone)]
pub struct DeviceRegion {
    ordinal: i32,
    address: u64,
    nbytes: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

impl DeviceRegion {
    /// `nbytes` bytes at `address` on the device with this number.
    ///
    /// # Safety
    /// They stay allocated on that device, and no other code uses them, until the last clone of `owner` is dropped.
    pub unsafe fn new(
        ordinal: i32,
        address: u64,
        nbytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> DeviceRegion {
        DeviceRegion {
            ordinal,
            address,
            nbytes,
            owner,
        }
    }

    /// `nbytes` bytes at `at`, cut at the end.
    pub(crate) fn part(&self, at: usize, nbytes: usize) -> DeviceRegion {
        let at = at.min(self.nbytes);
        DeviceRegion {
            address: self.address + to_u64(at),
            nbytes: nbytes.min(self.nbytes - at),
            ..self.clone()
        }
    }

    /// Return the number of the device.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Return the address of the first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Return the size in bytes.
    pub(crate) fn len(&self) -> usize {
        self.nbytes
    }

    /// The owner, which keeps the memory allocated. Many regions may share one.
    #[must_use]
    pub fn owner(&self) -> &Arc<dyn Any + Send + Sync> {
        &self.owner
    }
}

impl fmt::Debug for DeviceRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceRegion({:#x}, {} bytes)", self.address, self.nbytes)
    }
}
