//! Where tensors that are read go when nobody has memory for them: to the host, or to a device.

use std::ptr;
use std::sync::Arc;

use ingot_format::to_u64;

use super::gather::Destination;
use super::part::Part;
use super::plan::{Blocks, Piece, Place, Plan};
use crate::device::{DeviceBlock, DeviceFault, DeviceRegion, Fresh, Onto};
use crate::error::Failure;
use crate::memory::{Block, Memory, Region};

/// Where a part that is read goes.
#[derive(Clone, Copy, Debug, Default)]
pub enum Home<'h> {
    /// Memory of ours, or the mapping of its file.
    #[default]
    Host,
    /// A device, whose memory a framework gives.
    Device(&'h Onto),
}

/// What was read, where it is.
#[derive(Clone, Debug)]
pub enum Found {
    /// In memory of the host.
    Host(Region),
    /// In that of a device. Boxed, since most are on the host, of which there may be many.
    Device(Box<DeviceRegion>),
}

impl Found {
    pub(super) fn len(&self) -> usize {
        match self {
            Found::Host(region) => region.len(),
            Found::Device(region) => region.len(),
        }
    }

    /// Where it was read to memory of the host, as it is where no [`Home`] was given.
    #[must_use]
    pub fn host(self) -> Option<Region> {
        match self {
            Found::Host(region) => Some(region),
            Found::Device(_) => None,
        }
    }
}

/// The pools that blocks are allocated from: that of the host, and one for each device that is a home.
pub(super) struct Pools<'h> {
    homes: &'h [Home<'h>],
    devices: Vec<&'h Onto>,
}

/// Devices with copies under way. When this is dropped, also because a reader panicked, the callers' streams are made to wait
/// for the copies: the memory that they write to may be freed next.
pub(super) struct Copying<'p>(&'p [&'p Onto]);

impl Copying<'_> {
    /// Makes the callers' streams wait for the copies.
    pub(super) fn end(mut self) -> Result<(), DeviceFault> {
        while let Some((onto, rest)) = self.0.split_first() {
            onto.at.hold()?;
            self.0 = rest;
        }
        Ok(())
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|onto| onto.at.settle());
    }
}

/// What an allocator is asked for: which of the blocks of a plan are for one of the parts alone.
fn fresh<'p, 'a: 'p>(
    plan: &Plan<'_>,
    places: &[Place],
    parts: impl Iterator<Item = &'p Part<'a>>,
) -> Vec<Fresh<'p>> {
    let block = |&nbytes: &usize| Fresh { nbytes, tensor: None };
    let mut fresh: Vec<Fresh<'p>> = plan.blocks().iter().map(block).collect();
    for (part, place) in parts.zip(places) {
        if Blocks::DEVICE.is_own(place.nbytes) {
            fresh[place.block].tensor = Some((part.dtype(), part.shape()));
        }
    }
    fresh
}

fn too_few(nbytes: usize) -> Failure {
    Failure::OutOfMemory {
        nbytes: to_u64(nbytes),
        source: None,
    }
}

/// A block that was allocated.
pub(super) enum Allocated {
    Host(Block),
    Device(DeviceBlock),
}

