//! The bytes of a selection, one stretch after another.

use alloc::vec::Vec;
use core::iter::FusedIterator;

use super::{Loop, Selection};

/// A stretch of a tensor's bytes. Never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// First byte, counted from the start of the tensor.
    pub begin: u64,
    /// Byte after the last, counted from the start of the tensor.
    pub end: u64,
}

impl Run {
    /// Bytes in the run.
    #[must_use]
    pub const fn nbytes(&self) -> u64 {
        self.end - self.begin
    }
}

/// Blocks of one size, one distance apart. They do not touch, but the last may touch the first of the next row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// First byte of the first block, counted from the start of the tensor.
    pub begin: u64,
    /// Bytes in each block.
    pub nbytes: u64,
    /// Number of blocks, at least 1.
    pub count: u64,
    /// Bytes from the beginning of one block to that of the next. 0 where a list repeats one place.
    pub stride: u64,
}

/// The rows of a [`Selection`], in the order of the result. See [`Selection::rows`].
#[derive(Clone, Debug)]
pub struct Rows<'s> {
    selection: &'s Selection,
    /// Turn of each loop. Of no meaning for [`Loop::Pick`], whose turn is `block`.
    turns: Vec<u64>,
    /// Where the turns of the even loops lead.
    begin: u64,
    /// Place in the selection's blocks; past the end when all rows are given.
    block: usize,
}

impl<'s> Rows<'s> {
    pub(super) fn new(selection: &'s Selection) -> Rows<'s> {
        Rows {
            selection,
            turns: alloc::vec![0; selection.loops.len()],
            begin: 0,
            block: 0,
        }
    }

    /// Turns the innermost loop that has a turn left, and starts those inside it again.
    fn turn(&mut self) {
        for (turns, turn) in self.selection.loops.iter().zip(&mut self.turns).rev() {
            match *turns {
                Loop::Even { count, stride } => {
                    *turn += 1;
                    if *turn < count {
                        self.begin += stride;
                        return;
                    }
                    *turn = 0;
                    self.begin -= (count - 1) * stride;
                }
                Loop::Pick => {
                    self.block += 1;
                    if self.block < self.selection.blocks.len() {
                        return;
                    }
                    self.block = 0;
                }
            }
        }
        self.block = self.selection.blocks.len();
    }
}

impl Iterator for Rows<'_> {
    type Item = Row;

    fn next(&mut self) -> Option<Row> {
        let block = self.selection.blocks.get(self.block)?;
        let row = Row {
            begin: self.begin + block.begin,
            nbytes: block.nbytes(),
            count: self.selection.row_count,
            stride: self.selection.row_stride,
        };
        self.turn();
        Some(row)
    }
}

impl FusedIterator for Rows<'_> {}

/// The runs of a [`Selection`], in the order of the result. See [`Selection::runs`].
#[derive(Clone, Debug)]
pub struct Runs<'s> {
    rows: Rows<'s>,
    /// What is left of the row that is being given.
    row: Option<Row>,
}

impl<'s> Runs<'s> {
    pub(super) fn new(selection: &'s Selection) -> Runs<'s> {
        let mut rows = Rows::new(selection);
        let row = rows.next();
        Runs { rows, row }
    }

    /// The run that begins with the last block of a row, and goes on as long as rows touch.
    fn last_of_row(&mut self, mut run: Run) -> Run {
        loop {
            self.row = self.rows.next();
            match &mut self.row {
                Some(row) if row.begin == run.end => {
                    run.end += row.nbytes;
                    if row.count > 1 {
                        row.begin += row.stride;
                        row.count -= 1;
                        return run;
                    }
                }
                _ => return run,
            }
        }
    }
}

impl Iterator for Runs<'_> {
    type Item = Run;

    #[inline]
    fn next(&mut self) -> Option<Run> {
        let row = self.row.as_mut()?;
        let run = Run {
            begin: row.begin,
            end: row.begin + row.nbytes,
        };
        // Blocks of one row do not touch, so only its last one may go on.
        if row.count > 1 {
            row.begin += row.stride;
            row.count -= 1;
            return Some(run);
        }
        Some(self.last_of_row(run))
    }
}

impl FusedIterator for Runs<'_> {}
