//! What can go wrong with a file, in words: nothing here can fail, and nothing is done. [`Error`] is what callers get, the
//! faults inside it are those of one thing each, a [`Failure`] or a [`Stop`] is what becomes an error once path and tensor are known.

mod checkpoint;
mod edit;
#[allow(clippy::module_inception, reason = "the file that has `Error`")]
mod error;
mod failure;
mod write;

pub use checkpoint::CheckpointFault;
pub use edit::EditError;
pub use error::{Error, Misfit};
pub(crate) use failure::{Failure, InFile, Step, Stop, size, unopened};
pub(crate) use write::step;
