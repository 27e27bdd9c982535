//! What a path leads to.

use std::ffi::OsString;
use std::fs::File;
use std::io;

use super::{Attributes, Birth, Directory, Facts, Opening, exists};
use crate::error::{Step, Stop, step};
use crate::options::{Existing, ReadOnly, SaveOptions};

/// What a path leads to, every symlink followed.
#[allow(dead_code, reason = "not every system has files without a name")]
pub(crate) enum Resolved {
    /// A name in a directory. A regular file has it, or nothing.
    Entry(DirectoryEntry),
    /// A regular file that has no name that could be given to another: what a link of /proc points to.
    Nameless(File),
    /// Something that takes bytes in order: a pipe, a terminal, another device.
    Stream(File),
}

/// A name in a directory, for a regular file. The directory stays the same one when it is renamed, or when the
/// program changes its working directory.
pub(crate) struct DirectoryEntry {
    pub(crate) directory: Directory,
    pub(crate) name: OsString,
    /// `None` when nothing has the name.
    pub(crate) existing: Option<Facts>,
}

impl DirectoryEntry {
    /// Whether the existing file, if there is one, may be replaced. Renaming over it needs no right to write to it,
    /// so this has to be asked.
    pub(crate) fn check_writable(&self, read_only: ReadOnly) -> Result<(), Stop> {
        if self.existing.is_none() || read_only == ReadOnly::Replace {
            return Ok(());
        }
        self.directory.check_writable(&self.name).step(step::READ_ONLY)
    }

    /// Whether what has the name, if anything has, may go.
    pub(crate) fn check(&self, options: &SaveOptions) -> Result<(), Stop> {
        match self.existing {
            Some(_) if options.existing() == Existing::Refuse => Err(exists()).step(step::OPEN),
            _ => self.check_writable(options.read_only),
        }
    }

    /// Opens the file for writing in place, or makes it; says whether it made it.
    pub(crate) fn open(&self) -> io::Result<(File, bool)> {
        let open = |opening| self.directory.file(&self.name, opening);
        loop {
            match open(Opening::Write) {
                Ok(file) => return Ok((file, false)),
                Err(fault) if fault.kind() == io::ErrorKind::NotFound => {}
                Err(fault) => return Err(fault),
            }
            match open(Opening::New(Birth::Usual)) {
                Ok(file) => return Ok((file, true)),
                Err(fault) if fault.kind() == io::ErrorKind::AlreadyExists => {}
                Err(fault) => return Err(fault),
            }
        }
    }

    /// Takes the name away again from a file that was made and could not be filled.
    pub(crate) fn remove(&self) {
        let _ = self.directory.remove(&self.name);
    }

    /// What the new file gets from the one that is there, and who may read it until then.
    pub(crate) fn inherited(&self) -> io::Result<(Option<Attributes>, Birth)> {
        let of = |facts| Attributes::of(&self.directory, &self.name, facts);
        let attributes = self.existing.as_ref().map(of).transpose()?;
        let birth = match attributes {
            Some(_) => Birth::Private,
            None => Birth::Usual,
        };
        Ok((attributes, birth))
    }
}
