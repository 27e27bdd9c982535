//! Slices of a tensor: which bytes an index selects, and in which order.
//!
//! An index is first reduced to its selection along each dimension of the tensor ([`Taken`]), which settles the shape
//! of the result and finds every mistake of the caller. Then the dimensions are folded, innermost first, into as few
//! loops over as long blocks as possible. All positions are in bits until they are proven to be whole bytes.

mod error;
mod places;
mod runs;
mod strides;
#[cfg(test)]
mod tests;

use alloc::borrow::ToOwned;
use alloc::vec::Vec;
use core::ops::{Range, RangeFrom, RangeFull, RangeTo};

use crate::dtype::Dtype;
use crate::extent::{self, ExtentError, to_u64};

use places::{Steps, place};

pub use error::SelectionError;
pub use places::Places;
pub use runs::{Row, Rows, Runs};
pub use strides::Strides;

/// One part of an index, such as one of the comma-separated parts in Python's `tensor[…]`.
///
/// Dimensions without a part are selected whole. Rust ranges convert, and their bounds may be negative:
///
/// ```
/// use ingot_format::Index;
/// let last_two = Index::from(-2..);
/// assert_eq!(last_two, Index::Span { start: Some(-2), stop: None, step: None });
/// assert_eq!(Index::from(..), Index::WHOLE);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Index {
    /// One index along a dimension, which the result does not have. Negative indices count from the end.
    At(i64),
    /// `start:stop:step`. Bounds are clipped to the dimension, as Python's `slice.indices` does; negative ones
    /// count from the end.
    Span {
        /// First index. `None`: the beginning.
        start: Option<i64>,
        /// Index after the last. `None`: the end.
        stop: Option<i64>,
        /// Distance between indices, above zero. `None`: 1.
        step: Option<i64>,
    },
    /// A list of indices in any order, with repetitions, as single indices or ranges. Negative ones count from the end.
    Pick(Vec<Places>),
    /// `...`: every dimension that the other parts do not cover.
    Rest,
    /// `None` in Python: a new dimension of size 1 in the result.
    NewAxis,
}

impl Index {
    /// `:`, a whole dimension.
    pub const WHOLE: Index = Index::Span {
        start: None,
        stop: None,
        step: None,
    };

    const fn takes_a_dimension(&self) -> bool {
        !matches!(self, Index::Rest | Index::NewAxis)
    }
}

impl From<i64> for Index {
    fn from(at: i64) -> Index {
        Index::At(at)
    }
}

impl From<Vec<i64>> for Index {
    fn from(list: Vec<i64>) -> Index {
        Index::Pick(list.into_iter().map(Places::from).collect())
    }
}

impl From<Range<i64>> for Index {
    fn from(range: Range<i64>) -> Index {
        Index::Span {
            start: Some(range.start),
            stop: Some(range.end),
            step: None,
        }
    }
}

impl From<RangeFrom<i64>> for Index {
    fn from(range: RangeFrom<i64>) -> Index {
        Index::Span {
            start: Some(range.start),
            stop: None,
            step: None,
        }
    }
}

impl From<RangeTo<i64>> for Index {
    fn from(range: RangeTo<i64>) -> Index {
        Index::Span {
            start: None,
            stop: Some(range.end),
            step: None,
        }
    }
}

impl From<RangeFull> for Index {
    fn from(_: RangeFull) -> Index {
        Index::WHOLE
    }
}

/// A contiguous range of a tensor's bytes. Never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// First byte, counted from the start of the tensor.
    pub begin: u64,
    /// Byte after the last, counted from the start of the tensor.
    pub end: u64,
}

impl Run {
    /// Returns the length of the run in bytes.
    #[must_use]
    pub const fn nbytes(&self) -> u64 {
        self.end - self.begin
    }
}

