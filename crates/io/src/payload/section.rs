//! A part of an archive that is not a file.

use std::io;

use crate::archive::Archive;
use crate::error::Error;
use crate::source::read_exactly;

/// Bytes of an archive that go into a file, such as one behind a URL. Any thread may read them, and waits for them.
#[derive(Clone, Copy, Debug)]
pub struct Section<'a> {
    archive: &'a Archive,
    begin: u64,
    nbytes: u64,
}

impl<'a> Section<'a> {
    /// The bytes `begin..end` of the data section.
    pub(crate) fn new(archive: &'a Archive, begin: u64, end: u64) -> Section<'a> {
        Section {
            archive,
            begin: archive.header().data_start() + begin,
            nbytes: end - begin,
        }
    }

    pub(super) fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Fills `into` with the bytes from `begin` of the section on. What goes wrong is an [`Error`] of the archive, which
    /// [`Section::fault`] finds again.
    pub(super) fn read(&self, begin: u64, into: &mut [u8]) -> io::Result<()> {
        read_exactly(self.archive.source(), self.begin + begin, into)
            .map_err(|failure| io::Error::other(self.archive.explain(failure)))
    }

    /// What went wrong with the archive that was read from, where that is why something could not be written.
    pub(crate) fn fault(error: Error) -> Error {
        match error {
            Error::Write {
                path,
                step,
                nbytes,
                source,
            } => match source.downcast::<Error>() {
                Ok(fault) => fault,
                Err(source) => Error::Write {
                    path,
                    step,
                    nbytes,
                    source,
                },
            },
            other => other,
        }
    }
}
