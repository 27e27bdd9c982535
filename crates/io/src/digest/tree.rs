//! Hashes BLAKE3 as a tree: threads hash subtrees of one input in any order, and the results are joined as they arrive.

use std::collections::HashMap;
use std::sync::OnceLock;

use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use ingot_format::{saturating_usize, to_u64};

use super::algorithm::{Algorithm, Digest};
use crate::sync::{Mutex, locked};

/// The size of a subtree in bytes, except for the last one of an input. A power of two, as the tree requires; small
/// enough to stay in a core's cache while it is hashed, and to be kept until the rest of it arrives; large enough for
/// the widest registers.
pub(crate) const SUBTREE_NBYTES: u64 = 128 << 10;

/// The digest of one input, whose bytes arrive in any order.
///
/// Two neighbours become one node as soon as both exist. Memory is only needed for subtrees that arrive out of order.
pub(crate) struct Tree {
    nbytes: u64,
    /// The digest of the whole input, after all bytes have arrived.
    root: OnceLock<Digest>,
    /// Nodes that wait for their neighbours.
    alone: Mutex<HashMap<Node, ChainingValue>>,
    /// Subtrees that have arrived in part, by their number.
    partial: Mutex<HashMap<u64, Partial>>,
}

/// A node of the tree: its height, which is 0 for subtrees, and its number among the nodes of that height.
type Node = (u32, u64);

struct Partial {
    bytes: Vec<u8>,
    filled: usize,
}

impl Tree {
    /// Creates the tree for an input of this many bytes.
    pub(crate) fn new(nbytes: u64) -> Tree {
        Tree {
            nbytes,
            root: match nbytes {
                0 => Algorithm::Blake3.digest(&[]).into(),
                _ => OnceLock::new(),
            },
            alone: Mutex::default(),
            partial: Mutex::default(),
        }
    }

    /// Hash the bytes that begin at `begin` of the input. Every byte arrives once. A subtree that arrives in parts is
    /// copied first, so whole ones are faster.
    pub(crate) fn feed(&self, begin: u64, bytes: &[u8]) {
        let mut at = begin;
        let mut rest = bytes;
        while !rest.is_empty() {
            let first = at - at % SUBTREE_NBYTES;
            let last = self.nbytes.min(first.saturating_add(SUBTREE_NBYTES));
            let (now, after) = rest.split_at(rest.len().min(saturating_usize(last - at)));
            if now.len() == saturating_usize(last - first) {
                self.put(first, now)
            } else {
                self.gather(first..last, at, now)
            }
            at += to_u64(now.len());
            rest = after;
        }
    }

    fn gather(&self, subtree: std::ops::Range<u64>, at: u64, bytes: &[u8]) {
        let number = subtree.start / SUBTREE_NBYTES;
        let len = saturating_usize(subtree.end - subtree.start);
        let mut partial = locked(&self.partial);
        let part = partial.entry(number).or_insert_with(|| Partial {
            bytes: vec![0; len],
            filled: 0,
        });
        let from = saturating_usize(at - subtree.start);
        part.bytes[from..from + bytes.len()].copy_from_slice(bytes);
        part.filled += bytes.len();
        if part.filled < len {
            return;
        }
        let whole = partial.remove(&number);
        // The others need not wait for the hashing.
        drop(partial);
        if let Some(whole) = whole {
            self.put(subtree.start, &whole.bytes);
        }
    }

    /// Take a whole subtree.
    fn put(&self, begin: u64, bytes: &[u8]) {
        if self.nbytes <= SUBTREE_NBYTES {
            // Adding a subtree twice changes nothing.
            let _ = self.root.set(Digest::of_blake3(&blake3::hash(bytes)));
            return;
        }
        self.join((0, begin / SUBTREE_NBYTES), subtree(begin, bytes));
    }

    /// Joins a node with its neighbours, as far up as they exist.
    fn join(&self, (mut height, mut number): Node, mut value: ChainingValue) {
        let last = (self.nbytes - 1) / SUBTREE_NBYTES;
        let mut alone = locked(&self.alone);
        loop {
            let other = number ^ 1;
            // A node without a right neighbour is also the node above.
            if other <= last >> height {
                let Some(found) = alone.remove(&(height, other)) else {
                    alone.insert((height, number), value);
                    return;
                };
                let (left, right) = if number < other {
                    (&value, &found)
                } else {
                    (&found, &value)
                };
                if last >> height == 1 {
                    let _ = self
                        .root
                        .set(Digest::of_blake3(&merge_subtrees_root(left, right, Mode::Hash)));
                    return;
                }
                value = merge_subtrees_non_root(left, right, Mode::Hash);
            }
            (height, number) = (height + 1, number / 2);
        }
    }

    /// Return the digest; `None` if some bytes are missing.
    pub(crate) fn finish(self) -> Option<Digest> {
        self.root.into_inner()
    }
}

/// The value of the subtree `bytes`, which begins at `begin` of its input: a multiple of [`SUBTREE_NBYTES`].
fn subtree(begin: u64, bytes: &[u8]) -> ChainingValue {
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(begin);
    hasher.update(bytes);
    hasher.finalize_non_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subtrees_join_to_the_digest_of_the_whole_in_any_order_and_in_any_parts() {
        let piece = saturating_usize(SUBTREE_NBYTES);
        let bytes: Vec<u8> = (0..5 * piece + 1).map(|at| at.to_le_bytes()[1]).collect();
        let lengths = [0, 1, 2, 3, 4, 5].into_iter();
        let lengths =
            lengths.flat_map(|whole| [piece * whole, piece * whole + 1, (piece * whole).max(1) - 1]);
        for len in lengths {
            let bytes = &bytes[..len];
            for part in [piece, 2 * piece, 3 * piece / 2, piece / 2 + 7] {
                let tree = Tree::new(to_u64(len));
                let mut parts: Vec<(usize, &[u8])> = (0..).step_by(part).zip(bytes.chunks(part)).collect();
                parts.reverse();
                for (begin, part) in parts {
                    tree.feed(to_u64(begin), part);
                }
                assert!(tree.partial.lock().unwrap().is_empty());
                assert_eq!(
                    tree.finish(),
                    Some(Algorithm::Blake3.digest(bytes)),
                    "{len} bytes in parts of {part}"
                );
            }
        }
    }

    #[test]
    fn a_tree_that_misses_a_byte_has_no_digest() {
        let tree = Tree::new(3 * SUBTREE_NBYTES);
        tree.feed(1, &vec![0; 3 * saturating_usize(SUBTREE_NBYTES) - 1]);
        assert_eq!(tree.finish(), None);
    }
}
