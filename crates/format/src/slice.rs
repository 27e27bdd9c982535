//! Slices in the form of the safetensors crate, for programs that are ported from it. [`Selection`] supports more.
//!
//! ```
//! use ingot_format::slice::{IndexOp, InvalidSlice};
//! use ingot_format::{Dtype, TensorView};
//!
//! let table = TensorView::new(Dtype::U8, vec![3, 2], b"abcdef")?;
//! let column = table.slice((.., 1))?;
//! assert_eq!((column.newshape(), column.remaining_byte_len()), (vec![3], 3));
//! assert!(matches!(table.slice(7), Err(InvalidSlice::SliceOutOfRange { dim_size: 3, .. })));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use alloc::vec::Vec;
use core::fmt;
use core::num::NonZeroUsize;
use core::ops::{Bound, Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

use crate::dtype::Dtype;
use crate::extent::{dims, to_u64, to_usize};
use crate::selection::{Index, Selection};
use crate::view::TensorView;

/// The selection along one dimension. Ranges of `usize` and single indices convert to it.
#[derive(Clone, Debug)]
pub enum TensorIndexer {
    /// One index; the result lacks the dimension.
    Select(usize),
    /// Start, stop and step.
    Narrow(Bound<usize>, Bound<usize>, NonZeroUsize),
}

/// Formats as `start:stop` or `start:stop:step`.
impl fmt::Display for TensorIndexer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            TensorIndexer::Select(place) => write!(f, "{place}"),
            TensorIndexer::Narrow(start, stop, step) => {
                if let Some(start) = first(start) {
                    write!(f, "{start}")?;
                }
                f.write_str(":")?;
                if let Some(stop) = after(stop) {
                    write!(f, "{stop}")?;
                }
                if step == NonZeroUsize::MIN {
                    Ok(())
                } else {
                    write!(f, ":{step}")
                }
            }
        }
    }
}

/// Returns the first index of a range; `None` if the range is unbounded.
fn first(bound: Bound<usize>) -> Option<usize> {
    match bound {
        Bound::Unbounded => None,
        Bound::Included(place) => Some(place),
        Bound::Excluded(place) => Some(place.saturating_add(1)),
    }
}

/// Returns the index after the last of a range; `None` if the range is unbounded.
fn after(bound: Bound<usize>) -> Option<usize> {
    match bound {
        Bound::Unbounded => None,
        Bound::Included(place) => Some(place.saturating_add(1)),
        Bound::Excluded(place) => Some(place),
    }
}

impl From<usize> for TensorIndexer {
    fn from(place: usize) -> TensorIndexer {
        TensorIndexer::Select(place)
    }
}

macro_rules! from_ranges {
    ($($range:ty),*) => {
        $(impl From<$range> for TensorIndexer {
            fn from(range: $range) -> TensorIndexer {
                use core::ops::RangeBounds;
                TensorIndexer::Narrow(range.start_bound().cloned(), range.end_bound().cloned(), NonZeroUsize::MIN)
            }
        })*
    };
}

from_ranges!(
    Range<usize>,
    RangeFrom<usize>,
    RangeFull,
    RangeInclusive<usize>,
    RangeTo<usize>,
    RangeToInclusive<usize>
);

/// Why a slice is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidSlice {
    /// More slices than the tensor has dimensions.
    TooManySlices,
    /// An index past the end of its dimension, or a range that ends before it begins.
    SliceOutOfRange {
        /// The dimension.
        dim_index: usize,
        /// The index that is out of range.
        asked: usize,
        /// Size of the dimension.
        dim_size: usize,
    },
    /// Elements narrower than a byte would be cut inside a byte, or the tensor has no size in bytes.
    MisalignedSlice,
}

