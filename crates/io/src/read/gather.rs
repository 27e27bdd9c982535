//! Copying what a selection takes of a tensor.

use ingot_format::{Row, Rows, Run, Selection, to_u64, to_usize};

use crate::failure::{Failure, read_exactly};
use crate::source::Source;
use crate::stream::Stream;

/// Runs that are closer than this in a file are read together: a call costs about as much as this many bytes.
///
/// So are runs whose distance is at most half of what they bring, whatever that is. More is not read for nothing: of
/// runs longer than this, half of their bytes at most.
const MAX_GAP_NBYTES: u64 = 1 << 10;

/// Bytes that are read together at most, which bounds the memory for what is thrown away.
const MAX_SPAN_NBYTES: u64 = 256 << 10;

/// Runs below this are taken out of the mapping where there is one. Reading longer ones costs less than mapping their
/// pages does.
const SHORT_RUN_NBYTES: u64 = 8 << 10;

/// Below this number of runs there is nothing to be won by anything but reading them.
const FEW_RUNS: usize = 8;

/// The page of the machines on which the distance of addresses was seen to matter.
pub(crate) const PAGE_NBYTES: usize = 4096;

/// Runs that are looked at together: as many as one call of the system takes.
const BATCH: usize = 1024;

/// A place in a selection's bytes, which it goes through in the order of the result.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'s> {
    rows: Rows<'s>,
    row: Option<Row>,
    /// Bytes of the row's first block that lie behind.
    passed: u64,
}

