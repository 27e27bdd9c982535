//! The work that is queued on streams, and its execution.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use crate::memory::FREED;

/// A stream: the legacy stream of a device, or a created stream.
pub(crate) type StreamId = usize;

/// One recording of an event.
pub(crate) type Ticket = u64;

/// Work that was queued.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    Copy(Copy),
    /// A write by a kernel of another program.
    Fill {
        address: usize,
        nbytes: usize,
        byte: u8,
    },
    Record(Ticket),
    Wait(Ticket),
    /// Memory that an allocator frees in the order of a stream.
    Free(usize),
}

/// A copy, and its source bytes if they were read at once.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) nbytes: usize,
    pub(crate) way: Way,
    pub(crate) staged: Option<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    In,
    Out,
}

impl Copy {
    /// The first address in host memory.
    pub(crate) fn on_host(&self) -> usize {
        if self.way == Way::In { self.from } else { self.to }
    }

    /// The address in device memory.
    pub(crate) fn on_device(&self) -> Range<usize> {
        let start = if self.way == Way::In { self.to } else { self.from };
        start..start + self.nbytes
    }
}

#[derive(Debug)]
pub(crate) struct Stream {
    /// The device of the stream.
    ordinal: usize,
    pub(crate) queue: VecDeque<Item>,
    pub(crate) capture: Option<Capture>,
    /// Whether an endless kernel runs on the stream.
    pub(crate) is_busy: bool,
}

/// A capture of a stream into a graph, in global mode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capture {
    pub(crate) is_valid: bool,
}

#[derive(Debug)]
struct Event {
    /// The device of the event.
    ordinal: usize,
    /// The last recording; `None` before the first.
    last: Option<Ticket>,
}

/// All streams and events.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: BTreeMap<StreamId, Stream>,
    events: BTreeMap<usize, Event>,
    done: BTreeSet<Ticket>,
    next: usize,
}

impl Streams {
    /// A number that no handle has had before.
    fn number(&mut self) -> usize {
        self.next += 1;
        // The first number, far from addresses and from the legacy streams.
        0x7000_0000 + self.next * 0x10
    }

    pub(crate) fn create_stream(&mut self, ordinal: usize) -> StreamId {
        let id = self.number();
        self.open(id, ordinal);
        id
    }

    /// Adds a stream that exists without being created.
    pub(crate) fn open(&mut self, id: StreamId, ordinal: usize) {
        let stream = Stream {
            ordinal,
            queue: VecDeque::new(),
            capture: None,
            is_busy: false,
        };
        self.streams.insert(id, stream);
    }

    pub(crate) fn get(&mut self, id: StreamId) -> Option<&mut Stream> {
        self.streams.get_mut(&id)
    }

    pub(crate) fn remove(&mut self, id: StreamId) -> bool {
        self.streams.remove(&id).is_some()
    }

    /// The current captures.
    pub(crate) fn captures(&mut self) -> impl Iterator<Item = &mut Capture> {
        self.streams
            .values_mut()
            .filter_map(|stream| stream.capture.as_mut())
    }

    pub(crate) fn create_event(&mut self, ordinal: usize) -> usize {
        let id = self.number();
        self.events.insert(id, Event { ordinal, last: None });
        id
    }

    /// Drops the work that is queued on the streams of a device. Nothing waits for it.
    pub(crate) fn stop(&mut self, ordinal: usize) {
        for stream in self
            .streams
            .values_mut()
            .filter(|stream| stream.ordinal == ordinal)
        {
            self.done
                .extend(stream.queue.drain(..).filter_map(|item| match item {
                    Item::Record(ticket) => Some(ticket),
                    _ => None,
                }));
        }
    }

    /// Destroys the streams and events of a device, with their work. Returns the numbers of both.
    pub(crate) fn destroy(&mut self, ordinal: usize) -> (usize, usize) {
        let before = (self.streams.len(), self.events.len());
        self.stop(ordinal);
        self.streams.retain(|_, stream| stream.ordinal != ordinal);
        self.events.retain(|_, event| event.ordinal != ordinal);
        (before.0 - self.streams.len(), before.1 - self.events.len())
    }

    pub(crate) fn remove_event(&mut self, id: usize) -> bool {
        self.events.remove(&id).is_some()
    }

    /// Records an event on a stream. Returns whether both exist.
    pub(crate) fn record(&mut self, event: usize, stream: StreamId) -> bool {
        self.next += 1;
        let ticket = Ticket::try_from(self.next).unwrap_or(Ticket::MAX);
        let (Some(event), Some(stream)) = (self.events.get_mut(&event), self.streams.get_mut(&stream)) else {
            return false;
        };
        event.last = Some(ticket);
        stream.queue.push_back(Item::Record(ticket));
        true
    }

