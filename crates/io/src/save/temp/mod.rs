//! The temporary file that one process or several fill before it is renamed.

mod journal;
mod names;
#[cfg(feature = "remote")]
mod resume;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) use self::journal::journal_fault;
pub(super) use self::names::{remove_stale, scratch};
use super::flush::flush;
use super::space;
use super::target::explain;
use crate::disk::{
    Attributes, DirectoryEntry, Locked, Size, Unlinked, is_replaced_by_copy, unsupported, write_all_at,
};
use crate::error::{EditError, Error, Failure, Step, of_step, step};
use crate::options::SaveOptions;
use crate::watch::Watch;

/// A file in the target's directory, without a name or with a temporary one.
///
/// It is locked until it gets the target's name or is dropped, and the system removes the lock however the process ends. A
/// temporary file without a lock is therefore abandoned.
pub(crate) struct Temp {
    /// The target, as the caller named it.
    path: PathBuf,
    entry: Arc<DirectoryEntry>,
    options: SaveOptions,
    /// The attributes of the file that is replaced.
    attributes: Option<Attributes>,
    file: Locked,
    /// `None` for a file without a name, which disappears when the process ends.
    name: Option<OsString>,
    /// `None` for a file that one process fills.
    journal: Option<Locked>,
    nbytes: u64,
    /// Whether the file is kept when this is dropped.
    stays: AtomicBool,
}

impl Temp {
    /// Make an empty file for `entry`, to which `path` leads. Only its owner may read it if it replaces a file.
    pub(super) fn make(
        path: &Path,
        entry: &Arc<DirectoryEntry>,
        options: &SaveOptions,
        has_name: bool,
    ) -> Result<Temp, Error> {
        let (attributes, birth) = entry.inherited().step(step::ATTRIBUTES)?;
        let unnamed = (!has_name).then(|| entry.directory.unnamed(birth)).flatten();
        let (file, name) = if let Some(file) = unnamed {
            names::lock(&file);
            (Locked::new(file), None)
        } else {
            let (file, name) = names::named(&entry.directory, &entry.name, birth).step(step::CREATE)?;
            (file, Some(name))
        };
        let temp = Temp::of(path, Arc::clone(entry), options, attributes, file, name);
        if let Some(attributes) = &temp.attributes {
            attributes.begin(&temp.file).step(step::ATTRIBUTES)?;
        }
        Ok(temp)
    }

    fn of(
        path: &Path,
        entry: Arc<DirectoryEntry>,
        options: &SaveOptions,
        attributes: Option<Attributes>,
        file: Locked,
        name: Option<OsString>,
    ) -> Temp {
        Temp {
            path: path.to_owned(),
            entry,
            options: *options,
            attributes,
            file,
            name,
            journal: None,
            nbytes: 0,
            stays: AtomicBool::new(false),
        }
    }

    /// Keep the file when this is dropped: others may continue to fill it.
    pub(crate) fn keep(&self) {
        self.stays.store(true, Ordering::Relaxed);
    }

    /// Return whether the file still has its temporary name, and not the target's.
    pub(crate) fn is_unnamed(&self) -> bool {
        names::has_name(&self.entry.directory, self.name(), &self.file)
    }

    /// Reserve `nbytes`, which are then written in any order.
    fn reserve(&mut self, nbytes: u64, watch: &dyn Watch) -> Result<(), Error> {
        self.nbytes = nbytes;
        space::reserve(&self.file, nbytes, Size::Scattered, watch)
            .map_err(|fault| fault.in_save(&self.path, nbytes))
    }

    /// Set the final size of the file, if it was not known when the file was made.
    pub(crate) fn grow_to(&mut self, nbytes: u64) {
        self.nbytes = nbytes;
    }

