//! How a caller stops something that takes long, and learns how far it is.

/// Asked and told now and then, on the thread that made the call.
pub trait Watch: Sync {
    /// Whether to stop. Asked at least every 100 ms.
    fn interrupted(&self) -> bool {
        false
    }

    /// Bytes that are done, of all that there are to do. Told before [`Watch::interrupted`] is asked, so that whoever
    /// has seen enough can stop, and once at the end; never fewer than before.
    fn progressed(&self, _done: u64, _total: u64) {}
}

/// Never stops.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl Watch for Unwatched {}
