//! Running the tasks of a plan on threads, in the same way for every source, every plan and every kind of memory.

use std::iter;
use std::ops::Range;

use ingot_format::{StopFlag, to_u64, to_usize};

use super::buffer::Destination;
use super::chunk::{Task, tasks};
use super::gather::Stages;
use super::input::Witness;
use super::plan::{FileRun, Piece, Plan};
use super::relay;
use crate::error::{Failure, InFile};
use crate::file::ReadAt;
use crate::options::ReadOptions;
use crate::pages::HUGE_PAGE_NBYTES;
use crate::watch::Watch;
use crate::workers::{Reading, each, share};

/// Choose threads and chunks for `plan`, which reads from these sources.
pub(crate) fn reading(plan: &Plan<'_>, sources: &[&dyn ReadAt], options: &ReadOptions) -> Reading {
    let spans: Vec<_> = sources.iter().copied().zip(plan.spans(sources.len())).collect();
    let reading = Reading::of(plan.nbytes(), &spans, options);
    let chunk_nbytes = if reading.waits {
        reading.chunk_nbytes
    } else {
        // Several chunks for each thread, so that all threads end at about the same time.
        each(plan.nbytes(), 4 * reading.threads, HUGE_PAGE_NBYTES)
    };
    Reading {
        chunk_nbytes,
        ..reading
    }
}

/// Read everything in `plan` from `sources`, one for each of its files, into `dests`, which has memory for each of its blocks.
/// There may be a witness for each file.
pub(crate) fn execute<'d>(
    plan: &Plan<'_>,
    sources: &[&dyn ReadAt],
    witnesses: &[&dyn Witness],
    dests: impl IntoIterator<Item = Destination<'d>>,
    reading: Reading,
    watch: &dyn Watch,
) -> Result<(), InFile> {
    let tasks = tasks(plan, dests, sources, reading.chunk_nbytes);
    carry_out(tasks, sources, witnesses, reading, plan.nbytes(), watch)
}

/// Read the bytes of these tasks, `total` in all.
fn carry_out<'p, 'd>(
    tasks: impl IntoIterator<Item = Task<'p, 'd>, IntoIter: Send>,
    sources: &[&dyn ReadAt],
    witnesses: &[&dyn Witness],
    reading: Reading,
    total: u64,
    watch: &dyn Watch,
) -> Result<(), InFile> {
    let stages = Stages::default();
    let read = |task: Task<'_, '_>, stop: StopFlag<'_>| {
        let file = task.first().map_or(0, |chunk| chunk.file);
        let mut ending = Ending(witnesses.get(file).copied());
        let outcome = stages.lend(|stage| relay::read(sources[file], ending.0, task, stage, stop));
        if outcome.is_ok() {
            ending.0 = None;
        }
        let file = Some(file);
        outcome.map_err(|failure| InFile { file, failure })
    };
    share(reading, tasks, total, read, watch)
}

/// Reports to a witness, when dropped, that bytes will not arrive: a read failed or panicked, and other threads wait
/// for its bytes.
struct Ending<'w>(Option<&'w dyn Witness>);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if let Some(witness) = self.0 {
            witness.end();
        }
    }
}

/// The least bytes for which a thread is started. Processing fewer takes less time than starting a thread.
const ALONE_NBYTES: u64 = 1 << 20;

/// The number of bytes of these runs.
pub(crate) fn nbytes(runs: &[FileRun]) -> u64 {
    let nbytes = runs.iter().map(|(_, run)| run.end - run.start);
    // Servers may claim any size.
    nbytes.fold(0, u64::saturating_add)
}

/// Choose threads and chunks for ordered runs whose bytes are discarded.
pub(crate) fn looking(sources: &[&dyn ReadAt], runs: &[FileRun], options: &ReadOptions) -> Reading {
    let span = |of_file: &[FileRun]| {
        let (file, first) = &of_file[0];
        (sources[*file], first.start..of_file[of_file.len() - 1].1.end)
    };
    let spans: Vec<_> = runs.chunk_by(|one, next| one.0 == next.0).map(span).collect();
    Reading::above(ALONE_NBYTES, nbytes(runs), &spans, options)
}

/// Files up to this size are read without a check. Larger ones may consist of a hole, which would take years to read.
const UNCHECKED_NBYTES: u64 = 1 << 40;

/// Check that large sources can have the size that they report, before all of their bytes are read.
pub(crate) fn check_sizes(sources: &[&dyn ReadAt]) -> Result<(), InFile> {
    for (file, source) in sources.iter().enumerate() {
        if source.nbytes() > UNCHECKED_NBYTES {
            source.check_size().map_err(|fault| InFile {
                file: Some(file),
                failure: Failure::Read {
                    position: 0,
                    expected: source.nbytes(),
                    found: 0,
                    source: Some(fault),
                },
            })?;
        }
    }
    Ok(())
}

/// The number of pieces that are planned at once. A run may be as long as a server or a sparse file claims, so pieces
/// are created while earlier ones are read.
const PLANNED_PIECES: usize = 4096;

/// Read these runs in pieces that begin in order, and show them to the witnesses: one for each file, or none.
pub(crate) fn show(
    sources: &[&dyn ReadAt],
    witnesses: &[&dyn Witness],
    runs: &[FileRun],
    reading: Reading,
    watch: &dyn Watch,
) -> Result<(), InFile> {
    check_sizes(sources)?;
    let chunk_nbytes = reading.chunk_nbytes;
    let mut pieces = runs.iter().flat_map(move |(file, run)| {
        let parts = cut(run.clone(), chunk_nbytes, witnesses.get(*file).copied());
        parts.map(|(position, nbytes)| Piece::straight(*file, position, nbytes))
    });
    let planned = iter::from_fn(move || {
        let pieces: Vec<_> = pieces.by_ref().take(PLANNED_PIECES).collect();
        (!pieces.is_empty()).then(|| Plan::into_each(pieces))
    });
    let tasks = planned.flat_map(move |plan| {
        let dests = plan.blocks().iter().map(|block| Destination::Shown(block.nbytes));
        tasks(&plan, dests, sources, chunk_nbytes)
    });
    carry_out(tasks, sources, witnesses, reading, nbytes(runs), watch)
}

/// Return the position and the size of each part of a run: at most `most` bytes, split where `witness` prefers it.
fn cut(run: Range<u64>, most: usize, witness: Option<&dyn Witness>) -> impl Iterator<Item = (u64, usize)> {
    let mut at = run.start;
    iter::from_fn(move || {
        let begin = at;
        let left = to_u64(most).min(run.end - begin);
        at = witness.map_or(begin + left, |witness| witness.cut(begin, left));
        let nbytes = to_usize(at - begin).map_or(most, |nbytes| nbytes.min(most));
        (begin < run.end).then_some((begin, nbytes))
    })
}
