//! Changing a part of a file, and making files of the tensors of others. No tensor is decoded, and none comes to lie in
//! memory as a whole.
//!
//! | what changes | how |
//! |---|---|
//! | metadata, where all bytes that differ lie in one page | one write into the file, which the kernel copies at once; not where the file is read under other names too, as hard links and blobs of a cache are |
//! | other metadata, or a tensor | a new file of the same name, as [`save`](crate::save) makes it; the bytes that stay are shared where the file system can, or else copied by the kernel |
//!
//! A file that is being edited is locked, so that a second edit waits for the first, up to a minute, and begins with
//! what that one left. An edit that is overtaken by a save, which takes no lock, is refused.

mod assemble;
#[allow(clippy::module_inception, reason = "the file that has edits in place")]
mod edit;
mod held;
mod origins;
mod records;

pub use assemble::{Inherit, assemble};
pub use edit::{Edited, MetadataChange, Way, replace_tensor, update_metadata};
pub use origins::{Origin, Origins};
pub use records::{Alias, Pick, RECORD_KEYS, Role, aliases, passed_over};
