//! Pinned memory that bytes pass through on their way to a device: one ring for all devices and all calls.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::mem;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ingot_format::StopFlag;

use super::copy::Copy;
use super::driver::{Driver, Event, Stream, refuse_child};
use super::fault::DeviceFault;
use super::gpu::Gpu;
use super::numa::near;
use crate::sync::{Condvar, Mutex, PoisonError, locked, thread};

/// Bytes of a slot: copying this many takes twenty times as long as queueing the copy.
pub(super) const SLOT_NBYTES: usize = 4 << 20;

/// The most bytes of all slots together, unless the environment sets another number: enough to keep sixteen readers and
/// a device busy.
pub(super) const PINNED_NBYTES: usize = 128 << 20;

/// How long unused slots are kept: loads often follow each other.
const IDLE: Duration = Duration::from_secs(5);

/// How often a waiting thread checks for an interrupt. An interrupt should end a wait within 100 ms.
const ASK: Duration = Duration::from_millis(50);

/// Limits of the time between two queries while a thread waits for a copy. The thread sleeps for a fourth of the time
/// it has waited so far. A copy of a slot takes 75 µs at 55 GB/s.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// This many slots are made even if others fail: one is filled while the other is copied.
const FEWEST: usize = 2;

/// The slots. A slot is lent to be filled, and returns when its copies are queued. The slot that returned first is lent
/// first, so that a caller waits for the oldest copy.
#[derive(Debug)]
pub(crate) struct Ring {
    state: Mutex<State>,
    came_back: Condvar,
    idle: Arc<Idle>,
    slot_nbytes: usize,
}

#[derive(Debug)]
struct State {
    resting: VecDeque<Slot>,
    /// The number of slots, including lent ones.
    made: usize,
    /// The maximum number of slots.
    most: usize,
    /// The reason if some slots are not pinned.
    why_pageable: Option<String>,
    /// The time when a slot was last lent.
    used: Instant,
    /// Whether a thread frees unused slots.
    is_watched: bool,
}

#[derive(Debug)]
struct Slot {
    memory: Memory,
    /// The last copies that used the slot, which may still run.
    copies: Option<Copies>,
}

#[derive(Debug)]
struct Copies {
    gpu: Arc<Gpu>,
    event: Event,
}

/// The memory of a slot.
#[derive(Debug)]
enum Memory {
    /// Memory pinned in the context of this device; a reset of the device frees it.
    Pinned {
        start: *mut u8,
        gpu: Arc<Gpu>,
    },
    Pageable(Vec<u8>),
}

// SAFETY: only the slot uses its memory, which is writable from every thread.
unsafe impl Send for Memory {}

impl Ring {
    /// Creates a ring of at most `most_nbytes` bytes, but with at least two slots.
    pub(crate) fn new(slot_nbytes: usize, most_nbytes: usize) -> Ring {
        Ring {
            state: Mutex::new(State {
                resting: VecDeque::new(),
                made: 0,
                most: (most_nbytes / slot_nbytes).max(FEWEST),
                why_pageable: None,
                used: Instant::now(),
                is_watched: false,
            }),
            came_back: Condvar::new(),
            idle: Arc::default(),
            slot_nbytes,
        }
    }

    pub(crate) fn slot_nbytes(&self) -> usize {
        self.slot_nbytes
    }

    /// Returns the reason if some slots are not pinned.
    pub(crate) fn why_pageable(&self) -> Option<String> {
        locked(&self.state).why_pageable.clone()
    }

    /// Return a slot that no copy uses. Wait until there is one.
    pub(crate) fn lend(self: &Arc<Ring>, gpu: &Arc<Gpu>, stop: StopFlag<'_>) -> Result<Lent, DeviceFault> {
        // Checked before taking the lock, which another thread may have held when this process was forked.
        refuse_child()?;
        self.begin_use();
        loop {
            let slot = match self.next(stop)? {
                Next::Made(slot) => self.ready(slot, gpu, stop)?,
                Next::Room => self.make(gpu)?,
            };
            if let Some(slot) = slot {
                return Ok(Lent {
                    slot: Some(slot),
                    ring: Arc::clone(self),
                    gpu: Arc::clone(gpu),
                });
            }
        }
    }

    /// Record that slots are used, and start the thread that frees idle ones.
    fn begin_use(self: &Arc<Ring>) {
        let mut state = locked(&self.state);
        state.used = Instant::now();
        if !state.is_watched {
            state.is_watched = self.watch();
        }
    }

