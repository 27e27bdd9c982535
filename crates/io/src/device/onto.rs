//! What reads onto a device: its copies, the stream of the caller, and the framework that allocates.
#![allow(unsafe_code)]

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use ingot_format::Dtype;

use super::dest::DeviceDest;
use super::memory::DeviceRegion;
use super::stream::DeviceStream;

/// The reason why a framework refuses memory, in its own words.
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
    /// The framework has no memory.
    fn allocate(&self, blocks: &[Fresh<'_>]) -> Result<Vec<DeviceRegion>, Refusal>;
}

/// A device that tensors are read onto, and its allocator.
#[derive(Clone, Debug)]
pub struct Onto {
    /// In the order of whose stream memory is allocated and used.
    pub(crate) at: DeviceStream,
    pub(crate) allocator: Arc<dyn Allocator>,
}

impl Onto {
    /// The device of `at`, on which `allocator` allocates.
    #[must_use]
    pub fn new(at: DeviceStream, allocator: Arc<dyn Allocator>) -> Onto {
        Onto { at, allocator }
    }

    /// The device, in the order of whose stream memory is allocated and used.
    #[must_use]
    pub fn at(&self) -> &DeviceStream {
        &self.at
    }

    /// A block of fresh memory, which has this number, to be filled between [`DeviceStream::begin`] and
    /// [`DeviceStream::hold`].
    pub(crate) fn dest<'b>(&'b self, block: &'b mut DeviceRegion, number: usize) -> DeviceDest<'b> {
        // SAFETY: asks for
        // - memory that stays until the bytes have arrived: it is borrowed, and the holder of the block keeps it until
        //   `hold` or, if reading fails, `finish`;
        // - no other code that uses it except in the order of a stream: the allocator promised that for the stream of
        //   `begin` and `hold`.
        unsafe { DeviceDest::new(&self.at.device, block.address(), block.len(), Some(number)) }
    }
}
