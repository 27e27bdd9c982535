//! Digests of files and of the tensors in them.
//!
//! A digest is a destination of bytes like any other ([`Digests`]): what is read to be hashed, to be compared, or to be
//! loaded, and what is written, all pass through the same one.

mod algorithm;
mod checked;
mod definition;
mod digests;
#[cfg(feature = "remote")]
mod in_order;
mod pass;
mod seal;
mod tree;
mod verify;

#[cfg(all(unix, feature = "remote"))]
pub(crate) use algorithm::Hasher;
pub use algorithm::{Algorithm, Digest, Unequal};
pub use checked::Proof;
#[cfg(feature = "remote")]
pub(crate) use definition::of_source;
pub use definition::{Definition, hash};
#[cfg(feature = "remote")]
pub(crate) use in_order::read_in_order;
pub(crate) use seal::Sealing;
pub use seal::{Keep, Sealed};
pub use verify::{Compared, Mismatch, Report, verify};
pub(crate) use verify::{digest_of, renewed};
