//! The half for Linux, macOS and the other systems of this kind.

pub(super) mod attributes;
pub(super) mod beneath;
pub(super) mod directory;
pub(super) mod fault;
pub(super) mod file;
pub(super) mod name;
pub(super) mod resolve;
