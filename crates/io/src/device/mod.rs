//! Devices with their own memory, to and from which bytes are copied.
//!
//! ```text
//! read ─► Lent (a slot of the Ring) ─send─► copy on the stream of a Gpu ─► memory of a framework
//! save ◄─ Lent ◄─fetch─ copy on the stream of a Gpu ◄─ DeviceBytes, memory of a framework
//! ```
//!
//! The framework allocates the memory, and its streams order the uses of the memory. The copies run on a separate
//! stream, which waits for the caller's stream before the first copy; the caller's stream waits for it after the last.

mod arena;
mod bytes;
mod copy;
mod dest;
mod driver;
#[cfg(test)]
#[path = "tests/fake.rs"]
mod fake;
mod fault;
mod gpu;
mod memory;
mod onto;
mod ring;
mod slot;
mod stream;
mod system;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use self::arena::PAGE_NBYTES;
#[cfg(test)]
use self::driver::Driver;
use self::gpu::Gpu;
use self::ring::Ring;

pub use bytes::DeviceBytes;
pub(crate) use copy::Copy;
pub(crate) use dest::DeviceDest;
pub use fault::DeviceFault;
pub use memory::DeviceRegion;
pub use onto::{Allocator, Fresh, Onto, Refusal};
pub(crate) use ring::Lent;
pub use stream::DeviceStream;
pub use system::{release_pinned, why_pageable};

/// A device, and the ring through which its bytes pass.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    gpu: Arc<Gpu>,
    ring: Arc<Ring>,
}

impl Device {
    #[cfg(test)]
    fn open(driver: &Arc<Driver>, ordinal: i32, ring: &Arc<Ring>) -> Result<Device, DeviceFault> {
        Ok(Device {
            gpu: Arc::new(Gpu::open(driver, ordinal)?),
            ring: Arc::clone(ring),
        })
    }

    /// Return its number among the visible ones.
    pub(crate) fn ordinal(&self) -> i32 {
        self.gpu.ordinal
    }

    /// Return whether the device shares the memory of the host, so that a file in the page cache takes some of it.
    pub(crate) fn is_integrated(&self) -> bool {
        self.gpu.is_integrated
    }

    pub(crate) fn slot_nbytes(&self) -> usize {
        self.ring.slot_nbytes()
    }

    /// Return how many bytes are read at once. A slot has a page more.
    pub(crate) fn chunk_nbytes(&self) -> usize {
        self.slot_nbytes() - PAGE_NBYTES
    }
}
