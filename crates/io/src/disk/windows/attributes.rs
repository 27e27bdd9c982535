//! Attributes of a file besides its bytes and its name: the attributes of Windows, and its access list.

use std::ffi::OsStr;
use std::fs::File;
use std::io;

use windows_sys::Win32::Storage::FileSystem::{
    FILE_ATTRIBUTE_ARCHIVE, FILE_ATTRIBUTE_HIDDEN, FILE_ATTRIBUTE_NORMAL, FILE_ATTRIBUTE_NOT_CONTENT_INDEXED,
    FILE_ATTRIBUTE_READONLY, FILE_ATTRIBUTE_SYSTEM,
};

use super::calls::{AccessList, access_list, set_access_list, set_attributes};
use super::directory::Directory;
use crate::disk::{Facts, Opening};

/// The attributes that users set. The others describe how the disk keeps a file.
const KEPT: u32 = FILE_ATTRIBUTE_ARCHIVE
    | FILE_ATTRIBUTE_HIDDEN
    | FILE_ATTRIBUTE_NOT_CONTENT_INDEXED
    | FILE_ATTRIBUTE_READONLY
    | FILE_ATTRIBUTE_SYSTEM;

/// The attributes that a new file inherits from the file that it replaces.
pub(crate) struct Attributes {
    attributes: u32,
    /// `None` if this process may not read it.
    access: Option<AccessList>,
}

impl Attributes {
    #[allow(clippy::unnecessary_wraps, reason = "elsewhere not all of it can be read")]
    pub(crate) fn of(directory: &Directory, name: &OsStr, facts: &Facts) -> io::Result<Attributes> {
        let file = directory.file(name, Opening::Read);
        Ok(Attributes {
            attributes: facts.mode & KEPT,
            access: file.and_then(|file| access_list(&file)).ok(),
        })
    }

    /// Keep other users out of the new `file`: users without access to the old file never see a byte of the new one.
    #[allow(clippy::unnecessary_wraps, reason = "elsewhere this can fail")]
    pub(crate) fn begin(&self, file: &File) -> io::Result<()> {
        if let Some(access) = &self.access
            && access_list(file).is_ok_and(|now| now != *access)
        {
            // As far as permissions allow.
            let _ = set_access_list(file, access);
        }
        Ok(())
    }

    /// Keep other users out of `file`, which an earlier call may have made, until it is complete and gets these attributes.
    #[cfg(feature = "remote")]
    pub(crate) fn confine(&self, file: &File) -> io::Result<()> {
        self.begin(file)
    }

    /// Apply the attributes to `file` after all bytes are written.
    pub(crate) fn apply(&self, file: &File) -> io::Result<()> {
        let attributes = match self.attributes {
            0 => FILE_ATTRIBUTE_NORMAL,
            some => some,
        };
        set_attributes(file, attributes)
    }
}
