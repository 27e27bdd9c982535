//! What a digest is, and taking it: of bytes in any order, by any number of threads.
//!
//! A digest is a destination of bytes like any other ([`Digests`]). Bytes that are read to be hashed, compared or loaded,
//! and bytes that are written, all pass through the same one. Nothing here reads or writes.

mod algorithm;
mod digests;
mod seal;
mod tree;

pub(crate) use algorithm::Hasher;
pub use algorithm::{Algorithm, Digest, Unequal};
pub(crate) use digests::Digests;
pub(crate) use seal::Sealing;
pub use seal::{Keep, NewHeader};
pub(crate) use tree::SUBTREE_NBYTES;
