//! Memory that bytes pass through on their way to a device: one ring for all devices and all calls.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ingot_format::StopFlag;

use super::arena::{Arena, PAGE_NBYTES, Place};
use super::copy::Copy;
use super::driver::{Driver, Stream, refuse_child};
use super::fault::DeviceFault;
use super::gpu::{Gpu, Lane};
use super::slot::{Copies, Slot};
use crate::sync::{Condvar, Mutex, PoisonError, locked, thread};

/// Bytes that are copied at once: copying them takes five times as long as queueing the copy, and the chunks of all
/// readers together stay in the processors' caches.
pub(super) const CHUNK_NBYTES: usize = 1 << 20;

/// The most bytes of all slots together, unless the environment sets another number: enough to keep sixteen readers and
/// a device busy.
pub(super) const PINNED_NBYTES: usize = 32 << 20;

/// How long unused slots are kept: loads often follow each other.
const IDLE: Duration = Duration::from_secs(5);

/// How often a waiting thread checks for an interrupt. An interrupt should end a wait within 100 ms.
const ASK: Duration = Duration::from_millis(50);

/// Limits of the time between two queries while a thread waits. The thread sleeps for a fourth of the time it has waited
/// so far. A copy of a slot takes 20 µs at 55 GB/s.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// The fewest slots: one is filled while the other is copied.
const FEWEST: usize = 2;

/// The slots. A slot is lent to be filled, and returns when its copies are queued. The slot whose copies ended last is lent
/// first: its bytes are still in a processor's cache, and no more slots are pinned than the callers need.
#[derive(Debug)]
pub(crate) struct Ring {
    state: Mutex<State>,
    idle: Arc<Idle>,
    slot_nbytes: usize,
    /// The maximum number of slots.
    most: usize,
}

#[derive(Debug)]
struct State {
    /// Slots that no copy uses, the last used one last.
    free: Vec<Slot>,
    /// Slots that copies use, in the order of the copies, for each lane.
    flying: Vec<VecDeque<Slot>>,
    /// Places that no slot has.
    vacant: Vec<Place>,
    /// The number of slots, including lent ones.
    made: usize,
    /// The reason if some slots are not pinned.
    why_pageable: Option<String>,
    /// Whether pinning failed in a load that may still run. It is tried again by the next load.
    is_refused: bool,
    /// The time when a slot was last lent.
    used: Instant,
    /// Whether a thread frees unused slots.
    is_watched: bool,
}

/// The slot that is lent next.
enum Next {
    /// An existing slot.
    Made(Slot),
    /// The place of a new slot, which is counted already.
    Room(Place),
    /// All slots are lent or used by copies.
    Wait,
}

impl Ring {
    /// Creates a ring for chunks of this size, with at most `most_nbytes` bytes, but with at least two slots.
    pub(crate) fn new(chunk_nbytes: usize, most_nbytes: usize) -> Ring {
        // A chunk begins as far into a page of its slot as it does in its file.
        let slot_nbytes = chunk_nbytes + PAGE_NBYTES;
        Ring {
            state: Mutex::new(State {
                free: Vec::new(),
                flying: Vec::new(),
                vacant: Vec::new(),
                made: 0,
                why_pageable: None,
                is_refused: false,
                used: Instant::now(),
                is_watched: false,
            }),
            idle: Arc::default(),
            slot_nbytes,
            most: (most_nbytes / slot_nbytes).max(FEWEST),
        }
    }

    pub(crate) fn slot_nbytes(&self) -> usize {
        self.slot_nbytes
    }

    /// Returns the reason if some slots are not pinned.
    pub(crate) fn why_pageable(&self) -> Option<String> {
        locked(&self.state).why_pageable.clone()
    }

    /// Try to pin memory again, which an earlier load could not.
    pub(crate) fn try_again(&self) {
        locked(&self.state).is_refused = false;
    }