    /// Return the slot with the oldest copies, or permission to make a new one if there is room and those copies still
    /// run. Wait while all slots are lent.
    fn next(&self, stop: StopFlag<'_>) -> Result<Next, DeviceFault> {
        let mut state = locked(&self.state);
        loop {
            let is_room = state.made < state.most;
            // If the query fails, `ready` makes it again and handles the fault.
            let is_ready = |slot: &Slot| !is_room || slot.is_free().unwrap_or(true);
            if state.resting.front().is_some_and(is_ready)
                && let Some(slot) = state.resting.pop_front()
            {
                return Ok(Next::Made(slot));
            }
            if is_room {
                state.made += 1;
                return Ok(Next::Room);
            }
            let waited = self.came_back.wait_timeout(state, ASK);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            if stop.asked() {
                return Err(DeviceFault::Interrupted);
            }
            state = locked(&self.state);
        }
    }

    /// Start the thread that frees unused slots. Return whether the system permits it.
    fn watch(self: &Arc<Ring>) -> bool {
        let (ring, idle) = (Arc::downgrade(self), Arc::clone(&self.idle));
        let watch = move || {
            let mut is_let_go = idle.wait();
            while ring.upgrade().is_some_and(|ring| ring.is_used(is_let_go)) {
                is_let_go = idle.wait();
            }
        };
        let thread = thread::Builder::new().name("ingot-pinned".to_owned());
        thread.spawn(watch).is_ok()
    }

    /// Free the slots that no copy uses, if the ring has been idle for long enough or `is_let_go`. Return whether slots
    /// are left.
    fn is_used(&self, is_let_go: bool) -> bool {
        let is_idle = locked(&self.state).used.elapsed() >= IDLE;
        if is_let_go || is_idle {
            self.give_back();
        }
        let mut state = locked(&self.state);
        state.is_watched = state.made > 0;
        state.is_watched
    }

    /// Frees the memory that no copy uses now, instead of after some idle time.
    pub(crate) fn let_go(&self) {
        self.idle.end();
    }

    /// Waits until the copies of `slot` are done, and returns it. `None` if its memory is gone, or if the copies were
    /// of another device than `gpu` and failed, which is no error for this caller.
    fn ready(&self, mut slot: Slot, gpu: &Arc<Gpu>, stop: StopFlag<'_>) -> Result<Option<Slot>, DeviceFault> {
        match slot.finish(stop) {
            Ok(()) if !slot.is_gone() => Ok(Some(slot)),
            Err(fault) if fault == DeviceFault::Interrupted || slot.is_used_by(gpu) => {
                // The copies may still run; the next caller checks again.
                self.take_back(slot);
                Err(fault)
            }
            Ok(()) | Err(_) => {
                self.forget(slot);
                Ok(None)
            }
        }
    }

    /// Make a new slot, whose place in the ring is counted already. `None` if pinning fails and the ring has enough
    /// slots.
    fn make(&self, gpu: &Arc<Gpu>) -> Result<Option<Slot>, DeviceFault> {
        // The driver allocates memory near the calling thread.
        let pinned = near(gpu.node, || {
            gpu.within(|driver, _| driver.allocate(self.slot_nbytes))
        });
        let fault = match pinned {
            Ok(start) => {
                let gpu = Arc::clone(gpu);
                return Ok(Some(Slot::new(Memory::Pinned { start, gpu })));
            }
            Err(fault) => fault,
        };
        let mut state = locked(&self.state);
        state.made -= 1;
        if !fault.is_unpinned() {
            drop(state);
            // Another thread may wait for a slot, and there is room for one again.
            self.came_back.notify_one();
            return Err(fault);
        }
        if state.made >= FEWEST {
            state.most = state.made;
            return Ok(None);
        }
        state.made += 1;
        state.most = FEWEST;
        state.why_pageable.get_or_insert_with(|| fault.to_string());
        Ok(Some(Slot::new(Memory::Pageable(vec![0; self.slot_nbytes]))))
    }

    /// Take back a slot whose copies failed. Some of them may be queued.
    fn abandon(&self, mut slot: Slot, gpu: &Arc<Gpu>) {
        match gpu.within(|driver, _| gpu.mark(driver)) {
            Ok(event) => {
                let gpu = Arc::clone(gpu);
                slot.copies = Some(Copies { gpu, event });
                self.take_back(slot);
            }
            Err(_) => self.forget(slot),
        }
    }

    /// Drops a slot whose memory is gone, or whose copies may still run because the driver cannot be asked. The memory is never
    /// used again.
    fn forget(&self, slot: Slot) {
        slot.leak();
        let mut state = locked(&self.state);
        state.made -= 1;
        drop(state);
        self.came_back.notify_one();
    }

    /// Take a slot back.
    fn take_back(&self, slot: Slot) {
        locked(&self.state).resting.push_back(slot);
        self.came_back.notify_one();
    }

