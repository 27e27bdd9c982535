//! Bytes that somebody has to make or fetch.

use std::fmt::Debug;
use std::io;

/// Gives the bytes of a tensor piece by piece, such as those of one on another device.
pub trait Produce: Debug + Sync {
    /// The size in bytes.
    fn nbytes(&self) -> u64;

    /// Fills `into` with the bytes from `begin` on. Called for one piece after another, on the thread that asked for
    /// the save.
    ///
    /// # Errors
    /// Whatever keeps it from that. The save ends with this error then.
    fn produce(&self, begin: u64, into: &mut [u8]) -> io::Result<()>;
}
