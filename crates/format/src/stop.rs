//! Cancels work that waits.

use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};

/// The caller of a function, for example an interpreter with signals. Only the calling thread can ask it whether to
/// stop.
pub trait Caller: Sync {
    /// Asks whether to stop if the current thread is the calling thread, and sets the flag if so.
    fn ask(&self);
}

/// A stop flag for work that waits, such as a read over a network. The work polls the flag and stops once it is set.
#[derive(Clone, Copy)]
pub struct StopFlag<'f> {
    flag: Option<&'f AtomicBool>,
    caller: Option<&'f dyn Caller>,
}

impl<'f> StopFlag<'f> {
    /// A flag that is never set.
    #[must_use]
    pub const fn never() -> StopFlag<'f> {
        StopFlag {
            flag: None,
            caller: None,
        }
    }

    /// Creates a flag that `caller` sets.
    #[must_use]
    pub fn of(flag: &'f AtomicBool, caller: &'f dyn Caller) -> StopFlag<'f> {
        StopFlag {
            flag: Some(flag),
            caller: Some(caller),
        }
    }

    /// Returns whether to stop.
    #[must_use]
    pub fn is_set(self) -> bool {
        self.flag.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// Asks the caller, if this is the calling thread, and returns whether to stop. For work that waits on the
    /// calling thread, where no other thread can ask. Hold no lock: the caller may run any code.
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
