//! The bytes of a selection, run by run.

use alloc::vec::Vec;
use core::iter::FusedIterator;

use super::{Loop, Run, Selection};

impl Selection {
    /// Iterates over the byte ranges of the result, in its order. Consecutive runs never touch, so a whole tensor is
    /// one run.
    ///
    /// ```
    /// use ingot_format::{Dtype, Index, Run, Selection};
    /// let even = Index::Span { start: None, stop: None, step: Some(2) };
    /// let columns = Selection::new(Dtype::U8, &[2, 3], &[Index::WHOLE, even])?;
    /// let runs: Vec<Run> = columns.runs().collect();
    /// // The last column of row 0 and the first of row 1 are adjacent.
    /// assert_eq!(runs, [Run { begin: 0, end: 1 }, Run { begin: 2, end: 4 }, Run { begin: 5, end: 6 }]);
    /// # Ok::<(), ingot_format::SelectionError>(())
    /// ```
    #[must_use]
    pub fn runs(&self) -> Runs<'_> {
        Runs::new(self)
    }

    /// Iterates over the same bytes as [`Selection::runs`], as rows of blocks of one size. Rows may touch.
    ///
    /// This is faster for short blocks: one turn of a tight loop for each, without a call or a test for neighbours.
    ///
    /// ```
    /// use ingot_format::{Dtype, Index, Row, Selection};
    /// let column = Selection::new(Dtype::U8, &[1000, 8], &[Index::WHOLE, Index::At(3)])?;
    /// let rows: Vec<Row> = column.rows().collect();
    /// assert_eq!(rows, [Row { begin: 3, nbytes: 1, count: 1000, stride: 8 }]);
    /// # Ok::<(), ingot_format::SelectionError>(())
    /// ```
    #[must_use]
    pub fn rows(&self) -> Rows<'_> {
        Rows::new(self)
    }
}

/// Equally spaced blocks of one size. They do not touch, but the last may touch the first of the next row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// First byte of the first block, counted from the start of the tensor.
    pub begin: u64,
    /// Bytes in each block.
    pub nbytes: u64,
    /// Number of blocks, at least 1.
    pub count: u64,
    /// Bytes from the beginning of one block to the next. 0 if a list repeats one index.
    pub stride: u64,
}

/// The rows of a [`Selection`], in the order of the result. See [`Selection::rows`].
#[derive(Clone, Debug)]
pub struct Rows<'s> {
    selection: &'s Selection,
    /// Current turn of each loop. Unused for [`Loop::Pick`], whose turn is `block`.
    turns: Vec<u64>,
    /// Position reached by the even loops.
    begin: u64,
    /// Index into the selection's blocks; past the end once all rows were returned.
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

    /// Advances the innermost loop that has a turn left, and resets the loops inside it.
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
    /// The rest of the current row.
    row: Option<Row>,
}

impl<'s> Runs<'s> {
    pub(super) fn new(selection: &'s Selection) -> Runs<'s> {
        let mut rows = Rows::new(selection);
        let row = rows.next();
        Runs { rows, row }
    }

    /// Returns the run that begins with the last block of a row and continues as long as rows touch.
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
        // Blocks of one row do not touch, so only its last block may continue.
        if row.count > 1 {
            row.begin += row.stride;
            row.count -= 1;
            return Some(run);
        }
        Some(self.last_of_row(run))
    }
}

impl FusedIterator for Runs<'_> {}
