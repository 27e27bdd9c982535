//! The half for Windows. Paths are given to it with the prefix that takes their length and their characters as they are.

pub(super) mod attributes;
pub(super) mod beneath;
mod calls;
pub(super) mod directory;
pub(super) mod fault;
pub(super) mod file;
pub(super) mod name;
#[cfg(feature = "remote")]
pub(super) mod partial;
pub(super) mod resolve;
