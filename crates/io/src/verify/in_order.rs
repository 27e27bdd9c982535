//! All bytes of a source, one after another, for hash functions of others.

use ingot_format::to_u64;

use super::pass::reading;
use crate::error::Failure;
use crate::file::ReadAt;
use crate::read::input::Witness;
use crate::read::show::show;
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError, locked};
use crate::watch::Watch;

/// Gives `take` all bytes of `source` in their order. They are read by several threads, and `take` is called by one of
/// them at a time.
pub(crate) fn read_in_order(
    source: &dyn ReadAt,
    take: &mut (dyn FnMut(&[u8]) + Send),
    watch: &dyn Watch,
) -> Result<(), Failure> {
    let queue = Queue {
        turn: Mutex::new(Turn {
            at: 0,
            ended: false,
            take,
        }),
        moved: Condvar::new(),
    };
    let runs = [(0, 0..source.nbytes())];
    let reading = reading(&[source], &runs);
    show(&[source], &[&queue], &runs, reading, watch).map_err(|fault| fault.failure)
}

/// Where pieces wait for those before them.
struct Queue<'t> {
    turn: Mutex<Turn<'t>>,
    moved: Condvar,
}

struct Turn<'t> {
    /// Where the next byte is.
    at: u64,
    /// A piece will not come.
    ended: bool,
    take: &'t mut (dyn FnMut(&[u8]) + Send),
}

impl Witness for Queue<'_> {
    fn step_nbytes(&self) -> u64 {
        u64::MAX
    }

    fn see(&self, begin: u64, bytes: &[u8]) {
        let mut turn = self.locked();
        while turn.at < begin && !turn.ended {
            turn = self.moved.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
        if turn.at == begin {
            (turn.take)(bytes);
            turn.at += to_u64(bytes.len());
            self.moved.notify_all();
        }
    }

    fn end(&self) {
        self.locked().ended = true;
        self.moved.notify_all();
    }
}

impl<'t> Queue<'t> {
    fn locked(&self) -> MutexGuard<'_, Turn<'t>> {
        locked(&self.turn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{Given, MemorySource};
    use crate::sync::{in_every_order, thread};
    use crate::watch::Unwatched;

    #[test]
    fn bytes_come_in_their_order() {
        for len in [0, 1, (5 << 20) + 1] {
            let bytes: Vec<u8> = (0_usize..len).map(|at| at.to_le_bytes()[1]).collect();
            let source = Given::new(MemorySource::new(bytes.clone()));
            let mut found = Vec::new();
            read_in_order(&source, &mut |piece| found.extend_from_slice(piece), &Unwatched).unwrap();
            assert!(found == bytes, "{len} bytes");
        }
    }

    #[test]
    fn in_every_order_of_threads_pieces_are_taken_in_theirs_and_none_waits_for_one_that_does_not_come() {
        for comes in [true, false] {
            in_every_order(move || {
                let mut found = Vec::new();
                let mut take = |piece: &[u8]| found.extend_from_slice(piece);
                let queue = Queue {
                    turn: Mutex::new(Turn {
                        at: 0,
                        ended: false,
                        take: &mut take,
                    }),
                    moved: Condvar::new(),
                };
                thread::scope(|scope| {
                    scope.spawn(|| queue.see(5, b"fgh"));
                    scope.spawn(|| queue.see(3, b"de"));
                    if comes { queue.see(0, b"abc") } else { queue.end() }
                });
                let expected: &[u8] = if comes { b"abcdefgh" } else { b"" };
                assert_eq!(found, expected);
            });
        }
    }
}