/// The part of a tensor that an index selects. Proven: every byte of it is inside the tensor.
///
/// The rules are NumPy's, with these restrictions:
/// - no steps below zero, since the formats have no reversed data;
/// - at most one list;
/// - no other part between a list and an int, unless the list's dimension comes first in the result anyway. Otherwise
///   NumPy and PyTorch return results of different shapes (`x[0, :, [1, 2]]` of a `2×3×4` tensor is `2×3` in NumPy and
///   `3×2` in PyTorch), so code that knows the caller's library must decide;
/// - no run of elements narrower than a byte that begins or ends inside a byte.
///
/// ```
/// use ingot_format::{Dtype, Index, Run, Selection};
/// let rows = Selection::new(Dtype::F32, &[6, 5], &[Index::from(2..4)])?;
/// assert_eq!(rows.shape(), [2, 5]);
/// assert_eq!(rows.runs().collect::<Vec<_>>(), [Run { begin: 40, end: 80 }]);
///
/// let column = Selection::new(Dtype::F32, &[6, 5], &[Index::Rest, Index::At(-1)])?;
/// assert_eq!(column.shape(), [6]);
/// assert_eq!(column.runs().next(), Some(Run { begin: 16, end: 20 }));
/// # Ok::<(), ingot_format::SelectionError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    shape: Vec<u64>,
    nbytes: u64,
    /// Loops around the rows, outermost first. At most one is [`Loop::Pick`].
    loops: Vec<Loop>,
    /// The blocks that [`Loop::Pick`] iterates over, or a single block. Empty if the selection is empty.
    blocks: Vec<Run>,
    /// Blocks in a row.
    row_count: u64,
    /// Bytes from the beginning of one block in a row to the next.
    row_stride: u64,
}

/// A loop of the iteration. An `Even` loop has at least two turns, and its blocks are not adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loop {
    Even { count: u64, stride: u64 },
    Pick,
}

impl Selection {
    /// Selects `index` of a tensor of `dtype` and `shape`.
    ///
    /// ```
    /// use ingot_format::{Dtype, Index, Selection};
    /// let picked = Selection::new(Dtype::BF16, &[4, 3], &[Index::from(vec![3, 0, 0]), Index::NewAxis])?;
    /// assert_eq!(picked.shape(), [3, 1, 3]);
    ///
    /// let fault = Selection::new(Dtype::BF16, &[4, 3], &[Index::At(4)]).unwrap_err();
    /// assert_eq!(fault.code(), "index-out-of-range");
    /// assert_eq!(fault.to_string(), "index 4 is out of range for dimension 0 of size 4");
    /// # Ok::<(), ingot_format::SelectionError>(())
    /// ```
    ///
    /// # Errors
    /// If the index does not fit the shape, or is not supported (see [`Selection`]); if the result is too large, or
    /// begins or ends inside a byte.
    pub fn new(dtype: Dtype, shape: &[u64], index: &[Index]) -> Result<Selection, SelectionError> {
        // After this check no position in the tensor can overflow, not even in bits.
        extent::nbytes(dtype, shape).map_err(no_extent(dtype, shape))?;
        Selection::of(dtype, shape, None, index)
    }

    /// Selects `index` of a tensor whose elements are not contiguous: `strides` has the distance from one element to the
    /// next along each dimension, in elements. Positions are counted from the first element of the tensor.
    ///
    /// ```
    /// use ingot_format::{Dtype, Index, Run, Selection};
    /// // The second column of a transposed 2×3 tensor.
    /// let column = Selection::strided(Dtype::U8, &[3, 2], &[1, 3], &[Index::Rest, Index::At(1)])?;
    /// assert_eq!(column.runs().collect::<Vec<_>>(), [Run { begin: 3, end: 6 }]);
    /// # Ok::<(), ingot_format::SelectionError>(())
    /// ```
    ///
    /// # Errors
    /// As [`Selection::new`]; if the last element is at a position that overflows.
    ///
    /// # Panics
    /// If `shape` and `strides` have different lengths.
    pub fn strided(
        dtype: Dtype,
        shape: &[u64],
        strides: &[u64],
        index: &[Index],
    ) -> Result<Selection, SelectionError> {
        assert_eq!(shape.len(), strides.len(), "each dimension has a stride");
        let reach = shape
            .iter()
            .zip(strides)
            .try_fold(0_u64, |reach, (&dim, &stride)| {
                reach.checked_add(dim.saturating_sub(1).checked_mul(stride)?)
            });
        let bits = reach.and_then(|reach| reach.checked_add(1)?.checked_mul(dtype.bits()));
        if bits.is_none() {
            return Err(SelectionError::Extent {
                dtype,
                shape: shape.to_owned(),
                reason: ExtentError::Overflow,
            });
        }
        Selection::of(dtype, shape, Some(strides), index)
    }

    fn of(
        dtype: Dtype,
        shape: &[u64],
        strides: Option<&[u64]>,
        index: &[Index],
    ) -> Result<Selection, SelectionError> {
        let (taken, result) = take(shape, index)?;
        let nbytes = extent::nbytes(dtype, &result).map_err(no_extent(dtype, &result));
        // A list may repeat an index until the result overflows, though the tensor does not.
        let is_countable = !matches!(
            nbytes,
            Err(SelectionError::Extent {
                reason: ExtentError::Overflow,
                ..
            })
        );
        let selection = if is_countable && !result.contains(&0) {
            // Before the check of `nbytes`, since this error names the run that is not a whole number of bytes.
            Selection::fold(dtype, shape, strides, &taken)?
        } else {
            Selection::empty()
        };
        Ok(Selection {
            nbytes: nbytes?,
            shape: result,
            ..selection
        })
    }

