//! Saving: a layout and payloads become a file, and never harm the one that was there. No file gets its name unless each
//! payload gave exactly the bytes that the header promises: [`Pieces`] exist only for payloads of the right sizes, what
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
//! | a file that this process may not write to | refused, unless [`ReadOnly::Replace`] |
//! | a symlink | followed to its end, which may not exist yet; the link stays |
//! | a pipe, terminal or other device, standard output | the bytes are streamed into it; refused where the file is to keep digests, which stand before them |
//! | a directory | refused |
//!
//! Where a file system renames no file over another, the bytes are copied into the target as [`Replace::InPlace`]
//! does. Where it cannot reserve space or make unnamed files, saving goes on without.
//!
//! What a large file had that was replaced is given back after [`save`] returned, unless another has it open.

use std::path::Path;
use std::time::Duration;

#[cfg(unix)]
mod atomic;
#[cfg(unix)]
mod attributes;
mod direct;
#[cfg(unix)]
pub(crate) mod draft;
mod flush;
#[cfg(unix)]
mod in_place;
#[cfg(all(unix, feature = "remote"))]
pub(crate) mod partial;
mod pieces;
#[cfg(not(unix))]
mod portable;
#[cfg(unix)]
mod release;
mod ring;
mod snapshot;
#[cfg(unix)]
mod space;
#[cfg(unix)]
mod stream;
#[cfg(unix)]
mod target;
#[cfg(unix)]
mod temp;
mod write;

use ingot_format::{FormatError, Layout};

use crate::digest::Sealed;
use crate::error::{Error, Stop};
use crate::options::SaveOptions;
#[cfg(unix)]
use crate::options::{Durability, Replace};
use crate::payload::Payload;
use crate::watch::Watch;
use pieces::Pieces;
#[cfg(unix)]
pub(crate) use release::release;
pub use snapshot::Snapshot;

/// How long a thread waits before it asks the watch again. Half of the 100 ms that are promised.
const POLL: Duration = Duration::from_millis(50);

/// Writes the file of `layout` at `path`, with one payload for each tensor, in the order of the layout.
///
/// ```
/// use ingot_format::{Dtype, Format, Spec, layout};
/// use ingot_io::{Payload, SaveOptions, Unwatched, save};
///
/// let bias = Spec { name: "bias", dtype: Dtype::F32, shape: &[2] };
/// let new = layout(&[bias], None, Format::Safetensors)?;
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("bias.safetensors");
/// save(&path, &new, &[Payload::from(&b"12345678"[..])], &SaveOptions::default(), &Unwatched)?;
/// assert_eq!(std::fs::read(&path)?.len(), new.head.len() + 8);
/// // Whatever does not give just the bytes that the header promises becomes no file.
/// assert!(save(&path, &new, &[Payload::from(&b"1234"[..])], &SaveOptions::default(), &Unwatched).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Unstorable`] when a payload has not just the bytes that its tensor needs, before the disk is touched.
/// [`Error::Write`] when the file cannot be written, [`Error::Interrupted`] when `watch` says so. What was at `path`
/// is still there then, and no temporary file is; except where [`Replace::InPlace`] says otherwise, for streams, and
/// when the last step failed, to flush the directory: the new file is there, but a loss of power may undo that.
pub fn save(
    path: &Path,
    layout: &Layout,
    payloads: &[Payload<'_>],
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    save_cut(path, Pieces::of(layout, payloads), options, watch)
}

/// As [`save`], of a file that begins with `head` and has `data_nbytes` of data, whichever way `payloads` cut them.
pub(crate) fn save_data(
    path: &Path,
    head: &[u8],
    data_nbytes: u64,
    payloads: &[Payload<'_>],
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    save_cut(path, Pieces::of_data(head, data_nbytes, payloads), options, watch)
}

impl Sealed {
    /// Writes the file: as [`crate::save`] does, with `payloads` in the order of the layout. Not into a pipe or a
    /// device, where the header cannot be written last.
    ///
    /// # Errors
    /// What [`crate::save`] says.
    pub fn save(
        &self,
        path: &Path,
        payloads: &[Payload<'_>],
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        save_sealed(path, self, payloads, options, watch)
    }

    /// Writes the file with what was copied for it.
    ///
    /// # Errors
    /// What [`crate::save`] says.
    pub fn save_snapshot(
        &self,
        path: &Path,
        snapshot: &Snapshot,
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        save_sealed_snapshot(path, self, snapshot, options, watch)
    }
}

/// As [`save`], with digests in the head that are taken of everything else on its way into the file.
///
/// # Errors
/// What [`save`] says; also when `path` is a pipe or a device, where the head cannot be written last.
pub(crate) fn save_sealed(
    path: &Path,
    sealed: &Sealed,
    payloads: &[Payload<'_>],
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let pieces = Pieces::of(sealed.layout(), payloads);
    save_cut(
        path,
        pieces.map(|pieces| pieces.sealed_by(sealed)),
        options,
        watch,
    )
}

/// As [`save_sealed`], of a copy of the payloads.
pub(crate) fn save_sealed_snapshot(
    path: &Path,
    sealed: &Sealed,
    snapshot: &Snapshot,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let Layout { header, head, .. } = sealed.layout();
    let payloads = snapshot.payloads();
    let pieces = Pieces::of_data(head, header.data_nbytes(), &payloads);
    save_cut(
        path,
        pieces.map(|pieces| pieces.sealed_by(sealed)),
        options,
        watch,
    )
}

fn save_cut(
    path: &Path,
    pieces: Result<Pieces<'_>, FormatError>,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let pieces = &pieces.map_err(|fault| Error::Unstorable {
        path: Some(path.to_path_buf()),
        fault,
    })?;
    save_pieces(path, pieces, options, watch).map_err(|stop| match stop {
        Stop::Interrupted => Error::Interrupted,
        Stop::Fault { step, source } => Error::Write {
            path: path.to_path_buf(),
            step,
            nbytes: pieces.nbytes(),
            source,
        },
    })
}

#[cfg(unix)]
fn save_pieces(
    path: &Path,
    pieces: &Pieces<'_>,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Stop> {
    use target::Target;
    match Target::find(path, watch)? {
        Target::Place(place) => match options.replace {
            Replace::Atomic => atomic::save(&place, pieces, options, watch),
            Replace::InPlace => in_place::save(&place, pieces, options, watch),
        },
        Target::Nameless(file) => in_place::overwrite(&file, None, pieces, options, watch),
        Target::Stream(file) => {
            stream::write(pieces, &file, watch)?;
            match options.durable {
                Durability::Durable => flush::flush(&file, watch),
                Durability::Fast => Ok(()),
            }
        }
    }
}

#[cfg(not(unix))]
use portable::save as save_pieces;
