//! Reading the chunks of a task to their memory.
//!
//! The bytes of a chunk are runs. Up to [`BATCH`] of them are processed together, from as many chunks as needed. Bytes
//! that are converted, scattered or only shown to a witness go to a stage, which stays in a core's cache unless a
//! witness needs more at once.

use std::cell::LazyCell;
use std::mem;
use std::sync::{Mutex, PoisonError};

use ingot_format::{Dtype, StopFlag, saturating_usize, to_u64, to_usize};

use super::buffer::Destination;
use super::chunk::{Chunk, Task};
use super::input::{BATCH, Input, VECTOR, Witness, level, step_end};
use super::plan::widths;
use crate::convert::convert;
use crate::error::Failure;
use crate::file::{ReadAt, Stream};
use crate::memory::Dest;

/// Bytes that wait between the file and the conversion or the scattering, in the wider of the two dtypes: few enough to stay
/// in the cache.
const STAGE_NBYTES: usize = 128 << 10;

/// Below this, page faults take no longer than a call that populates the memory.
const POPULATE_NBYTES: usize = 64 << 10;

/// Stages that one task after the other uses: as many as there are threads.
#[derive(Default)]
pub(super) struct Stages(Mutex<Vec<Stage>>);

/// Scratch memory of one thread, which grows as needed.
#[derive(Default)]
pub(super) struct Stage {
    /// Bytes to convert or scatter.
    packed: Vec<u8>,
    /// Converted bytes to scatter.
    converted: Vec<u8>,
    /// Runs that are read together, and the gaps between them.
    mixed: Vec<u8>,
    /// Bytes from a network that are copied to a device next.
    pub(super) relayed: Vec<u8>,
}

impl Stages {
    pub(super) fn lend<R>(&self, work: impl FnOnce(&mut Stage) -> R) -> R {
        let locked = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stage = locked().pop().unwrap_or_default();
        let outcome = work(&mut stage);
        locked().push(stage);
        outcome
    }
}

/// Read chunks of one file, and return the number of bytes that they filled. A source that makes one long read of
/// several short ones gets one read.
pub(super) fn read(
    source: &dyn ReadAt,
    witness: Option<&dyn Witness>,
    chunks: Task<'_, '_>,
    stage: &mut Stage,
    stop: StopFlag<'_>,
) -> Result<usize, Failure> {
    let nbytes = chunks.iter().map(|chunk| chunk.dest.len()).sum();
    let span = match &chunks[..] {
        [first, .., last] => first.span.start..last.span.end,
        [only] => only.span.clone(),
        [] => 0..0,
    };
    let stream = if source.gap_nbytes() > 0 && !span.is_empty() {
        Stream::new(source, span, stop)
    } else {
        None
    };
    let mut input = Input {
        source,
        witness,
        stream,
        stop,
    };
    let mut batch = Batch::default();
    let ends = chunks.first().zip(chunks.last());
    let reach = ends.map_or(0..0, |(first, last)| first.runs.begin()..last.runs.row_end());
    let is_cold = LazyCell::new(|| source.is_cold(&reach));
    for mut chunk in chunks {
        if let Destination::Host(dest) = &mut chunk.dest
            && dest.len() >= POPULATE_NBYTES
        {
            dest.populate();
        }
        let suits = chunk
            .runs
            .row()
            .is_some_and(|row| input.suits_rows(row, chunk.dest.len()));
        if suits && !*is_cold {
            batch.read(&mut input, stage)?;
            read_rows(chunk, &mut input, stage)?;
            continue;
        }
        let mut rest = batch.take(chunk, witness);
        while let Some(chunk) = rest {
            batch.read(&mut input, stage)?;
            rest = batch.take(chunk, witness);
        }
    }
    batch.read(&mut input, stage)?;
    Ok(nbytes)
}

/// Read a chunk row by row, as many bytes at once as a stage takes.
fn read_rows(chunk: Chunk<'_, '_>, input: &mut Input<'_>, stage: &mut Stage) -> Result<(), Failure> {
    let Chunk {
        mut runs,
        converted,
        dest,
        ..
    } = chunk;
    let (stored, wanted) = widths(converted);
    let (mut rows, mut rest) = (Vec::new(), dest);
    while rest.len() > 0 {
        let most = (STAGE_NBYTES / stored.max(wanted)).min(rest.len() / wanted);
        rows.clear();
        let nbytes = runs.take_rows(most * stored, BATCH, &mut rows);
        let (dest, after) = rest.split_at(nbytes / stored * wanted);
        match dest {
            Destination::Host(mut dest) if converted.is_none() && dest.is_contiguous() => {
                dest.fill(|bytes| input.read_rows(&rows, bytes, &mut stage.mixed))?;
            }
            dest => {
                let begin = rows.first().map_or(0, |row| row.begin);
                let bytes = level(&mut stage.packed, begin, nbytes);
                input.read_rows(&rows, bytes, &mut stage.mixed)?;
                finish(dest, converted, bytes, &mut stage.converted);
            }
        }
        rest = after;
    }
    Ok(())
}

/// Runs that are processed together.
#[derive(Default)]
struct Batch<'d> {
    runs: Vec<BatchRun>,
    /// The destinations of the runs that are read directly.
    straight: Vec<Dest<'d>>,
    /// The memory of the others, and the conversion of each.
    staged: Vec<(Destination<'d>, Option<(Dtype, Dtype)>)>,
    /// Bytes of the stage that these need.
    taken: usize,
}