    /// The shape of the result.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the size of the result in bytes: the sum of its runs.
    #[must_use]
    pub const fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Returns the number of blocks in all rows. The number of runs is at most this, and at least half of it.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        if self.blocks.is_empty() {
            return 0;
        }
        // Each block has at least one bit of the result, whose bits were counted without overflow.
        self.loops
            .iter()
            .map(|turn| match turn {
                Loop::Even { count, .. } => *count,
                Loop::Pick => to_u64(self.blocks.len()),
            })
            .fold(self.row_count, |product, count| product * count)
    }

    /// Returns whether the result is a single run, or empty.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.block_count() <= 1
    }

    /// Returns the shortest range that contains all runs. `None` for an empty selection.
    ///
    /// ```
    /// use ingot_format::{Dtype, Index, Run, Selection};
    /// let column = Selection::new(Dtype::U8, &[10, 8], &[Index::from(1..3), Index::At(3)])?;
    /// assert_eq!(column.span(), Some(Run { begin: 11, end: 20 }));
    /// # Ok::<(), ingot_format::SelectionError>(())
    /// ```
    #[must_use]
    pub fn span(&self) -> Option<Run> {
        let begin = self.blocks.iter().map(|block| block.begin).min()?;
        let end = self.blocks.iter().map(|block| block.end).max()?;
        let reach = |count: u64, stride: u64| (count - 1) * stride;
        let turns = self.loops.iter().map(|turn| match *turn {
            Loop::Even { count, stride } => reach(count, stride),
            Loop::Pick => 0,
        });
        Some(Run {
            begin,
            end: end + turns.sum::<u64>() + reach(self.row_count, self.row_stride),
        })
    }

    const fn empty() -> Selection {
        Selection {
            shape: Vec::new(),
            nbytes: 0,
            loops: Vec::new(),
            blocks: Vec::new(),
            row_count: 1,
            row_stride: 0,
        }
    }

    /// Folds the dimensions into loops. No dimension of the selection is empty.
    fn fold(
        dtype: Dtype,
        shape: &[u64],
        strides: Option<&[u64]>,
        taken: &[Taken],
    ) -> Result<Selection, SelectionError> {
        let mut fold = Fold {
            begin: 0,
            block: dtype.bits(),
            blocks: Vec::new(),
            loops: Vec::new(),
        };
        let mut units = Units::new(dtype.bits(), shape, strides);
        for taken in taken.iter().rev() {
            let unit = units.next();
            match taken {
                Taken::Even { start, count, step } => {
                    fold.begin += start * unit;
                    // With a single turn, the step may exceed the dimension, so the product may overflow.
                    if *count > 1 {
                        fold.even(*count, step * unit);
                    }
                }
                Taken::Picked(ranges) => fold.pick(ranges, unit)?,
            }
        }
        fold.finish(dtype)
    }
}

fn no_extent(dtype: Dtype, shape: &[u64]) -> impl Fn(ExtentError) -> SelectionError {
    move |reason| SelectionError::Extent {
        dtype,
        shape: shape.to_owned(),
        reason,
    }
}

/// The distance from one element to the next along each dimension, the last dimension first.
struct Units<'s> {
    /// The size of an element.
    element: u64,
    shape: &'s [u64],
    /// `None` if the elements are contiguous in C order.
    strides: Option<&'s [u64]>,
    /// The distance along the next dimension if the elements are contiguous.
    contiguous: u64,
}

impl<'s> Units<'s> {
    fn new(element: u64, shape: &'s [u64], strides: Option<&'s [u64]>) -> Units<'s> {
        Units {
            element,
            shape,
            strides,
            contiguous: element,
        }
    }

    fn next(&mut self) -> u64 {
        let Some((&dim, shape)) = self.shape.split_last() else {
            return 0;
        };
        self.shape = shape;
        match self.strides {
            // A dimension of one element may have any distance.
            Some(strides) if dim > 1 => strides[shape.len()] * self.element,
            Some(_) => 0,
            None => {
                let unit = self.contiguous;
                self.contiguous *= dim;
                unit
            }
        }
    }
}

/// The selection of an index along one dimension of the tensor.
enum Taken {
    /// `count` indices from `start` at a distance of `step`: a slice, an int, or a list that is equal to a slice.
    Even { start: u64, count: u64, step: u64 },
    /// The indices of these ranges, one after another.
    Picked(Vec<Steps>),
}

