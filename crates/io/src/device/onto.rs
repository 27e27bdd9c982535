//! What reads onto a device: its copies, the stream of the caller, and the framework that allocates.
#![allow(unsafe_code)]

use std::error::Error as StdError;
use std::ffi::c_void;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use ingot_format::Dtype;

use super::dest::DeviceDest;
use super::device::Device;
use super::driver::Stream;
use super::fault::DeviceFault;
use super::memory::DeviceBlock;
use super::system;

/// Why a framework gives no memory, in its own words.
pub type Refusal = Box<dyn StdError + Send + Sync>;

/// Memory that is wanted of a framework.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fresh<'a> {
    /// Bytes.
    pub nbytes: usize,
    /// The dtype and the shape of the tensor that it is for; `None` where several share it.
    pub tensor: Option<(Dtype, &'a [u64])>,
}

/// What allocates memory of a device: the framework that its tensors are of.
pub trait Allocator: fmt::Debug + Send + Sync {
    /// Memory for these blocks, to be used in the order of the caller's stream. It may be in use there until then.
    ///
    /// # Errors
    /// The framework has none.
    fn allocate(&self, blocks: &[Fresh<'_>]) -> Result<Vec<DeviceBlock>, Refusal>;
}

/// A device that tensors are read onto, and who allocates there.
#[derive(Clone, Debug)]
pub struct Onto {
    pub(crate) device: Device,
    pub(super) stream: Stream,
    pub(crate) allocator: Arc<dyn Allocator>,
}

impl Onto {
    /// The device of this number among the visible ones, on which `allocator` allocates. `stream` is the caller's, in whose
    /// order memory is allocated and used; null is the default one. `driver` is a library that does as the driver does: for
    /// tests.
    ///
    /// # Errors
    /// There is no driver or no such device, or this is the child of a process that used one.
    ///
    /// # Safety
    /// `stream` is null, or a stream of the device's primary context that stays as long as this.
    pub unsafe fn new(
        ordinal: i32,
        stream: *mut c_void,
        allocator: Arc<dyn Allocator>,
        driver: Option<&Path>,
    ) -> Result<Onto, DeviceFault> {
        Ok(Onto {
            allocator,
            device: system::device(ordinal, driver)?,
            stream: Stream::of_framework(stream),
        })
    }

    /// The number of the device.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.device.ordinal()
    }

    /// Has what the caller queues on its stream from now on wait for all that was read.
    ///
    /// # Errors
    /// The device fails.
    pub fn hold(&self) -> Result<(), DeviceFault> {
        self.device.end(self.stream)
    }

    /// A block of fresh memory, which has this number, to be filled between [`Onto::begin`] and [`Onto::hold`].
    pub(crate) fn dest<'b>(&'b self, block: &'b mut DeviceBlock, number: usize) -> DeviceDest<'b> {
        // SAFETY: asks for
        // - memory that stays until what was sent is there: it is borrowed, and whoever has the block keeps it until
        //   `hold` or, where reading fails, `finish`;
        // - nobody else who uses it, but in the order of a stream: the allocator promised that of the stream that
        //   `begin` and `hold` are about.
        unsafe { DeviceDest::new(&self.device, block.address(), block.len(), Some(number)) }
    }

    /// Raises where the caller's stream is being recorded into a graph: before a framework allocates for that.
    pub(crate) fn refuse_capture(&self) -> Result<(), DeviceFault> {
        self.device.refuse_capture(self.stream)
    }

    /// Has what is read from now on wait for what the caller has queued on its stream by now.
    pub(crate) fn begin(&self) -> Result<(), DeviceFault> {
        self.device.begin(self.stream)
    }
}
