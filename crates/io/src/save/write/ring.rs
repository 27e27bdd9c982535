//! Buffers that pass between the thread that fills them and the threads that write them.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use crate::digest::Sealing;
use crate::pages::Pages;
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError, locked};

/// A ring of buffers: empty ones go to the fetching thread, filled ones to a writing thread, and back.
pub(crate) struct Ring {
    state: Mutex<RingState>,
    changed: Condvar,
}

struct RingState {
    empty: Vec<Pages>,
    filled: VecDeque<(usize, Pages)>,
    closed: bool,
}

impl Ring {
    pub(crate) fn new(buffers: usize, nbytes: usize) -> io::Result<Ring> {
        let empty = (0..buffers).map(|_| Pages::allocate(nbytes));
        let state = RingState {
            empty: empty.collect::<io::Result<_>>()?,
            filled: VecDeque::new(),
            closed: false,
        };
        Ok(Ring {
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, RingState> {
        locked(&self.state)
    }

    /// Take a buffer to fill. `None` if no writer returns one in time.
    pub(crate) fn empty(&self, patience: Duration) -> Option<Pages> {
        let state = self.state();
        let waited = self
            .changed
            .wait_timeout_while(state, patience, |state| state.empty.is_empty());
        waited.unwrap_or_else(PoisonError::into_inner).0.empty.pop()
    }

    pub(crate) fn give_back(&self, buffer: Pages) {
        self.state().empty.push(buffer);
        self.changed.notify_all();
    }

    pub(crate) fn put(&self, piece: usize, buffer: Pages) {
        self.state().filled.push_back((piece, buffer));
        self.changed.notify_all();
    }

    /// Return a filled buffer, if there is one now.
    pub(crate) fn ready(&self) -> Option<(usize, Pages)> {
        self.state().filled.pop_front()
    }

    /// Return the next filled buffer; `None` if no more will come.
    pub(crate) fn next(&self) -> Option<(usize, Pages)> {
        let state = self.state();
        let waited = self
            .changed
            .wait_while(state, |state| state.filled.is_empty() && !state.closed);
        waited.unwrap_or_else(PoisonError::into_inner).filled.pop_front()
    }

    /// Report that no more buffers will be filled.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }
}

/// Closes the ring when it is dropped, also on unwinding, so that no writer waits for ever.
pub(crate) struct Closing<'r>(pub(crate) &'r Ring);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Reports, when dropped, that pieces will not arrive: a thread has failed or panicked, and others may wait for its
/// bytes.
pub(crate) struct Ending<'w>(pub(crate) Option<&'w Sealing<'w>>);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if let Some(sealing) = self.0 {
            sealing.end();
        }
    }
}