    /// Fail in the child of a fork: the file is the parent's.
    pub(crate) fn check_process(&self) -> Result<(), Error> {
        if self.file.is_ours() {
            Ok(())
        } else {
            Err(EditError::Forked.about(&self.path))
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The path of the temporary file.
    pub(crate) fn temporary_path(&self) -> PathBuf {
        self.entry.directory.path(self.name())
    }

    /// The name of the temporary file; empty if it has none.
    pub(crate) fn name(&self) -> &OsStr {
        self.name.as_deref().unwrap_or_default()
    }

    /// Write `bytes` at `position`.
    pub(crate) fn write(&self, bytes: &[u8], position: u64) -> Result<(), Error> {
        write_all_at(&self.file, bytes, position).map_err(|fault| self.write_fault(fault))
    }

    /// Return the error for `source`, which prevented writing a part of the file.
    pub(crate) fn write_fault(&self, source: std::io::Error) -> Error {
        of_step(step::WRITE, source).in_save(&self.path, self.nbytes)
    }

    /// Apply the attributes of the target, and rename the file to it.
    pub(crate) fn publish(&self, watch: &dyn Watch) -> Result<(), Error> {
        self.try_publish(watch)
            .map_err(|fault| explain(&self.path, self.nbytes, &self.options, fault))
    }

    fn try_publish(&self, watch: &dyn Watch) -> Result<(), Error> {
        self.apply_attributes()?;
        if self.options.durable {
            flush(&self.file, watch)?;
        }
        if !self.take_name(watch)? {
            return Err(unsupported()).step(step::RENAME);
        }
        self.flush_name()
    }

    /// Apply the attributes of the file that is replaced.
    pub(super) fn apply_attributes(&self) -> Result<(), Error> {
        match &self.attributes {
            Some(attributes) => attributes.apply(&self.file).step(step::ATTRIBUTES),
            None => Ok(()),
        }
    }

    /// Link a file without a name to a temporary name. Return false if the system links no unnamed files here.
    pub(super) fn link(&mut self) -> Result<bool, Error> {
        if self.name.is_none() {
            match names::link(&self.entry, &self.file) {
                Ok(name) => self.name = Some(name),
                Err(Unlinked::Fault(fault)) => return Err(fault).step(step::RENAME),
                Err(Unlinked::Exists | Unlinked::Impossible) => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Rename the file to the target. A file that has that name is replaced if the options allow it. Return false if the file
    /// system renames no file over another.
    pub(super) fn take_name(&self, watch: &dyn Watch) -> Result<bool, Error> {
        if watch.interrupted() {
            return Err(Failure::Interrupted.into());
        }
        let DirectoryEntry { directory, name, .. } = &*self.entry;
        let new = || directory.rename_new(self.name(), name);
        if let Some(named) = self.options.keeps_existing().then(new).flatten() {
            named.step(step::RENAME)?;
        } else {
            let replaced = space::keep(&self.entry, &self.file);
            let renamed = directory.rename(self.name(), name, &|| names::free_old_name(&self.entry));
            if renamed.as_ref().is_err_and(is_replaced_by_copy) {
                return Ok(false);
            }
            renamed.step(step::RENAME)?;
            if let Some(replaced) = replaced {
                space::release(replaced);
            }
        }
        self.keep();
        self.file.unlock();
        self.remove_journal();
        Ok(true)
    }

    /// Make the new name durable if the options require it.
    pub(super) fn flush_name(&self) -> Result<(), Error> {
        if self.options.durable {
            let flushed = self.entry.directory.flush(&self.file);
            flushed.step(step::FLUSH_DIRECTORY)?;
        }
        Ok(())
    }

    /// Remove the file, unless it has been renamed, and its journal.
    pub(crate) fn discard(&self) {
        if let Some(name) = &self.name {
            names::remove_if(&self.entry, name, &self.file);
        }
        self.remove_journal();
    }

    fn remove_journal(&self) {
        if let Some(journal) = &self.journal {
            names::remove_if(&self.entry, &names::journal_name(&self.entry.name), journal);
        }
    }
}

/// In a child after a fork, the file belongs to the parent.
impl Drop for Temp {
    fn drop(&mut self) {
        if !*self.stays.get_mut() && self.file.is_ours() {
            self.discard();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Replace;
    use crate::save::target;
    use crate::watch::Unwatched;

    #[test]
    fn a_file_has_its_own_name_until_it_gets_that_of_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut temp = Temp::create(&path, 10, &SaveOptions::default(), &Unwatched).unwrap();
        assert!(temp.is_unnamed());
        temp.write(b"0123456789", 0).unwrap();
        std::fs::write(&path, "old").unwrap();
        temp.options = SaveOptions::new().durable(false).replace(Replace::Nothing);
        let refused = temp.publish(&Unwatched);
        assert_eq!(
            refused.unwrap_err().to_string(),
            target::is_there(&path).to_string()
        );
        assert!(temp.is_unnamed());
        temp.grow_to(20);
        temp.options.replace = Replace::Atomic;
        temp.publish(&Unwatched).unwrap();
        assert!(!temp.is_unnamed());
        assert_eq!(std::fs::read(&path).unwrap(), b"0123456789");
        // The temporary name does not exist any more.
        let gone = temp.publish(&Unwatched).unwrap_err();
        assert_ne!(gone.to_string(), target::is_there(&path).to_string());
        assert!(gone.to_string().contains("20 bytes"), "{gone}");
    }

    #[test]
    fn a_file_is_removed_when_it_is_dropped_unless_it_was_kept() {
        let folder = tempfile::tempdir().unwrap();
        let make = || Temp::create(&folder.path().join("a"), 10, &SaveOptions::default(), &Unwatched);
        drop(make().unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        make().unwrap().keep();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
