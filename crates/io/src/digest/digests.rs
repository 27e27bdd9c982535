//! Digests of runs of bytes that come in pieces, from many threads.

use std::ops::Range;

use ingot_format::{saturating_usize, to_u64};

use super::algorithm::{Algorithm, Digest, Hasher};
use super::tree::{SUBTREE_NBYTES, Tree};
use crate::sync::Turns;

/// A destination that computes a digest of each run and keeps no bytes.
///
/// Every byte of every run is fed once, in pieces from any thread. BLAKE3 takes them in any order. Other algorithms need
/// them in order: a thread with a later piece of a run waits until the earlier ones are hashed, so the threads must begin
/// them in order.
pub(crate) struct Digests {
    /// The runs in the order of the file. They do not overlap.
    runs: Vec<RunHash>,
    algorithm: Algorithm,
}

/// The hash of the bytes of one run so far.
struct RunHash {
    range: Range<u64>,
    hashing: Hashing,
}

enum Hashing {
    InOrder(Turns<OrderedHash>),
    Tree(Tree),
}

/// The hash of a run whose bytes come in order.
struct OrderedHash {
    /// The number of bytes that have not arrived yet.
    left: u64,
    hasher: Option<Hasher>,
    digest: Option<Digest>,
}

impl Digests {
    /// Create the digests for runs of bytes of a file, which are in the order of the file.
    pub(crate) fn new(algorithm: Algorithm, runs: impl IntoIterator<Item = Range<u64>>) -> Digests {
        let runs = runs
            .into_iter()
            .map(|range| RunHash::new(algorithm, range))
            .collect();
        Digests { runs, algorithm }
    }

    /// Hash the bytes at `position` of the file. Bytes outside the runs are ignored.
    pub(crate) fn feed(&self, position: u64, bytes: &[u8]) {
        let end = position + to_u64(bytes.len());
        let first = self.runs.partition_point(|run| run.range.end <= position);
        for run in self.runs[first..].iter().take_while(|run| run.range.start < end) {
            let from = run.range.start.max(position);
            let until = run.range.end.min(end);
            let of = |at: u64| saturating_usize(at - position);
            run.feed(self.algorithm, from, &bytes[of(from)..of(until)]);
        }
    }

    /// Report that a piece is missing, so that no thread waits for it.
    pub(crate) fn end(&self) {
        for run in &self.runs {
            if let Hashing::InOrder(turns) = &run.hashing {
                turns.end();
            }
        }
    }

    /// Return whether pieces wait for those before them.
    pub(crate) fn in_order(&self) -> bool {
        self.algorithm != Algorithm::Blake3 && !self.runs.is_empty()
    }

    /// Return the ranges of the file that the digests cover, in the order of the file.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        self.runs.iter().map(|run| run.range.clone())
    }

    /// Return the best place to cut a piece from `at` on, of at most `most` bytes: between two subtrees, so that none
    /// arrives in parts.
    pub(crate) fn cut(&self, at: u64, most: u64) -> u64 {
        let end = at.saturating_add(most);
        let last = self.runs.partition_point(|run| run.range.end <= end);
        match self.runs.get(last) {
            Some(RunHash {
                range,
                hashing: Hashing::Tree(_),
            }) if range.start < end => {
                let cut = end - (end - range.start) % SUBTREE_NBYTES;
                if cut > at { cut } else { end }
            }
            _ => end,
        }
    }

    /// Return the digests in the order of the runs. `None` for a run whose bytes have not all arrived.
    pub(crate) fn finish(self) -> Vec<Option<Digest>> {
        self.runs.into_iter().map(RunHash::finish).collect()
    }
}

impl RunHash {
    fn new(algorithm: Algorithm, range: Range<u64>) -> RunHash {
        let nbytes = range.end - range.start;
        let hashing = if algorithm == Algorithm::Blake3 {
            Hashing::Tree(Tree::new(nbytes))
        } else {
            let hash = OrderedHash {
                left: nbytes,
                hasher: None,
                digest: (nbytes == 0).then(|| algorithm.digest(&[])),
            };
            Hashing::InOrder(Turns::new(range.start, hash))
        };
        RunHash { range, hashing }
    }

