//! Copying what a selection takes of a tensor.

use std::time::{Duration, Instant};

use ingot_format::{Run, Selection, to_u64, to_usize};

use crate::failure::{Failure, read_exactly};
use crate::source::Source;
use crate::watch::Watch;

/// Runs that are closer than this in a file are read together: a call costs about as much as this many bytes.
const MAX_GAP_NBYTES: u64 = 16 << 10;

/// Bytes that are read together at most, which bounds the memory for what is thrown away.
const MAX_SPAN_NBYTES: u64 = 1 << 20;

/// Copies the selected bytes of the tensor that begins at `start` in the source to `dest`, which has just the
/// size of the selection.
pub(crate) fn gather(
    source: &dyn Source,
    start: u64,
    selection: &Selection,
    dest: &mut [u8],
    watch: &dyn Watch,
) -> Result<(), Failure> {
    let mut pace = Pace::new(watch);
    let mut scratch = Vec::new();
    let mut group: Vec<Run> = Vec::new();
    let mut rest = dest;
    for run in selection.runs() {
        let joins = match (group.first(), group.last()) {
            (Some(first), Some(last)) => {
                last.end <= run.begin
                    && run.begin - last.end < MAX_GAP_NBYTES
                    && run.end - first.begin <= MAX_SPAN_NBYTES
            }
            _ => true,
        };
        if !joins {
            rest = read_group(source, start, &group, &mut scratch, rest, &mut pace)?;
            group.clear();
        }
        group.push(run);
    }
    read_group(source, start, &group, &mut scratch, rest, &mut pace)?;
    Ok(())
}

/// Reads one group of runs, which ascend, to the front of `dest`; gives what is left of it.
fn read_group<'d>(
    source: &dyn Source,
    start: u64,
    group: &[Run],
    scratch: &mut Vec<u8>,
    dest: &'d mut [u8],
    pace: &mut Pace<'_>,
) -> Result<&'d mut [u8], Failure> {
    let (Some(first), Some(last)) = (group.first(), group.last()) else {
        return Ok(dest);
    };
    let position = start + first.begin;
    if group.len() == 1 {
        let (part, rest) = dest.split_at_mut(size(first.end - first.begin));
        read_in_pieces(source, position, part, pace)?;
        return Ok(rest);
    }
    scratch.resize(size(last.end - first.begin), 0);
    read_in_pieces(source, position, scratch, pace)?;
    let mut rest = dest;
    for run in group {
        let (part, after) = rest.split_at_mut(size(run.end - run.begin));
        part.copy_from_slice(&scratch[size(run.begin - first.begin)..size(run.end - first.begin)]);
        rest = after;
    }
    Ok(rest)
}

/// In pieces, because one run may be all of a tensor, and whoever interrupts does not wait for gigabytes.
fn read_in_pieces(
    source: &dyn Source,
    position: u64,
    dest: &mut [u8],
    pace: &mut Pace<'_>,
) -> Result<(), Failure> {
    let mut position = position;
    for piece in dest.chunks_mut(size(MAX_SPAN_NBYTES)) {
        read_exactly(source, position, piece)?;
        position += to_u64(piece.len());
        pace.check(piece.len())?;
    }
    Ok(())
}

/// A size that fits, because the whole selection was allocated before.
fn size(nbytes: u64) -> usize {
    to_usize(nbytes).unwrap_or(usize::MAX)
}

/// Asks a watch now and then, because asking may cost more than copying a run.
struct Pace<'w> {
    watch: &'w dyn Watch,
    nbytes: usize,
    asked: Instant,
}

impl<'w> Pace<'w> {
    const INTERVAL: Duration = Duration::from_millis(50);
    /// Bytes between two looks at the clock.
    const NBYTES: usize = 4 << 20;
    /// What a read counts besides its bytes: a call of the system takes about as long as copying these.
    const READ_NBYTES: usize = 64 << 10;

    fn new(watch: &'w dyn Watch) -> Pace<'w> {
        Pace {
            watch,
            nbytes: 0,
            asked: Instant::now(),
        }
    }

    fn check(&mut self, nbytes: usize) -> Result<(), Failure> {
        self.nbytes += nbytes + Pace::READ_NBYTES;
        if self.nbytes < Pace::NBYTES {
            return Ok(());
        }
        self.nbytes = 0;
        if self.asked.elapsed() < Pace::INTERVAL {
            return Ok(());
        }
        self.asked = Instant::now();
        if self.watch.interrupted() {
            Err(Failure::Interrupted)
        } else {
            Ok(())
        }
    }
}