impl<'h> Pools<'h> {
    /// Those of `homes`, one for each part; of none, all go to the host.
    pub(super) fn of(homes: &'h [Home<'h>]) -> Pools<'h> {
        let mut devices: Vec<&Onto> = Vec::new();
        for home in homes {
            if let Home::Device(onto) = *home
                && !devices.iter().any(|known| ptr::eq(*known, onto))
            {
                devices.push(onto);
            }
        }
        Pools { homes, devices }
    }

    /// The pool that the part with this number is read into: 0 is the host's.
    fn pool(&self, rank: usize) -> usize {
        let Some(Home::Device(onto)) = self.homes.get(rank) else {
            return 0;
        };
        let rank = self.devices.iter().position(|known| ptr::eq(*known, *onto));
        rank.map_or(0, |rank| rank + 1)
    }

    /// Plans to read `pieces`, one for each part: where each goes, and the pool of each block.
    pub(super) fn plan<'p>(&self, pieces: &[Piece<'p>]) -> (Plan<'p>, Vec<Place>, Vec<usize>) {
        let mut kinds = vec![Blocks::DEVICE; self.devices.len() + 1];
        kinds[0] = Blocks::HOST;
        Plan::fresh_in(&kinds, pieces, |rank| self.pool(rank))
    }

    /// Bytes of a chunk at most.
    pub(super) fn chunk_nbytes(&self) -> usize {
        let slots = self.devices.iter().map(|onto| onto.at.device().chunk_nbytes());
        slots.min().unwrap_or(usize::MAX)
    }

    /// Memory for the blocks of a plan.
    pub(super) fn allocate<'p, 'a: 'p>(
        &self,
        plan: &Plan<'_>,
        places: &[Place],
        pools: &[usize],
        parts: impl Iterator<Item = &'p Part<'a>>,
    ) -> Result<Vec<Allocated>, Failure> {
        let on_host = |&nbytes: &usize| Block::allocate(nbytes).map(Allocated::Host);
        if self.devices.is_empty() {
            return plan.blocks().iter().map(on_host).collect();
        }
        let fresh = fresh(plan, places, parts);
        let mut given = Vec::with_capacity(self.devices.len());
        for (number, onto) in self.devices.iter().enumerate() {
            onto.at.refuse_capture()?;
            let mine = fresh.iter().zip(pools).filter(|(_, pool)| **pool == number + 1);
            let mine: Vec<Fresh<'_>> = mine.map(|(&fresh, _)| fresh).collect();
            let blocks = onto.allocator.allocate(&mine).map_err(Failure::Refused)?;
            given.push(blocks.into_iter());
        }
        let allocated = |(&pool, nbytes): (&usize, &usize)| match pool.checked_sub(1) {
            None => on_host(nbytes),
            // As many as were asked for, which the allocator gave.
            Some(device) => given[device]
                .next()
                .map(Allocated::Device)
                .ok_or_else(|| too_few(*nbytes)),
        };
        pools.iter().zip(plan.blocks()).map(allocated).collect()
    }

    /// The blocks, to be filled.
    pub(super) fn dests<'b>(
        &'b self,
        blocks: &'b mut [Allocated],
        pools: &'b [usize],
    ) -> impl Iterator<Item = Destination<'b>> {
        blocks.iter_mut().enumerate().map(|(number, block)| match block {
            Allocated::Host(block) => Destination::Together(block.dest()),
            Allocated::Device(block) => {
                let dest = self.devices[pools[number] - 1].dest(block, number);
                Destination::Device(Box::new(dest))
            }
        })
    }

    /// Makes the copies that follow wait for the work that is queued on the callers' streams.
    pub(super) fn begin(&self) -> Result<Copying<'_>, DeviceFault> {
        self.devices.iter().try_for_each(|onto| onto.at.begin())?;
        Ok(Copying(&self.devices))
    }

    /// Whether one of the devices has the host's memory for its own.
    pub(super) fn is_integrated(&self) -> bool {
        self.devices.iter().any(|onto| onto.at.device().is_integrated())
    }

    /// What was read of each part.
    pub(super) fn found(&self, blocks: Vec<Allocated>, places: &[Place], pools: &[usize]) -> Vec<Found> {
        enum Kept {
            Host(Arc<Memory>),
            Device(i32, DeviceBlock),
        }
        let keep = |(block, &pool): (Allocated, &usize)| match block {
            Allocated::Host(block) => Kept::Host(Arc::new(Memory::from(block))),
            Allocated::Device(block) => Kept::Device(self.devices[pool - 1].at.ordinal(), block),
        };
        let kept: Vec<Kept> = blocks.into_iter().zip(pools).map(keep).collect();
        let found = |place: &Place| match &kept[place.block] {
            Kept::Host(memory) => Found::Host(Region::new(Arc::clone(memory), place.at, place.nbytes)),
            Kept::Device(ordinal, block) => {
                let region = DeviceRegion::new(*ordinal, block.clone(), place.at, place.nbytes);
                Found::Device(Box::new(region))
            }
        };
        places.iter().map(found).collect()
    }
}
