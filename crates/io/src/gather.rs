//! Copying what a selection takes of a tensor.

use std::time::{Duration, Instant};

use ingot_format::{Run, Selection, to_usize};

use crate::execute::Failure;
use crate::source::{Source, read_full};
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
    // From memory nothing is gained by reading what lies between two runs.
    let (max_gap, max_span) = if source.memory().is_some() {
        (0, u64::MAX)
    } else {
        (MAX_GAP_NBYTES, MAX_SPAN_NBYTES)
    };
    let mut pace = Pace::default();
    let mut scratch = Vec::new();
    let mut group: Vec<Run> = Vec::new();
    let mut rest = dest;
    for run in selection.runs() {
        let joins = match (group.first(), group.last()) {
            (Some(first), Some(last)) => {
                last.end <= run.begin && run.begin - last.end < max_gap && run.end - first.begin <= max_span
            }
            _ => true,
        };
        if !joins {
            rest = read_group(source, start, &group, &mut scratch, rest)?;
            group.clear();
            pace.check(watch)?;
        }
        group.push(run);
    }
    read_group(source, start, &group, &mut scratch, rest)?;
    Ok(())
}

/// Reads one group of runs, which ascend, to the front of `dest`; gives what is left of it.
fn read_group<'d>(
    source: &dyn Source,
    start: u64,
    group: &[Run],
    scratch: &mut Vec<u8>,
    dest: &'d mut [u8],
) -> Result<&'d mut [u8], Failure> {
    let (Some(first), Some(last)) = (group.first(), group.last()) else {
        return Ok(dest);
    };
    let position = start + first.begin;
    if group.len() == 1 {
        let (part, rest) = dest.split_at_mut(size(first.end - first.begin));
        read_exactly(source, position, part)?;
        return Ok(rest);
    }
    scratch.resize(size(last.end - first.begin), 0);
    read_exactly(source, position, scratch)?;
    let mut rest = dest;
    for run in group {
        let (part, after) = rest.split_at_mut(size(run.end - run.begin));
        part.copy_from_slice(&scratch[size(run.begin - first.begin)..size(run.end - first.begin)]);
        rest = after;
    }
    Ok(rest)
}

fn read_exactly(source: &dyn Source, position: u64, dest: &mut [u8]) -> Result<(), Failure> {
    let expected = dest.len();
    match read_full(source, position, dest) {
        Ok(found) if found == expected => Ok(()),
        Ok(found) => Err(Failure::Read {
            position,
            expected,
            found,
            source: None,
        }),
        Err(fault) => Err(Failure::Read {
            position,
            expected,
            found: 0,
            source: Some(fault),
        }),
    }
}

/// A size that fits, because the whole selection was allocated before.
fn size(nbytes: u64) -> usize {
    to_usize(nbytes).unwrap_or(usize::MAX)
}

/// Asks a watch now and then, because asking may cost more than copying a run.
struct Pace {
    groups: u32,
    asked: Instant,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            groups: 0,
            asked: Instant::now(),
        }
    }
}

impl Pace {
    const INTERVAL: Duration = Duration::from_millis(50);
    /// Groups between two looks at the clock.
    const GROUPS: u32 = 64;

    fn check(&mut self, watch: &dyn Watch) -> Result<(), Failure> {
        self.groups += 1;
        if self.groups < Pace::GROUPS || self.asked.elapsed() < Pace::INTERVAL {
            return Ok(());
        }
        *self = Pace::default();
        if watch.interrupted() {
            Err(Failure::Interrupted)
        } else {
            Ok(())
        }
    }
}