    /// Free the memory of all slots that no copy uses: of all slots if no call is running.
    pub(crate) fn give_back(&self) {
        let mut state = locked(&self.state);
        let mut free = Vec::new();
        for slot in mem::take(&mut state.resting) {
            match slot.is_free() {
                Ok(true) => free.push(slot),
                // The memory is lost with the device: no call frees it.
                Err(fault) if fault.is_lost() => {
                    slot.leak();
                    state.made -= 1;
                }
                Ok(false) | Err(_) => state.resting.push_back(slot),
            }
        }
        state.made -= free.len();
        // Freeing pinned memory takes long, and no other thread need wait for it.
        drop(state);
        drop(free);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.idle.end();
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

/// The slot that is lent next.
enum Next {
    /// An existing slot. Its copies may still run.
    Made(Slot),
    /// Room for a new slot, which is counted already.
    Room,
}

impl Slot {
    fn new(memory: Memory) -> Slot {
        Slot { memory, copies: None }
    }

    /// Return whether no copy uses the slot.
    fn is_free(&self) -> Result<bool, DeviceFault> {
        match &self.copies {
            None => Ok(true),
            Some(copies) => match copies.gpu.within(|driver, _| driver.is_done(copies.event)) {
                // The copies ended with their context.
                Err(fault) if fault.is_reset() => Ok(true),
                asked => asked,
            },
        }
    }

    /// Wait until no copy uses the slot. This polls: the driver's own wait cannot be interrupted, and a copy may wait
    /// for a kernel that never ends.
    fn finish(&mut self, stop: StopFlag<'_>) -> Result<(), DeviceFault> {
        let begun = Instant::now();
        let mut asked = begun;
        while !self.is_free()? {
            let is_late = asked.elapsed() >= ASK;
            if is_late {
                asked = Instant::now();
            }
            if stop.is_set() || is_late && stop.asked() {
                return Err(DeviceFault::Interrupted);
            }
            let waited = begun.elapsed();
            if waited < SHORTEST {
                thread::yield_now();
            } else {
                thread::sleep((waited / 4).clamp(SHORTEST, LONGEST));
            }
        }
        if let Some(Copies { gpu, event }) = self.copies.take() {
            gpu.give_back(event);
        }
        Ok(())
    }

    fn is_used_by(&self, gpu: &Arc<Gpu>) -> bool {
        let copies = self.copies.as_ref();
        copies.is_some_and(|copies| Arc::ptr_eq(&copies.gpu, gpu))
    }

    /// Return whether the context in which the memory was pinned is gone, and the memory with it.
    fn is_gone(&self) -> bool {
        match &self.memory {
            Memory::Pinned { gpu, .. } => gpu.is_reset(),
            Memory::Pageable(_) => false,
        }
    }

    /// Drops everything but the memory, which is never freed.
    fn leak(mut self) {
        match &mut self.memory {
            Memory::Pinned { start, .. } => *start = ptr::null_mut(),
            Memory::Pageable(bytes) => mem::forget(mem::take(bytes)),
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(Copies { gpu, event }) = self.copies.take() {
            gpu.give_back(event);
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Memory::Pinned { start, gpu } = self
            && !start.is_null()
            && !gpu.is_reset()
        {
            // SAFETY: `free` requires that no code uses the memory any more: only slots that no copy uses are dropped
            // (`give_back`, `leak`), and only the slot has the address.
            let freed = gpu.within(|driver, _| unsafe { driver.free(*start) });
            // With a lost context the memory is gone already, and the child of a fork has no context.
            drop(freed);
        }
    }
}

/// A lent slot, which is being filled. If it is dropped unsent, it returns to the ring at once.
#[derive(Debug)]
pub(crate) struct Lent {
    slot: Option<Slot>,
    ring: Arc<Ring>,
    gpu: Arc<Gpu>,
}

impl Lent {
    /// The memory of the slot, with unspecified content.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        match self.slot.as_mut().map(|slot| &mut slot.memory) {
            Some(Memory::Pinned { start, .. }) => {
                // SAFETY: `from_raw_parts_mut` requires
                // - that many bytes in one allocation, readable and writable: memory of `cuMemHostAlloc`, which is zero or
                //   holds the last bytes that were written to it;
                // - no other access while the slice lives: no copy uses them (`ready`), and `self` is borrowed mutably.
                // Not provable: a `cudaDeviceReset` by another thread frees them while the slot is filled.
                unsafe { std::slice::from_raw_parts_mut(*start, self.ring.slot_nbytes) }
            }
            Some(Memory::Pageable(bytes)) => bytes,
            None => &mut [],
        }
    }

    /// Copy these bytes of a device to their places in the slot, and wait until they have arrived. If that fails, the slot
    /// returns to the ring.
    pub(super) fn fetch(
        &mut self,
        gpu: &Arc<Gpu>,
        copies: &[Copy],
        stop: StopFlag<'_>,
    ) -> Result<(), DeviceFault> {
        let start = self.room_for(copies);
        let queue = |driver: &Driver, stream: Stream| {
            for copy in copies {
                let bytes = copy.bytes();
                let to = start.wrapping_add(bytes.start);
                // SAFETY: requires
                // - bytes that no other code uses until the copy is done: the slot's (`room_for`), which is not lent until
                //   then (`finish`, `abandon`);
                // - as many bytes on the device: the constructor of `DeviceBytes`, which makes copies, requires them.
                unsafe { driver.copy_out(to, copy.address, bytes.len(), stream) }?;
            }
            gpu.mark(driver)
        };
        let marked = gpu.within(queue);
        let Some(mut slot) = self.queued(marked, gpu)? else {
            return Ok(());
        };
        match slot.finish(stop) {
            Ok(()) => {
                self.slot = Some(slot);
                Ok(())
            }
            Err(fault) => {
                self.ring.take_back(slot);
                Err(fault)
            }
        }
    }

    /// The first byte of the slot, which has room for these copies.
    fn room_for(&mut self, copies: &[Copy]) -> *mut u8 {
        let room = self.bytes();
        let fits = copies.iter().all(|copy| copy.bytes().end <= room.len());
        assert!(fits, "a copy ends within its slot");
        room.as_mut_ptr()
    }

    /// Queue these copies, and return the slot, to be lent again when they are done.
    pub(crate) fn send(mut self, copies: &[Copy]) -> Result<(), DeviceFault> {
        let start = self.room_for(copies);
        let gpu = Arc::clone(&self.gpu);
        let queue = |driver: &Driver, stream: Stream| {
            for copy in copies {
                let bytes = copy.bytes();
                let from = start.cast_const().wrapping_add(bytes.start);
                // SAFETY: requires
                // - bytes that stay until the copy is done: the slot's (`room_for`), which is not lent before (`finish`,
                //   `abandon`);
                // - as many bytes on the device: the constructor of `DeviceDest`, which makes copies, requires them.
                unsafe { driver.copy_in(from, copy.address, bytes.len(), stream) }?;
            }
            gpu.mark(driver)
        };
        let marked = gpu.within(queue);
        let sent = self.queued(marked, &gpu)?;
        sent.into_iter().for_each(|slot| self.ring.take_back(slot));
        Ok(())
    }

    /// Return the slot with the copies that use it. If they failed, the slot returns to the ring.
    fn queued(
        &mut self,
        marked: Result<Event, DeviceFault>,
        gpu: &Arc<Gpu>,
    ) -> Result<Option<Slot>, DeviceFault> {
        let Some(mut slot) = self.slot.take() else {
            return Ok(None);
        };
        match marked {
            Ok(event) => {
                let gpu = Arc::clone(gpu);
                slot.copies = Some(Copies { gpu, event });
                Ok(Some(slot))
            }
            Err(fault) => {
                self.ring.abandon(slot, gpu);
                Err(fault)
            }
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
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
        let lent = fake.ring.lend(&device.gpu, StopFlag::never());
        lent.unwrap().send(&[]).unwrap();
        device.gpu.finish().unwrap();
        locked(&fake.ring.state).used = Instant::now() + LONG;
        (fake, device)
    }

    #[test]
    fn sixteen_readers_have_a_slot_each() {
        const { assert!(PINNED_NBYTES / SLOT_NBYTES >= 16) };
    }

    #[test]
    fn memory_is_given_back_when_it_is_idle_and_when_that_is_asked_for_and_not_before() {
        for (is_let_go, is_idle, is_left) in
            [(false, false, true), (true, false, false), (false, true, false)]
        {
            let (fake, _device) = used();
            if is_idle {
                locked(&fake.ring.state).used = Instant::now().checked_sub(IDLE).unwrap();
            }
            assert_eq!(fake.ring.is_used(is_let_go), is_left, "{is_let_go} {is_idle}");
            assert_eq!(locked(&fake.ring.state).is_watched, is_left);
            assert_eq!(fake.counters().pinned > 0, is_left);
        }
    }

    #[test]
    fn memory_that_is_let_go_is_given_back_by_another_thread() {
        let (fake, _device) = used();
        assert!(fake.counters().pinned > 0);
        fake.ring.let_go();
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
            assert_eq!((state.made, state.resting.len()), (left, left), "{code}");
            assert_eq!(fake.counters().pinned, pinned, "none of it was freed");
        }
    }
}
