//! Reading tensors of many shards at once.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::archive::{Archive, Tensor};
use crate::error::Error;
use crate::execute::{ReadOptions, execute_all};
use crate::plan::{Place, Plan};
use crate::region::Region;
use crate::source::{Memory, Source};
use crate::watch::Watch;

/// What one shard has to give.
struct Part<'a> {
    archive: &'a Archive,
    /// Places in the caller's list.
    ranks: Vec<usize>,
}

pub(super) fn regions(
    tensors: &[Tensor<'_>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Region>, Error> {
    let mut regions: Vec<Option<Region>> = vec![None; tensors.len()];
    let mut parts = by_shard(tensors);
    for part in &mut parts {
        // Before anything is handed out, because touching what is no longer there is fatal.
        part.archive.check_unchanged()?;
        for &rank in &part.ranks {
            regions[rank] = tensors[rank].view();
        }
        part.ranks.retain(|&rank| regions[rank].is_none());
    }
    parts.retain(|part| !part.ranks.is_empty());
    read(tensors, &parts, &mut regions, options, watch)?;
    // Every rank has been in one part, and was either viewed or read.
    Ok(regions.into_iter().flatten().collect())
}

fn by_shard<'a>(tensors: &[Tensor<'a>]) -> Vec<Part<'a>> {
    let mut parts: Vec<Part<'a>> = Vec::new();
    // Archives do not move while tensors of them are there.
    let mut known: BTreeMap<*const Archive, usize> = BTreeMap::new();
    for (rank, tensor) in tensors.iter().enumerate() {
        let archive = tensor.archive();
        let part = *known.entry(std::ptr::from_ref(archive)).or_insert_with(|| {
            parts.push(Part {
                archive,
                ranks: Vec::new(),
            });
            parts.len() - 1
        });
        parts[part].ranks.push(rank);
    }
    parts
}

impl Part<'_> {
    fn plan(&self, tensors: &[Tensor<'_>]) -> Result<(Plan, Vec<Place>), Error> {
        let numbers: Vec<usize> = self.ranks.iter().map(|&rank| tensors[rank].number()).collect();
        Plan::of_tensors(self.archive.header(), &numbers)
            .map_err(|too_large| self.archive.explain(too_large.into()))
    }
}

fn read(
    tensors: &[Tensor<'_>],
    parts: &[Part<'_>],
    regions: &mut [Option<Region>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    if parts.is_empty() {
        return Ok(());
    }
    let planned = parts
        .iter()
        .map(|part| part.plan(tensors))
        .collect::<Result<Vec<_>, _>>()?;
    let work: Vec<(&Plan, &dyn Source)> = planned
        .iter()
        .zip(parts)
        .map(|((plan, _), part)| (plan, part.archive.source()))
        .collect();
    let blocks = execute_all(&work, options, watch)
        .map_err(|(number, failure)| parts[number].archive.explain(failure))?;
    for ((part, (_, places)), blocks) in parts.iter().zip(&planned).zip(blocks) {
        part.archive.check_unchanged()?;
        let blocks: Vec<_> = blocks
            .into_iter()
            .map(|block| Arc::new(Memory::from(block)))
            .collect();
        for (&rank, place) in part.ranks.iter().zip(places) {
            regions[rank] = Some(Region::new(
                Arc::clone(&blocks[place.block]),
                place.at,
                place.nbytes,
            ));
        }
    }
    Ok(())
}
