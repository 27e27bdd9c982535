//! Devices with memory of their own, which bytes are copied to.
//!
//! ```text
//! read ─► Lent (a slot of the Ring) ─send─► copy on the stream of a Gpu ─► memory of a framework
//! ```
//!
//! The framework allocates, and its streams decide who uses the memory when; the copies run on a stream of ours, which
//! waits for the caller's before the first and is waited for after the last.

mod copy;
mod dest;
#[allow(clippy::module_inception, reason = "the file that has `Device`")]
mod device;
mod driver;
#[cfg(test)]
mod fake;
mod fault;
mod gpu;
mod memory;
mod onto;
mod ring;
mod system;
#[cfg(test)]
mod tests;

pub(crate) use copy::Copy;
pub(crate) use dest::DeviceDest;
pub use fault::DeviceFault;
pub use memory::{DeviceBlock, DeviceRegion};
pub use onto::{Allocator, Fresh, Onto, Refusal};
pub use system::{release_pinned, why_pageable};
