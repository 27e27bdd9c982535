//! Results of chunks that end in any order, joined in the order of the chunks.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use ingot_format::locked;

/// The result of all chunks of one tensor. Chunks are joined in order, so that sums of floats are reproducible. Only
/// chunks that are being read, or that wait for an earlier one, take memory.
pub(crate) struct Ordered<A> {
    /// The result of no chunk.
    empty: A,
    join: fn(A, A) -> A,
    chunks: Mutex<Chunks<A>>,
}

struct Chunks<A> {
    joined: A,
    /// The number of the chunk to join next.
    next: u64,
    /// Results of later chunks, and of those that have not ended.
    begun: BTreeMap<u64, (A, bool)>,
}

impl<A: Clone> Ordered<A> {
    pub(crate) fn new(empty: A, join: fn(A, A) -> A) -> Ordered<A> {
        let chunks = Mutex::new(Chunks {
            joined: empty.clone(),
            next: 0,
            begun: BTreeMap::new(),
        });
        Ordered { empty, join, chunks }
    }

    /// Add a part of a chunk to its result with `fold`; `ends` marks the last part. One thread at a time works on one
    /// chunk.
    pub(crate) fn add(&self, chunk: u64, ends: bool, fold: impl FnOnce(&mut A)) {
        let begun = locked(&self.chunks).begun.remove(&chunk);
        let mut result = begun.map_or_else(|| self.empty.clone(), |(result, _)| result);
        // Other threads need not wait for this.
        fold(&mut result);
        let mut chunks = locked(&self.chunks);
        chunks.begun.insert(chunk, (result, ends));
        let Chunks { joined, next, begun } = &mut *chunks;
        while begun.get(next).is_some_and(|(_, has_ended)| *has_ended) {
            let Some((result, _)) = begun.remove(next) else {
                break;
            };
            // Moved, since a result may hold much memory.
            let earlier = std::mem::replace(joined, self.empty.clone());
            *joined = (self.join)(earlier, result);
            *next += 1;
        }
    }

    /// The result of all chunks.
    pub(crate) fn finish(self) -> A {
        self.chunks
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
            .joined
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Joined text shows the order.
        #[test]
        fn chunks_are_joined_in_their_order_whatever_order_they_end_in(
            order in Just((0..20_u64).collect::<Vec<_>>()).prop_shuffle(),
        ) {
            let ordered = Ordered::new(String::new(), |one, two| one + &two);
            for chunk in order {
                ordered.add(chunk, false, |text| text.push_str(&chunk.to_string()));
                ordered.add(chunk, true, |text| text.push(' '));
            }
            prop_assert!(locked(&ordered.chunks).begun.is_empty());
            let expected: String = (0..20).map(|chunk| format!("{chunk} ")).collect();
            prop_assert_eq!(ordered.finish(), expected);
        }
    }
}