impl fmt::Display for InvalidSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidSlice::TooManySlices => f.write_str("more slices than the tensor has dimensions"),
            InvalidSlice::SliceOutOfRange {
                dim_index,
                asked,
                dim_size,
            } => write!(
                f,
                "index {asked} out of bounds for tensor dimension #{dim_index} of size {dim_size}"
            ),
            InvalidSlice::MisalignedSlice => f.write_str("the slice begins or ends inside a byte"),
        }
    }
}

impl core::error::Error for InvalidSlice {}

/// `tensor.slice(…)`: with one index or range, or with a tuple of up to six.
///
/// ```
/// use ingot_format::slice::IndexOp;
/// use ingot_format::{Dtype, TensorView};
/// let matrix = TensorView::new(Dtype::U8, vec![2, 3], &[1, 2, 3, 4, 5, 6])?;
/// let columns = matrix.slice((.., 1..))?;
/// assert_eq!(columns.newshape(), [2, 2]);
/// assert_eq!(columns.flatten().collect::<Vec<_>>(), [&2, &3, &5, &6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait IndexOp<'data, T> {
    /// Returns the bytes that `index` selects, as slices of the tensor's memory.
    ///
    /// # Errors
    /// [`InvalidSlice`] if `index` does not fit the tensor's shape.
    fn slice(&'data self, index: T) -> Result<SliceIterator<'data>, InvalidSlice>;
}

impl<'data, A: Into<TensorIndexer>> IndexOp<'data, A> for TensorView<'data> {
    fn slice(&'data self, index: A) -> Result<SliceIterator<'data>, InvalidSlice> {
        self.sliced_data(&[index.into()])
    }
}

macro_rules! index_by_tuples {
    ($(($($part:ident)+))*) => {
        $(impl<'data, $($part: Into<TensorIndexer>),+> IndexOp<'data, ($($part,)+)> for TensorView<'data> {
            #[allow(non_snake_case, reason = "the parts are named as their types are")]
            fn slice(&'data self, ($($part,)+): ($($part,)+)) -> Result<SliceIterator<'data>, InvalidSlice> {
                self.sliced_data(&[$($part.into()),+])
            }
        })*
    };
}

index_by_tuples!((A)(A B)(A B C)(A B C D)(A B C D E)(A B C D E F));

