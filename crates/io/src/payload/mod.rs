//! What a tensor's part of a file is made from. Saves, edits and writers take it; nothing here writes a file that has a
//! name.

mod file;
mod gathered;
#[allow(clippy::module_inception, reason = "the file that has `Payload`")]
mod payload;

pub use file::FileRange;
pub(crate) use file::shares_blocks;
pub(crate) use gathered::Gathered;
#[cfg(test)]
pub(crate) use payload::Gather;
pub(crate) use payload::prove_sizes;
pub use payload::{Payload, Produce};
pub(crate) use payload::{Section, prove_total};
