//! Filling the system's cache.

use std::ops::Range;

use ingot_format::{to_u64, to_usize};

use crate::failure::{Failure, InFile, read_exactly};
use crate::read::execute::{ReadOptions, Reading};
use crate::source::Source;
use crate::watch::Watch;
use crate::workers::share;

/// Memory that what is read passes through: little enough to stay in a core's cache.
const SCRATCH_NBYTES: usize = 256 << 10;

/// Reads these runs, `nbytes` in all, each of the source of that number, and keeps nothing. That is what brings pages into
/// the cache on every file system, and it ends when they are there; advice to the system does neither.
pub(crate) fn warm(
    runs: Vec<(usize, Range<u64>)>,
    nbytes: u64,
    sources: &[&dyn Source],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), InFile> {
    // As if it were in the cache: filling that is what takes time, and more threads than cores only get in each other's
    // way.
    let spans: Vec<_> = sources.iter().map(|&source| (source, 0..0)).collect();
    let reading = Reading::of(nbytes, &spans, options);
    let step = to_u64(reading.chunk_nbytes);
    let cut = |(file, run): (usize, Range<u64>)| {
        let end = run.end;
        (run.start..end)
            .step_by(reading.chunk_nbytes)
            .map(move |at| (file, at..end.min(at + step)))
    };
    let chunks: Vec<(usize, Range<u64>)> = runs.into_iter().flat_map(cut).collect();
    share(
        reading,
        chunks,
        nbytes,
        |(file, chunk)| {
            pass(sources[file], chunk).map_err(|failure| InFile {
                file: Some(file),
                failure,
            })
        },
        watch,
    )
}

fn pass(source: &dyn Source, chunk: Range<u64>) -> Result<usize, Failure> {
    let mut scratch = vec![0; SCRATCH_NBYTES];
    let mut at = chunk.start;
    while at < chunk.end {
        let count = to_usize(chunk.end - at).map_or(SCRATCH_NBYTES, |rest| rest.min(SCRATCH_NBYTES));
        read_exactly(source, at, &mut scratch[..count])?;
        at += to_u64(count);
    }
    Ok(to_usize(chunk.end - chunk.start).unwrap_or(0))
}