impl<'data> TensorView<'data> {
    /// Returns the bytes that `slices` select, as slices of the tensor's memory. [`TensorView::select`] supports every
    /// index that NumPy supports, and copies.
    ///
    /// # Errors
    /// [`InvalidSlice`] if `slices` do not fit the tensor's shape.
    pub fn sliced_data(&'data self, slices: &[TensorIndexer]) -> Result<SliceIterator<'data>, InvalidSlice> {
        let (ranges, newshape) = slice_byte_ranges(self.dtype(), self.shape(), slices)?;
        let remaining = ranges.iter().map(|(begin, end)| end - begin).sum();
        Ok(SliceIterator {
            data: self.data(),
            ranges: ranges.into_iter(),
            remaining,
            newshape,
        })
    }
}

/// The byte ranges of a slice, counted from the start of the tensor: begin and end of each.
pub type SliceByteRanges = Vec<(usize, usize)>;

/// The shape of a slice.
pub type SlicedShape = Vec<usize>;

/// Returns the byte ranges that `slices` select, and the shape of the result. Needs no access to the tensor's bytes.
///
/// ```
/// use ingot_format::Dtype;
/// use ingot_format::slice::slice_byte_ranges;
/// let (ranges, shape) = slice_byte_ranges(Dtype::F32, &[6, 5], &[(2..4).into()])?;
/// assert_eq!((ranges, shape), (vec![(40, 80)], vec![2, 5]));
/// # Ok::<(), ingot_format::slice::InvalidSlice>(())
/// ```
///
/// # Errors
/// [`InvalidSlice`] if `slices` do not fit `shape`.
pub fn slice_byte_ranges(
    dtype: Dtype,
    shape: &[usize],
    slices: &[TensorIndexer],
) -> Result<(SliceByteRanges, SlicedShape), InvalidSlice> {
    if slices.len() > shape.len() {
        return Err(InvalidSlice::TooManySlices);
    }
    let index: Vec<Index> = slices
        .iter()
        .zip(shape)
        .enumerate()
        .map(|(dim_index, (slice, &dim_size))| within(slice, dim_index, dim_size))
        .collect::<Result<_, _>>()?;
    // `within` has checked indices and bounds, so the only possible fault is an element narrower than a byte.
    let selection = Selection::new(dtype, &dims(shape), &index).map_err(|_| InvalidSlice::MisalignedSlice)?;
    // The selection is part of a tensor whose size fits into `usize`, or it is empty.
    let fit = |n: u64| to_usize(n).unwrap_or(usize::MAX);
    let ranges = selection
        .runs()
        .map(|run| (fit(run.begin), fit(run.end)))
        .collect();
    Ok((ranges, selection.shape().iter().map(|&dim| fit(dim)).collect()))
}

/// Converts one slice to an index, and checks that it is within its dimension: a selection would clip it.
fn within(slice: &TensorIndexer, dim_index: usize, dim_size: usize) -> Result<Index, InvalidSlice> {
    let out_of_range = |asked| InvalidSlice::SliceOutOfRange {
        dim_index,
        asked,
        dim_size,
    };
    let signed = |place: usize| i64::try_from(to_u64(place)).map_err(|_| out_of_range(place));
    match *slice {
        TensorIndexer::Select(place) if place < dim_size => Ok(Index::At(signed(place)?)),
        TensorIndexer::Select(place) => Err(out_of_range(place)),
        TensorIndexer::Narrow(start, stop, step) => {
            let (start, stop) = (first(start).unwrap_or(0), after(stop).unwrap_or(dim_size));
            match (start <= stop, stop <= dim_size) {
                (true, true) => Ok(Index::Span {
                    start: Some(signed(start)?),
                    stop: Some(signed(stop)?),
                    step: Some(signed(step.get()).unwrap_or(i64::MAX)),
                }),
                (_, false) => Err(out_of_range(stop - 1)),
                (false, true) => Err(out_of_range(start)),
            }
        }
    }
}

/// The bytes of a slice: pieces of the tensor's memory that together form the result in C order.
#[derive(Clone, Debug)]
pub struct SliceIterator<'data> {
    data: &'data [u8],
    ranges: alloc::vec::IntoIter<(usize, usize)>,
    remaining: usize,
    newshape: Vec<usize>,
}

impl SliceIterator<'_> {
    /// Returns the number of bytes in the pieces that were not yet returned.
    #[must_use]
    pub fn remaining_byte_len(&self) -> usize {
        self.remaining
    }

    /// The shape of the result.
    #[must_use]
    pub fn newshape(&self) -> Vec<usize> {
        self.newshape.clone()
    }
}

impl<'data> Iterator for SliceIterator<'data> {
    type Item = &'data [u8];

    fn next(&mut self) -> Option<&'data [u8]> {
        let (begin, end) = self.ranges.next()?;
        self.remaining -= end - begin;
        self.data.get(begin..end)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.ranges.size_hint()
    }
}

