//! The groups of columns that share a scale: equal parts of a row, or the numbers of a tensor for a weight that was quantised in
//! the order of its activations.

use std::ops::Range;
use std::sync::OnceLock;

use ingot_format::{Dtype, to_u64, to_usize};

use super::codes::{groups, place};
use super::model::Model;
use super::part::{Part, Reads};
use crate::error::{Error, Failure};

/// A tensor with the number of the group of each column.
#[derive(Debug)]
pub(super) struct GroupIndex {
    part: Part,
    groups: u64,
    /// Whether the tensor has a negative number, which means that the groups were never set: the module was not
    /// quantised in the order of its activations. The first read finds out.
    is_unset: OnceLock<bool>,
}

impl GroupIndex {
    /// Return the index of `columns` columns of `groups` groups.
    pub(super) fn new(model: &Model<'_>, part: Part, columns: u64, groups: u64) -> Result<GroupIndex, Error> {
        model.check(&part, &[Dtype::I32, Dtype::I64], &[columns])?;
        Ok(GroupIndex {
            part,
            groups,
            is_unset: OnceLock::new(),
        })
    }

    /// Return the group of each of these columns, or `None` if the groups were never set.
    fn of(&self, columns: &Range<u64>, reads: Reads<'_>) -> Result<Option<Vec<usize>>, Error> {
        let is_unset = match self.is_unset.get() {
            Some(known) => *known,
            None => {
                let all = self.numbers(&(0..self.part.columns()), reads)?;
                *self.is_unset.get_or_init(|| all.iter().any(|number| *number < 0))
            }
        };
        if is_unset {
            return Ok(None);
        }
        let numbers = self.numbers(columns, reads)?;
        let group = |number: &i64| {
            u64::try_from(*number)
                .ok()
                .filter(|group| *group < self.groups)
                .and_then(to_usize)
        };
        let found: Option<Vec<usize>> = numbers.iter().map(group).collect();
        found.map(Some).ok_or_else(|| {
            let reason = format!("it has a group that is not in 0..{}", self.groups);
            Failure::Dequantization(reason).about(reads.inputs.path(), Some(&self.part.name))
        })
    }

    fn numbers(&self, columns: &Range<u64>, reads: Reads<'_>) -> Result<Vec<i64>, Error> {
        let bytes = reads.bytes(&self.part, 0..1, columns.clone())?;
        let numbers: Vec<i64> = if self.part.dtype == Dtype::I64 {
            bytes
                .as_chunks()
                .0
                .iter()
                .map(|bytes| i64::from_le_bytes(*bytes))
                .collect()
        } else {
            bytes
                .as_chunks()
                .0
                .iter()
                .map(|bytes| i32::from_le_bytes(*bytes).into())
                .collect()
        };
        Ok(numbers)
    }
}

/// The group of each column of a tile, from the first group that the tile needs on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Groups {
    /// Columns that follow one another and have the same group.
    Runs(Vec<(usize, Range<usize>)>),
    /// The group of each column.
    Each(Vec<usize>),
}

impl Groups {
    /// Shorter runs cost more than a look-up for each column.
    const SHORTEST: usize = 16;

    /// Return the groups that columns need: the groups of the index, or without one groups of `size` columns.
    pub(super) fn needed(
        index: Option<&GroupIndex>,
        columns: &Range<u64>,
        size: u64,
        reads: Reads<'_>,
    ) -> Result<(Range<u64>, Groups), Error> {
        if let Some(index) = index
            && let Some(order) = index.of(columns, reads)?
        {
            return Ok(Groups::of(order));
        }
        let needed = columns.start / size..columns.end.div_ceil(size);
        let runs = groups(columns, size).map(|(group, run)| (place(group, needed.start), run));
        Ok((needed.clone(), Groups::Runs(runs.collect())))
    }

    /// Return the range of groups in `order`, which has the group of each column, and the columns of each group.
    fn of(mut order: Vec<usize>) -> (Range<u64>, Groups) {
        let first = order.iter().copied().min().unwrap_or(0);
        let end = order.iter().copied().max().map_or(first, |last| last + 1);
        order.iter_mut().for_each(|group| *group -= first);
        let mut at = 0;
        let runs = order.chunk_by(|one, other| one == other).map(|run| {
            at += run.len();
            (run[0], at - run.len()..at)
        });
        let runs: Vec<_> = runs.collect();
        let groups = if runs.len() * Groups::SHORTEST <= order.len() {
            Groups::Runs(runs)
        } else {
            Groups::Each(order)
        };
        (to_u64(first)..to_u64(end), groups)
    }

    /// Multiply `code - zero` by `scale` in each column of a row, with the zero and the scale of its group. `number` returns
    /// the integer of an element of `codes`.
    pub(super) fn scale<T: Copy>(
        &self,
        codes: &[T],
        number: impl Fn(T) -> u8,
        zeros: &[f32],
        scales: &[f32],
        values: &mut [f32],
    ) {
        match self {
            Groups::Runs(runs) => {
                for (group, run) in runs {
                    let (zero, scale) = (zeros[*group], scales[*group]);
                    for (value, code) in values[run.clone()].iter_mut().zip(&codes[run.clone()]) {
                        *value = (f32::from(number(*code)) - zero) * scale;
                    }
                }
            }
            Groups::Each(order) => {
                for ((value, code), &group) in values.iter_mut().zip(codes).zip(order) {
                    *value = (f32::from(number(*code)) - zeros[group]) * scales[group];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_of_a_group_are_found() {
        let order = [[5; 16], [3; 16], [5; 16]].concat();
        let runs = vec![(2, 0..16), (0, 16..32), (2, 32..48)];
        assert_eq!(Groups::of(order), (3..6, Groups::Runs(runs)));
        assert_eq!(Groups::of(vec![7, 9, 7]), (7..10, Groups::Each(vec![0, 2, 0])));
        assert_eq!(Groups::of(vec![]), (0..0, Groups::Runs(vec![])));
    }

    #[test]
    fn both_kinds_of_groups_scale_alike() {
        let codes: Vec<u8> = (0..48).collect();
        let (zeros, scales) = ([1.0, 2.0, 8.0], [0.5, 3.0, 0.25]);
        let order = [[2; 16], [0; 16], [1; 16]].concat();
        let (_, runs) = Groups::of(order.clone());
        assert!(matches!(runs, Groups::Runs(_)));
        let mut found = [[0.0; 48], [1.0; 48]];
        runs.scale(&codes, |code| code, &zeros, &scales, &mut found[0]);
        Groups::Each(order).scale(&codes, |code| code, &zeros, &scales, &mut found[1]);
        assert_eq!(found[0], found[1]);
        assert_eq!((found[0][0], found[0][47]), (-2.0, 135.0));
    }
}
