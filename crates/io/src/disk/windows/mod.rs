//! The implementation for Windows. Its paths have the prefix `\\?\`, with which Windows accepts any length and characters.

pub(super) mod attributes;
pub(super) mod beneath;
mod calls;
pub(super) mod directory;
pub(super) mod fault;
pub(super) mod file;
pub(super) mod name;
pub(super) mod resolve;
