//! The state of the driver, and the scheduler.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::codes::{
    ALREADY_REGISTERED, BUSY, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, INVALID_CONTEXT, INVALID_DEVICE,
    INVALID_HANDLE, INVALID_VALUE, NOT_INITIALIZED, OUT_OF_MEMORY, SUCCESS, UNKNOWN, is_sticky,
};
use crate::counters::Counters;
use crate::link::Link;
use crate::memory::{Arena, POISON, Pinned, bytes_of, write_host};
use crate::streams::{Capture, Copy, Item, StreamId, Streams, Ticket, Way};

/// The memory of each device in bytes.
const MEMORY_NBYTES: usize = 8 << 30;
/// The handle of the legacy stream of the first device; the handles of the other devices follow. Callers pass 0 or 1
/// for the legacy stream of the current device.
const LEGACY: StreamId = 0x100;
/// Contexts are these numbers plus the ordinal, so that contexts from before a reset are invalid.
const CONTEXT: usize = 0x5000_0000;
/// The numbers of contexts per device, one for each reset of the device.
const RESETS: usize = 0x100;

/// Calls on streams that are not captured that do not invalidate a capture.
const HARMLESS: [&str; 13] = [
    "cuInit",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamIsCapturing",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
];
/// Calls that succeed on a thread whose current device is lost.
const ALWAYS: [&str; 3] = [
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
];

/// The attributes of a new device: not integrated, and on a machine without memory nodes.
const ATTRIBUTES: [(i32, i32); 2] = [(18, 0), (134, -1)];

pub(crate) type Outcome<T = ()> = Result<T, i32>;

#[derive(Debug)]
pub(crate) struct Simulator {
    random: u64,
    process: u32,
    is_initialized: bool,
    generation: usize,
    devices: Vec<Device>,
    streams: Streams,
    pinned: Pinned,
    pub(crate) pin_limit: usize,
    /// The error code of pinning beyond the limit.
    pub(crate) pin_code: i32,
    /// The link of a benchmark.
    pub(crate) link: Option<Link>,
    /// Whether copies are done when they are queued.
    pub(crate) is_instant: bool,
    /// The error code of registering memory, if it always fails.
    pub(crate) register_code: Option<i32>,
    pub(crate) mistake: Option<Mistake>,
    pub(crate) counters: Counters,
    /// The planned failure: the number of calls until then, and the code.
    pub(crate) planned: Option<(u64, i32)>,
    /// Recordings that a call has asked about.
    asked: BTreeSet<Ticket>,
}

/// The calls that a thread may make while another thread captures a stream: `CUstreamCaptureMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    pub(crate) fn of(number: i32) -> Option<Mode> {
        [Mode::Global, Mode::ThreadLocal, Mode::Relaxed]
            .into_iter()
            .find(|mode| mode.number() == number)
    }

    pub(crate) fn number(self) -> i32 {
        match self {
            Mode::Global => 0,
            Mode::ThreadLocal => 1,
            Mode::Relaxed => 2,
        }
    }
}

/// A mistake that is made in place of the caller, to test the tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// Threads do not wait for events.
    NoHostWait,
    /// Created streams do not wait for events.
    NoWaitBefore,
    /// The legacy stream does not wait for events.
    NoWaitAfter,
    /// Events are recorded on the legacy stream, not on the given stream.
    WrongStream,
}

impl Mistake {
    pub(crate) const ALL: [Mistake; 4] = [
        Mistake::NoHostWait,
        Mistake::NoWaitBefore,
        Mistake::NoWaitAfter,
        Mistake::WrongStream,
    ];
}

#[derive(Debug)]
struct Device {
    retained: u64,
    /// The number of resets.
    resets: usize,
    /// The code that every call returns once the device is lost.
    lost: Option<i32>,
    attributes: BTreeMap<i32, i32>,
    arena: Arena,
}

static SIMULATOR: Mutex<Option<Simulator>> = Mutex::new(None);

