//! How work that waits hears that nobody wants it any more.

use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};

/// The caller of a function, which only the calling thread can ask whether to stop: an interpreter with signals, for example.
pub trait Caller: Sync {
    /// Asks, if this is the thread of the call, and sets the flag if the answer is no.
    fn ask(&self);
}

/// Tells work that waits, such as a read over a network, that nobody wants it any more. The work looks now and then, and
/// gives up.
#[derive(Clone, Copy)]
pub struct StopFlag<'f> {
    flag: Option<&'f AtomicBool>,
    caller: Option<&'f dyn Caller>,
}

impl<'f> StopFlag<'f> {
    /// The flag of work that is not stopped.
    #[must_use]
    pub const fn never() -> StopFlag<'f> {
        StopFlag {
            flag: None,
            caller: None,
        }
    }

    /// A flag that `caller` sets.
    #[must_use]
    pub fn of(flag: &'f AtomicBool, caller: &'f dyn Caller) -> StopFlag<'f> {
        StopFlag {
            flag: Some(flag),
            caller: Some(caller),
        }
    }

    /// Whether to give up.
    #[must_use]
    pub fn is_set(self) -> bool {
        self.flag.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// Asks the caller, if this is the calling thread, and returns whether to give up. For work that waits on the calling
    /// thread, where no other thread can ask. Hold no lock: the caller may run any code.
    #[must_use]
    pub fn asked(self) -> bool {
        if let Some(caller) = self.caller {
            caller.ask();
        }
        self.is_set()
    }
}

impl fmt::Debug for StopFlag<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StopFlag").field(&self.flag).finish()
    }
}

impl<'f> From<&'f AtomicBool> for StopFlag<'f> {
    fn from(flag: &'f AtomicBool) -> StopFlag<'f> {
        StopFlag {
            flag: Some(flag),
            caller: None,
        }
    }
}
