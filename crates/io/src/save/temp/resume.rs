//! A temporary file that stays beside its target when a download is interrupted, so that the next one can resume.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::Temp;
use super::journal::busy;
use super::names::{has_name, temp_prefix};
use crate::disk::{self, Attributes, Birth, DirectoryEntry, Lock, Locked, Opening, try_lock};
use crate::error::{Error, Step, step};
use crate::options::SaveOptions;
use crate::save::flush::flush;
use crate::save::target::{explain, find, is_there};
use crate::watch::Watch;

/// How often the file is opened again if another process has just renamed or removed it.
const TRIES: usize = 10;

/// Temporary files under a name that their target determines. They are locked until they are dropped, so that no other
/// process fills them.
impl Temp {
    /// Open the unfinished file for `path`, or make an empty one.
    pub(crate) fn resume(path: &Path, options: &SaveOptions, watch: &dyn Watch) -> Result<Temp, Error> {
        let entry = find(path, watch)?;
        if entry.existing.is_some() && options.keeps_existing() {
            return Err(is_there(path));
        }
        let name = partial_name(&entry.name);
        let opened = || -> io::Result<Option<(Locked, Option<Attributes>)>> {
            let (attributes, birth) = entry.inherited()?;
            let Some(file) = locked(&entry, &name, birth)? else {
                return Ok(None);
            };
            if let Some(attributes) = &attributes {
                attributes.confine(&file)?;
            }
            Ok(Some((file, attributes)))
        };
        let opened = opened()
            .step(step::CREATE)
            .map_err(|fault| fault.in_save(path, 0))?;
        let (file, attributes) = opened.ok_or_else(|| busy(&entry, &name, path))?;
        let temp = Temp::of(path, Arc::new(entry), options, attributes, file, Some(name));
        temp.keep();
        Ok(temp)
    }

    /// Open the unfinished file for `path` for reading.
    pub(crate) fn left(path: &Path, watch: &dyn Watch) -> Option<File> {
        let entry = find(path, watch).ok()?;
        let name = partial_name(&entry.name);
        entry.directory.file(&name, Opening::Read).ok()
    }

    /// Flush its bytes to the disk, which may take long.
    pub(crate) fn flush(&self, watch: &dyn Watch) -> Result<(), Error> {
        if !self.options.durable {
            return Ok(());
        }
        flush(&self.file, watch).map_err(|fault| fault.in_save(&self.path, self.nbytes))
    }

    /// Remove its bytes, and reserve `nbytes`.
    pub(crate) fn begin_anew(&mut self, nbytes: u64, watch: &dyn Watch) -> Result<(), Error> {
        self.nbytes = nbytes;
        self.set_len(0)?;
        self.reserve(nbytes, watch)?;
        self.set_len(nbytes)
    }

    fn set_len(&self, nbytes: u64) -> Result<(), Error> {
        self.file.set_len(nbytes).map_err(|fault| self.write_fault(fault))
    }

    /// Rename it to the target with its first `nbytes` only.
    pub(crate) fn publish_first(&self, nbytes: u64, watch: &dyn Watch) -> Result<(), Error> {
        let published = || -> Result<(), Error> {
            if self.options.durable {
                // Before the hashes after the data are removed, since this takes the longest and may be interrupted.
                flush(&self.file, watch)?;
            }
            self.file.set_len(nbytes).step(step::WRITE)?;
            self.try_publish(watch)
        };
        published().map_err(|fault| explain(&self.path, nbytes, &self.options, fault))
    }
}

/// Open or create the file `name`, and lock it. `None` if another process has the lock.
fn locked(entry: &DirectoryEntry, name: &OsStr, birth: Birth) -> io::Result<Option<Locked>> {
    for _ in 0..TRIES {
        let file = entry.directory.file(name, Opening::Left(birth))?;
        if !disk::is_ours(&disk::facts(&file)?) {
            let name = name.to_string_lossy().into_owned();
            let message = format!("{} is not a file of this user", ingot_format::Escaped(&name));
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        // Without locks, two processes may download into one file. The bytes are compared before it is renamed.
        let file = Locked::new(file);
        if matches!(try_lock(&file, Lock::Exclusive), Ok(false)) {
            return Ok(None);
        }
        // The process that had the lock may have renamed it to the target.
        if has_name(&entry.directory, name, &file) {
            return Ok(Some(file));
        }
    }
    Err(disk::in_use())
}

/// The name of an unfinished file, which stays when a download is interrupted, so that the next one can resume.
fn partial_name(target: &OsStr) -> OsString {
    let mut name = temp_prefix(target);
    name.push("ingot-part");
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::save::temp::names::is_temp_of;
    use crate::watch::Unwatched;

    /// The thread that flushes the file may still have it open.
    #[test]
    fn a_draft_can_be_resumed_while_an_earlier_call_still_has_its_file_open() {
        let folder = tempfile::tempdir().unwrap();
        let resume = || Temp::resume(&folder.path().join("a"), &SaveOptions::new(), &Unwatched);
        let first = resume().unwrap();
        let flushing = first.file().try_clone().unwrap();
        assert_eq!(resume().map(drop).unwrap_err().code(), "busy");
        drop(first);
        resume().unwrap();
        drop(flushing);
    }

    #[test]
    fn what_stays_is_not_taken_for_what_was_left_behind() {
        let target = OsStr::new("a");
        assert!(!is_temp_of(&partial_name(target), target));
    }
}
