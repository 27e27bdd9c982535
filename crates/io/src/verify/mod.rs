//! Digests of files and of the tensors in them: taken, and compared with those that a file keeps.

mod checked;
mod definition;
#[cfg(feature = "remote")]
mod in_order;
mod pass;
#[allow(clippy::module_inception, reason = "the file that has the function `verify`")]
mod verify;

pub use checked::Proof;
#[cfg(feature = "remote")]
pub(crate) use definition::of_source;
pub use definition::{Definition, hash};
#[cfg(feature = "remote")]
pub(crate) use in_order::read_in_order;
pub(crate) use pass::read_watched;
pub use verify::{Compared, Mismatch, Report, verify};
pub(crate) use verify::{digest_of, renewed};
