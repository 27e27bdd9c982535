//! Reading chunks for a device: into a pinned slot, which is then sent.

use std::mem;
use std::ops::Range;

use ingot_format::{StopFlag, to_u64, to_usize};

use super::buffer::Destination;
use super::chunk::{Chunk, Task};
use super::gather::{self, Stage};
use super::input::{PAGE_NBYTES, Witness};
use crate::device::{Copy, DeviceDest, DeviceStream};
use crate::error::Failure;
use crate::file::ReadAt;
use crate::memory::Dest;

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
        let mut load = Load {
            is_long: source.waits(),
            ..Load::default()
        };
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
    /// Whether the chunks are read together even if they do not fit into one slot: starting a read takes long.
    is_long: bool,
    /// The stream of the copies to a device, and the copies. Neighbours are one copy.
    at: Option<&'d DeviceStream>,
    copies: Vec<Copy>,
}

impl<'p, 'd> Load<'p, 'd> {
    fn has_room(&self, chunk: &Chunk<'_, 'd>) -> bool {
        match (self.at, &chunk.dest) {
            _ if self.chunks.is_empty() => true,
            (Some(at), Destination::Device(next)) => {
                let (place, _) = self.place(next, chunk.runs.begin());
                at.is(next.at) && (self.is_long || place + next.len() <= at.device().slot_nbytes())
            }
            (None, dest) => !matches!(dest, Destination::Device(_)),
            _ => false,
        }
    }

    /// Return the position in the slot of the bytes of `next`, which begin at `position` of the file, and whether the last
    /// copy can include them. If not, they begin as far into a page of the slot as they do in the file: whole pages of a
    /// file become whole pages of memory, as reads past the page cache need it, and neighbours in the file are neighbours in
    /// the slot.
    fn place(&self, next: &DeviceDest<'_>, position: u64) -> (usize, bool) {
        if let Some(Chunk {
            dest: Destination::Device(last),
            ..
        }) = self.chunks.last()
            && last.is_before(next)
        {
            return (self.end + next.gap, true);
        }
        let after = self.end + next.gap;
        let into_page = to_usize(position % to_u64(PAGE_NBYTES)).unwrap_or(0);
        (
            after + (PAGE_NBYTES + into_page - after % PAGE_NBYTES) % PAGE_NBYTES,
            false,
        )
    }

    fn add(&mut self, chunk: Chunk<'p, 'd>) {
        let mut place = 0;
        if let Destination::Device(next) = &chunk.dest {
            let is_near;
            (place, is_near) = self.place(next, chunk.runs.begin());
            self.at = Some(next.at);
            let copy = next.copied_from(place);
            match self.copies.last_mut() {
                Some(last) if is_near => last.extend(&copy),
                _ => self.copies.push(copy),
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
        let Some(at) = self.at else {
            return gather::read(source, witness, self.chunks, stage, stop);
        };
        let (copies, span, end) = (self.copies.clone(), self.span(), self.end);
        let slot_nbytes = at.device().slot_nbytes();
        let nbytes = if self.is_long || end > slot_nbytes {
            // No slot is held while a read waits for a network.
            let mut room = mem::take(&mut stage.relayed);
            room.resize(end.max(room.len()), 0);
            let nbytes = gather::read(source, witness, self.onto(&mut room), stage, stop)?;
            for part in copies.iter().flat_map(|copy| copy.parts(slot_nbytes)) {
                let mut slot = at.lend(stop)?;
                slot.bytes()[..part.bytes().len()].copy_from_slice(&room[part.bytes()]);
                slot.send(&[part.at_start()])?;
            }
            stage.relayed = room;
            nbytes
        } else {
            let mut slot = at.lend(stop)?;
            let nbytes = gather::read(source, witness, self.onto(slot.bytes()), stage, stop)?;
            slot.send(&copies)?;
            nbytes
        };
        if at.device().is_integrated() {
            // Host and device share their memory: free the file's pages, so that its bytes are not in memory twice.
            source.forget(span);
        }
        Ok(nbytes)
    }

    /// Return the chunks with places in `room` as their destinations. Gaps that are copied with them are zeroed.
    fn onto(self, room: &mut [u8]) -> Task<'p, '_> {
        let (mut room, mut at) = (room, 0);
        let mut chunks = Vec::with_capacity(self.chunks.len());
        for (chunk, place) in self.chunks.into_iter().zip(self.places) {
            let (before, from_place) = mem::take(&mut room).split_at_mut(place - at);
            if let Destination::Device(dest) = &chunk.dest {
                let begin = before.len() - dest.gap;
                before[begin..].fill(0);
            }
            let (bytes, after) = from_place.split_at_mut(chunk.dest.len());
            (room, at) = (after, place + bytes.len());
            chunks.push(chunk.into(Destination::Host(Dest::from(bytes))));
        }
        chunks
    }

    /// Return the range of the file that is read.
    fn span(&self) -> Range<u64> {
        let spans = || self.chunks.iter().map(|chunk| &chunk.span);
        let begin = spans().map(|span| span.start).min().unwrap_or_default();
        begin..spans().map(|span| span.end).max().unwrap_or_default()
    }
}
