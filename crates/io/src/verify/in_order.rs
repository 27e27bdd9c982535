//! Reading all bytes of a source in order, for other hash functions.

use ingot_format::to_u64;

use super::pass::reading;
use crate::error::Failure;
use crate::file::ReadAt;
use crate::read::input::Witness;
use crate::read::run::show;
use crate::sync::Turns;
use crate::watch::Watch;

/// Call `take` with all bytes of `source` in their order. Several threads read them, and one at a time calls `take`.
pub(crate) fn read_in_order(
    source: &dyn ReadAt,
    take: &mut (dyn FnMut(&[u8]) + Send),
    watch: &dyn Watch,
) -> Result<(), Failure> {
    let queue = Queue(Turns::new(0, take));
    let runs = [(0, 0..source.nbytes())];
    let reading = reading(&[source], &runs);
    show(&[source], &[&queue], &runs, reading, watch).map_err(|fault| fault.failure)
}

/// Calls `take` with the bytes of a piece at its turn.
type Take<'t> = &'t mut (dyn FnMut(&[u8]) + Send);

/// Pieces that wait for those before them.
struct Queue<'t>(Turns<Take<'t>>);

impl Witness for Queue<'_> {
    fn step_nbytes(&self) -> u64 {
        u64::MAX
    }

    fn see(&self, begin: u64, bytes: &[u8]) {
        self.0.take(begin, to_u64(bytes.len()), |take| {
            take(bytes);
            true
        });
    }

    fn end(&self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{MemorySource, OpenSource};
    use crate::sync::{in_every_order, thread};
    use crate::watch::Unwatched;

    #[test]
    fn bytes_come_in_their_order() {
        for len in [0, 1, (5 << 20) + 1] {
            let bytes: Vec<u8> = (0_usize..len).map(|at| at.to_le_bytes()[1]).collect();
            let source = OpenSource::new(MemorySource::new(bytes.clone()));
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
                let queue = Queue(Turns::new(0, &mut take));
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
