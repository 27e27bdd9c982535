//! The SHA-256 of a file whose parts are written in any order.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};

use ingot_format::to_usize;

use super::journal::Journal;
use crate::digest::{Algorithm, Digest, Hasher};
use crate::payload::FileRange;

/// Bytes that are hashed at once.
const PIECE_NBYTES: u64 = 1 << 20;

/// Follows the parts of a file, as far as all before are there. They are read again, while the system still has them in
/// memory: so nobody waits for the parts before his own, and nothing is kept.
pub(super) struct Follow<'f> {
    file: &'f File,
    journal: &'f Journal,
    is_there: Vec<AtomicBool>,
    turn: Mutex<Turn>,
}

struct Turn {
    /// The part that is hashed next.
    next: usize,
    hasher: Hasher,
}

impl<'f> Follow<'f> {
    pub(super) fn new(file: &'f File, journal: &'f Journal) -> Follow<'f> {
        Follow {
            file,
            journal,
            is_there: (0..journal.count()).map(|_| AtomicBool::new(false)).collect(),
            turn: Mutex::new(Turn {
                next: 0,
                hasher: Hasher::new(Algorithm::Sha256),
            }),
        }
    }

    /// Notes that a part is there. Whoever does so hashes what can be hashed, unless somebody is at it.
    pub(super) fn came(&self, number: usize) -> std::io::Result<()> {
        self.is_there[number].store(true, Ordering::SeqCst);
        loop {
            let mut turn = match self.turn.try_lock() {
                Ok(turn) => turn,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Ok(()),
            };
            while self.can_go_on(turn.next) {
                self.hash(&mut turn)?;
            }
            let next = turn.next;
            drop(turn);
            // A part may have come after it was looked for and before the lock was given back.
            if !self.can_go_on(next) {
                return Ok(());
            }
        }
    }

    fn can_go_on(&self, next: usize) -> bool {
        self.is_there
            .get(next)
            .is_some_and(|is_there| is_there.load(Ordering::SeqCst))
    }

    fn hash(&self, turn: &mut Turn) -> std::io::Result<()> {
        let part = self.journal.part(turn.next);
        let range = FileRange::new(self.file, part.start, part.end - part.start);
        let mut buffer = Vec::new();
        let mut at = 0;
        while at < part.end - part.start {
            let count = PIECE_NBYTES.min(part.end - part.start - at);
            buffer.resize(to_usize(count).unwrap_or(0), 0);
            range.read(at, &mut buffer)?;
            turn.hasher.update(&buffer);
            at += count;
        }
        turn.next += 1;
        Ok(())
    }

    /// The digest, once all parts came.
    pub(super) fn finish(self) -> Digest {
        let turn = self.turn.into_inner().unwrap_or_else(PoisonError::into_inner);
        turn.hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn parts_that_come_in_any_order_are_hashed_in_theirs() {
        let bytes: Vec<u8> = (0_usize..(5 << 20) + 3).map(|at| at.to_le_bytes()[1]).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        let journal = Journal::new(5 * (1 << 20) + 3, "v");
        for order in [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]] {
            let follow = Follow::new(&file, &journal);
            for number in order {
                follow.came(number).unwrap();
            }
            assert_eq!(follow.finish(), Algorithm::Sha256.digest(&bytes));
        }
    }
}
