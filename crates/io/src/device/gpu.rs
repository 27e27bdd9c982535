//! One device: its context, its streams for copies, and the events that order them.
//!
//! A copy waits for the work that its caller had queued. So callers whose streams have nothing to do with each other copy on
//! different streams, as long as there are no more than a few.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ingot_format::locked;

use super::driver::{Context, Driver, Event, INTEGRATED, Stream, refuse_child};
use super::fault::DeviceFault;
use crate::sync;

/// A device in use.
#[derive(Debug)]
pub(crate) struct Gpu {
    driver: Arc<Driver>,
    /// Its number among the visible ones.
    pub(super) ordinal: i32,
    device: i32,
    context: Context,
    /// The first stream for copies, which is asked whether the context is still there.
    stream: Stream,
    /// Whether it shares the memory of the host.
    pub(super) is_integrated: bool,
    incoming: Lanes,
    outgoing: Lanes,
    /// Events that nothing waits for.
    events: Mutex<Vec<Event>>,
    /// Whether the context was found to be gone, with the streams, the events and all memory that was pinned in it.
    was_reset: AtomicBool,
}

impl Gpu {
    /// Opens the device with this number among the visible ones.
    pub(crate) fn open(driver: &Arc<Driver>, ordinal: i32) -> Result<Gpu, DeviceFault> {
        refuse_child()?;
        let (device, context) = driver.relaxed(|| driver.retain(ordinal))?;
        let stream = driver.within(context, || driver.create_stream());
        // The first fault is reported.
        let stream = stream.inspect_err(|_| drop(driver.relaxed(|| driver.release(device))))?;
        let is_integrated = driver.attribute(device, INTEGRATED).is_ok_and(|value| value != 0);
        let incoming = Lanes::default();
        incoming.add(stream);
        Ok(Gpu {
            driver: Arc::clone(driver),
            ordinal,
            device,
            context,
            stream,
            is_integrated,
            incoming,
            outgoing: Lanes::default(),
            events: Mutex::default(),
            was_reset: AtomicBool::new(false),
        })
    }

    /// Return the lane for copies of a caller with this stream.
    pub(crate) fn lane(&self, caller: Stream, way: Way) -> Result<Arc<Lane>, DeviceFault> {
        let lanes = match way {
            Way::In => &self.incoming,
            Way::Out => &self.outgoing,
        };
        lanes.of(caller, || self.within(Driver::create_stream))
    }

    /// Return whether the context with which this device was opened is gone: `cudaDeviceReset` destroys it under all its
    /// users.
    pub(crate) fn is_reset(&self) -> bool {
        if self.was_reset.load(Ordering::Relaxed) {
            return true;
        }
        let asked = self.within(|driver| driver.is_capturing(self.stream));
        let is_reset = asked.is_err_and(|fault| fault.is_reset());
        if is_reset {
            self.was_reset.store(true, Ordering::Relaxed);
        }
        is_reset
    }

    /// Run `work` with this device as the current one of the calling thread.
    pub(crate) fn within<R>(
        &self,
        work: impl FnOnce(&Driver) -> Result<R, DeviceFault>,
    ) -> Result<R, DeviceFault> {
        refuse_child()?;
        self.driver.within(self.context, || work(&self.driver))
    }

    /// Fail if work on `stream` is being recorded into a graph.
    pub(crate) fn refuse_capture(&self, stream: Stream) -> Result<(), DeviceFault> {
        if self.within(|driver| driver.is_capturing(stream))? {
            Err(DeviceFault::Capturing)
        } else {
            Ok(())
        }
    }

    /// Make `second` wait for the work on `first` so far, and return the event that records the work.
    pub(super) fn order(&self, driver: &Driver, first: Stream, second: Stream) -> Result<Event, DeviceFault> {
        let event = self.mark(driver, first)?;
        let ordered = driver.wait(second, event);
        ordered.inspect_err(|_| self.give_back(event))?;
        Ok(event)
    }

    /// Wait until all copies on `stream` that are queued by now are done.
    pub(crate) fn finish(&self, stream: Stream) -> Result<(), DeviceFault> {
        self.within(|driver| driver.finish(stream))
    }

    /// Record the work that is queued on `stream` so far.
    pub(crate) fn mark(&self, driver: &Driver, stream: Stream) -> Result<Event, DeviceFault> {
        let kept = locked(&self.events).pop();
        let event = kept.map_or_else(|| driver.create_event(), Ok)?;
        let recorded = driver.record(event, stream);
        recorded.inspect_err(|_| self.give_back(event))?;
        Ok(event)
    }

    pub(crate) fn give_back(&self, event: Event) {
        locked(&self.events).push(event);
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // In the child of a fork nothing is the child's to destroy, and the lock may be held for ever.
        if refuse_child().is_err() {
            return;
        }
        let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut events = std::mem::take(events);
        let mut streams = Vec::new();
        for lanes in [&mut self.incoming, &mut self.outgoing] {
            let (taken, awaited) = lanes.take();
            streams.extend(taken);
            events.extend(awaited);
        }
        if !self.is_reset() {
            // A lost device cannot be repaired.
            let _ = self.within(|driver| {
                events.iter().for_each(|&event| drop(driver.destroy_event(event)));
                streams
                    .iter()
                    .for_each(|&stream| drop(driver.destroy_stream(stream)));
                Ok(())
            });
        }
        drop(self.driver.relaxed(|| self.driver.release(self.device)));
    }
}

