//! Digests, and their computation from bytes in any order by any number of threads.
//!
//! A digest is a destination of bytes like any other ([`Digests`]). All digests are computed by it: of bytes that are
//! read to be hashed, compared or loaded, and of bytes that are written. No code in this module reads or writes files.

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
