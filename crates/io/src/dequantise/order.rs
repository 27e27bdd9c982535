//! The group of each column of a weight that was quantised in the order of its activations.

use std::ops::Range;

use ingot_format::{Dtype, to_usize};

use super::model::Model;
use super::part::{Part, Reads};
use crate::error::{Error, Failure};

/// A tensor with the number of the group of each column.
#[derive(Debug)]
pub(super) struct GroupIndex {
    part: Part,
    groups: u64,
}

impl GroupIndex {
    /// Return the index of `columns` columns of `groups` groups.
    pub(super) fn new(model: &Model<'_>, part: Part, columns: u64, groups: u64) -> Result<GroupIndex, Error> {
        model.check(&part, &[Dtype::I32, Dtype::I64], &[columns])?;
        Ok(GroupIndex { part, groups })
    }

    /// Return the group of each of these columns. `None` if a number is negative: the groups of a module that was not
    /// quantised in this order were never set.
    pub(super) fn of(&self, columns: &Range<u64>, reads: Reads<'_>) -> Result<Option<Vec<usize>>, Error> {
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
        if numbers.iter().any(|number| *number < 0) {
            return Ok(None);
        }
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
}
