//! Chunks that go to a device: they are read into a pinned slot, and sent on from there.

use std::mem;
use std::ops::Range;

use ingot_format::{StopFlag, to_usize};

use super::gather::{self, Chunk, Destination, Stage};
use super::input::Witness;
use crate::device::{Copy, DeviceDest};
use crate::error::Failure;
use crate::file::ReadAt;
use crate::memory::Dest;

/// Where tensors begin in the memory of a device, in bytes: what its vector units ask for at most.
pub(super) const ALIGNMENT: usize = 256;

/// Reads chunks as [`gather::read`] does, whatever memory they go to.
pub(super) fn read(
    source: &dyn ReadAt,
    witness: Option<&dyn Witness>,
    chunks: Vec<Chunk<'_, '_>>,
    stage: &mut Stage,
    stop: StopFlag<'_>,
) -> Result<usize, Failure> {
    if !chunks.iter().any(Chunk::is_for_device) {
        return gather::read(source, witness, chunks, stage, stop);
    }
    let mut nbytes = 0;
    let mut rest = chunks.into_iter().peekable();
    while let Some(first) = rest.next() {
        let mut group = Group::of(first);
        while let Some(chunk) = rest.next_if(|chunk| group.has_room(chunk)) {
            group.add(chunk);
        }
        nbytes += group.read(source, witness, stage, stop)?;
    }
    Ok(nbytes)
}

/// Chunks that are read together: through one slot, or past the ring.
struct Group<'p, 'd> {
    chunks: Vec<Chunk<'p, 'd>>,
    /// Of each, where in the slot its bytes stand.
    places: Vec<usize>,
    /// Where the last ends.
    end: usize,
}

impl<'p, 'd> Group<'p, 'd> {
    fn of(first: Chunk<'p, 'd>) -> Group<'p, 'd> {
        Group {
            end: first.dest.len(),
            places: vec![0],
            chunks: vec![first],
        }
    }

    fn has_room(&self, chunk: &Chunk<'_, '_>) -> bool {
        match (self.device(), &chunk.dest) {
            (Some(last), Destination::Device(next)) => {
                last.device.is(next.device) && self.place(next) + next.len() <= next.device.slot_nbytes()
            }
            (None, dest) => !matches!(dest, Destination::Device(_)),
            _ => false,
        }
    }

    /// The last destination, if it is on a device.
    fn device(&self) -> Option<&DeviceDest<'d>> {
        match self.chunks.last().map(|chunk| &chunk.dest) {
            Some(Destination::Device(last)) => Some(last),
            _ => None,
        }
    }

    /// Where the bytes of `next` stand: as far from those before it as on the device, where both are of one fresh block
    /// and near each other, so that one copy takes both.
    fn place(&self, next: &DeviceDest<'_>) -> usize {
        match self.device().and_then(|last| gap(last, next)) {
            Some(gap) => self.end + gap,
            None => self.end.next_multiple_of(ALIGNMENT),
        }
    }

    fn add(&mut self, chunk: Chunk<'p, 'd>) {
        let place = match &chunk.dest {
            Destination::Device(next) => self.place(next),
            _ => 0,
        };
        self.end = place + chunk.dest.len();
        self.places.push(place);
        self.chunks.push(chunk);
    }

    fn read(
        self,
        source: &dyn ReadAt,
        witness: Option<&dyn Witness>,
        stage: &mut Stage,
        stop: StopFlag<'_>,
    ) -> Result<usize, Failure> {
        let Some(device) = self.device().map(|dest| dest.device) else {
            return gather::read(source, witness, self.chunks, stage, stop);
        };
        let copies = self.copies();
        let span = self.span();
        let mut slot = device.lend(stop)?;
        let mut room = slot.bytes();
        let mut at = 0;
        let mut chunks = Vec::with_capacity(self.chunks.len());
        for (chunk, place) in self.chunks.into_iter().zip(self.places) {
            let (_, from_place) = mem::take(&mut room).split_at_mut(place - at);
            let (bytes, after) = from_place.split_at_mut(chunk.dest.len());
            (room, at) = (after, place + bytes.len());
            chunks.push(chunk.into(Destination::Together(Dest::from(bytes))));
        }
        let nbytes = gather::read(source, witness, chunks, stage, stop)?;
        slot.send(&copies)?;
        if device.is_integrated() {
            // Else the memory would hold the file as well as the tensors.
            source.forget(span);
        }
        Ok(nbytes)
    }

    /// What is read of the file, from the first byte to the last.
    fn span(&self) -> Range<u64> {
        let spans = || self.chunks.iter().map(|chunk| &chunk.span);
        let begin = spans().map(|span| span.start).min().unwrap_or_default();
        begin..spans().map(|span| span.end).max().unwrap_or_default()
    }

    /// What takes the bytes to the device: one copy for neighbours.
    fn copies(&self) -> Vec<Copy> {
        let mut joined: Vec<(usize, DeviceDest<'d>)> = Vec::new();
        for (chunk, &place) in self.chunks.iter().zip(&self.places) {
            let Destination::Device(dest) = &chunk.dest else {
                continue;
            };
            match joined.last_mut() {
                Some((_, last)) if gap(last, dest).is_some() => *last = last.reaching(dest.end()),
                _ => joined.push((place, **dest)),
            }
        }
        joined
            .iter()
            .map(|(place, dest)| dest.copied_from(*place))
            .collect()
    }
}

/// Bytes between two destinations of one fresh block that are near each other.
fn gap(first: &DeviceDest<'_>, next: &DeviceDest<'_>) -> Option<usize> {
    let between = first.block.is_some() && first.block == next.block;
    let gap = next.address.checked_sub(first.end())?;
    to_usize(gap).filter(|&gap| between && gap < ALIGNMENT)
}
