//! Digests of files and of the tensors in them: taken, and compared with those that a file keeps.

mod checked;
mod hash;
#[cfg(feature = "remote")]
pub(crate) mod in_order;
mod pass;
#[allow(clippy::module_inception, reason = "the file that has the function `verify`")]
mod verify;

pub use checked::Proof;
pub use hash::{hash, hash_range, read_runs};
pub use verify::{Compared, Mismatch, Report, verify};
pub(crate) use verify::{RecordedDigests, digest_of, renewed};
