//! One device: its context, a stream for copies, and the events that order them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ingot_format::locked;

use super::driver::{Context, Driver, Event, HOST_NUMA_ID, INTEGRATED, Stream, refuse_child};
use super::fault::DeviceFault;

/// A device in use.
#[derive(Debug)]
pub(crate) struct Gpu {
    driver: Arc<Driver>,
    /// Its number among the visible ones.
    pub(super) ordinal: i32,
    device: i32,
    context: Context,
    stream: Stream,
    /// The node of the host's memory that is near it, where that is known.
    pub(super) node: Option<u32>,
    /// Whether it shares the memory of the host.
    pub(super) is_integrated: bool,
    /// Events that nothing waits for.
    events: Mutex<Vec<Event>>,
    /// Whether the context was found to be gone, with the stream, the events and all memory that was pinned in it.
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
        let node = driver.attribute(device, HOST_NUMA_ID).ok();
        let is_integrated = driver.attribute(device, INTEGRATED).is_ok_and(|value| value != 0);
        Ok(Gpu {
            node: node.and_then(|node| u32::try_from(node).ok()),
            driver: Arc::clone(driver),
            ordinal,
            device,
            context,
            stream,
            is_integrated,
            events: Mutex::default(),
            was_reset: AtomicBool::new(false),
        })
    }

    /// Return whether the context with which this device was opened is gone: `cudaDeviceReset` destroys it under all its
    /// users.
    pub(crate) fn is_reset(&self) -> bool {
        if self.was_reset.load(Ordering::Relaxed) {
            return true;
        }
        let asked = self.within(|driver, stream| driver.is_capturing(stream));
        let is_reset = asked.is_err_and(|fault| fault.is_reset());
        if is_reset {
            self.was_reset.store(true, Ordering::Relaxed);
        }
        is_reset
    }

    /// Run `work` with this device as the current one of the calling thread.
    pub(crate) fn within<R>(
        &self,
        work: impl FnOnce(&Driver, Stream) -> Result<R, DeviceFault>,
    ) -> Result<R, DeviceFault> {
        refuse_child()?;
        self.driver
            .within(self.context, || work(&self.driver, self.stream))
    }

    /// Make later copies wait for the work that is queued on `stream` so far: earlier work of the stream may still use
    /// memory that an allocator hands out.
    pub(crate) fn wait_for(&self, stream: Stream) -> Result<(), DeviceFault> {
        self.within(|driver, copies| self.order(driver, stream, copies))
    }

    /// Fail if work on `stream` is being recorded into a graph.
    pub(crate) fn refuse_capture(&self, stream: Stream) -> Result<(), DeviceFault> {
        if self.within(|driver, _| driver.is_capturing(stream))? {
            Err(DeviceFault::Capturing)
        } else {
            Ok(())
        }
    }

    /// Make later work on `stream` wait for the copies that are queued so far.
    pub(crate) fn hold(&self, stream: Stream) -> Result<(), DeviceFault> {
        self.within(|driver, copies| self.order(driver, copies, stream))
    }

    /// Make `second` wait for the work on `first` so far.
    fn order(&self, driver: &Driver, first: Stream, second: Stream) -> Result<(), DeviceFault> {
        let event = self.event(driver)?;
        let ordered = driver
            .record(event, first)
            .and_then(|()| driver.wait(second, event));
        // A queued wait does not need the event any more.
        self.give_back(event);
        ordered
    }

    /// Wait until all copies that are queued by now are done.
    pub(crate) fn finish(&self) -> Result<(), DeviceFault> {
        self.within(Driver::finish)
    }

    /// Record the copies that are queued so far.
    pub(crate) fn mark(&self, driver: &Driver) -> Result<Event, DeviceFault> {
        let event = self.event(driver)?;
        let recorded = driver.record(event, self.stream);
        recorded.inspect_err(|_| self.give_back(event))?;
        Ok(event)
    }

    fn event(&self, driver: &Driver) -> Result<Event, DeviceFault> {
        let kept = locked(&self.events).pop();
        kept.map_or_else(|| driver.create_event(), Ok)
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
        let events = std::mem::take(events);
        if !self.is_reset() {
            let destroyed = self.within(|driver, stream| {
                let events: Result<Vec<()>, _> =
                    events.iter().map(|&event| driver.destroy_event(event)).collect();
                driver.destroy_stream(stream)?;
                events
            });
            // A lost device cannot be repaired.
            drop(destroyed);
        }
        drop(self.driver.relaxed(|| self.driver.release(self.device)));
    }
}
