//! Which way a file is written, and what is said when it cannot be.

use std::io;
use std::path::Path;

use ingot_format::{FormatError, Layout, StopFlag};

use super::pieces::Pieces;
use super::snapshot::Snapshot;
use super::{atomic, flush, in_place, stream, target};
use crate::digest::Sealed;
use crate::disk::{Resolved, resolve};
use crate::error::{Error, Step, Stop, step};
use crate::options::{Durability, Replace, SaveOptions};
use crate::payload::Payload;
use crate::watch::Watch;

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
/// [`Error::Open`] when something has the name and [`Replace::Nothing`] says that it stays. [`Error::Write`] when the
/// file cannot be written, [`Error::Interrupted`] when `watch` says so. What was at `path`
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

/// Write a file of any content at `path`, as [`save`] writes a file of tensors.
///
/// # Errors
/// What [`save`] says.
pub fn replace_file(
    path: &Path,
    contents: &[Payload<'_>],
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    save_data(
        path,
        b"",
        contents.iter().map(Payload::nbytes).sum(),
        contents,
        options,
        watch,
    )
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

impl Snapshot {
    /// Writes the file of the `layout` that the copy was taken for.
    ///
    /// # Errors
    /// What [`crate::save`] says.
    pub fn save(
        &self,
        path: &Path,
        layout: &Layout,
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        let Layout { header, head, .. } = layout;
        save_data(path, head, header.data_nbytes(), &self.payloads(), options, watch)
    }
}

impl Sealed {
    /// Writes the file: as [`crate::save`] does, with `payloads` in the order of the layout, and the digests in the head
    /// taken of everything else on its way into the file. Not into a pipe or a device, where the head cannot be written last.
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
        let pieces = Pieces::of(self.layout(), payloads).map(|pieces| pieces.sealed_by(self));
        save_cut(path, pieces, options, watch)
    }

    /// The file with the digests of `pieces`, which are cut from [`Sealed::layout`]: for what takes bytes in order only,
    /// where the head comes first. They are read once for it, by this thread, and a tensor that changes before they are
    /// read again does not match its digest.
    ///
    /// # Errors
    /// A payload cannot be read; [`io::ErrorKind::Interrupted`] when `watch` says so.
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
        self.save_data(path, &snapshot.payloads(), options, watch)
    }

    /// As [`Sealed::save`], of payloads that together are the data, whichever way they cut it.
    pub(crate) fn save_data(
        &self,
        path: &Path,
        payloads: &[Payload<'_>],
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        let Layout { header, head, .. } = self.layout();
        let pieces = Pieces::of_data(head, header.data_nbytes(), payloads);
        save_cut(path, pieces.map(|pieces| pieces.sealed_by(self)), options, watch)
    }
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
    save_pieces(path, pieces, options, watch)
        .map_err(|stop| target::explain(path, pieces.nbytes(), options.existing(), stop))
}

fn save_pieces(
    path: &Path,
    pieces: &Pieces<'_>,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Stop> {
    match resolve(path, watch)? {
        Resolved::Entry(entry) => match options.replace {
            Replace::InPlace if entry.blob.is_none() => in_place::save(&entry, pieces, options, watch),
            _ => atomic::save(&entry, pieces, options, watch),
        },
        Resolved::Nameless(_) if options.replace == Replace::Nothing => {
            Err(io::Error::from(io::ErrorKind::AlreadyExists)).step(step::OPEN)
        }
        Resolved::Nameless(file) => in_place::overwrite(&file, None, pieces, options, watch),
        Resolved::Stream(file) => {
            stream::write(pieces, &file, watch)?;
            match options.durable {
                Durability::Durable => flush::flush(&file, watch),
                Durability::Fast => Ok(()),
            }
        }
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
        save_data(path, b"head", payload.nbytes(), &[payload], &options, &Unwatched)
    }

    #[test]
    fn where_nothing_may_be_replaced_another_fault_is_still_one_of_writing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let empty = tempfile::tempfile().unwrap();
        let saved = save_new(&path, Payload::File(FileRange::new(&empty, 0, 5)));
        assert!(matches!(saved, Err(Error::Write { .. })), "{saved:?}");
        save_new(&path, Payload::from(&b"bytes"[..])).unwrap();
        let saved = save_new(&path, Payload::from(&b"bytes"[..]));
        assert!(matches!(saved, Err(Error::Open { .. })), "{saved:?}");
    }
}