/// The simulator, locked for one call. A waiting thread runs the work of all streams, so that no thread waits for
/// another.
pub(crate) struct Held(MutexGuard<'static, Option<Simulator>>);

pub(crate) fn held() -> Held {
    let mut held = SIMULATOR.lock().unwrap_or_else(PoisonError::into_inner);
    held.get_or_insert_with(|| Simulator::new(0, 1, 0));
    Held(held)
}

impl Held {
    pub(crate) fn get(&mut self) -> &mut Simulator {
        self.0.get_or_insert_with(|| Simulator::new(0, 1, 0))
    }

    /// Resets the simulator.
    pub(crate) fn reset(&mut self, seed: u64, devices: usize) {
        let generation = self.get().generation + 1;
        *self.0 = Some(Simulator::new(seed, devices, generation));
    }
}

impl Simulator {
    fn new(seed: u64, devices: usize, generation: usize) -> Simulator {
        let device = |_| Device {
            retained: 0,
            resets: 0,
            lost: None,
            attributes: BTreeMap::from(ATTRIBUTES),
            arena: Arena::new(MEMORY_NBYTES),
        };
        let mut streams = Streams::default();
        for ordinal in 0..devices {
            streams.open(LEGACY + ordinal, ordinal);
        }
        Simulator {
            random: seed,
            process: std::process::id(),
            is_initialized: false,
            generation,
            devices: (0..devices).map(device).collect(),
            streams,
            pinned: Pinned::default(),
            pin_limit: usize::MAX,
            pin_code: OUT_OF_MEMORY,
            link: None,
            is_instant: false,
            register_code: None,
            mistake: None,
            counters: Counters::default(),
            planned: None,
            asked: BTreeSet::new(),
        }
    }

    /// Begins a call of a thread with this mode and this current context. Returns the code if it has to fail.
    pub(crate) fn call(&mut self, name: &'static str, mode: Mode, context: usize) -> Outcome {
        self.counters.calls += 1;
        if self.process != std::process::id() {
            self.counters.forked += 1;
            return Err(NOT_INITIALIZED);
        }
        let current = self.ordinal_of(context);
        let lost = current.and_then(|ordinal| self.devices[ordinal].lost);
        if let Some(code) = lost.filter(|_| !ALWAYS.contains(&name)) {
            return Err(code);
        }
        if let Some((left, code)) = self.planned {
            self.planned = (left > 1).then_some((left - 1, code));
            if left <= 1 {
                let all = 0..self.devices.len();
                let struck = current.map_or(all, |ordinal| ordinal..ordinal + 1);
                if is_sticky(code) {
                    struck
                        .into_iter()
                        .try_for_each(|ordinal| self.lose(ordinal, code))?;
                }
                return Err(code);
            }
        }
        if mode != Mode::Relaxed && !HARMLESS.contains(&name) && self.break_captures() {
            return Err(CAPTURE_UNSUPPORTED);
        }
        match name == "cuInit" || self.is_initialized {
            true => Ok(()),
            false => Err(NOT_INITIALIZED),
        }
    }

    pub(crate) fn initialize(&mut self) {
        self.is_initialized = true;
    }

    pub(crate) fn devices(&self) -> usize {
        self.devices.len()
    }

    pub(crate) fn attribute(&self, ordinal: usize, attribute: i32) -> Outcome<i32> {
        let device = self.devices.get(ordinal).ok_or(INVALID_DEVICE)?;
        device.attributes.get(&attribute).copied().ok_or(INVALID_VALUE)
    }

    /// Sets an attribute of a device.
    pub(crate) fn set_attribute(&mut self, ordinal: usize, attribute: i32, value: i32) -> Outcome {
        let device = self.devices.get_mut(ordinal).ok_or(INVALID_DEVICE)?;
        device.attributes.insert(attribute, value);
        Ok(())
    }

    pub(crate) fn retain(&mut self, ordinal: usize) -> Outcome<usize> {
        let device = self.devices.get_mut(ordinal).ok_or(INVALID_VALUE)?;
        if let Some(code) = device.lost {
            return Err(code);
        }
        device.retained += 1;
        self.counters.contexts += 1;
        Ok(self.context(ordinal))
    }

    /// Returns the current primary context of a device.
    fn context(&self, ordinal: usize) -> usize {
        CONTEXT + (self.generation * RESETS + self.devices[ordinal].resets) * 0x100 + ordinal
    }

    pub(crate) fn release(&mut self, ordinal: usize) -> Outcome {
        let device = self.devices.get_mut(ordinal).ok_or(INVALID_VALUE)?;
        device.retained = device.retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        self.counters.contexts -= 1;
        Ok(())
    }

    /// Returns the device of a retained context.
    pub(crate) fn ordinal_of(&self, context: usize) -> Option<usize> {
        let ordinal = context.checked_sub(CONTEXT)? % 0x100;
        self.devices.get(ordinal).filter(|device| device.retained > 0)?;
        (self.context(ordinal) == context).then_some(ordinal)
    }

    /// Returns the device of the current context, or an error if there is none.
    pub(crate) fn current(&mut self, context: usize) -> Outcome<usize> {
        let found = self.ordinal_of(context);
        if found.is_none() {
            self.counters.without_context += 1;
        }
        found.ok_or(INVALID_CONTEXT)
    }

    /// Invalidates all captures, as a forbidden call does. Returns whether there were any.
    fn break_captures(&mut self) -> bool {
        let mut is_any = false;
        for capture in self.streams.captures() {
            (capture.is_valid, is_any) = (false, true);
        }
        self.counters.captured += u64::from(is_any);
        is_any
    }

    /// Fails if the stream is being captured, because ordering it with other streams invalidates the capture: this
    /// driver does not record work in graphs.
    fn refuse_captured(&mut self, id: StreamId) -> Outcome {
        match self.capture_status(id) {
            0 => Ok(()),
            _ => {
                self.break_captures();
                Err(CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Destroys the primary context of a device and everything in it.
    pub(crate) fn reset_device(&mut self, ordinal: usize) -> Outcome {
        let device = self.devices.get_mut(ordinal).ok_or(INVALID_DEVICE)?;
        device.resets += 1;
        device.lost = None;
        device.arena.clear();
        // Its copies end first.
        let (streams, events) = self.streams.destroy(ordinal);
        for address in self.pinned.of(ordinal) {
            self.unpin(address)?;
        }
        // The legacy stream was not created, so it stays.
        self.counters.streams -= as_u64(streams.saturating_sub(1));
        self.counters.events -= as_u64(events);
        self.streams.open(LEGACY + ordinal, ordinal);
        Ok(())
    }

    /// Makes every later call for a device fail. Its pending work is dropped.
    pub(crate) fn lose(&mut self, ordinal: usize, code: i32) -> Outcome {
        let device = self.devices.get_mut(ordinal).ok_or(INVALID_DEVICE)?;
        device.lost = Some(code);
        self.streams.stop(ordinal);
        Ok(())
    }

    // Memory.

    pub(crate) fn pin(&mut self, nbytes: usize, ordinal: usize) -> Outcome<usize> {
        self.count_pinned(nbytes)?;
        Ok(self.pinned.allocate(nbytes, ordinal))
    }

    /// Pins memory of the caller.
    pub(crate) fn register(&mut self, address: usize, nbytes: usize, ordinal: usize) -> Outcome {
        self.register_code.map_or(Ok(()), Err)?;
        if self.pinned.meets(address, nbytes) {
            return Err(ALREADY_REGISTERED);
        }
        self.count_pinned(nbytes)?;
        self.pinned.register(address, nbytes, ordinal);
        Ok(())
    }

    fn count_pinned(&mut self, nbytes: usize) -> Outcome {
        let pinned = self.counters.pinned + as_u64(nbytes);
        if pinned > as_u64(self.pin_limit) {
            return Err(self.pin_code);
        }
        self.counters.pins += 1;
        self.counters.pinned = pinned;
        self.counters.pinned_most = self.counters.pinned_most.max(pinned);
        Ok(())
    }

    pub(crate) fn unpin(&mut self, address: usize) -> Outcome {
        let owner = self.pinned.owner(address).ok_or(INVALID_VALUE)?;
        self.devices[owner].lost.map_or(Ok(()), Err)?;
        let nbytes = self.pinned.free(address).ok_or(INVALID_VALUE)?;
        self.counters.pinned -= as_u64(nbytes);
        self.counters.stray += self.streams.strand(address..address + nbytes);
        Ok(())
    }

    pub(crate) fn allocate(&mut self, ordinal: usize, nbytes: usize) -> Outcome<usize> {
        let device = self.devices.get_mut(ordinal).ok_or(INVALID_VALUE)?;
        let allocated = if self.link.is_some() {
            device.arena.reserve(nbytes)
        } else {
            device.arena.allocate(nbytes)
        };
        allocated.ok_or(OUT_OF_MEMORY)
    }

    pub(crate) fn free(&mut self, address: usize) -> Outcome {
        let mut arenas = self.devices.iter_mut().map(|device| &mut device.arena);
        let arena = arenas.find(|arena| arena.is_ours(address));
        match arena.is_some_and(|arena| arena.free(address)) {
            true => Ok(()),
            false => Err(INVALID_VALUE),
        }
    }

    fn arena(&mut self, address: usize) -> Option<&mut Arena> {
        let mut arenas = self.devices.iter_mut().map(|device| &mut device.arena);
        arenas.find(|arena| arena.is_ours(address))
    }

    /// Reads the current contents, without running queued work.
    pub(crate) fn peek(&mut self, address: usize, into: &mut [u8]) -> bool {
        let arena = self.arena(address).filter(|arena| arena.has(address, into.len()));
        arena.is_some_and(|arena| {
            arena.read(address, into);
            true
        })
    }

    pub(crate) fn poke(&mut self, address: usize, bytes: &[u8]) -> bool {
        let arena = self
            .arena(address)
            .filter(|arena| arena.has(address, bytes.len()));
        arena.is_some_and(|arena| {
            arena.write(address, bytes);
            true
        })
    }

    // Streams and events.

    pub(crate) fn create_stream(&mut self, ordinal: usize) -> usize {
        self.counters.streams += 1;
        self.streams.create_stream(ordinal)
    }

    /// The stream's work runs before the stream is destroyed.
    pub(crate) fn destroy_stream(&mut self, id: StreamId) -> Outcome {
        self.drain(id)?;
        match self.streams.remove(id) {
            true => {
                self.counters.streams -= 1;
                Ok(())
            }
            false => Err(INVALID_HANDLE),
        }
    }

    /// Returns the stream of a handle on this device.
    pub(crate) fn stream(&mut self, handle: usize, ordinal: usize) -> Outcome<StreamId> {
        let id = if handle <= 1 { LEGACY + ordinal } else { handle };
        self.streams.get(id).map(|_| id).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn capture(&mut self, id: StreamId, is_capturing: bool) -> Outcome {
        let stream = self.streams.get(id).ok_or(INVALID_HANDLE)?;
        let begun = is_capturing.then_some(Capture { is_valid: true });
        match std::mem::replace(&mut stream.capture, begun) {
            Some(ended) if !ended.is_valid => Err(CAPTURE_INVALIDATED),
            _ => Ok(()),
        }
    }

    /// `CUstreamCaptureStatus`: 1 during a capture, 2 if the capture was invalidated.
    pub(crate) fn capture_status(&mut self, id: StreamId) -> i32 {
        let capture = self.streams.get(id).and_then(|stream| stream.capture);
        capture.map_or(0, |capture| if capture.is_valid { 1 } else { 2 })
    }

    pub(crate) fn set_busy(&mut self, id: StreamId, is_busy: bool) -> Outcome {
        let stream = self.streams.get(id).ok_or(INVALID_HANDLE)?;
        stream.is_busy = is_busy;
        Ok(())
    }

    pub(crate) fn create_event(&mut self, ordinal: usize) -> usize {
        self.counters.events += 1;
        self.streams.create_event(ordinal)
    }

    pub(crate) fn destroy_event(&mut self, event: usize) -> Outcome {
        match self.streams.remove_event(event) {
            true => {
                self.counters.events -= 1;
                Ok(())
            }
            false => Err(INVALID_HANDLE),
        }
    }

    pub(crate) fn record(&mut self, event: usize, stream: StreamId, ordinal: usize) -> Outcome {
        self.refuse_captured(stream)?;
        self.counters.records += 1;
        if let Some(link) = &mut self.link {
            link.record(event, stream);
            return Ok(());
        }
        self.take_some_steps();
        let stream = match self.mistake {
            Some(Mistake::WrongStream) => LEGACY + ordinal,
            _ => stream,
        };
        if !self.streams.record(event, stream) {
            return Err(INVALID_HANDLE);
        }
        self.hurry(stream);
        Ok(())
    }

    /// Runs the work of a stream if the link is infinitely fast.
    fn hurry(&mut self, id: StreamId) {
        // Work that waits for an endless kernel stays queued.
        let _ = self.is_instant && self.drain(id).is_ok();
    }

    pub(crate) fn wait(&mut self, stream: StreamId, event: usize) -> Outcome {
        self.refuse_captured(stream)?;
        if let Some(link) = &mut self.link {
            link.wait(stream, event);
            return Ok(());
        }
        let ticket = self.streams.ticket(event).ok_or(INVALID_HANDLE)?;
        let is_legacy = stream < LEGACY + self.devices.len();
        let forgotten = if is_legacy {
            Mistake::NoWaitAfter
        } else {
            Mistake::NoWaitBefore
        };
        let ticket = ticket.filter(|_| self.mistake != Some(forgotten));
        let stream = self.streams.get(stream).ok_or(INVALID_HANDLE)?;
        // An event that was never recorded counts as done.
        stream.queue.extend(ticket.map(Item::Wait));
        Ok(())
    }

    /// Returns whether the last recording of an event is done, after some steps. A second call waits for it, so that it
    /// is done then.
    pub(crate) fn query(&mut self, event: usize) -> Outcome<bool> {
        if let Some(link) = &self.link {
            return Ok(link.is_done(event));
        }
        self.take_some_steps();
        let ticket = self.streams.ticket(event).ok_or(INVALID_HANDLE)?;
        let ticket = ticket.filter(|_| self.mistake != Some(Mistake::NoHostWait));
        let Some(ticket) = ticket.filter(|&ticket| !self.streams.is_done(ticket)) else {
            return Ok(true);
        };
        if self.asked.insert(ticket) {
            return Ok(false);
        }
        match self.run_until(|streams| streams.left_for(ticket)) {
            Ok(()) => Ok(true),
            Err(BUSY) => Ok(false),
            Err(code) => Err(code),
        }
    }

    pub(crate) fn finish_event(&mut self, event: usize) -> Outcome {
        match self.streams.ticket(event).ok_or(INVALID_HANDLE)? {
            Some(_) if self.mistake == Some(Mistake::NoHostWait) => Ok(()),
            Some(ticket) => self.run_until(|streams| streams.left_for(ticket)),
            None => Ok(()),
        }
    }

    pub(crate) fn drain(&mut self, id: StreamId) -> Outcome {
        self.streams.get(id).ok_or(INVALID_HANDLE)?;
        if self.link.as_ref().is_some_and(|link| !link.is_idle(id)) {
            return Err(BUSY);
        }
        self.run_until(|streams| streams.left_on(id))
    }

    pub(crate) fn finish_all(&mut self) -> Outcome {
        let ids = self.streams.ids();
        ids.into_iter().try_for_each(|id| self.drain(id))
    }

    // Copies.

    pub(crate) fn copy(&mut self, from: usize, to: usize, nbytes: usize, way: Way, id: StreamId) -> Outcome {
        self.refuse_captured(id)?;
        if let Some(link) = &mut self.link {
            link.copy(id, nbytes, way);
            let host = if way == Way::In { from } else { to };
            self.counters.copies += 1;
            self.counters.pageable += u64::from(!self.pinned.has(host, nbytes));
            return Ok(());
        }
        self.take_some_steps();
        let mut copy = Copy {
            from,
            to,
            nbytes,
            way,
            staged: None,
        };
        let device = copy.on_device();
        let is_there = |arena: &mut Arena| arena.has(device.start, nbytes);
        if !self.arena(device.start).is_some_and(is_there) {
            self.counters.stray += 1;
            return Err(INVALID_VALUE);
        }
        let crosses = |other: &Copy| {
            let other = other.on_device();
            other.start < device.end && device.start < other.end
        };
        let is_overlapping = way == Way::In && self.streams.copies().any(crosses);
        self.counters.overlapping += u64::from(is_overlapping);
        self.counters.copies += 1;
        match way {
            Way::In => self.counters.bytes_in += as_u64(nbytes),
            Way::Out => self.counters.bytes_out += as_u64(nbytes),
        }
        let host = if way == Way::In { from } else { to };
        if !self.pinned.has(host, nbytes) {
            // The real driver copies through memory of its own, and returns after it has read the source.
            self.counters.pageable += 1;
            copy.staged = (way == Way::In).then(|| bytes_of(from, nbytes));
        }
        match way {
            Way::In => self.fill_device(to, nbytes, POISON),
            Way::Out => write_host(to, &vec![POISON; nbytes]),
        }
        let is_pageable_out = way == Way::Out && !self.pinned.has(host, nbytes);
        let stream = self.streams.get(id).ok_or(INVALID_HANDLE)?;
        stream.queue.push_back(Item::Copy(copy));
        if is_pageable_out {
            return self.drain(id);
        }
        self.hurry(id);
        Ok(())
    }

    /// Queues a write of another program's kernel.
    pub(crate) fn queue_fill(&mut self, id: StreamId, address: usize, nbytes: usize, byte: u8) -> Outcome {
        if self.link.is_some() {
            return Ok(());
        }
        let stream = self.streams.get(id).ok_or(INVALID_HANDLE)?;
        stream.queue.push_back(Item::Fill {
            address,
            nbytes,
            byte,
        });
        Ok(())
    }

    /// Queues memory for an allocator to free when the stream reaches this point.
    pub(crate) fn queue_free(&mut self, id: StreamId, address: usize) -> Outcome {
        if self.link.is_some() {
            return self.free(address);
        }
        let stream = self.streams.get(id).ok_or(INVALID_HANDLE)?;
        stream.queue.push_back(Item::Free(address));
        Ok(())
    }

    fn fill_device(&mut self, address: usize, nbytes: usize, byte: u8) {
        if let Some(arena) = self.arena(address) {
            arena.fill(address, nbytes, byte);
        }
    }

    // The scheduler.

    fn next_random(&mut self) -> u64 {
        // SplitMix64 (Steele, Lea, Flood 2014).
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn take_some_steps(&mut self) {
        // Mostly zero steps, so that copies run as late as possible.
        let steps = self.next_random() % 8;
        for _ in 5..steps.max(5) {
            self.take_any_step(false);
        }
    }

    /// Runs the next item of some stream. Returns whether there was one. Endless kernels end only if a thread waits.
    fn take_any_step(&mut self, is_waited_for: bool) -> bool {
        let mut ready = self.streams.ready();
        ready.retain(|&id| is_waited_for || !self.streams.is_at_kernel(id));
        let chosen = self.next_random() % as_u64(ready.len().max(1));
        let chosen = ready.into_iter().nth(usize::try_from(chosen).unwrap_or(0));
        chosen.is_some_and(|id| self.take_step(id))
    }

    /// Runs the next item of a stream. Returns whether there was one.
    fn take_step(&mut self, id: StreamId) -> bool {
        let item = self.streams.take(id);
        match &item {
            Some(Item::Copy(copy)) => self.carry_out(copy),
            Some(Item::Fill {
                address,
                nbytes,
                byte,
            }) => self.fill_device(*address, *nbytes, *byte),
            Some(Item::Free(address)) => {
                let is_freed = self.free(*address).is_ok();
                self.counters.stray += u64::from(!is_freed);
            }
            _ => {}
        }
        item.is_some()
    }

    fn carry_out(&mut self, copy: &Copy) {
        let device = copy.on_device();
        let arena = self.arena(device.start);
        let Some(arena) = arena.filter(|arena| arena.has(device.start, copy.nbytes)) else {
            // Its memory was freed before the copy ran.
            self.counters.stray += 1;
            return;
        };
        match (copy.way, &copy.staged) {
            (Way::In, Some(bytes)) => arena.write(copy.to, bytes),
            (Way::In, None) => arena.write(copy.to, &bytes_of(copy.from, copy.nbytes)),
            // Its destination was unpinned before the copy ran.
            (Way::Out, Some(_)) => {}
            (Way::Out, None) => {
                let mut bytes = vec![0; copy.nbytes];
                arena.read(copy.from, &mut bytes);
                write_host(copy.to, &bytes);
            }
        }
    }

    /// Does the remaining work for a waiting thread, and mostly nothing else.
    fn run_until(&mut self, left: impl Fn(&Streams) -> Option<StreamId>) -> Outcome {
        if left(&self.streams).is_none() {
            return Ok(());
        }
        self.counters.host_waits += 1;
        while let Some(id) = left(&self.streams) {
            let is_other = self.next_random().is_multiple_of(16);
            let next = self.streams.what_holds(id).filter(|_| !is_other);
            let is_done = match next {
                Some(next) if self.streams.is_busy(next) => return Err(BUSY),
                Some(next) => self.take_step(next),
                None => self.take_any_step(true),
            };
            if !is_done && self.streams.is_any_busy() {
                return Err(BUSY);
            }
            if !is_done {
                self.counters.deadlocks += 1;
                eprintln!("the streams wait for each other:\n{}", self.streams.shown());
                return Err(UNKNOWN);
            }
        }
        Ok(())
    }
}

/// A code of the driver.
pub(crate) fn code(outcome: Outcome) -> i32 {
    outcome.err().unwrap_or(SUCCESS)
}

fn as_u64(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
