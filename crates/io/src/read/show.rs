//! Reading for those who look at bytes and keep none: digests, statistics, the system's cache.

use std::ops::Range;

use ingot_format::to_u64;

use super::execute::execute;
use super::gather::Destination;
use super::input::Witness;
use super::plan::{Piece, Plan};
use crate::error::InFile;
use crate::options::ReadOptions;
use crate::source::Source;
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
    runs.iter().map(|(_, run)| run.end - run.start).sum()
}

/// How these runs of the sources, which come in their order, are best read to be looked at.
pub(crate) fn looking(sources: &[&dyn Source], runs: &[FileRun], options: &ReadOptions) -> Reading {
    let span = |of_file: &[FileRun]| {
        let (file, first) = &of_file[0];
        (sources[*file], first.start..of_file[of_file.len() - 1].1.end)
    };
    let spans: Vec<_> = runs.chunk_by(|one, next| one.0 == next.0).map(span).collect();
    Reading::above(ALONE_NBYTES, nbytes(runs), &spans, options)
}

/// Reads these runs, in pieces that are begun in their order, and shows them to the witnesses: one for each file, or none.
pub(crate) fn show(
    sources: &[&dyn Source],
    witnesses: &[&dyn Witness],
    runs: &[FileRun],
    reading: Reading,
    watch: &dyn Watch,
) -> Result<(), InFile> {
    let mut pieces = Vec::with_capacity(runs.len());
    for (file, run) in runs {
        let mut at = run.start;
        while at < run.end {
            let most = to_u64(reading.chunk_nbytes).min(run.end - at);
            let end = witnesses
                .get(*file)
                .map_or(at + most, |witness| witness.cut(at, most));
            pieces.push(Piece::run(*file, at..end)?);
            at = end;
        }
    }
    let plan = Plan::into_each(pieces);
    let dests = plan.blocks().iter().map(|&nbytes| Destination::Shown(nbytes));
    execute(&plan, sources, witnesses, dests, reading, watch)
}