    /// Returns the recording that a wait for an event waits for, if it was ever recorded. `None` if there is no such
    /// event.
    pub(crate) fn ticket(&self, event: usize) -> Option<Option<Ticket>> {
        self.events.get(&event).map(|event| event.last)
    }

    pub(crate) fn is_done(&self, ticket: Ticket) -> bool {
        self.done.contains(&ticket)
    }

    /// Returns all streams, the legacy streams first.
    pub(crate) fn ids(&self) -> Vec<StreamId> {
        self.streams.keys().copied().collect()
    }

    /// Returns the streams whose next item can run.
    pub(crate) fn ready(&self) -> Vec<StreamId> {
        let is_ready = |stream: &Stream| match stream.queue.front() {
            _ if stream.is_busy => false,
            None => false,
            Some(Item::Wait(ticket)) => self.is_done(*ticket),
            Some(_) => true,
        };
        let ready = self.streams.iter().filter(|(_, stream)| is_ready(stream));
        ready.map(|(&id, _)| id).collect()
    }

    /// Returns the stream on which a recording's work is still queued, if there is one.
    pub(crate) fn left_on(&self, id: StreamId) -> Option<StreamId> {
        let stream = self.streams.get(&id)?;
        (!stream.queue.is_empty()).then_some(id)
    }

    /// Returns the stream that a recording is still queued on.
    pub(crate) fn left_for(&self, ticket: Ticket) -> Option<StreamId> {
        let is_here = |stream: &Stream| {
            let mut items = stream.queue.iter();
            items.any(|item| matches!(item, Item::Record(one) if *one == ticket))
        };
        let found = self.streams.iter().find(|(_, stream)| is_here(stream));
        found.map(|(&id, _)| id)
    }

    /// Returns the stream that has to continue before `id` can: `id` itself, or the stream that it waits for. `None` if
    /// streams wait for each other.
    pub(crate) fn what_holds(&self, id: StreamId) -> Option<StreamId> {
        let mut id = id;
        for _ in 0..=self.streams.len() {
            match self.streams.get(&id)?.queue.front()? {
                Item::Wait(ticket) if !self.is_done(*ticket) => id = self.left_for(*ticket)?,
                _ => return Some(id),
            }
        }
        None
    }

    /// Returns whether an endless kernel runs on a stream.
    pub(crate) fn is_busy(&self, id: StreamId) -> bool {
        self.streams.get(&id).is_some_and(|stream| stream.is_busy)
    }

    /// Returns whether an endless kernel runs on any stream.
    pub(crate) fn is_any_busy(&self) -> bool {
        self.streams.values().any(|stream| stream.is_busy)
    }

    /// Returns whether the next item of a stream is a kernel.
    pub(crate) fn is_at_kernel(&self, id: StreamId) -> bool {
        let next = self.streams.get(&id).and_then(|stream| stream.queue.front());
        matches!(next, Some(Item::Fill { .. }))
    }

    /// Removes and returns the next item of a stream. If it records an event, the event is marked as recorded.
    pub(crate) fn take(&mut self, id: StreamId) -> Option<Item> {
        let item = self.streams.get_mut(&id)?.queue.pop_front()?;
        if let Item::Record(ticket) = item {
            self.done.insert(ticket);
        }
        Some(item)
    }

    /// Returns the pending copies.
    pub(crate) fn copies(&self) -> impl Iterator<Item = &Copy> {
        let items = self.streams.values().flat_map(|stream| &stream.queue);
        items.filter_map(|item| match item {
            Item::Copy(copy) => Some(copy),
            _ => None,
        })
    }

    /// Cuts off the pending copies from or to these bytes of the host, which are unpinned too early. Such a copy reads other
    /// bytes, or writes nothing. Returns their number.
    pub(crate) fn strand(&mut self, host: Range<usize>) -> u64 {
        let mut count = 0;
        for item in self.streams.values_mut().flat_map(|stream| &mut stream.queue) {
            if let Item::Copy(copy) = item
                && copy.staged.is_none()
                && host.contains(&copy.on_host())
            {
                copy.staged = Some(vec![FREED; copy.nbytes]);
                count += 1;
            }
        }
        count
    }

    /// Prints the queues for people.
    pub(crate) fn shown(&self) -> String {
        let mut text = String::new();
        for (id, stream) in &self.streams {
            text += &format!("stream {id:#x}: {:?}\n", stream.queue);
        }
        text
    }
}
