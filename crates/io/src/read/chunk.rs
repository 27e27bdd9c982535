//! Pieces cut into chunks, and chunks joined into tasks for threads.

use std::ops::Range;

use ingot_format::{Dtype, Row, Rows, Selection, saturating_usize, to_u64, to_usize};

use super::buffer::Destination;
use super::input::PAGE_NBYTES;
use super::plan::{Piece, Plan, widths};
use crate::file::ReadAt;
use crate::pages::HUGE_PAGE_NBYTES;

/// A run costs at least as much as this many bytes of a long one, so that a chunk of many short runs does not delay an
/// interruption.
const RUN_NBYTES: u64 = 128;

/// Some of the bytes of a piece, and their destination.
pub(super) struct Chunk<'p, 'd> {
    pub(super) file: usize,
    /// The cost of reading it, in bytes of a long run.
    pub(super) cost: usize,
    /// The range in the file. It begins at the chunk's first byte; its end counts only if the chunk is part of one long
    /// read.
    pub(super) span: Range<u64>,
    /// The bytes of the chunk are the first of these.
    pub(super) runs: Runs<'p>,
    pub(super) converted: Option<(Dtype, Dtype)>,
    pub(super) dest: Destination<'d>,
}

impl<'p, 'd> Chunk<'p, 'd> {
    /// Return a chunk of the same bytes with another destination of this size.
    pub(super) fn into<'e>(self, dest: Destination<'e>) -> Chunk<'p, 'e> {
        Chunk {
            file: self.file,
            cost: self.cost,
            span: self.span,
            runs: self.runs,
            converted: self.converted,
            dest,
        }
    }

    /// Whether its bytes are read from the file directly to their destination.
    pub(super) fn is_straight(&self) -> bool {
        self.converted.is_none() && matches!(&self.dest, Destination::Host(dest) if dest.is_contiguous())
    }

    /// Split off the memory of its first `nbytes` bytes. Return it and the rest.
    pub(super) fn split_at(self, nbytes: usize) -> (Destination<'d>, Option<Chunk<'p, 'd>>) {
        // If there are many chunks, most are taken whole.
        if nbytes >= self.dest.len() {
            return (self.dest, None);
        }
        let (first, rest) = self.dest.split_at(nbytes);
        let rest = (rest.len() > 0).then_some(Chunk { dest: rest, ..self });
        (first, rest)
    }
}

/// Chunks that one thread reads, one after the other.
pub(super) type Task<'p, 'd> = Vec<Chunk<'p, 'd>>;

/// Split a plan into tasks, in the order of the files. `dests` has the memory of each block.
pub(super) fn tasks<'p, 'd>(
    plan: &Plan<'p>,
    dests: impl IntoIterator<Item = Destination<'d>>,
    sources: &[&dyn ReadAt],
    chunk_nbytes: usize,
) -> Vec<Task<'p, 'd>> {
    let mut chunks = split(plan, dests, sources, chunk_nbytes);
    chunks.sort_by_key(|chunk| (chunk.file, chunk.span.start));
    join(chunks, sources, chunk_nbytes)
}

/// Split a plan into chunks.
fn split<'p, 'd>(
    plan: &Plan<'p>,
    dests: impl IntoIterator<Item = Destination<'d>>,
    sources: &[&dyn ReadAt],
    chunk_nbytes: usize,
) -> Vec<Chunk<'p, 'd>> {
    let mut chunks = Vec::with_capacity(plan.pieces().len());
    let mut pieces = plan.pieces().iter().peekable();
    for (number, dest) in dests.into_iter().enumerate() {
        // If there are many blocks, most have one piece.
        if let Some(piece) = pieces.next_if(|piece| piece.block == number && piece.nbytes == dest.len()) {
            let gap = sources[piece.file].gap_nbytes();
            cut(piece, dest, gap, chunk_nbytes, &mut chunks);
            continue;
        }
        let mut rest = dest;
        let mut at = 0;
        while let Some(piece) = pieces.next_if(|piece| piece.block == number) {
            let (_, from_piece) = rest.split_at(piece.at - at);
            let (dest, after) = from_piece.split_at(piece.nbytes);
            let dest = dest.after(piece.at - at);
            let gap = sources[piece.file].gap_nbytes();
            cut(piece, dest, gap, chunk_nbytes, &mut chunks);
            rest = after;
            at = piece.at + piece.nbytes;
        }
    }
    chunks
}

