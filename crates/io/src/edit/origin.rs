//! A file whose tensors go into another one.

use std::fs::File;
use std::path::{Path, PathBuf};

use ingot_format::{Header, Limits};

use super::EditError;
use crate::archive::open_file;
use crate::error::Error;
use crate::head::read_header;
use crate::payload::FileRange;
use crate::source::{FileSource, Source};

/// An open file that tensors are taken from, byte by byte: none is decoded, and none comes to lie in memory as a whole.
#[derive(Debug)]
pub struct Origin {
    path: PathBuf,
    source: FileSource,
    header: Header,
}

impl Origin {
    /// Opens a file and proves its header.
    ///
    /// # Errors
    /// As [`Archive::open`](crate::Archive::open).
    pub fn open(path: &Path) -> Result<Origin, Error> {
        let file = open_file(path).map_err(|source| Error::Open {
            path: path.to_owned(),
            source,
        })?;
        Origin::of_file(file, path.to_owned())
    }

    /// As [`Origin::open`], for a file that is open. `path` is for the errors.
    pub(crate) fn of_file(file: File, path: PathBuf) -> Result<Origin, Error> {
        let source = FileSource::new(file).map_err(|source| Error::Open {
            path: path.clone(),
            source,
        })?;
        let header = read_header(&source, Some(&path), &Limits::default())?;
        Ok(Origin { path, source, header })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it holds.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Bytes of the data section.
    pub(crate) fn range(&self, begin: u64, end: u64) -> FileRange<'_> {
        FileRange::new(self.source.file(), self.header.data_start() + begin, end - begin)
    }

    /// Fails when somebody wrote to the file since it was opened.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.source.nbytes_now() {
            Ok(Some(now)) if now == self.source.nbytes() => Ok(()),
            _ => Err(Error::Edit {
                path: self.path.clone(),
                fault: EditError::Overtaken,
            }),
        }
    }
}
