//! Reading runs of one file; runs that are close together are read at once.

use std::io::IoSliceMut;
use std::mem;
use std::ops::Range;

use ingot_format::{Row, StopFlag, saturating_usize, to_u64, to_usize};

use crate::error::Failure;
use crate::file::{ReadAt, Stream, read_exactly, read_until};

/// The page size of the machines on which the distance between addresses affected the speed of copies.
pub(crate) const PAGE_NBYTES: usize = 4096;

/// The number of destinations that one system call fills, and of long runs that are processed together.
pub(super) const VECTOR: usize = 1024;

/// The number of short runs that are processed together: enough to fill a read.
pub(super) const BATCH: usize = 8 << 10;

/// Runs that are closer than this in a file are read together: a call costs more than this many bytes. Runs that are
/// less than a page apart are also read together, since a disk reads whole pages, unless the read would discard more
/// bytes than it returns.
const CLOSE_NBYTES: u64 = 1 << 10;

/// Runs that are shorter than this, on average, are read with the gaps between them and then copied: the system takes longer
/// to put each of them into its own place.
const SHORT_NBYTES: usize = 256;

/// Blocks of at least this size are read one by one, directly into their destination.
const SHORT_BLOCK_NBYTES: u64 = 8 << 10;

/// Chunks below this share a read with their neighbours.
const ROWS_NBYTES: usize = 4 << 10;

/// Bytes of the file that one read of a row takes: they stay in the cache of a core until the blocks are copied.
const ROW_READ_NBYTES: u64 = 256 << 10;

/// Looks at the bytes of a file while they are read, such as for a digest.
pub(crate) trait Witness: Sync {
    /// Return the largest number of bytes that are best processed together.
    fn step_nbytes(&self) -> u64;

    /// Return the best position to split at most `most` bytes from `position` on.
    fn cut(&self, position: u64, most: u64) -> u64 {
        position + most
    }

    /// Look at the bytes at `position` of the file. Reads of one file begin in order, and each byte is seen once.
    fn see(&self, position: u64, bytes: &[u8]);

    /// Report that some bytes will not arrive, because reading them failed or panicked.
    fn end(&self) {}
}

/// Return the end of the bytes that `witness` processes together: at most `most` bytes from `position` on.
pub(super) fn step_end(witness: &dyn Witness, position: u64, most: u64) -> u64 {
    witness.cut(position, most.min(witness.step_nbytes()))
}

/// A run, and the memory that it fills.
pub(super) type ReadRun<'m> = (u64, &'m mut [u8]);

/// A source, or one long read of it.
pub(super) struct Input<'s> {
    pub(super) source: &'s dyn ReadAt,
    pub(super) witness: Option<&'s dyn Witness>,
    pub(super) stream: Option<Stream<'s>>,
    pub(super) stop: StopFlag<'s>,
}

/// The limits of one read.
struct Limit {
    /// Bytes from the first run to the last.
    nbytes: u64,
    /// The size of a run in bytes. Longer runs are read alone.
    run_nbytes: usize,
    /// The number of bytes that may be discarded.
    waste_nbytes: u64,
}

impl Limit {
    /// For reads that fill memory of our own, including gaps, from which the runs are copied.
    const MIXED: Limit = Limit {
        nbytes: 256 << 10,
        run_nbytes: 16 << 10,
        waste_nbytes: 256 << 10,
    };

    /// For reads that put each run into its own destination. Runs of 1 MiB may be read past the page cache, each alone.
    const VECTORED: Limit = Limit {
        nbytes: 8 << 20,
        run_nbytes: (1 << 20) - 1,
        waste_nbytes: 256 << 10,
    };
}

