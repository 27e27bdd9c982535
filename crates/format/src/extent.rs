//! How many bytes a tensor takes, and the conversions between the file's `u64` and memory's `usize`.

use alloc::vec::Vec;
use core::fmt;

use crate::dtype::Dtype;

/// Why a shape and a dtype have no size in bytes (rule F9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentError {
    /// The size in bits passes 2⁶⁴.
    Overflow,
    /// The elements end inside a byte.
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

/// Bytes that a tensor of `shape` and `dtype` takes. Rule F9.
///
/// ```
/// use ingot_format::{Dtype, nbytes};
/// assert_eq!(nbytes(Dtype::F32, &[2, 3]), Ok(24));
/// assert_eq!(nbytes(Dtype::F4, &[6]), Ok(3));
/// assert!(nbytes(Dtype::F4, &[5]).is_err());
/// ```
///
/// # Errors
/// When the size overflows, or ends inside a byte (an odd count of F4).
pub fn nbytes(dtype: Dtype, shape: &[u64]) -> Result<u64, ExtentError> {
    let mut nbits = dtype.bits();
    let mut has_zero = false;
    for &dim in shape {
        // The product of the non-zero dims must fit too, so that the verdict does not depend on where a zero
        // stands: upstream refuses [2⁴⁰, 2⁴⁰, 0] and accepts [0, 2⁴⁰, 2⁴⁰]. Vector `zero-dimension-order`.
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

/// `n` as a size in memory. `None` where the machine's addresses are too short for it.
#[must_use]
pub fn to_usize(n: u64) -> Option<usize> {
    usize::try_from(n).ok()
}

/// `n` as a size in a file. Rust has no machine whose `usize` is wider than 64 bits.
#[must_use]
pub const fn to_u64(n: usize) -> u64 {
    n as u64
}

/// `n` as an index into a header. Limits keep headers below 4 GiB ([`crate::Limits`]), so a larger one saturates
/// only where it is refused anyway.
#[must_use]
pub(crate) fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// `n`, an index that fits because it once was a `usize` or because 32 bits fit in one.
#[must_use]
pub(crate) fn index(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// A shape in memory as one in a header.
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
