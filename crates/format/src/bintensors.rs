//! The `.bt` format: a binary header.
//!
//! Has the names that the root of the bintensors crate has.

use crate::error::FormatError;
use crate::extent::to_u64;
use crate::header::Record;
use crate::limits::Limits;

pub use crate::{BinTensors, Dtype, FormatError as BinTensorError, TensorView, View};

#[cfg(feature = "std")]
crate::serialize::serialize_as!(crate::Format::Bintensors, "bintensors", "BinTensors");

/// What the entries, dimensions and metadata pairs of one header may take in memory, in bytes.
///
/// One byte of the file is enough for a dimension and five for an entry, so the length of the header alone does
/// not bound memory well. bintensors stops at the same sum and counts more for each, so no file that it reads is
/// refused here.
const ROOM_NBYTES: usize = 100_000_000;

/// Refuses a header that takes more than [`ROOM_NBYTES`].
pub(crate) fn check_room(entries: usize, dims: usize, pairs: usize) -> Result<(), FormatError> {
    let found = [
        (entries, size_of::<Record>()),
        (dims, size_of::<u64>()),
        // Where the key ends, and where the value does.
        (pairs, 2 * size_of::<u32>()),
    ]
    .into_iter()
    .fold(0_usize, |sum, (count, each)| {
        sum.saturating_add(count.saturating_mul(each))
    });
    if found > ROOM_NBYTES {
        return Err(FormatError::HeaderTooLarge {
            found: to_u64(found),
            limit: Limits::HEADER_NBYTES,
        });
    }
    Ok(())
}
