//! Files in a directory that lie nowhere else.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Component, Path, PathBuf};

use super::file::open_for_reading;
use crate::disk::Refusal;
use crate::disk::facts::LINK;

/// A directory, beneath which links are looked for before a file is opened. Not proof against whoever exchanges them
/// in between; Windows has no call that is.
#[derive(Debug)]
pub(crate) struct Beneath {
    path: PathBuf,
}

impl Beneath {
    pub(crate) fn of(path: &Path) -> io::Result<Beneath> {
        let path = std::path::absolute(path)?;
        Ok(Beneath { path })
    }

    pub(crate) fn open(&self, name: &OsStr) -> Result<File, Refusal> {
        let mut path = self.path.clone();
        for part in Path::new(name).components() {
            let Component::Normal(part) = part else {
                return Err(Refusal::Elsewhere("it lies outside of the directory"));
            };
            if part.as_encoded_bytes().contains(&b':') {
                return Err(Refusal::Elsewhere("it is a stream of a file, and no file"));
            }
            path.push(part);
            if path.symlink_metadata()?.is_symlink() {
                return Err(Refusal::Elsewhere(LINK));
            }
        }
        Ok(open_for_reading(&path)?)
    }
}
