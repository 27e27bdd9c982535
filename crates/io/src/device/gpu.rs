//! One device: its context, its streams for copies, and the events that order them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ingot_format::locked;

use super::driver::{Context, Driver, Event, INTEGRATED, Stream, refuse_child};
use super::fault::DeviceFault;
use super::lane::{Lane, Lanes, Way};

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
