//! BLAKE3 is a tree: threads hash subtrees of one input, in any order, and these are joined at the end.

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};
use ingot_format::to_usize;

use super::algorithm::Digest;

/// Bytes in a subtree, but for the last one of an input. A power of two, as the tree asks for; few enough to be hashed
/// while they are in a core's cache. What is kept of each is 32 bytes: 32 MB for a terabyte.
pub(crate) const SUBTREE_NBYTES: u64 = 1 << 20;

/// The value of the subtree `bytes`, which begins at `begin` of its input: a multiple of [`SUBTREE_NBYTES`].
pub(crate) fn subtree(begin: u64, bytes: &[u8]) -> ChainingValue {
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(begin);
    hasher.update(bytes);
    hasher.finalize_non_root()
}

/// The digest of an input of `nbytes`, more than one subtree, from all of its subtrees in order.
pub(crate) fn join(nbytes: u64, subtrees: &[ChainingValue]) -> Digest {
    let (left, right) = halves(nbytes, subtrees);
    Digest::of_blake3(&merge_subtrees_root(&left, &right, Mode::Hash))
}

fn halves(nbytes: u64, subtrees: &[ChainingValue]) -> (ChainingValue, ChainingValue) {
    let in_left = left_subtree_len(nbytes);
    // A power of two that is less than the whole and at least one subtree, so this cuts between subtrees.
    let (left, right) = subtrees.split_at(to_usize(in_left / SUBTREE_NBYTES).unwrap_or(usize::MAX));
    (inner(in_left, left), inner(nbytes - in_left, right))
}

fn inner(nbytes: u64, subtrees: &[ChainingValue]) -> ChainingValue {
    match subtrees {
        [one] => *one,
        _ => {
            let (left, right) = halves(nbytes, subtrees);
            merge_subtrees_non_root(&left, &right, Mode::Hash)
        }
    }
}

/// How many subtrees an input of `nbytes` has.
pub(crate) fn count(nbytes: u64) -> usize {
    to_usize(nbytes.div_ceil(SUBTREE_NBYTES)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Algorithm;
    use ingot_format::to_u64;

    #[test]
    fn subtrees_join_to_the_digest_of_the_whole() {
        let piece = to_usize(SUBTREE_NBYTES).unwrap();
        let bytes: Vec<u8> = (0..5 * piece + 1).map(|at| at.to_le_bytes()[1]).collect();
        for len in [1, 2, 3, 4, 5]
            .into_iter()
            .flat_map(|whole| [piece * whole, piece * whole + 1, piece * whole - 1])
            .filter(|&len| len > piece)
        {
            let bytes = &bytes[..len.min(bytes.len())];
            let nbytes = to_u64(bytes.len());
            let subtrees: Vec<_> = bytes
                .chunks(piece)
                .zip((0..).step_by(piece))
                .map(|(bytes, begin)| subtree(to_u64(begin), bytes))
                .collect();
            assert_eq!(subtrees.len(), count(nbytes));
            assert_eq!(
                join(nbytes, &subtrees),
                Algorithm::Blake3.digest(bytes),
                "{len} bytes"
            );
        }
    }
}
