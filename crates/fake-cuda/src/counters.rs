//! What was done, and what should not have been.

/// Numbers since the last reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counters {
    /// Calls of functions that may fail.
    pub calls: u64,
    /// Primary contexts that are retained.
    pub contexts: u64,
    /// Streams that were created and not destroyed.
    pub streams: u64,
    /// Events likewise.
    pub events: u64,
    /// Bytes of pinned memory now.
    pub pinned: u64,
    /// The same at most.
    pub pinned_most: u64,
    /// Recordings of events.
    pub records: u64,
    /// Copies that were queued.
    pub copies: u64,
    /// Bytes that they take to devices.
    pub bytes_in: u64,
    /// Bytes that they bring from devices.
    pub bytes_out: u64,
    /// Times that a thread waited for something that was not done.
    pub host_waits: u64,
    /// Calls without a current context that need one.
    pub without_context: u64,
    /// Calls in the child of a fork.
    pub forked: u64,
    /// Calls during a capture that break it.
    pub captured: u64,
    /// Copies from or to memory of the host that is not pinned.
    pub pageable: u64,
    /// Copies to memory of a device that another copy under way writes to.
    pub overlapping: u64,
    /// Copies from or to memory that is not allocated, or no more when they are carried out.
    pub stray: u64,
    /// Waits for what never happens.
    pub deadlocks: u64,
}
