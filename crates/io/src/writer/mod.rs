//! Filling a file tensor by tensor, by threads and processes, without ever holding all of it.
//!
//! [`Writer`](crate::Writer) is told all names, dtypes and shapes first, and takes tensors and slices of them in any order. It writes
//! into a temporary file, which gets its name by [`Writer::commit`](crate::Writer::commit) when every byte was written once; until then, and for
//! good when that never comes, the path leads to what was there before. Another process fills the same file after
//! [`Writer::join`](crate::Writer::join). [`Appender`](crate::Appender) is told each tensor with its bytes, and keeps space for the header.

mod append;
mod aside;
mod coverage;
mod foreign;
mod journal;
#[cfg(any(test, feature = "fuzzing"))]
#[path = "tests/journal_model.rs"]
pub(crate) mod journal_model;
#[cfg(test)]
#[path = "tests/model.rs"]
mod model;
mod preamble;
#[allow(clippy::module_inception, reason = "the file that has `Writer`")]
mod writer;

pub use append::Appender;
pub use aside::Aside;
pub use foreign::ForeignFile;
pub use writer::{Orphan, Writer};
