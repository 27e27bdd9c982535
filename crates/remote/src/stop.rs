//! How work that waits hears that nobody wants it any more.

use std::sync::atomic::{AtomicBool, Ordering};

/// Tells work that waits, such as a read over a network, that nobody wants it any more. The work looks now and then, and
/// gives up.
#[derive(Clone, Copy, Debug)]
pub struct StopFlag<'f>(Option<&'f AtomicBool>);

impl<'f> StopFlag<'f> {
    /// The flag of work that is not stopped.
    #[must_use]
    pub const fn never() -> StopFlag<'f> {
        StopFlag(None)
    }

    /// Whether to give up.
    #[must_use]
    pub fn is_set(self) -> bool {
        self.0.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }
}

impl<'f> From<&'f AtomicBool> for StopFlag<'f> {
    fn from(flag: &'f AtomicBool) -> StopFlag<'f> {
        StopFlag(Some(flag))
    }
}