impl Input<'_> {
    /// Fill all runs; runs that are close together are read at once.
    pub(super) fn read(&mut self, runs: &mut [ReadRun<'_>], mixed: &mut Vec<u8>) -> Result<(), Failure> {
        let is_vectored = self.stream.is_none() && self.source.is_vectored();
        let mut rest = &mut *runs;
        while !rest.is_empty() {
            let mut is_mixed = !is_vectored;
            let limit = if is_mixed { &Limit::MIXED } else { &Limit::VECTORED };
            let mut count = together(rest, limit);
            if is_vectored && count > 1 && nbytes(&rest[..count]) < count * SHORT_NBYTES {
                is_mixed = true;
                count = together(rest, &Limit::MIXED);
            }
            let (now, later) = rest.split_at_mut(count);
            self.read_together(now, is_mixed, mixed)?;
            rest = later;
        }
        if self.stream.is_some() {
            // The witness may take a while, and must not keep the server waiting.
            self.show(runs);
        }
        Ok(())
    }

    /// Return whether [`Input::read_rows`] suits `nbytes` bytes that begin with `row`: they are many short blocks, and
    /// the source is in memory or the blocks are less than a page apart.
    ///
    /// Other sources would read more bytes than needed. Only local files have vectored reads.
    pub(super) fn suits_rows(&self, row: &Row, nbytes: usize) -> bool {
        let is_close = row.count > 1 && row.stride <= row.nbytes + to_u64(PAGE_NBYTES);
        self.stream.is_none()
            && self.witness.is_none()
            && nbytes >= ROWS_NBYTES
            && row.nbytes < SHORT_BLOCK_NBYTES
            && (is_close || self.source.memory().is_some())
            && self.source.is_vectored()
            && !self.source.waits()
    }

    /// Fill `dest` with the blocks of `rows`: copied from the mapping of the file, or read together with the bytes between
    /// them.
    pub(super) fn read_rows(
        &mut self,
        rows: &[Row],
        dest: &mut [u8],
        mixed: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        if self.source.copy_rows(rows, dest) {
            return Ok(());
        }
        // The source is not mapped, or the file was truncated: then reading it reports the error.
        let mut blocks = dest;
        for row in rows {
            let is_close = row.stride <= row.nbytes + to_u64(PAGE_NBYTES);
            let most = if is_close {
                ROW_READ_NBYTES.saturating_sub(row.nbytes) / row.stride.max(1) + 1
            } else {
                1
            };
            let mut done = 0;
            while done < row.count {
                let count = most.min(row.count - done);
                let begin = row.begin + done * row.stride;
                let some = Row { begin, count, ..*row };
                let (now, later) = mem::take(&mut blocks).split_at_mut(bytes_of(&some));
                self.read_blocks(&some, now, mixed)?;
                (blocks, done) = (later, done + count);
            }
        }
        Ok(())
    }

    /// Fill `dest` with the blocks of `row` by one read.
    fn read_blocks(&mut self, row: &Row, dest: &mut [u8], mixed: &mut Vec<u8>) -> Result<(), Failure> {
        if row.count == 1 {
            return self.fill(row.begin, dest);
        }
        let mixed = level(
            mixed,
            row.begin,
            saturating_usize((row.count - 1) * row.stride + row.nbytes),
        );
        read_exactly(self.source, row.begin, mixed, self.stop)?;
        let blocks = dest.chunks_exact_mut(saturating_usize(row.nbytes));
        for (number, block) in blocks.enumerate() {
            let at = number * saturating_usize(row.stride);
            block.copy_from_slice(&mixed[at..at + block.len()]);
        }
        Ok(())
    }

    fn show(&self, runs: &[ReadRun<'_>]) {
        if let Some(witness) = self.witness {
            runs.iter()
                .for_each(|(position, bytes)| witness.see(*position, bytes));
        }
    }

    /// Fill runs that ascend and are close together.
    fn read_together(
        &mut self,
        runs: &mut [ReadRun<'_>],
        is_mixed: bool,
        mixed: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let done = match runs {
            [(position, bytes)] => return self.fill(*position, bytes),
            _ if is_mixed => self.read_mixed(runs, mixed),
            _ => self.read_vectored(runs, mixed),
        };
        match done {
            Err(failure) if self.stream.is_some() => Err(failure),
            // One by one, so that the error names the run.
            Err(_) => runs
                .iter_mut()
                .try_for_each(|(position, bytes)| self.fill(*position, bytes)),
            Ok(()) => {
                if self.stream.is_none() {
                    self.show(runs);
                }
                Ok(())
            }
        }
    }

    fn fill(&mut self, position: u64, bytes: &mut [u8]) -> Result<(), Failure> {
        let witness = match (&mut self.stream, self.witness) {
            (Some(stream), _) => return stream.fill(position, bytes),
            (None, None) => return read_exactly(self.source, position, bytes, self.stop),
            (None, Some(witness)) => witness,
        };
        let (mut at, mut rest) = (position, bytes);
        while !rest.is_empty() {
            let end = step_end(witness, at, to_u64(rest.len()));
            let (bytes, after) = rest.split_at_mut(saturating_usize(end - at));
            read_exactly(self.source, at, bytes, self.stop)?;
            witness.see(at, bytes);
            (at, rest) = (end, after);
        }
        Ok(())
    }

    /// Read the runs and the gaps between them, and copy the runs from there.
    fn read_mixed(&mut self, runs: &mut [ReadRun<'_>], mixed: &mut Vec<u8>) -> Result<(), Failure> {
        let span = span(runs);
        let mixed = level(mixed, span.start, saturating_usize(span.end - span.start));
        match &mut self.stream {
            Some(stream) => stream.fill(span.start, mixed)?,
            None => read_exactly(self.source, span.start, mixed, self.stop)?,
        }
        for (position, bytes) in runs {
            let at = saturating_usize(*position - span.start);
            bytes.copy_from_slice(&mixed[at..at + bytes.len()]);
        }
        Ok(())
    }

    /// Read each run into its own destination, and discard the gaps.
    fn read_vectored(&mut self, runs: &mut [ReadRun<'_>], waste: &mut Vec<u8>) -> Result<(), Failure> {
        let span = span(runs);
        let expected = saturating_usize(span.end - span.start);
        let unwanted = expected - nbytes(runs);
        waste.resize(unwanted.max(waste.len()), 0);
        let mut waste: &mut [u8] = waste;
        let mut places = Vec::with_capacity(2 * runs.len());
        let mut end = span.start;
        for (position, bytes) in runs.iter_mut() {
            let gap = saturating_usize(*position - end);
            if gap > 0 {
                let (between, after) = mem::take(&mut waste).split_at_mut(gap);
                places.push(IoSliceMut::new(between));
                waste = after;
            }
            end = *position + to_u64(bytes.len());
            places.push(IoSliceMut::new(bytes));
        }
        let (source, mut places) = (self.source, &mut places[..]);
        read_until(span.start, expected, |found| {
            let some = VECTOR.min(places.len());
            let count = source.read_vectored_at(span.start + to_u64(found), &mut places[..some])?;
            IoSliceMut::advance_slices(&mut places, count);
            Ok(count)
        })
    }
}

/// Return how many of these runs, from the first on, are read at once.
fn together(runs: &[ReadRun<'_>], limit: &Limit) -> usize {
    let Some(((begin, first), others)) = runs.split_first() else {
        return 0;
    };
    if first.len() > limit.run_nbytes {
        return 1;
    }
    let (mut end, mut wanted, mut waste) = (begin + to_u64(first.len()), to_u64(first.len()), 0);
    let joins = |(position, bytes): &&ReadRun<'_>| {
        let Some(gap) = position.checked_sub(end) else {
            return false;
        };
        end = position + to_u64(bytes.len());
        wanted += to_u64(bytes.len());
        waste += gap;
        let is_close = gap <= CLOSE_NBYTES || gap <= to_u64(PAGE_NBYTES) && waste <= wanted;
        is_close
            && bytes.len() <= limit.run_nbytes
            && end - begin <= limit.nbytes
            && waste <= limit.waste_nbytes
    };
    1 + others.iter().take_while(joins).count()
}

/// Return the range from the first byte to the last of ascending runs.
fn span(runs: &[ReadRun<'_>]) -> Range<u64> {
    let end = |(position, bytes): &ReadRun<'_>| *position + to_u64(bytes.len());
    runs.first().map_or(0, |run| run.0)..runs.last().map_or(0, end)
}

/// Bytes of all blocks.
fn bytes_of(row: &Row) -> usize {
    saturating_usize(row.nbytes * row.count)
}

fn nbytes(runs: &[ReadRun<'_>]) -> usize {
    runs.iter().map(|(_, bytes)| bytes.len()).sum()
}

/// `nbytes` bytes of `buffer`, which grows if needed, that begin as far into a page as `position` in the file.
///
/// Processors copy at a fifth of their speed if the destination begins a few bytes further into a page than the source
/// (2026-11, pread of 64 KiB: 2 GB/s at a distance of 8 or 16 bytes, 10 GB/s at 0, 32 or 64).
pub(crate) fn level(buffer: &mut Vec<u8>, position: u64, nbytes: usize) -> &mut [u8] {
    if nbytes == 0 {
        return &mut [];
    }
    let page = to_u64(PAGE_NBYTES);
    buffer.resize((nbytes + PAGE_NBYTES).max(buffer.len()), 0);
    let address = to_u64(buffer.as_ptr().addr()) % page;
    let skip = to_usize((position % page + page - address) % page).unwrap_or(0);
    &mut buffer[skip..skip + nbytes]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_get_the_place_in_a_page_that_they_have_in_the_file() {
        let mut buffer = Vec::new();
        for (position, nbytes) in [
            (0, 10),
            (16, 3 * PAGE_NBYTES),
            (5 * 4096 + 4095, 3 * PAGE_NBYTES),
            (1 << 40, 1),
        ] {
            let bytes = level(&mut buffer, position, nbytes);
            assert_eq!(bytes.len(), nbytes);
            assert_eq!(to_u64(bytes.as_ptr().addr()) % 4096, position % 4096);
        }
    }
}
