//! Reading chunks for a device: into a pinned slot, which is then sent.

use std::mem;
use std::ops::Range;

use ingot_format::{StopFlag, to_usize};

use super::buffer::Destination;
use super::chunk::{Chunk, Task};
use super::gather::{self, Stage};
use super::input::Witness;
use crate::device::{Copy, Device, DeviceDest};
use crate::error::Failure;
use crate::file::ReadAt;
use crate::memory::Dest;

/// The alignment of tensors in device memory, in bytes: the largest one that vector units need.
const ALIGNMENT: usize = 256;

/// Read a task as [`gather::read`] does, into memory of any kind.
pub(super) fn read(
    source: &dyn ReadAt,
    witness: Option<&dyn Witness>,
    task: Task<'_, '_>,
    stage: &mut Stage,
    stop: StopFlag<'_>,
) -> Result<usize, Failure> {
    let is_for_device = |chunk: &Chunk<'_, '_>| matches!(chunk.dest, Destination::Device(_));
    if !task.iter().any(is_for_device) {
        return gather::read(source, witness, task, stage, stop);
    }
    let mut nbytes = 0;
    let mut rest = task.into_iter().peekable();
    while rest.peek().is_some() {
        let mut load = Load::default();
        while let Some(chunk) = rest.next_if(|chunk| load.has_room(chunk)) {
            load.add(chunk);
        }
        nbytes += load.read(source, witness, stage, stop)?;
    }
    Ok(nbytes)
}

/// Chunks that are read together: into one slot, or to host memory.
#[derive(Default)]
struct Load<'p, 'd> {
    chunks: Task<'p, 'd>,
    /// The position of each chunk's bytes in the slot.
    places: Vec<usize>,
    /// The end of the last chunk.
    end: usize,
    /// The copies from the slot to devices, each with its position in the slot. Neighbours are one copy.
    copies: Vec<(usize, DeviceDest<'d>)>,
}

impl<'p, 'd> Load<'p, 'd> {
    fn device(&self) -> Option<&'d Device> {
        self.copies.first().map(|(_, dest)| dest.device)
    }

    fn has_room(&self, chunk: &Chunk<'_, 'd>) -> bool {
        match (self.device(), &chunk.dest) {
            _ if self.chunks.is_empty() => true,
            (Some(device), Destination::Device(next)) => {
                let (place, _) = self.place(next);
                device.is(next.device) && place + next.len() <= device.slot_nbytes()
            }
            (None, dest) => !matches!(dest, Destination::Device(_)),
            _ => false,
        }
    }

    /// Return the position of the bytes of `next` in the slot, and whether the last copy can include them: the gap is
    /// then the same as on the device.
    fn place(&self, next: &DeviceDest<'_>) -> (usize, bool) {
        match self.copies.last().and_then(|(_, last)| gap(last, next)) {
            Some(gap) => (self.end + gap, true),
            None => (self.end.next_multiple_of(ALIGNMENT), false),
        }
    }

    fn add(&mut self, chunk: Chunk<'p, 'd>) {
        let mut place = 0;
        if let Destination::Device(next) = &chunk.dest {
            let is_near;
            (place, is_near) = self.place(next);
            match self.copies.last_mut() {
                Some((_, last)) if is_near => *last = last.reaching(next.end()),
                _ => self.copies.push((place, **next)),
            }
        }
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
        let Some(device) = self.device() else {
            return gather::read(source, witness, self.chunks, stage, stop);
        };
        let copies = self.copies.iter().map(|(place, dest)| dest.copied_from(*place));
        let copies: Vec<Copy> = copies.collect();
        let span = self.span();
        let mut slot = device.lend(stop)?;
        let mut room = slot.bytes();
        let mut at = 0;
        let mut chunks = Vec::with_capacity(self.chunks.len());
        for (chunk, place) in self.chunks.into_iter().zip(self.places) {
            let (_, from_place) = mem::take(&mut room).split_at_mut(place - at);
            let (bytes, after) = from_place.split_at_mut(chunk.dest.len());
            (room, at) = (after, place + bytes.len());
            chunks.push(chunk.into(Destination::Host(Dest::from(bytes))));
        }
        let nbytes = gather::read(source, witness, chunks, stage, stop)?;
        slot.send(&copies)?;
        if device.is_integrated() {
            // Host and device share their memory: free the file's pages, so that its bytes are not in memory twice.
            source.forget(span);
        }
        Ok(nbytes)
    }

    /// Return the range of the file that is read.
    fn span(&self) -> Range<u64> {
        let spans = || self.chunks.iter().map(|chunk| &chunk.span);
        let begin = spans().map(|span| span.start).min().unwrap_or_default();
        begin..spans().map(|span| span.end).max().unwrap_or_default()
    }
}

/// Return the gap between two destinations of one fresh block that are near each other.
fn gap(first: &DeviceDest<'_>, next: &DeviceDest<'_>) -> Option<usize> {
    let between = first.block.is_some() && first.block == next.block;
    let gap = next.address.checked_sub(first.end())?;
    to_usize(gap).filter(|&gap| between && gap < ALIGNMENT)
}
