//! Reading chunks of pieces to where they belong.
//!
//! The bytes of a chunk are runs. Up to [`BATCH`] of them are looked at together, of as many chunks as have them. What
//! cannot go straight to its memory, because it is converted, scattered or only shown, waits in a stage. It never leaves the
//! cache of a core, unless a witness wants to see more at once.

use std::cell::LazyCell;
use std::mem;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use ingot_format::{Dtype, Row, StopFlag, to_u64, to_usize};

use super::input::{BATCH, Input, VECTOR, Witness, level, step_end};
use super::plan::widths;
use super::runs::Runs;
use crate::convert::convert;
use crate::device::DeviceDest;
use crate::error::Failure;
use crate::file::{ReadAt, Stream};
use crate::memory::{Dest, StridedDest};

/// Bytes that wait between the file and the conversion or the scattering, in the wider of the two dtypes. Few, so that they
/// never leave the cache.
const STAGE_NBYTES: usize = 128 << 10;

/// Below this, finding memory page by page takes no longer than asking for it.
const POPULATE_NBYTES: usize = 64 << 10;

/// Where bytes that are read go.
pub(crate) enum Destination<'d> {
    /// Memory that lies together.
    Together(Dest<'d>),
    /// Memory of a device. Boxed, since there may be many that lie together, which are moved about.
    Device(Box<DeviceDest<'d>>),
    /// Elements here and there. Boxed, since most lie together, and there may be many.
    Apart(Box<StridedDest<'d>>),
    /// Nowhere: so many bytes are shown to the file's witness, if it has one, and forgotten.
    Shown(usize),
}

impl<'d> Destination<'d> {
    pub(super) fn len(&self) -> usize {
        match self {
            Destination::Together(dest) => dest.len(),
            Destination::Device(dest) => dest.len(),
            Destination::Apart(strided) => strided.len(),
            Destination::Shown(nbytes) => *nbytes,
        }
    }

    /// The first `at` bytes, or all where there are no more, and the rest.
    pub(super) fn split_at(self, at: usize) -> (Destination<'d>, Destination<'d>) {
        match self {
            Destination::Together(dest) => {
                let (first, rest) = dest.split_at(at);
                (Destination::Together(first), Destination::Together(rest))
            }
            Destination::Device(dest) => {
                let (first, rest) = dest.split_at(at);
                (
                    Destination::Device(Box::new(first)),
                    Destination::Device(Box::new(rest)),
                )
            }
            Destination::Apart(strided) => {
                let (first, rest) = strided.split_at(at);
                (
                    Destination::Apart(Box::new(first)),
                    Destination::Apart(Box::new(rest)),
                )
            }
            Destination::Shown(nbytes) => {
                let first = at.min(nbytes);
                (Destination::Shown(first), Destination::Shown(nbytes - first))
            }
        }
    }
}

/// Some of the bytes of a piece.
pub(super) struct Chunk<'p, 'd> {
    pub(super) file: usize,
    /// What reading it takes, in bytes of a long run.
    pub(super) cost: usize,
    /// From its first byte in the file on; to its last, where it is part of one long read.
    pub(super) span: Range<u64>,
    /// Its bytes are the first of these.
    pub(super) runs: Runs<'p>,
    pub(super) converted: Option<(Dtype, Dtype)>,
    pub(super) dest: Destination<'d>,
}

impl<'p, 'd> Chunk<'p, 'd> {
    /// Whether its bytes go to a device.
    pub(super) fn is_for_device(&self) -> bool {
        matches!(self.dest, Destination::Device(_))
    }

    /// The same bytes, to other memory of this size.
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

    /// Whether its bytes go from the file straight to their memory.
    fn is_straight(&self) -> bool {
        self.converted.is_none() && matches!(self.dest, Destination::Together(_))
    }

    /// Whether it is read row by row.
    fn has_rows(&self, input: &Input<'_>) -> bool {
        let suits = |row: &Row| input.suits_rows(row, self.dest.len());
        self.runs.row().is_some_and(suits)
    }

    /// Read all of it row by row, as many bytes at once as a stage takes.
    fn read_rows(self, input: &mut Input<'_>, stage: &mut Stage) -> Result<(), Failure> {
        let Chunk {
            mut runs,
            converted,
            dest,
            ..
        } = self;
        let (stored, wanted) = widths(converted);
        let (mut rows, mut rest) = (Vec::new(), dest);
        while rest.len() > 0 {
            let most = (STAGE_NBYTES / stored.max(wanted)).min(rest.len() / wanted);
            rows.clear();
            let nbytes = runs.take_rows(most * stored, BATCH, &mut rows);
            let (dest, after) = rest.split_at(nbytes / stored * wanted);
            match dest {
                Destination::Together(mut dest) if converted.is_none() => {
                    dest.fill(|bytes| input.read_rows(&rows, bytes, &mut stage.mixed))?;
                }
                dest => {
                    let begin = rows.first().map_or(0, |row| row.begin);
                    let bytes = level(&mut stage.packed, begin, nbytes);
                    input.read_rows(&rows, bytes, &mut stage.mixed)?;
                    let staged = Staged {
                        nbytes,
                        converted,
                        dest,
                    };
                    staged.finish(bytes, &mut stage.converted);
                }
            }
            rest = after;
        }
        Ok(())
    }

    /// What fills the first `nbytes` of its memory, and the rest.
    fn split_at(self, nbytes: usize) -> (Destination<'d>, Option<Chunk<'p, 'd>>) {
        let (first, rest) = self.dest.split_at(nbytes);
        let rest = (rest.len() > 0).then_some(Chunk { dest: rest, ..self });
        (first, rest)
    }
}

/// Memory that is used again by one task after the other: as many of these as there are threads.
#[derive(Default)]
pub(super) struct Stages(Mutex<Vec<Stage>>);

/// Memory of one thread, which grows as it is needed.
#[derive(Default)]
pub(super) struct Stage {
    /// Bytes that are to be converted or scattered.
    packed: Vec<u8>,
    /// Bytes that were converted, and are to be scattered.
    converted: Vec<u8>,
    /// Bytes that are read together, and those between them.
    mixed: Vec<u8>,
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

/// Reads chunks of one file, and says how many bytes of memory they filled. From a source where it is beginning a read that
/// costs, they are one read.
pub(super) fn read(
    source: &dyn ReadAt,
    witness: Option<&dyn Witness>,
    chunks: Vec<Chunk<'_, '_>>,
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
        if let Destination::Together(dest) = &mut chunk.dest
            && dest.len() >= POPULATE_NBYTES
        {
            dest.populate();
        }
        if chunk.has_rows(&input) && !*is_cold {
            batch.read(&mut input, stage)?;
            chunk.read_rows(&mut input, stage)?;
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

/// Runs that are looked at together.
#[derive(Default)]
struct Batch<'d> {
    runs: Vec<BatchRun>,
    /// The memory of those that go straight to it.
    straight: Vec<Dest<'d>>,
    /// What becomes of the others.
    staged: Vec<Staged<'d>>,
    /// Bytes that these take of the stage.
    taken: usize,
}

/// A run of a batch, and whether it goes to the stage.
struct BatchRun {
    position: u64,
    nbytes: usize,
    is_staged: bool,
}

/// Bytes that lie in the stage, in the order of these.
struct Staged<'d> {
    nbytes: usize,
    converted: Option<(Dtype, Dtype)>,
    dest: Destination<'d>,
}

impl<'d> Batch<'d> {
    /// Takes as much of the chunk as there is room for, and gives back what is left.
    fn take<'p>(&mut self, mut chunk: Chunk<'p, 'd>, witness: Option<&dyn Witness>) -> Option<Chunk<'p, 'd>> {
        let (stored, wanted) = widths(chunk.converted);
        let is_straight = chunk.is_straight();
        let left = chunk.dest.len() / wanted * stored;
        let room = match (&chunk.dest, witness) {
            // As many as it looks at together.
            (Destination::Shown(_), Some(witness)) if self.taken == 0 => {
                let begin = chunk.runs.begin();
                to_usize(step_end(witness, begin, to_u64(left)) - begin).unwrap_or(left)
            }
            _ => STAGE_NBYTES.saturating_sub(self.taken) / stored.max(wanted) * stored,
        };
        // What does not fit begins a stage, so that no element comes in parts.
        let most = match is_straight || left <= room {
            true => left,
            false if self.taken == 0 => room,
            false => 0,
        };
        let mut nbytes = 0;
        while nbytes < most
            && self.has_room()
            && let Some(run) = chunk.runs.next(most - nbytes)
        {
            let run_nbytes = to_usize(run.end - run.start).unwrap_or(usize::MAX);
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
            Destination::Together(dest) if is_straight => self.straight.push(dest),
            dest => {
                self.taken += nbytes / stored * stored.max(wanted);
                self.staged.push(Staged {
                    nbytes,
                    converted,
                    dest,
                });
            }
        }
        rest
    }

    /// Whether one more run is looked at together with these: of long ones no more than one call of the system fills, since
    /// what is known of more would leave the cache.
    fn has_room(&self) -> bool {
        let first = self.runs.first().map_or(0, |run| run.position);
        let is_short = || {
            let last = self.runs.last().map_or(0, |run| run.position);
            last.saturating_sub(first) < to_u64(STAGE_NBYTES)
        };
        self.runs.len() < VECTOR || self.runs.len() < BATCH && is_short()
    }

    /// Adds a run, or lengthens the last one where both lie together in the file and in memory.
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

    /// Reads all that was taken, and forgets it.
    fn read(&mut self, input: &mut Input<'_>, stage: &mut Stage) -> Result<(), Failure> {
        let Stage {
            packed,
            converted,
            mixed,
        } = stage;
        let staged = self.staged.iter().map(|staged| staged.nbytes).sum();
        let begin = self.runs.iter().find(|run| run.is_staged);
        let packed = level(packed, begin.map_or(0, |run| run.position), staged);
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
        for staged in self.staged.drain(..) {
            let (bytes, after) = rest.split_at(staged.nbytes);
            staged.finish(bytes, converted);
            rest = after;
        }
        Ok(())
    }
}

impl Staged<'_> {
    fn finish(self, bytes: &[u8], room: &mut Vec<u8>) {
        match (self.dest, self.converted) {
            (Destination::Together(mut dest), Some((from, to))) => {
                dest.fill(|dest| convert(from, to, bytes, dest));
            }
            (Destination::Together(mut dest), None) => dest.fill(|dest| dest.copy_from_slice(bytes)),
            (Destination::Apart(mut strided), None) => strided.fill(bytes),
            (Destination::Apart(mut strided), Some((from, to))) => {
                let len = strided.len();
                room.resize(len.max(room.len()), 0);
                convert(from, to, bytes, &mut room[..len]);
                strided.fill(&room[..len]);
            }
            // Of a device it is a slot that is filled.
            (Destination::Device(_) | Destination::Shown(_), _) => {}
        }
    }
}