/// The most streams of one device and one direction. More callers share the stream that was unused for longest.
pub(super) const MOST_LANES: usize = 4;

/// The most slots for copies that cannot run yet, because their caller's stream is busy: enough to begin well, and few
/// enough to leave the others to other streams and devices.
pub(super) const MOST_HELD_UP: usize = 4;

/// The direction of copies. The directions have different streams, since devices copy both ways at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// To the device.
    In,
    /// From the device.
    Out,
}

/// A stream of copies in one direction, for the stream of a caller.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(super) stream: Stream,
    /// The last work of each caller that the copies wait for, as far as it is not known to be done.
    awaited: sync::Mutex<Vec<(Stream, Event)>>,
    /// Slots that are lent for its copies, or that its copies use.
    slots: sync::AtomicUsize,
}

impl Lane {
    pub(super) fn new(stream: Stream) -> Lane {
        Lane {
            stream,
            awaited: sync::Mutex::default(),
            slots: sync::AtomicUsize::new(0),
        }
    }

    /// Make later copies wait for the work that is queued on `stream` so far.
    pub(super) fn wait_for(&self, gpu: &Gpu, driver: &Driver, stream: Stream) -> Result<(), DeviceFault> {
        let event = gpu.order(driver, stream, self.stream)?;
        let mut awaited = sync::locked(&self.awaited);
        if let Some(rank) = awaited.iter().position(|(known, _)| *known == stream) {
            gpu.give_back(awaited.swap_remove(rank).1);
        }
        awaited.push((stream, event));
        Ok(())
    }

    /// Return whether copies have to wait for the work of a caller.
    fn is_held_up(&self, gpu: &Gpu) -> Result<bool, DeviceFault> {
        let mut awaited = sync::locked(&self.awaited);
        if awaited.is_empty() {
            return Ok(false);
        }
        gpu.within(|driver| {
            while let Some(&(_, event)) = awaited.last() {
                if !driver.is_done(event)? {
                    return Ok(true);
                }
                awaited.pop();
                gpu.give_back(event);
            }
            Ok(false)
        })
    }

    /// Count a slot for its copies, and return true; or return false if it has enough slots for copies that cannot run
    /// yet.
    pub(super) fn take(&self, gpu: &Gpu) -> Result<bool, DeviceFault> {
        let few = |slots| (slots < MOST_HELD_UP).then_some(slots + 1);
        let is_few = self
            .slots
            .fetch_update(sync::Ordering::SeqCst, sync::Ordering::SeqCst, few)
            .is_ok();
        if is_few {
            return Ok(true);
        }
        if self.is_held_up(gpu)? {
            return Ok(false);
        }
        self.slots.fetch_add(1, sync::Ordering::SeqCst);
        Ok(true)
    }

    /// Count one slot less.
    pub(super) fn put(&self) {
        self.slots.fetch_sub(1, sync::Ordering::SeqCst);
    }
}

/// The lanes of a device in one direction, each with the stream of its last caller; the one used last comes last.
#[derive(Debug, Default)]
pub(super) struct Lanes(Mutex<Vec<(Option<Stream>, Arc<Lane>)>>);

impl Lanes {
    /// Return the lane for a caller's stream: its own, an unused one, a new one, or the lane of another stream.
    pub(super) fn of(
        &self,
        caller: Stream,
        create: impl FnOnce() -> Result<Stream, DeviceFault>,
    ) -> Result<Arc<Lane>, DeviceFault> {
        let mut lanes = locked(&self.0);
        let known = lanes.iter().position(|(known, _)| *known == Some(caller));
        let unused = || lanes.iter().position(|(known, _)| known.is_none());
        let lane = match known.or_else(unused) {
            Some(rank) => lanes.remove(rank).1,
            None if lanes.len() < MOST_LANES => Arc::new(Lane::new(create()?)),
            None => lanes.remove(0).1,
        };
        lanes.push((Some(caller), Arc::clone(&lane)));
        Ok(lane)
    }

    /// Add a lane that no caller uses yet.
    pub(super) fn add(&self, stream: Stream) {
        locked(&self.0).push((None, Arc::new(Lane::new(stream))));
    }

    /// Return the streams, and the events that nothing waits for any more.
    pub(super) fn take(&mut self) -> (Vec<Stream>, Vec<Event>) {
        let lanes = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        let taken = lanes.drain(..).map(|(_, lane)| {
            let awaited = std::mem::take(&mut *sync::locked(&lane.awaited));
            (lane.stream, awaited)
        });
        let (streams, events): (Vec<_>, Vec<_>) = taken.unzip();
        (
            streams,
            events.concat().into_iter().map(|(_, event)| event).collect(),
        )
    }
}
