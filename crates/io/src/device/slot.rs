//! A slot: memory that bytes pass through, pinned if possible, and the copies that use it.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::arena::Place;
use super::driver::Event;
use super::fault::DeviceFault;
use super::gpu::{Gpu, Lane};

#[derive(Debug)]
pub(super) struct Slot {
    place: Place,
    pin: Option<Pin>,
    nbytes: usize,
    /// The last copies that used the slot, which may still run.
    pub(super) copies: Option<Copies>,
}

#[derive(Debug)]
pub(super) struct Copies {
    pub(super) gpu: Arc<Gpu>,
    pub(super) lane: Arc<Lane>,
    pub(super) event: Event,
}

/// How a slot was pinned, in the context of a device; a reset of the device ends it.
#[derive(Debug)]
struct Pin {
    gpu: Arc<Gpu>,
    /// The driver's own memory, which is used in place of the slot's. `None` if the slot's is registered.
    allocated: Option<Address>,
}

/// The address of memory that only the slot uses.
#[derive(Clone, Copy, Debug)]
struct Address(*mut u8);

// SAFETY: the memory at the address is readable and writable from every thread, and only the slot's holder uses it.
unsafe impl Send for Address {}

impl Slot {
    pub(super) fn new(place: Place, nbytes: usize) -> Slot {
        Slot {
            place,
            pin: None,
            nbytes,
            copies: None,
        }
    }

    /// The memory, with unspecified content.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        match self.pin.as_ref().and_then(|pin| pin.allocated) {
            // SAFETY: `from_raw_parts_mut` requires
            // - that many bytes in one allocation, readable and writable: memory of `cuMemHostAlloc`;
            // - no other access while the slice lives: only slots that no copy uses are lent, and `self` is borrowed
            //   exclusively. Not provable: a `cudaDeviceReset` by another thread frees them while the slot is filled.
            Some(Address(start)) => unsafe { std::slice::from_raw_parts_mut(start, self.nbytes) },
            None => self.place.bytes(),
        }
    }

    /// Return whether the memory is pinned, for copies of `gpu`. If another device had pinned it and was reset, it is
    /// not pinned any more.
    pub(super) fn is_pinned(&mut self, gpu: &Arc<Gpu>) -> bool {
        let is_gone = |pin: &Pin| !Arc::ptr_eq(&pin.gpu, gpu) && pin.gpu.is_reset();
        self.pin = self.pin.take().filter(|pin| !is_gone(pin));
        self.pin.is_some()
    }

    /// Pin the memory: by registering it or, where the system does not permit that, with memory of the driver.
    pub(super) fn pin(&mut self, gpu: &Arc<Gpu>) -> Result<(), DeviceFault> {
        self.place.touch();
        let start = self.place.start();
        // SAFETY: `register` requires memory that stays mapped until it is unregistered: `unpin` does this before the place
        // is dropped, or keeps the memory.
        let registered = gpu.within(|driver| unsafe { driver.register(start, self.nbytes) });
        let allocated = match registered {
            Ok(()) => None,
            Err(fault) if !fault.is_unpinned() => return Err(fault),
            Err(_) => Some(Address(gpu.within(|driver| driver.allocate(self.nbytes))?)),
        };
        let gpu = Arc::clone(gpu);
        self.pin = Some(Pin { gpu, allocated });
        Ok(())
    }

    /// Return whether no copy uses the slot.
    pub(super) fn is_free(&self) -> Result<bool, DeviceFault> {
        match &self.copies {
            None => Ok(true),
            Some(copies) => match copies.gpu.within(|driver| driver.is_done(copies.event)) {
                // The copies ended with their context.
                Err(fault) if fault.is_reset() => Ok(true),
                asked => asked,
            },
        }
    }

    /// Drop the record of copies that are done.
    pub(super) fn forget_copies(&mut self) {
        if let Some(Copies { gpu, lane, event }) = self.copies.take() {
            gpu.give_back(event);
            lane.put();
        }
    }

    /// Return the place, which is not pinned any more. `None` if the driver cannot be asked: then it is never used again.
    pub(super) fn unpin(mut self) -> Option<Place> {
        self.forget_copies();
        let Some(Pin { gpu, allocated }) = self.pin.take() else {
            return Some(self.place);
        };
        if gpu.is_reset() {
            return Some(self.place);
        }
        let start = self.place.start();
        let unpinned = gpu.within(|driver| match allocated {
            // SAFETY: requires memory that no code and no copy uses any more: only slots that no copy uses are unpinned, and
            // only the slot has the address.
            Some(Address(start)) => unsafe { driver.free(start) },
            // SAFETY: as for `free`.
            None => unsafe { driver.unregister(start) },
        });
        if unpinned.is_err() && allocated.is_none() {
            self.place.leak();
            return None;
        }
        Some(self.place)
    }

    /// Keep the memory for ever, since copies may still use it.
    pub(super) fn leak(self) {
        self.place.leak();
        if let Some(copies) = &self.copies {
            copies.lane.put();
        }
    }
}
