//! Saving: a layout and payloads become a file, and never harm the one that was there. No file gets its name unless each
//! payload gave exactly the bytes that the header promises: [`Pieces`](pieces::Pieces) exist only for payloads of the right sizes, what
//! reads a payload fills all of what it was asked for or fails, and all pieces have to be written.
//!
//! The atomic way, which is the default: a temporary file in the target's directory gets everything the target is
//! to have; it is flushed, renamed over the target, and the directory is flushed. Whatever happens in between, the
//! path leads to the whole old file or to the whole new one.
//!
//! | what stands at the path | what happens |
//! |---|---|
//! | nothing | a new file, mode 0666 cut by the umask |
//! | a file | its mode, and as far as allowed its owner, group, extended attributes and access list, pass on to the new one. Its other hard links keep the old bytes |
//! | anything but a pipe or a device, under [`Replace::Nothing`](crate::Replace::Nothing) | refused; a file that was made meanwhile stays too |
//! | a file that this process may not write to | refused, unless [`ReadOnly::Replace`](crate::ReadOnly::Replace) |
//! | a symlink | followed to its end, which may not exist yet; the link stays |
//! | a symlink to a blob of a content-addressed store | replaced by the new file, in place too; the blob stays as it is |
//! | such a blob | refused |
//! | a pipe, terminal or other device, standard output | the bytes are streamed into it; refused where the file is to keep digests, which stand before them |
//! | a directory | refused |
//!
//! Where a file system renames no file over another, the bytes are copied into the target as [`Replace::InPlace`](crate::Replace::InPlace)
//! does. Where it cannot reserve space or make unnamed files, saving goes on without.
//!
//! What a large file had that was replaced is given back after [`save`] returned, unless another has it open.

mod atomic;
mod direct;
pub(crate) mod draft;
mod flush;
mod in_place;
#[cfg(feature = "remote")]
mod partial;
mod pieces;
#[allow(clippy::module_inception, reason = "the file that has the function `save`")]
mod save;
mod snapshot;
mod space;
mod stream;
pub(crate) mod target;
mod temp;
mod write;

pub use pieces::Pieces;
pub(crate) use save::save_data;
pub use save::{replace_file, save};
pub use snapshot::Snapshot;
pub(crate) use space::release;
pub use target::check_destination;