/// Returns the selection of `index` along each dimension, and the shape of the result.
fn take(shape: &[u64], index: &[Index]) -> Result<(Vec<Taken>, Vec<u64>), SelectionError> {
    prove_parts(shape.len(), index)?;
    let spoken_of = index.iter().filter(|part| part.takes_a_dimension()).count();
    let mut left_over = shape.len() - spoken_of;
    let mut taken = Vec::with_capacity(shape.len());
    let mut result = Vec::with_capacity(shape.len().max(index.len()));
    for part in index {
        let axis = taken.len();
        match part {
            Index::At(at) => {
                let start = place(*at, axis, shape[axis])?;
                taken.push(Taken::Even {
                    start,
                    count: 1,
                    step: 1,
                });
            }
            Index::Span { start, stop, step } => {
                let (start, count, step) = span(*start, *stop, *step, axis, shape[axis])?;
                taken.push(Taken::Even { start, count, step });
                result.push(count);
            }
            Index::Pick(list) => {
                taken.push(evened(places::within(list, axis, shape[axis])?));
                // If the number of indices overflows 64 bits, the size in bytes does too.
                let counts = list.iter().map(|places| places.count);
                result.push(counts.fold(0, u64::saturating_add));
            }
            Index::Rest => {
                whole(&shape[axis..axis + left_over], &mut taken, &mut result);
                left_over = 0;
            }
            Index::NewAxis => result.push(1),
        }
    }
    whole(&shape[taken.len()..], &mut taken, &mut result);
    Ok((taken, result))
}

/// Selects `dims` whole.
fn whole(dims: &[u64], taken: &mut Vec<Taken>, result: &mut Vec<u64>) {
    taken.extend(dims.iter().map(|&count| Taken::Even {
        start: 0,
        count,
        step: 1,
    }));
    result.extend_from_slice(dims);
}

/// Checks the parts of an index together.
fn prove_parts(rank: usize, index: &[Index]) -> Result<(), SelectionError> {
    let count = |wanted: fn(&Index) -> bool| index.iter().filter(|part| wanted(part)).count();
    if count(|part| matches!(part, Index::Rest)) > 1 {
        return Err(SelectionError::TwoEllipses);
    }
    if count(|part| matches!(part, Index::Pick(_))) > 1 {
        return Err(SelectionError::TwoLists);
    }
    let found = count(Index::takes_a_dimension);
    if found > rank {
        return Err(SelectionError::TooManyIndices { rank, found });
    }
    prove_list_in_place(rank - found, index)
}

/// Rejects a list if NumPy and PyTorch disagree about the position of its dimension. PyTorch applies ints first and
/// keeps the dimension of the list in place. NumPy treats ints as lists, and moves the dimension to the front unless
/// all lists are adjacent. `...` separates lists even if it covers no dimension.
fn prove_list_in_place(left_over: usize, index: &[Index]) -> Result<(), SelectionError> {
    let Some(list) = index.iter().position(|part| matches!(part, Index::Pick(_))) else {
        return Ok(());
    };
    let is_list_for_numpy = |part: &Index| matches!(part, Index::At(_) | Index::Pick(_));
    let comes_first = index[..list].iter().all(|part| match part {
        Index::At(_) => true,
        Index::Rest => left_over == 0,
        _ => false,
    });
    let first = index.iter().position(is_list_for_numpy).unwrap_or(list);
    let last = index.iter().rposition(is_list_for_numpy).unwrap_or(list);
    if comes_first || index[first..=last].iter().all(is_list_for_numpy) {
        Ok(())
    } else {
        Err(SelectionError::SeparatedList)
    }
}

/// Returns start, count and step of a slice, as Python's `slice.indices` does for steps above zero.
fn span(
    start: Option<i64>,
    stop: Option<i64>,
    step: Option<i64>,
    axis: usize,
    size: u64,
) -> Result<(u64, u64, u64), SelectionError> {
    let step = match step.unwrap_or(1) {
        0 => return Err(SelectionError::ZeroStep { axis }),
        step @ ..0 => return Err(SelectionError::NegativeStep { axis, step }),
        step => step.unsigned_abs(),
    };
    let clip = |bound: i64| match bound.unsigned_abs() {
        distance if bound < 0 => size.saturating_sub(distance),
        distance => distance.min(size),
    };
    let start = start.map_or(0, clip);
    let stop = stop.map_or(size, clip);
    Ok((start, stop.saturating_sub(start).div_ceil(step), step))
}

