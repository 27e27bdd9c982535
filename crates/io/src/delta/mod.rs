//! Patches: the elements of a checkpoint that differ from another version, in a file of their own. FORMAT.md, "Patches".
//!
//! | step | how |
//! |---|---|
//! | [`diff`] | both versions are read side by side once; changes stay in memory up to a limit, and parts with more are read again |
//! | [`Patch::open`] | reads the record; to apply the patch, compares it with its digests and checks each position |
//! | [`apply`] | a new file, written like a [`save`](crate::save()): unchanged tensors are copied by the system |
//! | [`apply_in_place`] | the patch is the redo log: a mark makes the header unreadable, changed pages are written, and the new header replaces the mark |
//! | [`compose`] | patches of consecutive versions become one |

mod changes;
mod compose;
mod diff;
mod in_place;
mod numbers;
mod patch;
mod version;

pub use compose::compose;
pub use diff::diff;
pub use in_place::apply_in_place;
pub use patch::{Changed, Patch, apply};
pub use version::version_id;
