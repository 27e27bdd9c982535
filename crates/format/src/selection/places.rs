//! Lists of indices along a dimension. A range is never expanded: it may have more indices than fit into memory.

use alloc::vec::Vec;

use super::error::SelectionError;

/// Equally spaced indices, like Python's `range`, or a single index. Negative ones count from the end.
///
/// ```
/// use ingot_format::{Dtype, Index, Places, Selection};
/// let odd = Places { start: 1, count: 3, step: 2 };
/// let picked = Selection::new(Dtype::U8, &[6], &[Index::Pick(vec![Places::from(-6), odd])])?;
/// assert_eq!(picked.shape(), [4]);
/// # Ok::<(), ingot_format::SelectionError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Places {
    /// The first index.
    pub start: i64,
    /// The number of indices.
    pub count: u64,
    /// The distance from one index to the next; negative if they go backwards.
    pub step: i64,
}

impl Places {
    /// Returns the index number `turns`, counted from 0.
    fn at(&self, turns: u64) -> i128 {
        i128::from(self.start) + i128::from(self.step) * i128::from(turns)
    }

    /// Returns how many of the indices have the sign of the first.
    fn before_zero(&self) -> u64 {
        let (distance, pace) = (self.start.unsigned_abs(), self.step.unsigned_abs());
        if self.start < 0 && self.step > 0 {
            distance.div_ceil(pace).min(self.count)
        } else if self.start >= 0 && self.step < 0 {
            (distance / pace + 1).min(self.count)
        } else {
            self.count
        }
    }

    /// Returns the first index outside a dimension of `size`. The caller knows that there is one.
    fn first_outside(&self, size: u64) -> i64 {
        let (start, size) = (i128::from(self.start), i128::from(size));
        let pace = i128::from(self.step.unsigned_abs().max(1));
        let room = if self.step > 0 {
            size - 1 - start
        } else {
            start + size
        };
        let turns = if (-size..size).contains(&start) {
            room / pace + 1
        } else {
            0
        };
        let place = start + turns * i128::from(self.step);
        // Clipped to what the error can hold.
        i64::try_from(place).unwrap_or(if self.step > 0 { i64::MAX } else { i64::MIN })
    }
}

impl From<i64> for Places {
    fn from(start: i64) -> Places {
        Places {
            start,
            count: 1,
            step: 1,
        }
    }
}

/// Equally spaced indices, counted from the beginning. At least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Steps {
    pub(super) start: u64,
    pub(super) count: u64,
    pub(super) step: i64,
}

impl Steps {
    pub(super) fn places(self) -> impl Iterator<Item = u64> {
        (0..self.count).map(move |turns| self.at(turns))
    }

    /// Returns the index number `turns`. Wrapping is correct, since the index is inside the dimension.
    fn at(self, turns: u64) -> u64 {
        let forth = turns.wrapping_mul(self.step.cast_unsigned());
        self.start.wrapping_add(forth)
    }

    /// Returns the distance from the last index to another of the same dimension.
    fn distance(self, place: u64) -> i64 {
        place.wrapping_sub(self.at(self.count - 1)).cast_signed()
    }
}

/// Resolves the index `at` along a dimension of `size`.
pub(super) fn place(at: i64, axis: usize, size: u64) -> Result<u64, SelectionError> {
    let distance = at.unsigned_abs();
    let place = if at < 0 {
        size.checked_sub(distance)
    } else {
        Some(distance).filter(|&place| place < size)
    };
    place.ok_or(SelectionError::IndexOutOfRange {
        axis,
        size,
        index: at,
    })
}

/// Resolves a list against dimension `axis` of `size`, and joins neighbours with equal distances.
pub(super) fn within(list: &[Places], axis: usize, size: u64) -> Result<Vec<Steps>, SelectionError> {
    let mut found: Vec<Steps> = Vec::new();
    for range in list.iter().filter(|range| range.count > 0) {
        let has = |place: i128| (-i128::from(size)..i128::from(size)).contains(&place);
        if !has(range.at(0)) || !has(range.at(range.count - 1)) {
            return Err(SelectionError::IndexOutOfRange {
                axis,
                size,
                index: range.first_outside(size),
            });
        }
        let before = range.before_zero();
        for (turns, count) in [(0, before), (before, range.count - before)] {
            if count > 0 {
                let start = i64::try_from(range.at(turns)).unwrap_or(i64::MAX);
                let step = if count > 1 { range.step } else { 1 };
                let start = place(start, axis, size)?;
                join(&mut found, Steps { start, count, step });
            }
        }
    }
    Ok(found)
}

/// Appends `next`, merging it into the last entry if it continues that one.
fn join(list: &mut Vec<Steps>, next: Steps) {
    if let Some(last) = list.last_mut() {
        let distance = last.distance(next.start);
        let goes_on =
            (last.count == 1 || last.step == distance) && (next.count == 1 || next.step == distance);
        if let Some(count) = last.count.checked_add(next.count).filter(|_| goes_on) {
            (last.count, last.step) = (count, distance);
            return;
        }
    }
    list.push(next);
}