/// Turns a list with constant distances into a slice, which may be folded. The distance 0, one index many times, is
/// allowed; a negative distance is not.
fn evened(list: Vec<Steps>) -> Taken {
    match list[..] {
        [Steps { start, count, step }] if !step.is_negative() => Taken::Even {
            start,
            count,
            step: step.unsigned_abs(),
        },
        _ => Taken::Picked(list),
    }
}

/// The loops, added from the innermost dimension outwards. Positions and sizes are in bits.
struct Fold {
    /// Position of the first index of every dimension that the list does not index.
    begin: u64,
    /// Size of each block.
    block: u64,
    /// The blocks that the list picks, relative to `begin`. Empty without a list.
    blocks: Vec<Run>,
    /// Innermost first.
    loops: Vec<Loop>,
}

impl Fold {
    /// Adds a loop of `count` turns, at least 2, around the existing loops.
    fn even(&mut self, count: u64, stride: u64) {
        match self.loops.last_mut() {
            None if stride == self.block => self.block *= count,
            // The turns of both loops have the same stride, so the stride is kept. If the product overflows, it equals
            // no stride.
            Some(Loop::Even {
                count: inner,
                stride: pace,
            }) if inner.checked_mul(*pace) == Some(stride) => {
                *inner *= count;
            }
            _ => self.loops.push(Loop::Even { count, stride }),
        }
    }

    /// Adds a loop over the indices of `list`, at least 2, around the existing loops.
    fn pick(&mut self, list: &[Steps], unit: u64) -> Result<(), SelectionError> {
        let is_dense = self.loops.is_empty() && self.block == unit;
        for steps in list {
            if is_dense && steps.step == 1 {
                self.stretch(steps.start * unit, steps.count * unit);
            } else {
                let blocks = usize::try_from(steps.count).unwrap_or(usize::MAX);
                let reserved = self.blocks.try_reserve(blocks);
                reserved.map_err(|_| SelectionError::TooManyPlaces { found: steps.count })?;
                for place in steps.places() {
                    self.stretch(place * unit, self.block);
                }
            }
        }
        self.loops.push(Loop::Pick);
        Ok(())
    }

    /// Appends `nbits` from `begin` to the blocks of the list. With a loop inside, each index is a block of its own.
    fn stretch(&mut self, begin: u64, nbits: u64) {
        let end = begin + nbits;
        match self.blocks.last_mut() {
            Some(before) if self.loops.is_empty() && before.end == begin => before.end = end,
            _ => self.blocks.push(Run { begin, end }),
        }
    }

    /// Converts bits to bytes.
    fn finish(mut self, dtype: Dtype) -> Result<Selection, SelectionError> {
        if self.blocks.is_empty() {
            self.blocks.push(Run {
                begin: 0,
                end: self.block,
            });
        }
        for block in &mut self.blocks {
            block.begin += self.begin;
            block.end += self.begin;
        }
        self.prove_bytes(dtype)?;
        for block in &mut self.blocks {
            block.begin /= 8;
            block.end /= 8;
        }
        for turn in &mut self.loops {
            if let Loop::Even { stride, .. } = turn {
                *stride /= 8;
            }
        }
        self.loops.reverse();
        let (row_count, row_stride) = match self.loops.pop() {
            Some(Loop::Even { count, stride }) => (count, stride),
            Some(Loop::Pick) => {
                self.loops.push(Loop::Pick);
                (1, 0)
            }
            None => (1, 0),
        };
        Ok(Selection {
            loops: self.loops,
            blocks: self.blocks,
            row_count,
            row_stride,
            ..Selection::empty()
        })
    }

    /// Checks that every run begins and ends on a byte. This holds if and only if every block does and every stride is
    /// a whole number of bytes.
    ///
    /// The condition is clearly sufficient. It is also necessary, although several blocks may form one run: the first
    /// block and the second never touch, or they would have been folded into one. So the first is a run, and must begin
    /// and end on a byte. Any other block that is first in its loop either begins a run, or ends a run that started in
    /// the previous turn; in both cases its distance from the first block is a whole number of bytes.
    fn prove_bytes(&self, dtype: Dtype) -> Result<(), SelectionError> {
        let partial = |block: &Run, stride: u64| SelectionError::PartialByte {
            dtype,
            begin_bit: block.begin + stride,
            end_bit: block.end + stride,
        };
        for block in &self.blocks {
            if !block.begin.is_multiple_of(8) || !block.end.is_multiple_of(8) {
                return Err(partial(block, 0));
            }
        }
        for turn in &self.loops {
            if let Loop::Even { stride, .. } = turn
                && !stride.is_multiple_of(8)
            {
                return Err(partial(&self.blocks[0], *stride));
            }
        }
        Ok(())
    }
}