    /// Return a slot for a copy on `lane` that no copy uses. Wait until there is one.
    pub(crate) fn lend(
        self: &Arc<Ring>,
        gpu: &Arc<Gpu>,
        lane: &Arc<Lane>,
        stop: StopFlag<'_>,
    ) -> Result<Lent, DeviceFault> {
        let mut patience = Patience::new(stop);
        loop {
            if let Some(lent) = self.lend_now(gpu, lane)? {
                return Ok(lent);
            }
            patience.wait()?;
        }
    }

    /// Return a slot for a copy on `lane` if there is one that no copy uses.
    pub(crate) fn lend_now(
        self: &Arc<Ring>,
        gpu: &Arc<Gpu>,
        lane: &Arc<Lane>,
    ) -> Result<Option<Lent>, DeviceFault> {
        // Checked before taking the lock, which another thread may have held when this process was forked.
        refuse_child()?;
        if !lane.take(gpu)? {
            return Ok(None);
        }
        let slot = match self.next(gpu) {
            Ok(Next::Made(slot)) => slot,
            Ok(Next::Room(place)) => Slot::new(place, self.slot_nbytes),
            Ok(Next::Wait) => {
                lane.put();
                return Ok(None);
            }
            Err(fault) => {
                lane.put();
                return Err(fault);
            }
        };
        self.begin_use();
        let mut lent = Lent::new(slot, self, gpu, lane);
        self.pin(lent.slot_mut(), gpu)?;
        Ok(Some(lent))
    }

    /// Record that slots are used, and start the thread that frees idle ones.
    fn begin_use(self: &Arc<Ring>) {
        let mut state = locked(&self.state);
        state.used = Instant::now();
        if !state.is_watched {
            state.is_watched = self.watch();
        }
    }

    /// Return the slot whose copies ended last or, if all are in use, the place of a new one.
    fn next(&self, gpu: &Arc<Gpu>) -> Result<Next, DeviceFault> {
        let mut state = locked(&self.state);
        if state.free.is_empty() {
            state.harvest(Some(gpu))?;
        }
        if let Some(slot) = state.free.pop() {
            return Ok(Next::Made(slot));
        }
        if state.made == self.most {
            return Ok(Next::Wait);
        }
        if state.vacant.is_empty() {
            let opened = Arena::open(self.slot_nbytes, self.most);
            state.vacant = opened.map_err(|fault| DeviceFault::HostMemory {
                nbytes: self.slot_nbytes * self.most,
                reason: fault.to_string(),
            })?;
        }
        let place = state.vacant.pop();
        state.made += usize::from(place.is_some());
        Ok(place.map_or(Next::Wait, Next::Room))
    }

    /// Pin a slot, unless that failed in a load that may still run. A load never fails because memory cannot be pinned.
    fn pin(&self, slot: Option<&mut Slot>, gpu: &Arc<Gpu>) -> Result<(), DeviceFault> {
        let Some(slot) = slot else { return Ok(()) };
        if slot.is_pinned(gpu) || locked(&self.state).is_refused {
            return Ok(());
        }
        let pinned = slot.pin(gpu);
        let mut state = locked(&self.state);
        match pinned {
            Ok(()) => state.why_pageable = state.why_pageable.take().filter(|_| state.is_refused),
            Err(fault) if fault.is_unpinned() => {
                state.is_refused = true;
                state.why_pageable = Some(fault.to_string());
            }
            Err(fault) => return Err(fault),
        }
        Ok(())
    }

    /// Start the thread that frees unused slots. Return whether the system permits it.
    fn watch(self: &Arc<Ring>) -> bool {
        let (ring, idle) = (Arc::downgrade(self), Arc::clone(&self.idle));
        let watch = move || {
            let mut is_released = idle.wait();
            while ring.upgrade().is_some_and(|ring| ring.is_used(is_released)) {
                is_released = idle.wait();
            }
        };
        let thread = thread::Builder::new().name("ingot-pinned".to_owned());
        thread.spawn(watch).is_ok()
    }

