//! Reading for those who look at bytes and keep none: digests, statistics, the system's cache.

use std::iter;
use std::ops::Range;

use ingot_format::{to_u64, to_usize};

use super::execute::{carry_out, tasks};
use super::gather::Destination;
use super::input::Witness;
use super::plan::{Piece, Plan};
use crate::error::{Failure, InFile};
use crate::file::ReadAt;
use crate::options::ReadOptions;
use crate::watch::Watch;
use crate::workers::Reading;

/// Bytes that lie together, and the number of their file.
pub(crate) type FileRun = (usize, Range<u64>);

/// Below this, starting a thread takes longer than looking at the bytes.
const ALONE_NBYTES: u64 = 1 << 20;

/// Runs that come in their order, those that overlap or follow one another as one.
pub(crate) fn joined(runs: impl IntoIterator<Item = FileRun>) -> Vec<FileRun> {
    let mut joined: Vec<FileRun> = Vec::new();
    for (file, run) in runs {
        match joined.last_mut() {
            Some((same, last)) if *same == file && run.start <= last.end => last.end = last.end.max(run.end),
            _ => joined.push((file, run)),
        }
    }
    joined
}

/// Bytes of these runs.
pub(crate) fn nbytes(runs: &[FileRun]) -> u64 {
    let nbytes = runs.iter().map(|(_, run)| run.end - run.start);
    // Servers may claim anything.
    nbytes.fold(0, u64::saturating_add)
}

/// How these runs of the sources, which come in their order, are best read to be looked at.
pub(crate) fn looking(sources: &[&dyn ReadAt], runs: &[FileRun], options: &ReadOptions) -> Reading {
    let span = |of_file: &[FileRun]| {
        let (file, first) = &of_file[0];
        (sources[*file], first.start..of_file[of_file.len() - 1].1.end)
    };
    let spans: Vec<_> = runs.chunk_by(|one, next| one.0 == next.0).map(span).collect();
    Reading::above(ALONE_NBYTES, nbytes(runs), &spans, options)
}

/// Files up to this size are read without a question. Larger ones may be nothing but a hole, which takes years to read.
const UNQUESTIONED_NBYTES: u64 = 1 << 40;

/// Check that large sources can have the size that they claim, before a pass over all of their bytes.
pub(crate) fn check_sizes(sources: &[&dyn ReadAt]) -> Result<(), InFile> {
    for (file, source) in sources.iter().enumerate() {
        if source.nbytes() > UNQUESTIONED_NBYTES {
            source.check_size().map_err(|fault| InFile {
                file: Some(file),
                failure: Failure::Read {
                    position: 0,
                    expected: to_usize(source.nbytes()).unwrap_or(usize::MAX),
                    found: 0,
                    source: Some(fault),
                },
            })?;
        }
    }
    Ok(())
}

/// Pieces that are planned at once. A run may be as long as a server or a sparse file claims, so its pieces are made
/// while earlier ones are read.
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
        let dests = plan.blocks().iter().map(|&nbytes| Destination::Shown(nbytes));
        tasks(&plan, dests, sources, chunk_nbytes)
    });
    carry_out(tasks, sources, witnesses, reading, nbytes(runs), watch)
}

/// The position and the size of each part of a run: at most so many bytes, cut where `witness` prefers it.
fn cut(run: Range<u64>, most: usize, witness: Option<&dyn Witness>) -> impl Iterator<Item = (u64, usize)> {
    let mut at = run.start;
    iter::from_fn(move || {
        let begin = at;
        let left = to_u64(most).min(run.end - begin);
        at = witness.map_or(begin + left, |witness| witness.cut(begin, left));
        (begin < run.end).then(|| {
            (
                begin,
                to_usize(at - begin).map_or(most, |nbytes| nbytes.min(most)),
            )
        })
    })
}
