//! Where bytes come from.

mod file;
mod mapped;
mod memory;

use std::fmt::Debug;
use std::io;
use std::sync::Arc;

pub use file::FileSource;
pub(crate) use mapped::MappedSource;
pub use mapped::Memory;
pub use memory::MemorySource;

/// A run of bytes that tensors can be read from: a file, a mapping, memory, and later a URL.
///
/// Implementations may give fewer bytes than asked for and may be interrupted; whoever reads deals with both.
pub trait Source: Send + Sync + Debug {
    /// Bytes there were when the source was opened.
    fn nbytes(&self) -> u64;

    /// Copies bytes from `position` on into `dest`, and says how many. None means that there are no more.
    ///
    /// # Errors
    /// Whatever the device or the system says.
    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize>;

    /// The bytes as memory that tensors may lie in, where the source is such memory.
    fn memory(&self) -> Option<&Arc<Memory>> {
        None
    }

    /// Bytes there are now. Differs from [`Source::nbytes`] when someone wrote to the file since; `None` when
    /// they were overwritten and their number is the same.
    ///
    /// # Errors
    /// Whatever the system says.
    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        Ok(Some(self.nbytes()))
    }
}
