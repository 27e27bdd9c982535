//! The bytes of a piece in the order in which they are wanted.

use std::ops::Range;

use ingot_format::{Row, Rows, to_u64, to_usize};

use super::plan::Piece;

/// A place in the bytes of a piece, which it goes through run by run.
#[derive(Clone)]
pub(super) struct Runs<'p> {
    /// What the rows are counted from.
    position: u64,
    /// The rows after this one. Boxed, since most pieces have no more than one row, and there may be many.
    rows: Option<Box<Rows<'p>>>,
    row: Option<Row>,
    /// Bytes of the row's first block that lie behind.
    passed: u64,
}

/// Runs that are read at once.
pub(super) struct Span {
    /// From the first byte in the file to the last.
    pub(super) range: Range<u64>,
    /// Bytes of the runs.
    pub(super) nbytes: usize,
}

impl<'p> Runs<'p> {
    pub(super) fn of(piece: &Piece<'p>) -> Runs<'p> {
        let mut rows = piece.gathered.map(|selection| Box::new(selection.rows()));
        let row = match &mut rows {
            Some(rows) => rows.next(),
            None => Some(Row {
                begin: 0,
                nbytes: to_u64(piece.stored_nbytes()),
                count: 1,
                stride: 0,
            }),
        };
        Runs {
            position: piece.position,
            rows,
            row,
            passed: 0,
        }
    }

    /// Goes over at most `nbytes` bytes. Where there is a `gap`, no further than to one that is larger, to a run that lies
    /// before the last, or to the last run that ends within `most` bytes of where the first begins.
    pub(super) fn pass(&mut self, nbytes: usize, gap: u64, most: u64) -> Span {
        let begin = self.begin();
        if gap == 0 {
            self.skip(to_u64(nbytes));
            let range = begin..begin;
            return Span { range, nbytes };
        }
        let (mut end, mut passed) = (begin, 0);
        while passed < nbytes {
            let is_near = |run: &Range<u64>| {
                passed == 0 || run.start >= end && run.start - end <= gap && run.end - begin <= most
            };
            let Some(run) = self.peek(nbytes - passed).filter(is_near) else {
                break;
            };
            self.skip(run.end - run.start);
            passed += to_usize(run.end - run.start).unwrap_or(usize::MAX);
            end = run.end;
        }
        let (range, nbytes) = (begin..end, passed);
        Span { range, nbytes }
    }

    /// Goes `nbytes` bytes on, by whole rows where that leads there.
    fn skip(&mut self, nbytes: u64) {
        let mut left = nbytes;
        while left > 0
            && let Some(row) = &mut self.row
        {
            let to_go = row.nbytes * row.count - self.passed;
            if left >= to_go {
                left -= to_go;
                self.turn();
                continue;
            }
            let reach = self.passed + left;
            let blocks = reach / row.nbytes;
            row.begin += blocks * row.stride;
            row.count -= blocks;
            self.passed = reach % row.nbytes;
            left = 0;
        }
    }

    /// Return the blocks that come next in one row, at most `most` bytes in all, and go on behind them. Their positions
    /// count from the beginning of the file.
    fn next_row(&mut self, most: usize) -> Option<Row> {
        let (row, most) = (self.row?, to_u64(most));
        let is_part = self.passed > 0 || most < row.nbytes;
        let (nbytes, count) = match is_part {
            true => (most.min(row.nbytes - self.passed), 1),
            false => (row.nbytes, row.count.min(most / row.nbytes)),
        };
        let begin = self.begin();
        self.skip(nbytes * count);
        Some(Row {
            begin,
            nbytes,
            count,
            ..row
        })
    }

    /// Add the rows of the next `nbytes` bytes to `rows`, at most `count` of them, and return their bytes.
    pub(super) fn take_rows(&mut self, nbytes: usize, count: usize, rows: &mut Vec<Row>) -> usize {
        let mut taken = 0;
        while taken < nbytes
            && rows.len() < count
            && let Some(row) = self.next_row(nbytes - taken)
        {
            taken += to_usize(row.nbytes * row.count).unwrap_or(usize::MAX);
            rows.push(row);
        }
        taken
    }

    /// Return the current row if the piece is a selection.
    pub(super) fn row(&self) -> Option<&Row> {
        self.row.as_ref().filter(|_| self.rows.is_some())
    }

    /// Return where the current row ends in the file.
    pub(super) fn row_end(&self) -> u64 {
        let end = |row: &Row| row.begin + (row.count - 1) * row.stride + row.nbytes;
        self.position + self.row.as_ref().map_or(0, end)
    }

    fn turn(&mut self) {
        self.row = self.rows.as_mut().and_then(Iterator::next);
        self.passed = 0;
    }

    /// Where the next run begins in the file.
    pub(super) fn begin(&self) -> u64 {
        let row = self.row.as_ref();
        self.position + row.map_or(0, |row| row.begin + self.passed)
    }

    /// The next run, of at most `most` bytes.
    fn peek(&self, most: usize) -> Option<Range<u64>> {
        let left = self.row.as_ref()?.nbytes - self.passed;
        let begin = self.begin();
        Some(begin..begin + left.min(to_u64(most)))
    }

    /// Goes on by the next run, of at most `most` bytes.
    pub(super) fn next(&mut self, most: usize) -> Option<Range<u64>> {
        let run = self.peek(most)?;
        match &mut self.row {
            // Nearly all go this way, which takes no division.
            Some(row) if row.count > 1 && run.end - run.start == row.nbytes => {
                row.begin += row.stride;
                row.count -= 1;
            }
            _ => self.skip(run.end - run.start),
        }
        Some(run)
    }
}