impl<'s> Cursor<'s> {
    pub(crate) fn new(selection: &'s Selection) -> Cursor<'s> {
        let mut rows = selection.rows();
        let row = rows.next();
        Cursor { rows, row, passed: 0 }
    }

    /// Goes `nbytes` bytes on, by whole rows where that leads there.
    pub(crate) fn skip(&mut self, nbytes: u64) {
        let mut left = nbytes;
        while left > 0
            && let Some(row) = &mut self.row
        {
            let to_go = row.nbytes * row.count - self.passed;
            if left >= to_go {
                left -= to_go;
                self.row = self.rows.next();
                self.passed = 0;
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

    /// Where the next run begins, counted from the start of the tensor.
    pub(crate) fn begin(&self) -> u64 {
        self.row.as_ref().map_or(0, |row| row.begin + self.passed)
    }

    /// The next run, of at most `most` bytes.
    fn next(&mut self, most: u64) -> Option<Run> {
        let row = self.row.as_mut()?;
        let begin = row.begin + self.passed;
        let to_go = row.nbytes - self.passed;
        if to_go > most {
            self.passed += most;
            return Some(Run {
                begin,
                end: begin + most,
            });
        }
        self.passed = 0;
        if row.count > 1 {
            row.begin += row.stride;
            row.count -= 1;
        } else {
            self.row = self.rows.next();
        }
        Some(Run {
            begin,
            end: begin + to_go,
        })
    }
}

/// Fills `dest` with the bytes from `cursor` on of the tensor that begins at `start` in the source.
pub(crate) fn gather(
    source: &dyn Source,
    start: u64,
    cursor: &mut Cursor<'_>,
    dest: &mut [u8],
) -> Result<(), Failure> {
    let mut scratch = Vec::new();
    let mut batch: Vec<Run> = Vec::new();
    let mut rest = dest;
    while !rest.is_empty() {
        batch.clear();
        let mut nbytes = 0;
        while batch.len() < BATCH
            && nbytes < rest.len()
            && let Some(run) = cursor.next(to_u64(rest.len() - nbytes))
        {
            nbytes += length(run);
            batch.push(run);
        }
        if batch.is_empty() {
            break;
        }
        let (part, after) = rest.split_at_mut(nbytes);
        copy(source, start, &batch, part, &mut scratch)?;
        rest = after;
    }
    Ok(())
}

/// Fills `dest` with `runs`.
fn copy(
    source: &dyn Source,
    start: u64,
    runs: &[Run],
    dest: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<(), Failure> {
    if are_scattered(runs) && source.copy_runs(start, runs, dest) {
        return Ok(());
    }
    // Also where copying failed: this says what is wrong.
    read(source, start, runs, dest, scratch)
}

/// Whether the runs are so short and so far apart that a call for each would cost more than their bytes.
fn are_scattered(runs: &[Run]) -> bool {
    let joined = runs.windows(2).filter(|pair| joins(&pair[0], &pair[1])).count();
    runs.len() >= FEW_RUNS
        && 2 * joined < runs.len()
        && runs.iter().all(|run| run.nbytes() < SHORT_RUN_NBYTES)
}

/// Whether two runs are better read as one.
fn joins(one: &Run, next: &Run) -> bool {
    let most = MAX_GAP_NBYTES.max(one.nbytes().min(next.nbytes()) / 2);
    one.end <= next.begin && next.begin - one.end <= most
}

/// Reads `runs` from the source, those that are close together at once.
fn read(
    source: &dyn Source,
    start: u64,
    runs: &[Run],
    dest: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<(), Failure> {
    if source.gap_nbytes() > 0 {
        return read_streams(source, start, runs, dest);
    }
    let mut rest = dest;
    let mut runs = runs;
    while let [first, others @ ..] = runs {
        let mut last = first;
        let mut count = 1;
        for next in others {
            if !joins(last, next) || next.end - first.begin > MAX_SPAN_NBYTES {
                break;
            }
            last = next;
            count += 1;
        }
        let (span, after) = runs.split_at(count);
        rest = read_span(source, start, span, rest, scratch)?;
        runs = after;
    }
    Ok(())
}

/// As [`read`], from a source where it is beginning a read that costs.
fn read_streams(source: &dyn Source, start: u64, runs: &[Run], dest: &mut [u8]) -> Result<(), Failure> {
    let gap = source.gap_nbytes();
    let mut rest = dest;
    for span in runs.chunk_by(|one, next| one.end <= next.begin && next.begin - one.end <= gap) {
        let (Some(first), Some(last)) = (span.first(), span.last()) else {
            continue;
        };
        let mut stream = Stream::new(source, start + first.begin..start + last.end);
        for &run in span {
            let (part, after) = rest.split_at_mut(length(run));
            match &mut stream {
                Some(stream) => stream.fill(start + run.begin, part)?,
                None => read_exactly(source, start + run.begin, part)?,
            }
            rest = after;
        }
    }
    Ok(())
}

/// Reads runs that ascend, and all between them, to the front of `dest`; gives what is left of it.
fn read_span<'d>(
    source: &dyn Source,
    start: u64,
    span: &[Run],
    dest: &'d mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<&'d mut [u8], Failure> {
    let (Some(first), Some(last)) = (span.first(), span.last()) else {
        return Ok(dest);
    };
    let position = start + first.begin;
    let whole = Run {
        begin: first.begin,
        end: last.end,
    };
    let nbytes = span.iter().map(|&run| length(run)).sum();
    let (part, rest) = dest.split_at_mut(nbytes);
    if nbytes == length(whole) {
        read_exactly(source, position, part)?;
        return Ok(rest);
    }
    scratch.resize((length(whole) + PAGE_NBYTES).max(scratch.len()), 0);
    let scratch = level(scratch, position, length(whole));
    read_exactly(source, position, scratch)?;
    let mut at = 0;
    for &run in span {
        let from = length(Run {
            begin: first.begin,
            end: run.begin,
        });
        part[at..at + length(run)].copy_from_slice(&scratch[from..from + length(run)]);
        at += length(run);
    }
    Ok(rest)
}

/// `nbytes` bytes of `buffer`, which has a page more, that begin as far into a page as `position` does in the file.
///
/// Processors copy to an address a few bytes further into a page than the one they copy from at a fifth of their speed
/// (2026-11, pread of 64 KiB: 2 GB/s where the distance is 8 or 16 bytes, 10 GB/s where it is 0, 32 or 64).
pub(crate) fn level(buffer: &mut [u8], position: u64, nbytes: usize) -> &mut [u8] {
    let page = to_u64(PAGE_NBYTES);
    let address = to_u64(buffer.as_ptr().addr()) % page;
    let skip = to_usize((position % page + page - address) % page).unwrap_or(0);
    &mut buffer[skip..skip + nbytes]
}

/// A size that fits, because the whole selection has a place in memory.
fn length(run: Run) -> usize {
    to_usize(run.nbytes()).unwrap_or(usize::MAX)
}
