//! Pieces that threads bring in any order and that are processed in order.

use super::{Condvar, Mutex, PoisonError, locked};

/// A value that processes pieces in the order of their positions. A thread with a later piece waits for the earlier
/// ones, so the threads must begin the pieces in order.
pub(crate) struct Turns<T> {
    turn: Mutex<Turn<T>>,
    moved: Condvar,
}

struct Turn<T> {
    /// The position of the next piece.
    at: u64,
    /// Whether no more pieces will come.
    ended: bool,
    value: T,
}

impl<T> Turns<T> {
    pub(crate) fn new(at: u64, value: T) -> Turns<T> {
        Turns {
            turn: Mutex::new(Turn {
                at,
                ended: false,
                value,
            }),
            moved: Condvar::new(),
        }
    }

    /// Wait until the piece from `begin` on, of `nbytes`, is the next one, and call `take`, which returns whether another
    /// piece follows. Returns without a call after [`Turns::end`] if an earlier piece is missing.
    pub(crate) fn take(&self, begin: u64, nbytes: u64, take: impl FnOnce(&mut T) -> bool) {
        let mut turn = locked(&self.turn);
        while turn.at < begin && !turn.ended {
            turn = self.moved.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
        if turn.at == begin {
            turn.at += nbytes;
            if take(&mut turn.value) {
                self.moved.notify_all();
            }
        }
    }

    /// Wake all waiting threads, because pieces before theirs will not come.
    pub(crate) fn end(&self) {
        locked(&self.turn).ended = true;
        self.moved.notify_all();
    }

    pub(crate) fn into_inner(self) -> T {
        self.turn
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
            .value
    }
}
