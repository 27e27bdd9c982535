//! Files, or checkpoints of many, whose tensors go into others.

use std::path::{Path, PathBuf};

use ingot_format::{Header, Leniency, ShardIndex};

use crate::checkpoint::{Checkpoint, OpenWith};
use crate::error::{EditError, Error};
use crate::file::{Archive, BUFFER, LocalFile, ReadAt as _};
use crate::options::{Backend, CheckpointOptions, OpenOptions};
use crate::payload::{FileRange, Payload, Section};
use crate::watch::{Unwatched, Watch};

/// An open file that tensors are taken from, byte by byte: none is decoded, and none comes to lie in memory as a whole.
#[derive(Debug)]
pub struct Origin {
    archive: Archive,
}

impl Origin {
    /// Opens a file and proves its header.
    ///
    /// # Errors
    /// As [`Archive::open`](crate::Archive::open).
    pub fn open(path: &Path) -> Result<Origin, Error> {
        let file = LocalFile::open_one_of_many(path)?;
        Archive::of_file(file, path, &Origin::options(), None).map(Origin::of_archive)
    }

    /// How files are opened that are copied from.
    pub(crate) fn options() -> OpenOptions {
        OpenOptions {
            backend: Backend::Pread,
            ..OpenOptions::default()
        }
    }

    /// The same of a file that is open.
    pub(crate) fn of_archive(archive: Archive) -> Origin {
        Origin { archive }
    }

    /// Where it is, or `<buffer>` for bytes in memory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.archive.path().unwrap_or(Path::new(BUFFER))
    }

    /// What it holds.
    #[must_use]
    pub fn header(&self) -> &Header {
        self.archive.header()
    }

    /// Bytes of the data section.
    pub(crate) fn range(&self, begin: u64, end: u64) -> Payload<'_> {
        match self.archive.local() {
            Some(file) => {
                let start = self.header().data_start();
                Payload::File(FileRange::of_local(file, start + begin, end - begin))
            }
            None => Payload::Section(Section::new(&self.archive, begin, end)),
        }
    }

    /// Fails when somebody wrote to the file since it was opened.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let Some(file) = self.archive.local() else {
            return self.archive.check_unchanged();
        };
        match file.nbytes_now() {
            Ok(Some(now)) if now == file.nbytes() => Ok(()),
            _ => Err(EditError::Overtaken.about(self.path())),
        }
    }
}

/// All files of a checkpoint, open so that tensors can be taken from them byte by byte.
#[derive(Debug)]
pub struct Origins {
    path: PathBuf,
    files: Vec<Origin>,
    index: Option<ShardIndex>,
}

impl Origins {
    /// Opens a file, the shards of an index, or whatever of these a directory holds.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open(path: &Path, leniency: Leniency) -> Result<Origins, Error> {
        let mut options = CheckpointOptions {
            open: Origin::options(),
            ..CheckpointOptions::default()
        };
        options.open.limits.leniency = leniency;
        let with = OpenWith {
            is_one_of_many: true,
            ..OpenWith::default()
        };
        Origins::of(Checkpoint::open_with(path, &options, &with)?, &Unwatched)
    }

    /// Takes the files of a checkpoint and opens those that are not open.
    ///
    /// # Errors
    /// As [`Checkpoint::file`]; [`Error::Interrupted`].
    pub fn of(checkpoint: Checkpoint, watch: &dyn Watch) -> Result<Origins, Error> {
        let path = checkpoint.path().unwrap_or(Path::new(BUFFER)).to_owned();
        let (archives, index) = checkpoint.into_files(watch)?;
        let files = archives.into_iter().map(Origin::of_archive).collect();
        Ok(Origins { path, files, index })
    }

    /// The only file, or the index.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files, in the order of their names.
    #[must_use]
    pub fn files(&self) -> &[Origin] {
        &self.files
    }

    /// The index, where there is one.
    #[must_use]
    pub fn index(&self) -> Option<&ShardIndex> {
        self.index.as_ref()
    }
}