    /// Free the slots that no copy uses, if the ring has been idle for long enough or `is_released`. Return whether slots
    /// are left.
    fn is_used(&self, is_released: bool) -> bool {
        let is_idle = locked(&self.state).used.elapsed() >= IDLE;
        if is_released || is_idle {
            self.give_back();
        }
        let mut state = locked(&self.state);
        state.is_watched = state.made > 0;
        state.is_watched
    }

    /// Frees the memory that no copy uses now, instead of after some idle time.
    pub(crate) fn release_unused(&self) {
        self.idle.end();
    }

    /// Drop a slot whose copies may still run, because the driver cannot be asked. Its memory is never used again.
    pub(super) fn forget(&self, slot: Slot) {
        slot.leak();
        locked(&self.state).made -= 1;
    }

    /// Take a slot back.
    pub(super) fn take_back(&self, slot: Slot) {
        let mut state = locked(&self.state);
        let Some(lane) = slot.copies.as_ref().map(|copies| &copies.lane) else {
            state.free.push(slot);
            return;
        };
        let of_lane = |queue: &&mut VecDeque<Slot>| {
            let first = queue.front().and_then(|slot| slot.copies.as_ref());
            first.is_some_and(|copies| Arc::ptr_eq(&copies.lane, lane))
        };
        match state.flying.iter_mut().find(of_lane) {
            Some(queue) => queue.push_back(slot),
            None => state.flying.push(VecDeque::from([slot])),
        }
    }

    /// Free the memory of all slots that no copy uses: of all slots if no call is running.
    pub(crate) fn give_back(&self) {
        let mut state = locked(&self.state);
        // A query that fails is repeated by the next call.
        let _ = state.harvest(None);
        let free = mem::take(&mut state.free);
        let count = free.len();
        // Unpinning takes long, and no other thread need wait for it.
        drop(state);
        let places: Vec<Place> = free.into_iter().filter_map(Slot::unpin).collect();
        let mut state = locked(&self.state);
        state.vacant.extend(places);
        state.made -= count;
        if state.made == 0 {
            state.vacant.clear();
        }
    }
}

impl State {
    /// Collect the slots whose copies are done. A fault is reported if it is of `gpu`, which the caller uses. The slots of
    /// another device that is lost are dropped, which is no error for this caller.
    fn harvest(&mut self, gpu: Option<&Arc<Gpu>>) -> Result<(), DeviceFault> {
        for queue in &mut self.flying {
            while let Some(slot) = queue.front() {
                let is_ours = |copies: &Copies| gpu.is_some_and(|gpu| Arc::ptr_eq(gpu, &copies.gpu));
                match slot.is_free() {
                    Ok(false) => break,
                    Ok(true) => {
                        let mut slot = queue.pop_front();
                        slot.iter_mut().for_each(Slot::forget_copies);
                        self.free.extend(slot);
                    }
                    Err(fault) if slot.copies.as_ref().is_some_and(is_ours) => return Err(fault),
                    Err(fault) if fault.is_lost() || gpu.is_some() => {
                        queue.pop_front().into_iter().for_each(Slot::leak);
                        self.made -= 1;
                    }
                    Err(_) => break,
                }
            }
        }
        self.flying.retain(|queue| !queue.is_empty());
        Ok(())
    }
}

/// A wait that polls: the driver's own waits cannot be interrupted, and a copy may wait for a kernel that never ends.
#[derive(Debug)]
pub(super) struct Patience<'s> {
    stop: StopFlag<'s>,
    begun: Instant,
    asked: Instant,
}

