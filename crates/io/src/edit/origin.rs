//! A file whose tensors go into another one.

use std::path::Path;

use ingot_format::Header;

use crate::archive::Archive;
use crate::error::{EditError, Error};
use crate::options::{Backend, OpenOptions};
use crate::payload::{FileRange, Payload, Section};
use crate::source::Source as _;

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
        Archive::open_lent(path, &Origin::options()).map(Origin::of_archive)
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

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.archive.path().unwrap_or(Path::new(""))
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
        // Of what is behind a URL, whoever reads it asks for the version that was opened.
        let Some(file) = self.archive.local() else {
            return Ok(());
        };
        match file.nbytes_now() {
            Ok(Some(now)) if now == file.nbytes() => Ok(()),
            _ => Err(Error::Edit {
                path: self.path().to_owned(),
                fault: EditError::Overtaken,
            }),
        }
    }
}
