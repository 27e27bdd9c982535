//! Pieces on their way from the thread that fetches them to the threads that write them.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::direct::Aligned;

/// A few buffers that go round: empty to the fetching thread, filled to a writing one, and back.
pub(super) struct Ring {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    empty: Vec<Aligned>,
    filled: VecDeque<(usize, Aligned)>,
    closed: bool,
}

impl Ring {
    pub(super) fn new(buffers: usize) -> Ring {
        Ring {
            state: Mutex::new(State {
                empty: (0..buffers).map(|_| Aligned::default()).collect(),
                filled: VecDeque::new(),
                closed: false,
            }),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer to fill. `None` when no writer gives one back in time.
    pub(super) fn empty(&self, patience: Duration) -> Option<Aligned> {
        let state = self.state();
        let waited = self
            .changed
            .wait_timeout_while(state, patience, |state| state.empty.is_empty());
        waited.unwrap_or_else(PoisonError::into_inner).0.empty.pop()
    }

    pub(super) fn give_back(&self, buffer: Aligned) {
        self.state().empty.push(buffer);
        self.changed.notify_all();
    }

    pub(super) fn put(&self, piece: usize, buffer: Aligned) {
        self.state().filled.push_back((piece, buffer));
        self.changed.notify_all();
    }

    /// A filled buffer, if there is one at this moment.
    pub(super) fn ready(&self) -> Option<(usize, Aligned)> {
        self.state().filled.pop_front()
    }

    /// The next filled buffer; `None` when there will be none.
    pub(super) fn next(&self) -> Option<(usize, Aligned)> {
        let state = self.state();
        let waited = self
            .changed
            .wait_while(state, |state| state.filled.is_empty() && !state.closed);
        waited.unwrap_or_else(PoisonError::into_inner).filled.pop_front()
    }

    /// Says that nothing more will be put in.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }
}

/// Closes the ring when it goes, on unwinding as well, so that no writer waits for ever.
pub(super) struct Closing<'r>(pub(super) &'r Ring);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}
