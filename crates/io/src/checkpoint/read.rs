//! Reading tensors of many shards at once.

use std::sync::Arc;

use crate::archive::Archive;
use crate::checkpoint::ShardPlace;
use crate::error::Error;
use crate::execute::{ReadOptions, execute_all};
use crate::plan::{Place, Plan};
use crate::region::Region;
use crate::source::{Memory, Source};
use crate::watch::Watch;

/// What one shard has to give.
struct Part<'a> {
    archive: &'a Archive,
    /// Places in the caller's list, and the tensors that stand there.
    ranks: Vec<usize>,
    numbers: Vec<usize>,
}

pub(super) fn regions(
    shards: &[Archive],
    wanted: &[ShardPlace],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Region>, Error> {
    let mut regions: Vec<Option<Region>> = vec![None; wanted.len()];
    let mut parts = by_shard(shards, wanted);
    for part in &mut parts {
        // Before anything is handed out, because touching what is no longer there is fatal.
        part.archive.check_unchanged()?;
        part.take_views(&mut regions);
    }
    parts.retain(|part| !part.ranks.is_empty());
    read(&parts, &mut regions, options, watch)?;
    // Every rank has been in one part, and was either viewed or read.
    Ok(regions.into_iter().flatten().collect())
}

fn by_shard<'a>(shards: &'a [Archive], wanted: &[ShardPlace]) -> Vec<Part<'a>> {
    let mut parts: Vec<Part<'a>> = shards
        .iter()
        .map(|archive| Part {
            archive,
            ranks: Vec::new(),
            numbers: Vec::new(),
        })
        .collect();
    for (rank, place) in wanted.iter().enumerate() {
        parts[place.shard].ranks.push(rank);
        parts[place.shard].numbers.push(place.number);
    }
    parts.retain(|part| !part.ranks.is_empty());
    parts
}

impl Part<'_> {
    /// Hands out what can be used where it is mapped, and keeps what has to be read.
    fn take_views(&mut self, regions: &mut [Option<Region>]) {
        let (mut ranks, mut numbers) = (Vec::new(), Vec::new());
        for (&rank, &number) in self.ranks.iter().zip(&self.numbers) {
            regions[rank] = self.archive.tensor(number).and_then(|tensor| tensor.view());
            if regions[rank].is_none() {
                ranks.push(rank);
                numbers.push(number);
            }
        }
        (self.ranks, self.numbers) = (ranks, numbers);
    }

    fn plan(&self) -> Result<(Plan, Vec<Place>), Error> {
        Plan::of_tensors(self.archive.header(), &self.numbers)
            .map_err(|too_large| self.archive.explain(too_large.into()))
    }
}

fn read(
    parts: &[Part<'_>],
    regions: &mut [Option<Region>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    if parts.is_empty() {
        return Ok(());
    }
    let planned = parts.iter().map(Part::plan).collect::<Result<Vec<_>, _>>()?;
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
