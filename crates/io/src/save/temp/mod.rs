//! The temporary file that is filled before it gets its name, by one process or several.

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
    Attributes, DirectoryEntry, Locked, Unlinked, is_replaced_by_copy, unsupported, write_all_at,
};
use crate::error::{Error, Step, Stop, step};
use crate::options::{Durability, Existing};
use crate::watch::Watch;

/// A file in the target's directory, without a name or with one that says what it is.
///
/// It is locked until it gets the target's name or is dropped, and the system removes the lock however the process ends. A
/// temporary file without a lock is therefore one that was left behind.
pub(crate) struct Temp {
    /// The target, as the caller named it.
    path: PathBuf,
    entry: Arc<DirectoryEntry>,
    /// Attributes of the file that is replaced.
    attributes: Option<Attributes>,
    file: Locked,
    /// `None` for a file without a name, which vanishes when the process ends.
    name: Option<OsString>,
    /// `None` for a file that one process fills.
    journal: Option<Locked>,
    nbytes: u64,
    /// Whether the file stays when this is dropped.
    stays: AtomicBool,
}

/// Why a temporary file did not get the target's name.
pub(super) enum Refused {
    /// The system links no unnamed files here; a file that has a name has to be written.
    Link,
    /// The file system renames no file over another.
    Rename,
    Stop(Stop),
}

impl From<Stop> for Refused {
    fn from(stop: Stop) -> Refused {
        Refused::Stop(stop)
    }
}

impl From<Refused> for Stop {
    fn from(refused: Refused) -> Stop {
        match refused {
            Refused::Link | Refused::Rename => Stop::of(step::RENAME, unsupported()),
            Refused::Stop(stop) => stop,
        }
    }
}

impl Temp {
    /// Make an empty file for `entry`, to which `path` leads. Only its owner may read it if it replaces a file.
    pub(super) fn make(path: &Path, entry: &Arc<DirectoryEntry>, has_name: bool) -> Result<Temp, Stop> {
        let (attributes, birth) = entry.inherited().step(step::ATTRIBUTES)?;
        let unnamed = (!has_name).then(|| entry.directory.unnamed(birth)).flatten();
        let (file, name) = if let Some(file) = unnamed {
            names::lock(&file);
            (Locked::new(file), None)
        } else {
            let (file, name) = names::named(&entry.directory, &entry.name, birth).step(step::CREATE)?;
            (file, Some(name))
        };
        let temp = Temp {
            path: path.to_owned(),
            entry: Arc::clone(entry),
            attributes,
            file,
            name,
            journal: None,
            nbytes: 0,
            stays: AtomicBool::new(false),
        };
        if let Some(attributes) = &temp.attributes {
            attributes.begin(&temp.file).step(step::ATTRIBUTES)?;
        }
        Ok(temp)
    }

    /// Leave the file where it is when this is dropped: others may go on with it.
    pub(crate) fn keep(&self) {
        self.stays.store(true, Ordering::Relaxed);
    }

    /// Return whether the file still has its temporary name, and not the target's.
    pub(crate) fn is_unnamed(&self) -> bool {
        names::has_name(&self.entry.directory, self.name(), &self.file)
    }

    /// Set the final size of the file, if it was not known when the file was made.
    pub(crate) fn grow_to(&mut self, nbytes: u64) {
        self.nbytes = nbytes;
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The path of the temporary file.
    pub(crate) fn draft_path(&self) -> PathBuf {
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

    /// The error for `source`, which kept a part of the file from being written.
    pub(crate) fn write_fault(&self, source: std::io::Error) -> Error {
        Stop::of(step::WRITE, source).about(&self.path, self.nbytes)
    }

    /// Apply the attributes of the target, and rename the file to it.
    pub(crate) fn publish(
        &self,
        existing: Existing,
        durable: Durability,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        self.try_publish(existing, durable, watch)
            .map_err(|stop| explain(&self.path, self.nbytes, existing, stop))
    }

    fn try_publish(&self, existing: Existing, durable: Durability, watch: &dyn Watch) -> Result<(), Stop> {
        self.apply_attributes()?;
        if durable == Durability::Durable {
            flush(&self.file, watch)?;
        }
        self.take_name(existing, watch)?;
        self.flush_name(durable)
    }

    /// Apply the attributes of the file that is replaced.
    pub(super) fn apply_attributes(&self) -> Result<(), Stop> {
        match &self.attributes {
            Some(attributes) => attributes.apply(&self.file).step(step::ATTRIBUTES),
            None => Ok(()),
        }
    }

    /// Link a file without a name to a temporary name.
    pub(super) fn link(&mut self) -> Result<(), Refused> {
        if self.name.is_none() {
            let linked = names::link(&self.entry, &self.file);
            self.name = Some(linked.map_err(|unlinked| match unlinked {
                Unlinked::Fault(fault) => Stop::of(step::RENAME, fault).into(),
                Unlinked::Exists | Unlinked::Impossible => Refused::Link,
            })?);
        }
        Ok(())
    }

    /// Rename the file to the target. A file that has that name is replaced if `existing` allows it.
    pub(super) fn take_name(&self, existing: Existing, watch: &dyn Watch) -> Result<(), Refused> {
        if watch.interrupted() {
            return Err(Stop::Interrupted.into());
        }
        let new = || self.entry.directory.rename_new(self.name(), &self.entry.name);
        match (existing == Existing::Refuse).then(new).flatten() {
            Some(named) => named.step(step::RENAME)?,
            None => self.rename()?,
        }
        self.keep();
        self.file.unlock();
        self.remove_journal();
        Ok(())
    }

    fn rename(&self) -> Result<(), Refused> {
        let DirectoryEntry { directory, name, .. } = &*self.entry;
        let replaced = space::keep(&self.entry, &self.file);
        let renamed = directory.rename(self.name(), name, &|| names::free_old_name(&self.entry));
        if renamed.as_ref().is_err_and(is_replaced_by_copy) {
            return Err(Refused::Rename);
        }
        renamed.step(step::RENAME)?;
        if let Some(replaced) = replaced {
            space::release(replaced);
        }
        Ok(())
    }

    /// Make the new name durable.
    pub(super) fn flush_name(&self, durable: Durability) -> Result<(), Stop> {
        if durable == Durability::Durable {
            let flushed = self.entry.directory.flush(&self.file);
            flushed.step(step::FLUSH_DIRECTORY)?;
        }
        Ok(())
    }

    /// Remove the file, unless it has another name by now, and its journal.
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

/// In the child of a fork the file is the parent's.
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
    use crate::options::SaveOptions;
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
        let refused = temp.publish(Existing::Refuse, Durability::Fast, &Unwatched);
        assert_eq!(
            refused.unwrap_err().to_string(),
            target::is_there(&path).to_string()
        );
        assert!(temp.is_unnamed());
        temp.grow_to(20);
        temp.publish(Existing::Replace, Durability::Fast, &Unwatched)
            .unwrap();
        assert!(!temp.is_unnamed());
        assert_eq!(std::fs::read(&path).unwrap(), b"0123456789");
        // It has lost the name that it is published from.
        let gone = temp
            .publish(Existing::Replace, Durability::Fast, &Unwatched)
            .unwrap_err();
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
