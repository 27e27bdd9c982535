//! Copies that take the time of a link and move no bytes: for benchmarks of the host's side, with sizes of real loads.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::streams::{StreamId, Way};

/// The time that a copy takes beside its bytes.
const LAUNCH: Duration = Duration::from_micros(1);

/// A link between the host and the devices, with an engine for each direction.
#[derive(Debug)]
pub(crate) struct Link {
    nbytes_per_second: f64,
    /// The time at which each engine is idle.
    engines: [Instant; 2],
    /// The time at which each stream is idle.
    streams: BTreeMap<StreamId, Instant>,
    events: BTreeMap<usize, Instant>,
}

impl Link {
    pub(crate) fn new(nbytes_per_second: f64) -> Link {
        Link {
            nbytes_per_second,
            engines: [Instant::now(); 2],
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
        }
    }

    /// Queues a copy.
    #[allow(clippy::cast_precision_loss, reason = "the time of a copy is an estimate")]
    pub(crate) fn copy(&mut self, id: StreamId, nbytes: usize, way: Way) {
        let takes = Duration::from_secs_f64(nbytes as f64 / self.nbytes_per_second) + LAUNCH;
        let stream = self.streams.get(&id).copied();
        let engine = &mut self.engines[usize::from(way == Way::Out)];
        let done = Instant::now().max(*engine).max(stream.unwrap_or(*engine)) + takes;
        *engine = done;
        self.streams.insert(id, done);
    }

    pub(crate) fn record(&mut self, event: usize, id: StreamId) {
        let at = self.streams.get(&id).copied().unwrap_or_else(Instant::now);
        self.events.insert(event, at);
    }

    pub(crate) fn wait(&mut self, id: StreamId, event: usize) {
        if let Some(&at) = self.events.get(&event) {
            let stream = self.streams.entry(id).or_insert(at);
            *stream = at.max(*stream);
        }
    }

    pub(crate) fn is_done(&self, event: usize) -> bool {
        self.events.get(&event).is_none_or(|&at| at <= Instant::now())
    }

    /// Returns whether all work of a stream is done.
    pub(crate) fn is_idle(&self, id: StreamId) -> bool {
        self.streams.get(&id).is_none_or(|&at| at <= Instant::now())
    }
}
