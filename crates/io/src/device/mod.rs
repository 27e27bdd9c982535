//! Devices with memory of their own, which bytes are copied to and from.
//!
//! ```text
//! read ─► Lent (a slot of the Ring) ─send─► copy on the stream of a Gpu ─► memory of a framework
//! save ◄─ Lent ◄─fetch─ copy on the stream of a Gpu ◄─ DeviceBytes, memory of a framework
//! ```
//!
//! The framework allocates, and its streams decide who uses the memory when; the copies run on a stream of ours, which
//! waits for the caller's before the first and is waited for after the last.

mod bytes;
mod copy;
mod dest;
#[allow(clippy::module_inception, reason = "the file that has `Device`")]
mod device;
mod driver;
#[cfg(test)]
#[path = "tests/fake.rs"]
mod fake;
mod fault;
mod gpu;
mod memory;
mod numa;
mod onto;
mod ring;
mod stream;
mod system;
#[cfg(test)]
mod tests;

pub use bytes::DeviceBytes;
pub(crate) use copy::Copy;
pub(crate) use dest::DeviceDest;
pub(crate) use device::Device;
pub use fault::DeviceFault;
pub use memory::{DeviceBlock, DeviceRegion};
pub use onto::{Allocator, Fresh, Onto, Refusal};
pub(crate) use ring::Lent;
pub use stream::DeviceStream;
pub use system::{release_pinned, why_pageable};