/// Cut a piece into chunks of at most `chunk_nbytes` bytes, in the file and in memory. They end at the border of a huge page, or
/// of a smaller part of it, so that no two threads fault in the same one. If one read covers a `gap` of this many bytes,
/// chunks also end at larger gaps: what follows is another read, for another thread.
fn cut<'p, 'd>(
    piece: &Piece<'p>,
    dest: Destination<'d>,
    gap: u64,
    chunk_nbytes: usize,
    chunks: &mut Vec<Chunk<'p, 'd>>,
) {
    let (stored, wanted) = widths(piece.converted);
    // The cost of each byte, if runs are so short that their number counts.
    let blocks = piece.gathered.map_or(1, Selection::block_count);
    let run_nbytes = to_u64(piece.stored_nbytes()) / blocks.max(1);
    let cost = to_usize(RUN_NBYTES / run_nbytes.max(1)).map_or(1, |cost| cost.max(1));
    let most = (chunk_nbytes / cost / stored.max(wanted)).max(1) * wanted;
    let border = most.min(HUGE_PAGE_NBYTES);
    let mut runs = Runs::of(piece);
    let chunk = |span, runs, dest: Destination<'d>| Chunk {
        file: piece.file,
        cost: dest.len().saturating_mul(cost),
        span,
        runs,
        converted: piece.converted,
        dest,
    };
    if gap == 0 && (1..=most).contains(&dest.len()) {
        // If there are many pieces, most are one chunk.
        let begin = runs.begin();
        chunks.push(chunk(begin..begin, runs, dest));
        return;
    }
    let mut rest = dest;
    while rest.len() > 0 {
        let first = match &rest {
            Destination::Host(dest) if dest.len() > most && dest.is_contiguous() => {
                let first = most - dest.addr() % border;
                (first - first % wanted).max(wanted)
            }
            // The end of a page of the file, so that reads past the page cache are of whole pages.
            Destination::Device(dest) if dest.len() > most && piece.is_straight() && most > PAGE_NBYTES => {
                most - to_usize(runs.begin() % to_u64(PAGE_NBYTES)).unwrap_or(0)
            }
            _ => most.min(rest.len()),
        };
        let here = runs.clone();
        let span = runs.pass(first / wanted * stored, gap, to_u64(chunk_nbytes));
        let (dest, after) = rest.split_at(span.nbytes / stored * wanted);
        chunks.push(chunk(span.range, here, dest));
        rest = after;
    }
}

/// Join chunks into tasks. If the source makes one long read of several, a task is such a read: neighbours with gaps of at most
/// [`ReadAt::gap_nbytes`], `most` bytes from the first to the last. From other sources, a task is a sequence of chunks
/// with a total cost of at most `most` bytes.
fn join<'p, 'd>(mut chunks: Vec<Chunk<'p, 'd>>, sources: &[&dyn ReadAt], most: usize) -> Vec<Task<'p, 'd>> {
    let mut begins = Vec::new();
    let (mut file, mut span, mut cost) = (0, 0..0, 0);
    for (rank, chunk) in chunks.iter().enumerate() {
        let goes_on = || match sources[chunk.file].gap_nbytes() {
            0 => cost + chunk.cost <= most,
            gap => {
                chunk.span.start >= span.end
                    && chunk.span.start - span.end <= gap
                    && chunk.span.end - span.start <= to_u64(most)
            }
        };
        if rank > 0 && chunk.file == file && goes_on() {
            cost += chunk.cost;
            span.end = chunk.span.end;
        } else {
            (file, span, cost) = (chunk.file, chunk.span.clone(), chunk.cost);
            begins.push(rank);
        }
    }
    // Taken from the end, so that the first task stays in place: with many small tensors it has nearly all of them.
    let later = begins.iter().skip(1).rev();
    let mut tasks: Vec<_> = later.map(|&begin| chunks.split_off(begin)).collect();
    tasks.extend((!chunks.is_empty()).then_some(chunks));
    tasks.reverse();
    tasks
}

/// A cursor over the bytes of a piece, run by run, in the order of the result.
#[derive(Clone)]
pub(super) struct Runs<'p> {
    /// The rows count from here.
    position: u64,
    /// The rows after this one. Boxed, since most pieces have no more than one row, and there may be many.
    rows: Option<Box<Rows<'p>>>,
    row: Option<Row>,
    /// The number of bytes of the row's first block that were skipped already.
    passed: u64,
}

/// The number of runs that are read at once.
pub(super) struct Span {
    /// The range from the first byte in the file to the last.
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

    /// Skip at most `nbytes` bytes. With a `gap`, stop before a larger gap, before a run that goes back, and after the
    /// last run that ends within `most` bytes of the start of the first.
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
            passed += saturating_usize(run.end - run.start);
            end = run.end;
        }
        let (range, nbytes) = (begin..end, passed);
        Span { range, nbytes }
    }

    /// Pass `nbytes` bytes, whole rows at a time if possible.
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

    /// Return the next blocks in one row, at most `most` bytes in all, and advance past them. Positions are counted
    /// from the start of the file.
    fn next_row(&mut self, most: usize) -> Option<Row> {
        let (row, most) = (self.row?, to_u64(most));
        let is_part = self.passed > 0 || most < row.nbytes;
        let (nbytes, count) = if is_part {
            (most.min(row.nbytes - self.passed), 1)
        } else {
            (row.nbytes, row.count.min(most / row.nbytes))
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
            taken += saturating_usize(row.nbytes * row.count);
            rows.push(row);
        }
        taken
    }

    /// Return the current row if the piece is a selection.
    pub(super) fn row(&self) -> Option<&Row> {
        self.row.as_ref().filter(|_| self.rows.is_some())
    }

    /// Return the position in the file at which the current row ends.
    pub(super) fn row_end(&self) -> u64 {
        let end = |row: &Row| row.begin + (row.count - 1) * row.stride + row.nbytes;
        self.position + self.row.as_ref().map_or(0, end)
    }

    fn turn(&mut self) {
        self.row = self.rows.as_mut().and_then(Iterator::next);
        self.passed = 0;
    }

    /// Return the position in the file at which the next run begins.
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

    /// Pass the next run, of at most `most` bytes, and return it.
    pub(super) fn next(&mut self, most: usize) -> Option<Range<u64>> {
        let run = self.peek(most)?;
        match &mut self.row {
            // The common case, which needs no division.
            Some(row) if row.count > 1 && run.end - run.start == row.nbytes => {
                row.begin += row.stride;
                row.count -= 1;
            }
            _ => self.skip(run.end - run.start),
        }
        Some(run)
    }
}

#[cfg(test)]
#[path = "tests/chunk.rs"]
mod tests;
