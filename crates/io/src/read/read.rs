//! Reading whole tensors, of one file or of many.

use std::ops::Range;
use std::sync::Arc;

use crate::archive::Tensor;
use crate::error::Error;
use crate::failure::{Failure, InFile};
use crate::files::Files;
use crate::read::execute::{ReadOptions, execute_owned};
use crate::read::plan::{Place, Plan, TensorId};
use crate::read::warm;
use crate::region::Region;
use crate::source::{Memory, Source};
use crate::watch::{After, Watch, tell_all};

/// The bytes of tensors, of any files; the regions come in their order.
///
/// Where a file is mapped these are views of the mapping, and nothing is read. A tensor whose elements are not aligned
/// in its file is copied to where they are. Elsewhere all are read at once, from all files in parallel.
///
/// # Errors
/// [`Error::Read`] and [`Error::Changed`] when the bytes cannot be had, [`Error::OutOfMemory`], [`Error::Interrupted`].
pub fn read_tensors(
    tensors: &[Tensor<'_>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Region>, Error> {
    let (files, ids) = Files::of(tensors);
    // Before anything is handed out, because touching what is no longer there is fatal.
    files.check_unchanged()?;
    let mut regions: Vec<Option<Region>> = tensors.iter().map(Tensor::mapped).collect();
    let missing: Vec<usize> = (0..tensors.len())
        .filter(|&rank| regions[rank].is_none())
        .collect();
    let nbytes = |rank: usize| tensors[rank].entry().nbytes();
    let total = (0..tensors.len()).map(nbytes).sum();
    if missing.is_empty() {
        tell_all(watch, total)?;
    } else {
        let watch = &After {
            watch,
            before: total - missing.iter().map(|&rank| nbytes(rank)).sum::<u64>(),
            total,
        };
        let wanted: Vec<TensorId> = missing.iter().map(|&rank| ids[rank]).collect();
        let read = read_owned(&files, &files.sources(), &wanted, options, watch)?;
        for (rank, region) in missing.into_iter().zip(read) {
            regions[rank] = Some(region);
        }
        files.check_unchanged()?;
    }
    Ok(regions.into_iter().flatten().collect())
}

/// The bytes of these tensors in memory of their own.
pub(crate) fn read_whole(
    tensors: &[Tensor<'_>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Region>, Error> {
    let (files, ids) = Files::of(tensors);
    read_owned(&files, &files.sources(), &ids, options, watch)
}

/// The bytes of these tensors in memory of their own, from `sources`: those of the files, or others over them.
pub(crate) fn read_owned(
    files: &Files<'_>,
    sources: &[&dyn Source],
    tensors: &[TensorId],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Region>, Error> {
    let read = || -> Result<_, InFile> {
        let (plan, places) = Plan::of_tensors(&files.headers(), tensors).map_err(Failure::from)?;
        Ok((execute_owned(&plan, sources, options, watch)?, places))
    };
    let (blocks, places) = read().map_err(|fault| files.explain(fault))?;
    let blocks: Vec<_> = blocks
        .into_iter()
        .map(|block| Arc::new(Memory::from(block)))
        .collect();
    let region = |place: Place| Region::new(Arc::clone(&blocks[place.block]), place.at, place.nbytes);
    Ok(places.into_iter().map(region).collect())
}

/// Brings the bytes of tensors into the system's cache, and keeps none: what is read or touched next is there. Gives
/// their number.
///
/// # Errors
/// As [`read_tensors`].
pub fn warm_tensors(tensors: &[Tensor<'_>], options: &ReadOptions, watch: &dyn Watch) -> Result<u64, Error> {
    let (files, mut ids) = Files::of(tensors);
    ids.sort_unstable();
    ids.dedup();
    let runs = runs(&files, &ids);
    let nbytes = runs.iter().map(|(_, run)| run.end - run.start).sum();
    warm::warm(runs, nbytes, &files.sources(), options, watch).map_err(|fault| files.explain(fault))?;
    files.check_unchanged()?;
    Ok(nbytes)
}

/// As [`warm_tensors`] for those whose file is mapped. Others have memory of their own, and warming it would be reading
/// it twice.
pub(crate) fn warm_behind_mappings(
    tensors: &[Tensor<'_>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let is_mapped = |tensor: &&Tensor<'_>| tensor.archive().source().memory().is_some();
    let mapped: Vec<Tensor<'_>> = tensors.iter().filter(is_mapped).copied().collect();
    if mapped.is_empty() {
        return Ok(());
    }
    warm_tensors(&mapped, options, watch).map(drop)
}

/// Where the bytes of these tensors are, which come in their order: neighbours as one.
fn runs(files: &Files<'_>, tensors: &[TensorId]) -> Vec<(usize, Range<u64>)> {
    let headers = files.headers();
    let mut runs: Vec<(usize, Range<u64>)> = Vec::new();
    for &TensorId { file, number } in tensors {
        let Some(entry) = headers[file].entry(number) else {
            continue;
        };
        let start = headers[file].data_start();
        let run = start + entry.begin..start + entry.end;
        match runs.last_mut() {
            Some((same, last)) if *same == file && last.end == run.start => last.end = run.end,
            _ => runs.push((file, run)),
        }
    }
    runs
}
