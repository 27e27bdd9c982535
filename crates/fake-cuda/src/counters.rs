//! Counters of calls, and of mistakes in them.

/// The counters since the last reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counters {
    /// Calls of functions that may fail.
    pub calls: u64,
    /// Primary contexts that are currently retained.
    pub contexts: u64,
    /// Streams that were created and not yet destroyed.
    pub streams: u64,
    /// Events that were created and not yet destroyed.
    pub events: u64,
    /// Bytes of memory that are currently pinned.
    pub pinned: u64,
    /// The largest number of bytes that were pinned at once.
    pub pinned_most: u64,
    /// How often memory was pinned.
    pub pins: u64,
    /// Recorded events.
    pub records: u64,
    /// Queued copies.
    pub copies: u64,
    /// Bytes of copies to devices.
    pub bytes_in: u64,
    /// Bytes of copies from devices.
    pub bytes_out: u64,
    /// How often a thread waited for unfinished work.
    pub host_waits: u64,
    /// Calls that need a current context and have none.
    pub without_context: u64,
    /// Calls in a child after a fork.
    pub forked: u64,
    /// Calls during a capture that invalidate it.
    pub captured: u64,
    /// Copies from or to host memory that is not pinned.
    pub pageable: u64,
    /// Copies to device memory that another pending copy writes to.
    pub overlapping: u64,
    /// Copies from or to memory that is not allocated, or was freed before the copy ran.
    pub stray: u64,
    /// Waits for something that never happens.
    pub deadlocks: u64,
}
