//! Streams of a device on which copies run.
//!
//! A copy waits for the work that its caller had queued. So callers whose streams have nothing to do with each other copy on
//! different streams, as long as there are no more than a few.

use std::sync::Arc;

use ingot_format::locked;

use super::driver::{Driver, Event, Stream};
use super::fault::DeviceFault;
use super::gpu::Gpu;
use crate::sync::{AtomicUsize, Mutex, Ordering};

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
    awaited: Mutex<Vec<(Stream, Event)>>,
    /// Slots that are lent for its copies, or that its copies use.
    slots: AtomicUsize,
}

impl Lane {
    pub(super) fn new(stream: Stream) -> Lane {
        Lane {
            stream,
            awaited: Mutex::default(),
            slots: AtomicUsize::new(0),
        }
    }

    /// Make later copies wait for the work that is queued on `stream` so far.
    pub(super) fn wait_for(&self, gpu: &Gpu, driver: &Driver, stream: Stream) -> Result<(), DeviceFault> {
        let event = gpu.order(driver, stream, self.stream)?;
        let mut awaited = crate::sync::locked(&self.awaited);
        if let Some(rank) = awaited.iter().position(|(known, _)| *known == stream) {
            gpu.give_back(awaited.swap_remove(rank).1);
        }
        awaited.push((stream, event));
        Ok(())
    }

    /// Return whether copies have to wait for the work of a caller.
    fn is_held_up(&self, gpu: &Gpu) -> Result<bool, DeviceFault> {
        let mut awaited = crate::sync::locked(&self.awaited);
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

    /// Count a slot for its copies. Return whether it may have one: only a few if they cannot run yet.
    pub(super) fn take(&self, gpu: &Gpu) -> Result<bool, DeviceFault> {
        let few = |slots| (slots < MOST_HELD_UP).then_some(slots + 1);
        let is_few = self
            .slots
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, few)
            .is_ok();
        if is_few {
            return Ok(true);
        }
        if self.is_held_up(gpu)? {
            return Ok(false);
        }
        self.slots.fetch_add(1, Ordering::SeqCst);
        Ok(true)
    }

    /// Count a slot less.
    pub(super) fn put(&self) {
        self.slots.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The lanes of a device in one direction, each with the stream of its last caller; the one used last comes last.
#[derive(Debug, Default)]
pub(super) struct Lanes(std::sync::Mutex<Vec<(Option<Stream>, Arc<Lane>)>>);

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
        let lanes = self
            .0
            .get_mut()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let taken = lanes.drain(..).map(|(_, lane)| {
            let awaited = std::mem::take(&mut *crate::sync::locked(&lane.awaited));
            (lane.stream, awaited)
        });
        let (streams, events): (Vec<_>, Vec<_>) = taken.unzip();
        (
            streams,
            events.concat().into_iter().map(|(_, event)| event).collect(),
        )
    }
}
