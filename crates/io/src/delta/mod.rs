//! Patches: the elements of a checkpoint that differ from another version, in a file of their own. FORMAT.md, "Patches".
//!
//! | step | how |
//! |---|---|
//! | [`diff`] | both versions are read side by side once; changes stay in memory up to a limit, and parts with more are read again |
//! | [`Patch::open`] | reads the record; to apply the patch, compares it with its digests and checks each position |
//! | [`apply`] | a new file, written like a [`save`](crate::save()): unchanged tensors are copied by the system |
//! | [`apply_in_place`] | the patch is the redo log: a mark makes the header unreadable, changed pages are written, and the new header replaces the mark |
//! | [`Patch::write_into`] | tensors in memory: all targets are checked, and threads write the new elements |
//! | [`compose`] | patches of consecutive versions become one |
//!
//! ```
//! use ingot_io::binding::{Patch, apply, diff};
//! use ingot_io::{Checkpoint, CheckpointOptions, ReadOptions, SaveOptions, Unwatched};
//! # use ingot_io::{Dtype, TensorView, serialize_to_file};
//! # let folder = tempfile::tempdir()?;
//! # let at = |name: &str| folder.path().join(name);
//! # for (name, bytes) in [("old.safetensors", b"ab"), ("new.safetensors", b"ac")] {
//! #     serialize_to_file([("bias", &TensorView::new(Dtype::U8, vec![2], bytes)?)], None, &at(name))?;
//! # }
//!
//! let open = |name: &str| Checkpoint::open(&at(name), &CheckpointOptions::new());
//! let (read, save) = (ReadOptions::new(), SaveOptions::new());
//! let (old, new) = (open("old.safetensors")?, open("new.safetensors")?);
//! diff(&old, &new, None, Some(7), &at("patch.safetensors"), &read, &save, &Unwatched)?;
//!
//! let patch = Patch::open(open("patch.safetensors")?, true, &Unwatched)?;
//! apply(&old, &patch, 0, &at("result.safetensors"), &save, &Unwatched)?;
//! assert_eq!(std::fs::read(at("result.safetensors"))?, std::fs::read(at("new.safetensors"))?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod changes;
mod compose;
mod diff;
mod gaps;
mod in_place;
mod live;
mod mark;
mod numbers;
mod patch;
mod version;

pub use compose::compose;
pub use diff::diff;
pub use in_place::apply_in_place;
pub use live::has_digests;
pub use patch::{Changed, Patch, apply};
pub use version::version_id;