impl ExactSizeIterator for SliceIterator<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use alloc::vec;

    const TWO: NonZeroUsize = NonZeroUsize::MIN.saturating_add(1);
    const ALPHABET: &[u8] = b"abcdefghijkl";

    fn narrow(start: Bound<usize>, stop: Bound<usize>, step: NonZeroUsize) -> TensorIndexer {
        TensorIndexer::Narrow(start, stop, step)
    }

    /// The shape and the bytes of a slice of the letters from a to l in rows of 4.
    fn of_letters(slices: &[TensorIndexer]) -> Result<(Vec<usize>, Vec<u8>), InvalidSlice> {
        let tensor = TensorView::new(Dtype::U8, vec![3, 4], ALPHABET).unwrap();
        let parts = tensor.sliced_data(slices)?;
        Ok((parts.newshape(), parts.flatten().copied().collect()))
    }

    #[test]
    fn a_slice_has_the_elements_within_its_bounds() {
        use Bound::{Excluded, Included, Unbounded};
        for (slices, shape, bytes) in [
            (vec![2.into()], vec![4], "ijkl"),
            (vec![2.into(), 3.into()], vec![], "l"),
            (vec![(1..3).into()], vec![2, 4], "efghijkl"),
            (vec![(1..=1).into(), (..=1).into()], vec![1, 2], "ef"),
            (vec![(..).into(), (3..).into()], vec![3, 1], "dhl"),
            (vec![(3..3).into()], vec![0, 4], ""),
            (vec![(0..0).into()], vec![0, 4], ""),
            (
                vec![(..).into(), narrow(Excluded(0), Unbounded, TWO)],
                vec![3, 2],
                "bdfhjl",
            ),
            (vec![narrow(Unbounded, Included(2), TWO), 0.into()], vec![2], "ai"),
            (vec![0.into(), narrow(Unbounded, Excluded(3), TWO)], vec![2], "ac"),
        ] {
            assert_eq!(
                of_letters(&slices),
                Ok((shape, bytes.as_bytes().to_vec())),
                "{slices:?}"
            );
        }
    }

    #[test]
    fn rejects_an_index_out_of_range_and_names_it() {
        let out_of_range = |dim_index, asked, dim_size| InvalidSlice::SliceOutOfRange {
            dim_index,
            asked,
            dim_size,
        };
        for (slices, fault) in [
            (vec![3.into()], out_of_range(0, 3, 3)),
            (vec![(..).into(), 4.into()], out_of_range(1, 4, 4)),
            (vec![(1..4).into()], out_of_range(0, 3, 3)),
            (vec![(6..9).into()], out_of_range(0, 8, 3)),
            #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
            (vec![(2..1).into()], out_of_range(0, 2, 3)),
            (
                vec![(..).into(), (..).into(), (..).into()],
                InvalidSlice::TooManySlices,
            ),
        ] {
            assert_eq!(of_letters(&slices), Err(fault), "{slices:?}");
        }
        let packed = slice_byte_ranges(Dtype::F4, &[4], &[(1..3).into()]);
        assert_eq!(packed, Err(InvalidSlice::MisalignedSlice));
    }

    #[test]
    fn counts_the_remaining_bytes_during_iteration() {
        let tensor = TensorView::new(Dtype::U8, vec![3, 4], ALPHABET).unwrap();
        let mut parts = tensor.sliced_data(&[(..).into(), (1..3).into()]).unwrap();
        assert_eq!((parts.remaining_byte_len(), parts.size_hint()), (6, (3, Some(3))));
        assert_eq!(parts.next(), Some(&b"bc"[..]));
        assert_eq!((parts.remaining_byte_len(), parts.len()), (4, 2));
        assert_eq!(parts.by_ref().collect::<Vec<_>>(), [b"fg", b"jk"]);
        assert_eq!((parts.remaining_byte_len(), parts.next()), (0, None));
    }

    #[test]
    fn an_index_prints_as_in_python_and_a_fault_names_its_reason() {
        use Bound::{Excluded, Included};
        for (index, text) in [
            (7.into(), "7"),
            ((..).into(), ":"),
            ((2..).into(), "2:"),
            ((..=4).into(), ":5"),
            (narrow(Excluded(1), Excluded(9), TWO), "2:9:2"),
            (narrow(Included(1), Included(9), NonZeroUsize::MIN), "1:10"),
        ] {
            assert_eq!(TensorIndexer::to_string(&index), text);
        }
        let fault = of_letters(&[9.into()]).unwrap_err();
        assert_eq!(
            fault.to_string(),
            "index 9 out of bounds for tensor dimension #0 of size 3"
        );
        assert_eq!(
            InvalidSlice::TooManySlices.to_string(),
            "more slices than the tensor has dimensions"
        );
    }
}
