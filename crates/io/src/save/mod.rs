//! Saving: a layout and payloads become a file, and never harm an existing one. No file gets its name unless each payload
//! produced exactly the bytes that the header promises: [`Pieces`](pieces::Pieces) exist only for payloads of the right
//! sizes, reading a payload fills the whole buffer or fails, and all pieces have to be written.
//!
//! The default is atomic: a temporary file in the target's directory gets all bytes and attributes; it is flushed, renamed
//! over the target, and the directory is flushed. At any time, the path leads to the whole old file or to the whole new
//! one.
//!
//! | at the path | result |
//! |---|---|
//! | nothing | a new file, mode 0666 cut by the umask |
//! | a file | its mode, and as far as allowed its owner, group, extended attributes and access list, pass on to the new one. Its other hard links keep the old bytes |
//! | anything but a pipe or a device, under [`Replace::Nothing`](crate::Replace::Nothing) | refused; a file that was made meanwhile stays too |
//! | a file that this process may not write to | refused, unless [`SaveOptions::replace_read_only`] |
//! | a symlink | followed to its end, which may not exist yet; the link stays |
//! | a symlink to a blob of a content-addressed store | replaced by the new file, in place too; the blob stays as it is |
//! | such a blob | refused |
//! | a pipe, terminal or other device, standard output | the bytes are streamed into it; refused if the file is to keep digests, which come before the data |
//! | a directory | refused |
//!
//! If a file system cannot rename a file over another, the bytes are copied into the target as
//! [`Replace::InPlace`](crate::Replace::InPlace) does. If it cannot reserve space or make unnamed files, the save works
//! without.
//! The blocks of a large replaced file are freed after [`save`] has returned, unless another process has the file open.

mod flush;
mod snapshot;
mod space;
mod target;
mod temp;
mod write;

pub use snapshot::Snapshot;
pub(crate) use space::release;
pub use target::check_destination;
#[cfg(feature = "remote")]
pub(crate) use target::is_there;
pub(crate) use temp::{Temp, journal_fault};
#[cfg(feature = "remote")]
pub(crate) use write::pieces::PIECE;
pub use write::pieces::Pieces;
#[cfg(feature = "remote")]
pub(crate) use write::ring::{Closing, Ending, Ring};

use std::io;
use std::path::Path;

use ingot_format::{FormatError, Layout, StopFlag};

use crate::digest::NewHeader;
use crate::disk::{Resolved, resolve};
use crate::error::{Error, Step, step, unstorable};
use crate::options::{Replace, SaveOptions};
use crate::payload::Payload;
use crate::watch::Watch;
use write::Writing;

/// Write the file of `layout` at `path`, with one payload for each tensor, in the order of the layout.
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
/// // If a payload does not have the number of bytes in the header, no file is written.
/// assert!(save(&path, &new, &[Payload::from(&b"1234"[..])], &SaveOptions::default(), &Unwatched).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Failure::Unstorable`](crate::Failure::Unstorable) if the size of a payload is not the size of its tensor, before the
/// disk is touched. [`Failure::Open`](crate::Failure::Open) if a file exists and the options are [`Replace::Nothing`].
/// [`Failure::Write`](crate::Failure::Write) if the file cannot be written;
/// [`Failure::Interrupted`](crate::Failure::Interrupted). An existing file is unchanged then, and there is no temporary file;
/// except with [`Replace::InPlace`], for streams, and if the last step failed, flushing the directory: the new file exists,
/// but a loss of power may undo that.
pub fn save(
    path: &Path,
    layout: &Layout,
    payloads: &[Payload<'_>],
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    save_pieces(path, Pieces::of(layout, payloads), options, watch)
}

impl Snapshot {
    /// Write the file of `head`, for which the copy was taken.
    ///
    /// # Errors
    /// As [`save`].
    pub fn save(
        &self,
        path: &Path,
        head: &NewHeader,
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        save_pieces(path, Pieces::of_all(head, &self.payloads()), options, watch)
    }
}

impl NewHeader {
    /// Return the file with the digests of `pieces`, which are cut from [`NewHeader::layout`]: for streams, in which the
    /// head comes first. This thread reads the pieces once. A tensor that changes before it is read again does not match
    /// its digest.
    ///
    /// # Errors
    /// A payload cannot be read; [`io::ErrorKind::Interrupted`] if `watch` stops this.
    pub fn digest(&self, pieces: &Pieces<'_>, watch: &dyn Watch) -> io::Result<Layout> {
        let sealing = self.begin();
        let mut buffer = Vec::new();
        for piece in 0..pieces.count() {
            if watch.interrupted() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            buffer.resize(pieces.len(piece), 0);
            pieces.fill(piece, &mut buffer, StopFlag::never())?;
            sealing.feed(pieces.range(piece).start, &buffer);
        }
        sealing.layout()
    }
}

/// Write the file that consists of `pieces`, as [`save`] does.
///
/// # Errors
/// As [`save`]; [`Failure::Unstorable`](crate::Failure::Unstorable) if `pieces` could not be made.
pub fn save_pieces(
    path: &Path,
    pieces: Result<Pieces<'_>, FormatError>,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let writing = Writing {
        path,
        pieces: &pieces.map_err(unstorable(path))?,
        options,
        watch,
    };
    let nbytes = writing.pieces.nbytes();
    write_to_target(&writing).map_err(|fault| target::explain(path, nbytes, options, fault))
}

fn write_to_target(writing: &Writing<'_>) -> Result<(), Error> {
    let Writing { options, watch, .. } = *writing;
    match resolve(writing.path, watch)? {
        Resolved::Entry(entry) if options.replace == Replace::InPlace && entry.blob.is_none() => {
            writing.in_place(&entry)
        }
        Resolved::Entry(entry) => writing.atomic(entry),
        Resolved::Nameless(_) if options.keeps_existing() => {
            Err(io::Error::from(io::ErrorKind::AlreadyExists)).step(step::OPEN)
        }
        Resolved::Nameless(file) => writing.overwrite(&file, None),
        Resolved::Stream(file) => writing.stream(&file),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::FileRange;
    use crate::watch::Unwatched;

    fn save_new(path: &Path, payload: Payload<'_>) -> Result<(), Error> {
        let options = SaveOptions {
            replace: Replace::Nothing,
            ..SaveOptions::default()
        };
        let nbytes = payload.nbytes();
        save_pieces(
            path,
            Pieces::of_data(b"head", nbytes, &[payload]),
            &options,
            &Unwatched,
        )
    }

    #[test]
    fn where_nothing_may_be_replaced_another_fault_is_still_one_of_writing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let empty = tempfile::tempfile().unwrap();
        let saved = save_new(&path, Payload::File(FileRange::new(&empty, 0, 5)));
        assert_eq!(saved.unwrap_err().code(), "write");
        save_new(&path, Payload::from(&b"bytes"[..])).unwrap();
        let saved = save_new(&path, Payload::from(&b"bytes"[..]));
        assert_eq!(saved.unwrap_err().code(), "open");
    }
}
