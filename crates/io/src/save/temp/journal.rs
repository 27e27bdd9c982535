//! A temporary file that several processes fill, and the journal of their writes.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::Temp;
use super::names;
use crate::disk::{self, DirectoryEntry, Lock, Locked, Opening, try_lock, unlock};
use crate::error::{EditError, Error, Step, of_step, step};
use crate::options::SaveOptions;
use crate::save::target::{self, find};
use crate::watch::Watch;

/// The number of attempts to take a briefly held lock, and the pause between them.
const LOCK_TRIES: usize = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

impl Temp {
    /// Make the temporary file, of `nbytes`, and its journal. Both are removed when this is dropped.
    pub(crate) fn create(
        path: &Path,
        nbytes: u64,
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<Temp, Error> {
        let fault = |fault: Error| fault.in_save(path, nbytes);
        let entry = Arc::new(find(path, watch)?);
        target::check(&entry, path, options)?;
        names::remove_stale(&entry);
        let name = names::journal_name(&entry.name);
        let made = locked_journal(&entry, Opening::NewJournal, Lock::Shared);
        let Some(journal) = made.step(step::CREATE).map_err(fault)? else {
            return Err(busy(&entry, &name, path));
        };
        let made = Temp::make(path, &entry, options, true);
        let mut temp = made.map_err(|stop| {
            names::remove_if(&entry, &name, &journal);
            fault(stop)
        })?;
        temp.journal = Some(journal);
        temp.reserve(nbytes, watch)?;
        Ok(temp)
    }

    /// Open the journal of a file for `path` that another writer created, and lock it. `None` if there is no journal,
    /// or others hold a lock that excludes `lock`.
    pub(crate) fn journal_of(path: &Path, lock: Lock, watch: &dyn Watch) -> Result<Option<Locked>, Error> {
        let entry = find(path, watch)?;
        locked_journal(&entry, Opening::Journal, lock)
            .step(step::JOURNAL)
            .map_err(|fault| fault.in_save(path, 0))
    }

    /// Open the temporary file `name`, which another writer created. `None` if it does not exist, or is not a temporary
    /// file for `path`.
    pub(crate) fn join(
        path: &Path,
        name: &OsStr,
        journal: Locked,
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<Option<Temp>, Error> {
        let entry = find(path, watch)?;
        if !names::is_temp_of(name, &entry.name) || name == names::journal_name(&entry.name) {
            return Ok(None);
        }
        let opened = || -> io::Result<_> {
            let file = Locked::new(entry.directory.file(name, Opening::Both)?);
            Ok((file, entry.inherited()?.0))
        };
        let (file, attributes) = match opened() {
            Err(fault) if fault.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened
                .step(step::JOURNAL)
                .map_err(|fault| fault.in_save(path, 0))?,
        };
        let entry = Arc::new(entry);
        let mut temp = Temp::of(path, entry, options, attributes, file, Some(name.to_owned()));
        temp.nbytes = disk::facts(&temp.file).map_or(0, |facts| facts.nbytes);
        temp.journal = Some(journal);
        temp.keep();
        Ok(Some(temp))
    }

    /// Return whether the process that made the temporary file, or took it over, still has it open. The system removes its
    /// lock however the process ends, and passes the lock to no other process.
    pub(crate) fn has_owner(&self) -> Result<bool, Error> {
        let has_none = || -> io::Result<bool> {
            let locked = try_lock(&self.file, Lock::Shared)?;
            if locked {
                unlock(&self.file)?;
            }
            Ok(locked)
        };
        let has_none = has_none().map_err(|fault| self.lock_fault(fault))?;
        Ok(!has_none)
    }

    /// Take over the temporary file if it has no owner. Return whether this succeeded.
    pub(crate) fn own(&self) -> Result<bool, Error> {
        try_lock(&self.file, Lock::Exclusive).map_err(|fault| self.lock_fault(fault))
    }

    /// Let others open the journal too, after [`Lock::Exclusive`]. Return whether the journal still has its name.
    pub(crate) fn admit(&self) -> Result<bool, Error> {
        let journal = self.journal()?;
        // Without locks no save removes abandoned files.
        let _ = disk::share_lock(&journal);
        has_any_name(&journal).map_err(|fault| journal_fault(&self.path, fault))
    }

    /// Without locks no process can find out whether another one still runs.
    fn lock_fault(&self, source: io::Error) -> Error {
        of_step(step::OWNER, source).in_save(&self.path, self.nbytes)
    }

    /// Another handle of the journal.
    pub(crate) fn journal(&self) -> Result<File, Error> {
        let journal = self.journal.as_ref().ok_or(io::ErrorKind::NotFound);
        journal
            .map_err(io::Error::from)
            .and_then(|journal| journal.try_clone())
            .map_err(|fault| self.write_fault(fault))
    }
}

/// Return the error for `source`, which prevented reading or writing the journal for `path`.
pub(crate) fn journal_fault(path: &Path, source: io::Error) -> Error {
    of_step(step::JOURNAL, source).in_save(path, 0)
}

/// The error for a file `name` beside `path` that another writer has locked.
pub(super) fn busy(entry: &DirectoryEntry, name: &OsStr, path: &Path) -> Error {
    let locked = entry.directory.file(name, Opening::Read);
    let holder = locked.ok().and_then(|file| disk::lock_holder(&file));
    EditError::Busy { holder }.about(path)
}

/// Open and lock the journal. `None` if there is no journal to open, or one exists already, or others hold a lock that
/// excludes `lock`. All processes that have the journal open share a lock, so that no save takes it for an abandoned one.
fn locked_journal(entry: &DirectoryEntry, opening: Opening, lock: Lock) -> io::Result<Option<Locked>> {
    let none = match opening {
        Opening::NewJournal => io::ErrorKind::AlreadyExists,
        _ => io::ErrorKind::NotFound,
    };
    let file = match entry.directory.file(&names::journal_name(&entry.name), opening) {
        Err(fault) if fault.kind() == none => return Ok(None),
        opened => Locked::new(opened?),
    };
    Ok(lock_journal(&file, lock)?.then_some(file))
}

/// Lock the journal. Return false if others hold a lock that excludes this one, or if `file` has no name any more
/// because a save removed it before it was locked.
fn lock_journal(file: &File, lock: Lock) -> io::Result<bool> {
    let tries = match lock {
        // An exclusive lock is held briefly.
        Lock::Shared => LOCK_TRIES,
        Lock::Exclusive => 1,
    };
    for left in (0..tries).rev() {
        match try_lock(file, lock) {
            Ok(false) if left == 0 => return Ok(false),
            Ok(false) => std::thread::sleep(LOCK_PAUSE),
            // Without locks no save removes abandoned files.
            _ => break,
        }
    }
    has_any_name(file)
}

fn has_any_name(file: &File) -> io::Result<bool> {
    Ok(disk::facts(file)?.names > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::Unwatched;

    #[test]
    fn a_lock_that_somebody_has_for_a_moment_is_waited_for() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("journal");
        let journal = File::create(&path)?;
        let open = || File::options().write(true).open(&path);
        let theirs = open()?;
        assert!(try_lock(&theirs, Lock::Exclusive)?);
        assert!(!lock_journal(&journal, Lock::Exclusive)?);
        let is_locked = std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(3 * LOCK_PAUSE);
                drop(theirs);
            });
            lock_journal(&journal, Lock::Shared)
        });
        assert!(is_locked?);
        assert!(!try_lock(&open()?, Lock::Exclusive)?);
        Ok(())
    }

    #[test]
    #[cfg(unix)]
    fn a_journal_without_a_name_is_not_locked() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("journal");
        let journal = File::create(&path)?;
        std::fs::remove_file(&path)?;
        assert!(!lock_journal(&journal, Lock::Exclusive)?);
        Ok(())
    }

    #[test]
    fn only_the_temporary_file_of_the_same_path_is_joined() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let temp = Temp::create(&path, 10, &SaveOptions::default(), &Unwatched).unwrap();
        let journal = || Locked::new(temp.journal().unwrap());
        let options = SaveOptions::default();
        let join = |name: &OsStr| Temp::join(&path, name, journal(), &options, &Unwatched);
        let joined = join(temp.name()).unwrap().unwrap();
        temp.write(b"0123456789", 0).unwrap();
        assert!(joined.is_unnamed() && joined.file().metadata().unwrap().len() == 10);
        let of_another = names::temp_name(OsStr::new("b"));
        std::fs::write(folder.path().join(&of_another), b"").unwrap();
        let of_nobody = names::temp_name(OsStr::new("a"));
        for name in [of_another, of_nobody, names::journal_name(OsStr::new("a"))] {
            assert!(join(&name).unwrap().is_none(), "{}", name.display());
        }
        let folder_of_that_name = names::temp_name(OsStr::new("a"));
        std::fs::create_dir(folder.path().join(&folder_of_that_name)).unwrap();
        assert!(join(&folder_of_that_name).is_err());
    }

    #[test]
    fn a_journal_that_cannot_be_opened_is_not_taken_for_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        assert!(
            Temp::journal_of(&path, Lock::Shared, &Unwatched)
                .unwrap()
                .is_none()
        );
        std::fs::create_dir(folder.path().join(names::journal_name(OsStr::new("a")))).unwrap();
        assert!(Temp::journal_of(&path, Lock::Shared, &Unwatched).is_err());
    }
}
