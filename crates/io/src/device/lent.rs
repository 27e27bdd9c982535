//! A lent slot, which is filled or copied to.
#![allow(unsafe_code)]

use std::sync::Arc;

use ingot_format::StopFlag;

use super::copy::Copy;
use super::driver::{Driver, Stream};
use super::fault::DeviceFault;
use super::gpu::Gpu;
use super::lane::Lane;
use super::ring::{Patience, Ring};
use super::slot::{Copies, Slot};

/// A lent slot. When it is dropped, it returns to the ring.
#[derive(Debug)]
pub(crate) struct Lent {
    slot: Option<Slot>,
    ring: Arc<Ring>,
    gpu: Arc<Gpu>,
    lane: Arc<Lane>,
}

impl Lent {
    /// Lend a slot that no copy uses, and that `lane` has counted.
    pub(super) fn new(slot: Slot, ring: &Arc<Ring>, gpu: &Arc<Gpu>, lane: &Arc<Lane>) -> Lent {
        Lent {
            slot: Some(slot),
            ring: Arc::clone(ring),
            gpu: Arc::clone(gpu),
            lane: Arc::clone(lane),
        }
    }

    pub(super) fn slot_mut(&mut self) -> Option<&mut Slot> {
        self.slot.as_mut()
    }

    /// The memory of the slot, with unspecified content. Empty while copies use it.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        match &mut self.slot {
            Some(slot) if slot.copies.is_none() => slot.bytes(),
            _ => &mut [],
        }
    }

    /// Queue copies of these bytes of a device to their places in the slot.
    pub(super) fn fetch(&mut self, gpu: &Arc<Gpu>, lane: &Lane, copies: &[Copy]) -> Result<(), DeviceFault> {
        self.queue(gpu, lane.stream, copies, |driver, start, copy, stream| {
            // SAFETY: requires
            // - bytes that no other code uses until the copy is done: the slot's (`queue`), which is not lent until then;
            // - as many bytes on the device: the constructor of `DeviceBytes`, which makes copies, requires them.
            unsafe { driver.copy_out(start, copy.address, copy.nbytes, stream) }
        })
    }

    /// Wait until the copies have arrived.
    pub(super) fn arrive(&mut self, stop: StopFlag<'_>) -> Result<(), DeviceFault> {
        let Some(slot) = &mut self.slot else {
            return Ok(());
        };
        let mut patience = Patience::new(stop);
        while !slot.is_free()? {
            patience.wait()?;
        }
        if let Some(Copies { gpu, event, .. }) = slot.copies.take() {
            gpu.give_back(event);
        }
        Ok(())
    }

    /// Queue these copies, and return the slot, to be lent again when they are done.
    pub(crate) fn send(mut self, copies: &[Copy]) -> Result<(), DeviceFault> {
        let (gpu, stream) = (Arc::clone(&self.gpu), self.lane.stream);
        self.queue(&gpu, stream, copies, |driver, start, copy, stream| {
            // SAFETY: requires
            // - bytes that stay until the copy is done: the slot's (`queue`), which is not lent before;
            // - as many bytes on the device: the constructor of `DeviceDest`, which makes copies, requires them.
            unsafe { driver.copy_in(start.cast_const(), copy.address, copy.nbytes, stream) }
        })
    }

    /// Queue copies, each by `call` with the address of its bytes in the slot.
    fn queue(
        &mut self,
        gpu: &Arc<Gpu>,
        stream: Stream,
        copies: &[Copy],
        call: impl Fn(&Driver, *mut u8, &Copy, Stream) -> Result<(), DeviceFault>,
    ) -> Result<(), DeviceFault> {
        let room = self.bytes();
        let fits = copies.iter().all(|copy| copy.begin + copy.nbytes <= room.len());
        assert!(fits, "a copy ends within its slot");
        let start = room.as_mut_ptr();
        let queued = gpu.within(|driver| {
            let call = |copy: &Copy| call(driver, start.wrapping_add(copy.begin), copy, stream);
            copies.iter().try_for_each(call)?;
            gpu.mark(driver, stream)
        });
        let (event, outcome) = match queued {
            Ok(event) => (Some(event), Ok(())),
            // Some of them may be queued.
            Err(fault) => (gpu.within(|driver| gpu.mark(driver, stream)).ok(), Err(fault)),
        };
        match (event, self.slot.take()) {
            (Some(event), Some(mut slot)) => {
                let (gpu, lane) = (Arc::clone(gpu), Arc::clone(&self.lane));
                slot.copies = Some(Copies { gpu, lane, event });
                self.slot = Some(slot);
            }
            (None, Some(slot)) => {
                self.lane.put();
                self.ring.forget(slot);
            }
            (_, None) => {}
        }
        outcome
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            if slot.copies.is_none() {
                self.lane.put();
            }
            self.ring.take_back(slot);
        }
    }
}
