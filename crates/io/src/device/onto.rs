//! A device as the destination of reads: the caller's stream, and the framework that allocates.
#![allow(unsafe_code)]

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use ingot_format::Dtype;

use super::dest::DeviceDest;
use super::memory::DeviceRegion;
use super::stream::DeviceStream;

/// The framework's reason for refusing an allocation.
pub type Refusal = Box<dyn StdError + Send + Sync>;

/// A requested block of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fresh<'a> {
    /// The size in bytes.
    pub nbytes: usize,
    /// The dtype and the shape of the tensor in the block; `None` if several tensors share the block.
    pub tensor: Option<(Dtype, &'a [u64])>,
}

/// Allocates device memory: the framework whose tensors are read.
pub trait Allocator: fmt::Debug + Send + Sync {
    /// Returns memory for these blocks. The caller uses it in the order of its stream, since earlier work of the stream
    /// may still use the memory.
    ///
    /// # Errors
    /// The framework has no memory.
    fn allocate(&self, blocks: &[Fresh<'_>]) -> Result<Vec<DeviceRegion>, Refusal>;
}

/// A destination of reads: a device and its allocator.
#[derive(Clone, Debug)]
pub struct Onto {
    /// The device, and the stream in whose order memory is allocated and used.
    pub(crate) at: DeviceStream,
    pub(crate) allocator: Arc<dyn Allocator>,
}

impl Onto {
    /// Creates a destination on the device of `at`, with memory from `allocator`.
    #[must_use]
    pub fn new(at: DeviceStream, allocator: Arc<dyn Allocator>) -> Onto {
        Onto { at, allocator }
    }

    /// Returns the device, and the stream in whose order memory is allocated and used.
    #[must_use]
    pub fn at(&self) -> &DeviceStream {
        &self.at
    }

    /// Returns the block with this `number` as a destination. It must be filled between [`DeviceStream::begin`] and
    /// [`DeviceStream::hold`].
    pub(crate) fn dest<'b>(&'b self, block: &'b mut DeviceRegion, number: usize) -> DeviceDest<'b> {
        // SAFETY: requires
        // - memory that stays until the bytes have arrived: it is borrowed, and the holder of the block keeps it until
        //   `hold` or, if reading fails, `finish`;
        // - no other code that uses it except in the order of a stream: the allocator guarantees this for the stream of
        // `begin` and `hold`.
        unsafe { DeviceDest::new(&self.at, block.address(), block.len(), number) }
    }
}
