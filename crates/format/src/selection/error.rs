//! Faults of an index.

use alloc::vec::Vec;
use core::fmt;

use crate::dtype::Dtype;
use crate::extent::ExtentError;
use crate::quoted::Shape;

/// Why an index is invalid for a tensor.
///
/// `Display` mentions neither a path nor the tensor's name: code that knows them adds them.
///
/// ```
/// use ingot_format::{Dtype, Index, Selection, SelectionError};
///
/// let fault = Selection::new(Dtype::F32, &[2], &[Index::At(2)]).unwrap_err();
/// assert_eq!(fault, SelectionError::IndexOutOfRange { axis: 0, size: 2, index: 2 });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SelectionError {
    /// The index has more dimensions than the tensor.
    TooManyIndices {
        /// Dimensions of the tensor.
        rank: usize,
        /// Dimensions that the index needs.
        found: usize,
    },
    /// An int, or an entry of a list, lies outside its dimension.
    IndexOutOfRange {
        /// The dimension, counted from 0.
        axis: usize,
        /// Its size.
        size: u64,
        /// The int in the index.
        index: i64,
    },
    /// A slice has a negative step.
    NegativeStep {
        /// The dimension, counted from 0.
        axis: usize,
        /// The step.
        step: i64,
    },
    /// A slice has a step of 0.
    ZeroStep {
        /// The dimension, counted from 0.
        axis: usize,
    },
    /// The index has `...` more than once.
    TwoEllipses,
    /// The index has more than one list.
    TwoLists,
    /// Another index separates a list from an int, and NumPy and PyTorch interpret this differently.
    SeparatedList,
    /// A list has more indices than fit into memory.
    TooManyPlaces {
        /// Their number.
        found: u64,
    },
    /// A run begins or ends inside a byte.
    PartialByte {
        /// Type of the elements.
        dtype: Dtype,
        /// First bit of the first block that does so, counted from the start of the tensor.
        begin_bit: u64,
        /// Bit after its last.
        end_bit: u64,
    },
    /// The tensor or the result has no size in bytes.
    Extent {
        /// Type of the elements.
        dtype: Dtype,
        /// Shape of the tensor, or of the result.
        shape: Vec<u64>,
        /// The reason.
        reason: ExtentError,
    },
}

impl SelectionError {
    /// A stable name for the fault, in kebab-case; programs may match it.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            SelectionError::TooManyIndices { .. } => "too-many-indices",
            SelectionError::IndexOutOfRange { .. } => "index-out-of-range",
            SelectionError::NegativeStep { .. } => "negative-step",
            SelectionError::ZeroStep { .. } => "zero-step",
            SelectionError::TwoEllipses => "two-ellipses",
            SelectionError::TwoLists => "two-lists",
            SelectionError::SeparatedList => "separated-list",
            SelectionError::TooManyPlaces { .. } => "too-many-places",
            SelectionError::PartialByte { .. }
            | SelectionError::Extent {
                reason: ExtentError::PartialByte { .. },
                ..
            } => "partial-byte",
            SelectionError::Extent {
                reason: ExtentError::Overflow,
                ..
            } => "size-overflow",
        }
    }
}

impl fmt::Display for SelectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SelectionError::TooManyIndices { rank, found } => {
                write!(
                    f,
                    "too many indices: expected at most {rank}, one for each dimension, found {found}"
                )
            }
            SelectionError::IndexOutOfRange { axis, size, index } => {
                write!(
                    f,
                    "index {index} is out of range for dimension {axis} of size {size}"
                )
            }
            SelectionError::NegativeStep { axis, step } => write!(
                f,
                "slice of dimension {axis}: expected a step above zero, found {step} — flip the tensor in memory"
            ),
            SelectionError::ZeroStep { axis } => {
                write!(
                    f,
                    "slice of dimension {axis}: expected a step above zero, found 0"
                )
            }
            SelectionError::TwoEllipses => {
                f.write_str("expected at most one ellipsis in the index, found another")
            }
            SelectionError::TwoLists => f.write_str(
                "expected at most one list in the index, found another — load the tensor, then index it",
            ),
            SelectionError::SeparatedList => f.write_str(
                "a list and an int stand apart in the index, which numpy and PyTorch read differently \
                 — load the tensor, then index it",
            ),
            SelectionError::TooManyPlaces { found } => {
                write!(f, "no memory for the {found} places of a list — read it in parts")
            }
            SelectionError::PartialByte {
                dtype,
                begin_bit,
                end_bit,
            } => write!(
                f,
                "expected runs of {dtype} that begin and end on a byte, found bits {begin_bit}..{end_bit} \
                 — load the tensor, then index it"
            ),
            SelectionError::Extent { dtype, shape, reason } => {
                write!(f, "shape {} of {dtype}: {reason}", Shape(shape))
            }
        }
    }
}

impl core::error::Error for SelectionError {}
