//! All bytes of a source, one after another, for hash functions of others.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use ingot_format::to_u64;

use super::pass::{reading, show};
use crate::error::Failure;
use crate::read::input::Witness;
use crate::source::Source;
use crate::watch::Watch;

/// Gives `take` all bytes of `source` in their order. They are read by several threads, and `take` is called by one of
/// them at a time.
pub(crate) fn read_in_order(
    source: &dyn Source,
    take: &mut (dyn FnMut(&[u8]) + Send),
    watch: &dyn Watch,
) -> Result<(), Failure> {
    let (reading, piece_nbytes) = reading(source);
    let nbytes = source.nbytes();
    let begins = (0..nbytes.div_ceil(piece_nbytes)).map(|number| number * piece_nbytes);
    let pieces: Vec<Range<u64>> = begins
        .map(|begin| begin..nbytes.min(begin + piece_nbytes))
        .collect();
    let queue = Queue {
        turn: Mutex::new(Turn {
            at: 0,
            ended: false,
            take,
        }),
        moved: Condvar::new(),
    };
    show(source, reading, pieces, &queue, watch)
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
    fn step_end(&self, position: u64, most: u64) -> u64 {
        position + most
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
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::MemorySource;
    use crate::watch::Unwatched;

    #[test]
    fn bytes_come_in_their_order() {
        for len in [0, 1, (5 << 20) + 1] {
            let bytes: Vec<u8> = (0_usize..len).map(|at| at.to_le_bytes()[1]).collect();
            let source = MemorySource::new(bytes.clone());
            let mut found = Vec::new();
            read_in_order(&source, &mut |piece| found.extend_from_slice(piece), &Unwatched).unwrap();
            assert!(found == bytes, "{len} bytes");
        }
    }
}
