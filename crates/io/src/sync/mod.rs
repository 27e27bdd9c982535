//! Threads, locks and condition variables of the standard library, for all code that waits.
//!
//! With `--cfg shuttle` (`make test-orders`) they are shuttle's, which runs one thread at a time and chooses the next one
//! at each point where a thread might wait. Timeouts never end there: if a wake-up is lost, a test ends with a deadlock.

#[cfg(test)]
#[path = "tests/orders.rs"]
mod orders;
#[cfg(all(test, shuttle))]
#[path = "tests/shuttled.rs"]
mod shuttled;
mod turns;

#[cfg(not(all(test, shuttle)))]
mod system {
    pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
    pub(crate) use std::thread;

    pub(crate) use ingot_format::locked;
}

pub(crate) use turns::Turns;

#[cfg(test)]
pub(crate) use orders::in_every_order;
#[cfg(all(test, shuttle))]
pub(crate) use shuttled::*;
#[cfg(not(all(test, shuttle)))]
pub(crate) use system::*;