/// A run of a batch, and whether it goes to the stage.
struct BatchRun {
    position: u64,
    nbytes: usize,
    is_staged: bool,
}

impl<'d> Batch<'d> {
    /// Add as much of the chunk as fits, and return the rest.
    fn take<'p>(&mut self, mut chunk: Chunk<'p, 'd>, witness: Option<&dyn Witness>) -> Option<Chunk<'p, 'd>> {
        let (stored, wanted) = widths(chunk.converted);
        let is_straight = chunk.is_straight();
        let left = chunk.dest.len() / wanted * stored;
        let room = match (&chunk.dest, witness) {
            // As many bytes as the witness processes together.
            (Destination::Shown(_), Some(witness)) if self.taken == 0 => {
                let begin = chunk.runs.begin();
                to_usize(step_end(witness, begin, to_u64(left)) - begin).unwrap_or(left)
            }
            _ => STAGE_NBYTES.saturating_sub(self.taken) / stored.max(wanted) * stored,
        };
        // Bytes that do not fit begin the next stage, so that no element is split.
        let most = if is_straight || left <= room {
            left
        } else if self.taken == 0 {
            room
        } else {
            0
        };
        let mut nbytes = 0;
        while nbytes < most
            && self.has_room()
            && let Some(run) = chunk.runs.next(most - nbytes)
        {
            let run_nbytes = saturating_usize(run.end - run.start);
            self.add(run.start, run_nbytes, !is_straight, nbytes == 0);
            nbytes += run_nbytes;
        }
        if nbytes == 0 {
            // No room is left.
            return Some(chunk);
        }
        let converted = chunk.converted;
        let (dest, rest) = chunk.split_at(nbytes / stored * wanted);
        match dest {
            Destination::Host(dest) if is_straight => self.straight.push(dest),
            dest => {
                self.taken += nbytes / stored * stored.max(wanted);
                self.staged.push((dest, converted));
            }
        }
        rest
    }

    /// Return whether another run fits: for long runs, as many as one system call fills, since a longer list would
    /// leave the cache.
    fn has_room(&self) -> bool {
        let first = self.runs.first().map_or(0, |run| run.position);
        let is_short = || {
            let last = self.runs.last().map_or(0, |run| run.position);
            last.saturating_sub(first) < to_u64(STAGE_NBYTES)
        };
        self.runs.len() < VECTOR || self.runs.len() < BATCH && is_short()
    }

    /// Add a run, or lengthen the last one if both are neighbours in the file and in memory.
    fn add(&mut self, position: u64, nbytes: usize, is_staged: bool, is_first: bool) {
        match self.runs.last_mut() {
            Some(last)
                if last.is_staged == is_staged
                    && (is_staged || !is_first)
                    && last.position + to_u64(last.nbytes) == position =>
            {
                last.nbytes += nbytes;
            }
            _ => self.runs.push(BatchRun {
                position,
                nbytes,
                is_staged,
            }),
        }
    }

    /// Read all runs, and clear the batch.
    fn read(&mut self, input: &mut Input<'_>, stage: &mut Stage) -> Result<(), Failure> {
        let Stage {
            packed,
            converted,
            mixed,
            ..
        } = stage;
        let stored = |dest: &Destination<'_>, dtypes| {
            let (stored, wanted) = widths(dtypes);
            dest.len() / wanted * stored
        };
        let staged = self.staged.iter().map(|(dest, dtypes)| stored(dest, *dtypes));
        let begin = self.runs.iter().find(|run| run.is_staged);
        let packed = level(packed, begin.map_or(0, |run| run.position), staged.sum());
        Dest::fill_all(&mut self.straight, |lent| {
            let mut lent = lent.into_iter();
            let (mut straight, mut rest): (&mut [u8], &mut [u8]) = (&mut [], &mut *packed);
            let mut runs = Vec::with_capacity(self.runs.len());
            for run in &self.runs {
                if !run.is_staged && straight.is_empty() {
                    straight = lent.next().unwrap_or_default();
                }
                let from = if run.is_staged { &mut rest } else { &mut straight };
                let (bytes, after) = mem::take(from).split_at_mut(run.nbytes);
                *from = after;
                runs.push((run.position, bytes));
            }
            input.read(&mut runs, mixed)
        })?;
        self.straight.clear();
        self.runs.clear();
        self.taken = 0;
        let mut rest: &[u8] = packed;
        for (dest, dtypes) in self.staged.drain(..) {
            let (bytes, after) = rest.split_at(stored(&dest, dtypes));
            finish(dest, dtypes, bytes, converted);
            rest = after;
        }
        Ok(())
    }
}

/// Convert or scatter `bytes` to their memory. `room` is scratch memory.
fn finish(dest: Destination<'_>, converted: Option<(Dtype, Dtype)>, bytes: &[u8], room: &mut Vec<u8>) {
    // Bytes for a device were read into a slot.
    let Destination::Host(mut dest) = dest else {
        return;
    };
    match converted {
        None => dest.copy_from(bytes),
        Some((from, to)) if dest.is_contiguous() => dest.fill(|dest| convert(from, to, bytes, dest)),
        Some((from, to)) => {
            let len = dest.len();
            room.resize(len.max(room.len()), 0);
            convert(from, to, bytes, &mut room[..len]);
            dest.copy_from(&room[..len]);
        }
    }
}
