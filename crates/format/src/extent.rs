//! The size of a tensor in bytes, and the conversions between the file's `u64` and memory's `usize`.

use alloc::vec::Vec;
use core::fmt;

use crate::dtype::Dtype;

/// Why a shape and a dtype have no size in bytes (rule F9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentError {
    /// The size in bits exceeds 64 bits.
    Overflow,
    /// The last element ends inside a byte.
    PartialByte {
        /// The size in bits.
        nbits: u64,
    },
}

impl fmt::Display for ExtentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExtentError::Overflow => f.write_str("its size overflows 64 bits"),
            ExtentError::PartialByte { nbits } => write!(f, "its {nbits} bits end inside a byte"),
        }
    }
}

/// Returns the size in bytes of a tensor of `shape` and `dtype`. Rule F9.
///
/// ```
/// use ingot_format::{Dtype, nbytes};
/// assert_eq!(nbytes(Dtype::F32, &[2, 3]), Ok(24));
/// assert_eq!(nbytes(Dtype::F4, &[6]), Ok(3));
/// assert!(nbytes(Dtype::F4, &[5]).is_err());
/// ```
///
/// # Errors
/// If the size overflows, or is not a whole number of bytes (an odd count of F4).
pub fn nbytes(dtype: Dtype, shape: &[u64]) -> Result<u64, ExtentError> {
    let mut nbits = dtype.bits();
    let mut has_zero = false;
    for &dim in shape {
        // The product of the non-zero dimensions must fit too, so that the verdict does not depend on the position of a
        // zero: upstream rejects [2⁴⁰, 2⁴⁰, 0] and accepts [0, 2⁴⁰, 2⁴⁰]. Vector `zero-dimension-order`.
        if dim == 0 {
            has_zero = true;
        } else {
            nbits = nbits.checked_mul(dim).ok_or(ExtentError::Overflow)?;
        }
    }
    match nbits {
        _ if has_zero => Ok(0),
        nbits if nbits.is_multiple_of(8) => Ok(nbits / 8),
        nbits => Err(ExtentError::PartialByte { nbits }),
    }
}

/// Converts a file size to a size in memory. `None` if it exceeds the machine's address width.
#[must_use]
pub fn to_usize(n: u64) -> Option<usize> {
    usize::try_from(n).ok()
}

/// Converts a file size to a size in memory. One that exceeds the machine's address width becomes the largest, which no
/// allocation or slice can have.
#[must_use]
pub fn saturating_usize(n: u64) -> usize {
    to_usize(n).unwrap_or(usize::MAX)
}

/// Converts a size in memory to a file size. Rust supports no machine whose `usize` is wider than 64 bits.
#[must_use]
pub const fn to_u64(n: usize) -> u64 {
    n as u64
}

/// Converts `n` to an index into a header. Limits keep headers below 4 GiB ([`crate::Limits`]), so a value saturates
/// only in a header that is rejected anyway.
#[must_use]
pub(crate) fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Converts an index back to `usize`. It fits, because it was a `usize` before or because `usize` has at least 32 bits.
#[must_use]
pub(crate) fn index(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Converts a shape in memory to a header's shape.
pub(crate) fn dims(shape: &[usize]) -> Vec<u64> {
    shape.iter().copied().map(to_u64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zero_dimension_hides_no_overflow() {
        for shape in [
            [0, 1 << 40, 1 << 40],
            [1 << 40, 0, 1 << 40],
            [1 << 40, 1 << 40, 0],
        ] {
            assert_eq!(nbytes(Dtype::U8, &shape), Err(ExtentError::Overflow));
        }
    }

    #[test]
    fn sub_byte_elements_must_fill_bytes() {
        assert_eq!(nbytes(Dtype::F4, &[]), Err(ExtentError::PartialByte { nbits: 4 }));
        assert_eq!(nbytes(Dtype::F6_E2M3, &[4]), Ok(3));
        assert_eq!(
            nbytes(Dtype::F6_E2M3, &[2]),
            Err(ExtentError::PartialByte { nbits: 12 })
        );
        assert_eq!(nbytes(Dtype::F4, &[3, 0]), Ok(0));
    }
}