    fn feed(&self, algorithm: Algorithm, from: u64, bytes: &[u8]) {
        match &self.hashing {
            Hashing::Tree(tree) => tree.feed(from - self.range.start, bytes),
            Hashing::InOrder(turns) => {
                turns.take(from, to_u64(bytes.len()), |hash| hash.take(algorithm, bytes));
            }
        }
    }

    fn finish(self) -> Option<Digest> {
        match self.hashing {
            Hashing::InOrder(turns) => turns.into_inner().digest,
            Hashing::Tree(tree) => tree.finish(),
        }
    }
}

impl OrderedHash {
    /// Hash the next bytes. Returns false for a run in one piece, for which no thread waits.
    fn take(&mut self, algorithm: Algorithm, bytes: &[u8]) -> bool {
        self.left -= to_u64(bytes.len());
        if self.left == 0 && self.hasher.is_none() {
            self.digest = Some(algorithm.digest(bytes));
            return false;
        }
        let hasher = self.hasher.get_or_insert_with(|| Hasher::new(algorithm));
        hasher.update(bytes);
        if self.left == 0 {
            self.digest = self.hasher.take().map(Hasher::finish);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::{in_every_order, thread};
    use ingot_format::to_usize;
    use proptest::prelude::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at % 251).to_le_bytes()[0]).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// The simple version hashes each run by itself.
        #[test]
        fn digests_do_not_depend_on_how_the_bytes_come(
            sizes in prop::collection::vec(prop_oneof![3 => 0..3000_u64, 1 => (1_u64 << 20) - 1..(3 << 20)], 1..6),
            gap in 0..20_u64,
            piece in 1..1_500_000_u64,
            whole in any::<bool>(),
            algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
        ) {
            let mut end = 0;
            let runs: Vec<Range<u64>> = sizes.iter().map(|nbytes| {
                let begin = end + gap;
                end = begin + nbytes;
                begin..end
            }).collect();
            let file = bytes(to_usize(end).unwrap());
            let digests = Digests::new(algorithm, runs.clone());
            let mut at = 0;
            while at < end {
                let until = if whole { digests.cut(at, piece) } else { at + piece }.min(end);
                prop_assert!(until > at);
                digests.feed(at, &file[to_usize(at).unwrap()..to_usize(until).unwrap()]);
                at = until;
            }
            for (run, digest) in runs.iter().zip(digests.finish()) {
                let naive = algorithm.digest(&file[to_usize(run.start).unwrap()..to_usize(run.end).unwrap()]);
                prop_assert_eq!(digest, Some(naive));
            }
        }
    }

    #[test]
    fn in_every_order_of_threads_a_later_piece_waits_for_the_earlier_one() {
        in_every_order(|| {
            let file = bytes(1000);
            let digests = Digests::new(Algorithm::Sha256, [0..900, 900..1000]);
            thread::scope(|scope| {
                scope.spawn(|| digests.feed(600, &file[600..]));
                scope.spawn(|| digests.feed(300, &file[300..600]));
                digests.feed(0, &file[..300]);
            });
            let naive = |range: Range<usize>| Some(Algorithm::Sha256.digest(&file[range]));
            assert_eq!(digests.finish(), [naive(0..900), naive(900..1000)]);
        });
    }

    #[test]
    fn in_every_order_of_threads_parts_of_one_subtree_are_joined() {
        in_every_order(|| {
            let file = bytes(to_usize(SUBTREE_NBYTES).unwrap() + 1000);
            let digests = Digests::new(Algorithm::Blake3, std::iter::once(0..to_u64(file.len())));
            let (shared, whole) = (&digests, &file[..]);
            thread::scope(|scope| {
                for (begin, end) in [(0, 500), (500, 1000), (1000, whole.len())] {
                    scope.spawn(move || shared.feed(to_u64(begin), &whole[begin..end]));
                }
            });
            assert_eq!(digests.finish(), [Some(Algorithm::Blake3.digest(&file))]);
        });
    }

    #[test]
    fn in_every_order_of_threads_a_run_that_misses_bytes_has_no_digest_and_nobody_waits_for_it() {
        in_every_order(|| {
            let digests = Digests::new(Algorithm::Sha256, [0..10, 10..(5 << 20)]);
            thread::scope(|scope| {
                scope.spawn(|| digests.feed(5, &[0; 5]));
                scope.spawn(|| digests.feed(7, &[0; 3]));
                digests.end();
            });
            assert_eq!(digests.finish(), [None, None]);
        });
    }
}