impl<'s> Patience<'s> {
    pub(super) fn new(stop: StopFlag<'s>) -> Patience<'s> {
        let begun = Instant::now();
        Patience {
            stop,
            begun,
            asked: begun,
        }
    }

    /// Wait a little. Fail if the caller has stopped the call.
    pub(super) fn wait(&mut self) -> Result<(), DeviceFault> {
        let is_late = self.asked.elapsed() >= ASK;
        if is_late {
            self.asked = Instant::now();
        }
        if self.stop.is_set() || is_late && self.stop.asked() {
            return Err(DeviceFault::Interrupted);
        }
        let waited = self.begun.elapsed();
        if waited < SHORTEST {
            thread::yield_now();
        } else {
            thread::sleep((waited / 4).clamp(SHORTEST, LONGEST));
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.idle.end();
        // With a lost context the memory is gone already, and the child of a fork has no context.
        if refuse_child().is_ok() {
            self.give_back();
        }
        let flying = mem::take(&mut locked(&self.state).flying);
        flying.into_iter().flatten().for_each(Slot::leak);
    }
}

/// The signal for the thread that frees unused slots.
#[derive(Debug, Default)]
struct Idle {
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl Idle {
    /// Wait until slots may be idle. Return whether the wait was ended.
    fn wait(&self) -> bool {
        let is_over = locked(&self.is_over);
        let waited = self
            .changed
            .wait_timeout_while(is_over, IDLE, |is_over| !*is_over);
        mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    fn end(&self) {
        *locked(&self.is_over) = true;
        self.changed.notify_all();
    }
}

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

#[cfg(test)]
mod tests {
    use super::super::Device;
    use super::super::fake::Fake;
    use super::*;

    /// Longer than any test takes.
    const LONG: Duration = Duration::from_secs(3600);

    /// A ring with a slot that was filled and returned, at a time from which it is never idle.
    fn used() -> (Fake, Device) {
        let fake = Fake::new(1, 1, 2);
        let device = fake.device(0);
        let lent = Fake::stream(&device).lend(StopFlag::never());
        lent.unwrap().send(&[]).unwrap();
        Fake::finish(&device);
        locked(&fake.ring.state).used = Instant::now() + LONG;
        (fake, device)
    }

    #[test]
    fn sixteen_readers_have_a_slot_each_and_some_are_copied() {
        const { assert!(PINNED_NBYTES / (CHUNK_NBYTES + PAGE_NBYTES) >= 16 + 4) };
    }

    #[test]
    fn memory_is_given_back_when_it_is_idle_and_when_that_is_asked_for_and_not_before() {
        for (is_released, is_idle, is_left) in
            [(false, false, true), (true, false, false), (false, true, false)]
        {
            let (fake, _device) = used();
            if is_idle {
                locked(&fake.ring.state).used = Instant::now().checked_sub(IDLE).unwrap();
            }
            assert_eq!(fake.ring.is_used(is_released), is_left, "{is_released} {is_idle}");
            assert_eq!(locked(&fake.ring.state).is_watched, is_left);
            assert_eq!(fake.counters().pinned > 0, is_left);
        }
    }

    #[test]
    fn released_memory_is_freed_by_another_thread() {
        let (fake, _device) = used();
        assert!(fake.counters().pinned > 0);
        fake.ring.release_unused();
        let begun = Instant::now();
        while fake.counters().pinned > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "nobody gives it back");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_thread_of_a_ring_that_is_gone_need_not_wait() {
        let ring = Ring::new(1, 2);
        let idle = Arc::clone(&ring.idle);
        assert!(!*locked(&idle.is_over));
        drop(ring);
        assert!(*locked(&idle.is_over));
    }

    #[test]
    fn a_slot_whose_device_is_lost_is_forgotten_and_one_that_cannot_tell_yet_is_kept() {
        // The driver's answer for the event, after three calls that make the context the current one.
        for (code, left) in [(700, 0), (1, 1)] {
            let (fake, _device) = used();
            let pinned = fake.counters().pinned;
            fake.fail(4, code);
            fake.ring.give_back();
            let state = locked(&fake.ring.state);
            let flying: usize = state.flying.iter().map(VecDeque::len).sum();
            assert_eq!((state.made, flying), (left, left), "{code}");
            assert_eq!(fake.counters().pinned, pinned, "none of it was freed");
        }
    }
}
