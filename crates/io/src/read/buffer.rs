//! Memory as the destination of reads, on the host or on a device, before and after the read.

use std::sync::Arc;

use ingot_format::{Dtype, to_u64};

use super::job::Job;
use super::plan::{BlockPlan, Plan};
use crate::device::{DeviceDest, DeviceFault, DeviceRegion, Fresh, Onto};
use crate::error::Failure;
use crate::memory::{Block, Dest, Memory, Region};

/// Bytes that were read.
#[derive(Clone, Debug)]
pub enum Buffer {
    /// Host memory, or the mapping of a file.
    Host(Region),
    /// Device memory, which a framework allocated.
    Device(DeviceRegion),
}

impl Buffer {
    /// The size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Buffer::Host(region) => region.len(),
            Buffer::Device(region) => region.len(),
        }
    }

    /// Return whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return the bytes if they are on the host. They are unless a job names a device.
    #[must_use]
    pub fn host(self) -> Option<Region> {
        match self {
            Buffer::Host(region) => Some(region),
            Buffer::Device(_) => None,
        }
    }

    /// Return whether both are in one block of memory, which lives as long as one of them.
    #[must_use]
    pub fn shares_memory(&self, other: &Buffer) -> bool {
        match (self, other) {
            (Buffer::Host(one), Buffer::Host(other)) => Arc::ptr_eq(one.memory(), other.memory()),
            (Buffer::Device(one), Buffer::Device(other)) => Arc::ptr_eq(one.owner(), other.owner()),
            _ => false,
        }
    }

    /// Return `nbytes` bytes from `at` on as elements of `dtype`.
    pub(super) fn part(&self, at: usize, nbytes: usize, dtype: Dtype) -> Buffer {
        match self {
            Buffer::Host(region) => {
                let memory = Arc::clone(region.memory());
                Buffer::Host(Region::new(memory, region.at() + at, nbytes).of(dtype))
            }
            Buffer::Device(region) => Buffer::Device(region.part(at, nbytes)),
        }
    }
}

/// Fresh memory for one block of a plan.
pub(super) enum Allocated<'j> {
    Host(Block),
    Device(&'j Onto, DeviceRegion),
}

/// Allocate the blocks of a plan that reads these jobs.
pub(super) fn allocate<'j>(
    plan: &Plan<'_>,
    jobs: &[(usize, &'j Job<'_>)],
    devices: &[&'j Onto],
) -> Result<Vec<Allocated<'j>>, Failure> {
    let mut given = Vec::with_capacity(devices.len());
    for (number, onto) in devices.iter().enumerate() {
        onto.at.refuse_capture()?;
        let fresh = |block: &BlockPlan| {
            let job = block.job.map(|rank| jobs[rank].1);
            Fresh {
                nbytes: block.nbytes,
                tensor: job.map(|job| (job.dtype(), job.shape())),
            }
        };
        let blocks = plan.blocks().iter().filter(|block| block.pool == number + 1);
        let blocks: Vec<Fresh<'_>> = blocks.map(fresh).collect();
        let regions = onto.allocator.allocate(&blocks).map_err(Failure::Refused)?;
        given.push(regions.into_iter());
    }
    let allocated = |block: &BlockPlan| match block.pool.checked_sub(1) {
        None => Block::allocate(block.nbytes).map(Allocated::Host),
        Some(number) => {
            let region = given[number].next().ok_or(Failure::OutOfMemory {
                nbytes: to_u64(block.nbytes),
                source: None,
            })?;
            Ok(Allocated::Device(devices[number], region))
        }
    };
    plan.blocks().iter().map(allocated).collect()
}

impl Allocated<'_> {
    /// The memory to fill, as block `number` of its plan.
    pub(super) fn dest(&mut self, number: usize) -> Destination<'_> {
        match self {
            Allocated::Host(block) => Destination::Host(block.dest()),
            Allocated::Device(onto, region) => Destination::Device(Box::new(onto.dest(region, number))),
        }
    }
}

impl From<Allocated<'_>> for Buffer {
    fn from(block: Allocated<'_>) -> Buffer {
        match block {
            Allocated::Host(block) => {
                let memory = Memory::from(block);
                let nbytes = memory.len();
                Buffer::Host(Region::new(Arc::new(memory), 0, nbytes))
            }
            Allocated::Device(_, region) => Buffer::Device(region),
        }
    }
}

/// Copies that run on these devices. If it is dropped before [`Copies::end`], because reading failed or panicked, the callers'
/// streams wait for the copies: the memory that they write to may be freed next.
pub(super) struct Copies<'p, 'j>(&'p [&'j Onto]);

impl<'p, 'j> Copies<'p, 'j> {
    /// Make the copies that follow wait for the work on the callers' streams.
    pub(super) fn begin(devices: &'p [&'j Onto]) -> Result<Copies<'p, 'j>, DeviceFault> {
        devices.iter().try_for_each(|onto| onto.at.begin())?;
        Ok(Copies(devices))
    }

    /// Make the callers' streams wait for the copies.
    pub(super) fn end(mut self) -> Result<(), DeviceFault> {
        while let Some((onto, rest)) = self.0.split_first() {
            onto.at.hold()?;
            self.0 = rest;
        }
        Ok(())
    }
}

impl Drop for Copies<'_, '_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|onto| onto.at.settle());
    }
}

/// Memory during the read.
pub(crate) enum Destination<'d> {
    /// Memory of the host.
    Host(Dest<'d>),
    /// Memory of a device. Boxed, since there may be many destinations on the host, which are moved about.
    Device(Box<DeviceDest<'d>>),
    /// No memory: a witness of the file sees this many bytes.
    Shown(usize),
}

impl<'d> Destination<'d> {
    pub(super) fn len(&self) -> usize {
        match self {
            Destination::Host(dest) => dest.len(),
            Destination::Device(dest) => dest.len(),
            Destination::Shown(nbytes) => *nbytes,
        }
    }

    /// The same memory after a gap, which a device fills with it.
    pub(super) fn after(self, gap: usize) -> Destination<'d> {
        match self {
            Destination::Device(dest) => Destination::Device(Box::new(dest.after(gap))),
            other => other,
        }
    }

    /// Split off the first `at` bytes, or all if there are fewer. Return them and the rest.
    pub(super) fn split_at(self, at: usize) -> (Destination<'d>, Destination<'d>) {
        fn both<'d, T>(
            (first, rest): (T, T),
            kind: impl Fn(T) -> Destination<'d>,
        ) -> (Destination<'d>, Destination<'d>) {
            (kind(first), kind(rest))
        }
        match self {
            Destination::Host(dest) => both(dest.split_at(at), Destination::Host),
            Destination::Device(dest) => both(dest.split_at(at), |dest| Destination::Device(Box::new(dest))),
            Destination::Shown(nbytes) => {
                let first = at.min(nbytes);
                both((first, nbytes - first), Destination::Shown)
            }
        }
    }
}
