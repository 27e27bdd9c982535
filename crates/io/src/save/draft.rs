//! A file that is filled before it gets its name, by one process or several.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::flush::flush;
use super::space;
use super::target::{self, explain, find};
use super::temp::{self, Refused, has_name};
use crate::disk::{self, Attributes, DirectoryEntry, Lock, Locked, Opening, Size, try_lock, unlock};
use crate::error::{EditError, Error, Step, Stop, step};
use crate::options::{Durability, Existing, SaveOptions};
use crate::watch::Watch;

/// How often, and after what time, a lock is asked for again that somebody has for a moment.
const LOCK_TRIES: usize = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// A temporary file for a path, and beside it a file for notes of those who fill it together.
pub(crate) struct Draft {
    pub(super) path: PathBuf,
    pub(super) entry: DirectoryEntry,
    pub(super) attributes: Option<Attributes>,
    pub(super) file: Locked,
    pub(super) name: OsString,
    /// `None` where it is filled alone.
    pub(super) notes: Option<Locked>,
    pub(super) nbytes: u64,
}

impl Draft {
    /// Makes the temporary file, of `nbytes`, and the notes.
    pub(crate) fn create(
        path: &Path,
        nbytes: u64,
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<Draft, Error> {
        let fault = |stop: Stop| stop.about(path, nbytes);
        let entry = find(path, watch)?;
        target::check(&entry, path, options)?;
        temp::remove_stale(&entry);
        let made = locked_notes(&entry, Opening::NewNotes, Company::Others);
        let Some(notes) = made.step(step::CREATE).map_err(fault)? else {
            return Err(busy(&entry, &temp::notes_name(&entry.name), path));
        };
        let draft = Draft::begin(path, entry, notes, nbytes).map_err(fault)?;
        if let Err(stop) = space::reserve(&draft.file, nbytes, Size::Scattered, watch) {
            draft.discard();
            return Err(fault(stop));
        }
        Ok(draft)
    }

    fn begin(path: &Path, entry: DirectoryEntry, notes: Locked, nbytes: u64) -> Result<Draft, Stop> {
        let made = || -> io::Result<(Option<Attributes>, Locked, OsString)> {
            let (attributes, birth) = entry.inherited()?;
            let (file, name) = temp::named(&entry.directory, &entry.name, birth)?;
            if let Some(attributes) = &attributes {
                attributes.begin(&file)?;
            }
            Ok((attributes, file, name))
        };
        match made() {
            Ok((attributes, file, name)) => Ok(Draft {
                path: path.to_owned(),
                entry,
                attributes,
                file,
                name,
                notes: Some(notes),
                nbytes,
            }),
            Err(fault) => {
                remove_if(&entry, &temp::notes_name(&entry.name), &notes);
                Err(fault).step(step::CREATE)
            }
        }
    }

    /// The notes that somebody made beside `path`, open for appending. `None` when there are none, or others keep them
    /// from being locked so.
    pub(crate) fn notes_of(
        path: &Path,
        company: Company,
        watch: &dyn Watch,
    ) -> Result<Option<Locked>, Error> {
        let entry = find(path, watch)?;
        locked_notes(&entry, Opening::Notes, company)
            .step(step::JOURNAL)
            .map_err(|stop| stop.about(path, 0))
    }

    /// The temporary file of this `name`, which somebody else made. `None` when it is gone, or no name that anybody would
    /// have given it.
    pub(crate) fn join(
        path: &Path,
        name: &OsStr,
        notes: Locked,
        watch: &dyn Watch,
    ) -> Result<Option<Draft>, Error> {
        let entry = find(path, watch)?;
        if !temp::is_temp_of(name, &entry.name) || name == temp::notes_name(&entry.name) {
            return Ok(None);
        }
        let opened = || -> io::Result<(Locked, Option<Attributes>)> {
            let file = Locked::new(entry.directory.file(name, Opening::Both)?);
            Ok((file, entry.inherited()?.0))
        };
        let (file, attributes) = match opened() {
            Err(fault) if fault.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.step(step::JOURNAL).map_err(|stop| stop.about(path, 0))?,
        };
        let nbytes = disk::facts(&file).map_or(0, |facts| facts.nbytes);
        Ok(Some(Draft {
            path: path.to_owned(),
            entry,
            attributes,
            file,
            name: name.to_owned(),
            notes: Some(notes),
            nbytes,
        }))
    }

    /// Whether whoever made the temporary file, or took it over, still has it open. The lock that says so is undone by the
    /// system however a process ends, and belongs to no number that another process may get.
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

    /// Whether it still has its temporary name, and not that of its path.
    pub(crate) fn is_unnamed(&self) -> bool {
        has_name(&self.entry.directory, &self.name, &self.file)
    }

    /// Makes the temporary file this one's, if it is nobody's. Says whether it did.
    pub(crate) fn own(&self) -> Result<bool, Error> {
        try_lock(&self.file, Lock::Exclusive).map_err(|fault| self.lock_fault(fault))
    }

    /// Lets others open the notes too, after [`Company::Alone`]. Says whether they are still there.
    pub(crate) fn admit(&self) -> Result<bool, Error> {
        let notes = self.notes()?;
        // Without locks, nothing is ever cleaned up either.
        let _ = disk::share_lock(&notes);
        has_any_name(&notes).map_err(|fault| journal_fault(&self.path, fault))
    }

    /// Where there are no locks, nobody can tell whether anybody is there.
    fn lock_fault(&self, source: io::Error) -> Error {
        let step = step::OWNER;
        Stop::Fault { step, source }.about(&self.path, self.nbytes)
    }

    /// Says how long the file is going to be, where that was not known when it was made.
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
        self.entry.directory.path(&self.name)
    }

    /// The name of the temporary file.
    pub(crate) fn name(&self) -> &OsStr {
        &self.name
    }

    /// Another handle of the notes.
    pub(crate) fn notes(&self) -> Result<File, Error> {
        let notes = self.notes.as_ref().ok_or(io::ErrorKind::NotFound);
        notes
            .map_err(io::Error::from)
            .and_then(|notes| notes.try_clone())
            .map_err(|fault| self.write_fault(fault))
    }

    /// Writes `bytes` at `position`.
    pub(crate) fn write(&self, bytes: &[u8], position: u64) -> Result<(), Error> {
        crate::disk::write_all_at(&self.file, bytes, position).map_err(|fault| self.write_fault(fault))
    }

    /// `source` kept a part of the file from being written.
    pub(crate) fn write_fault(&self, source: io::Error) -> Error {
        Stop::of(step::WRITE, source).about(&self.path, self.nbytes)
    }

    /// Gives the file the name of its path.
    pub(crate) fn publish(
        &self,
        existing: Existing,
        durable: Durability,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        self.try_publish(existing, durable, watch)
            .map_err(|stop| explain(&self.path, self.nbytes, existing, stop))
    }

    pub(super) fn try_publish(
        &self,
        existing: Existing,
        durable: Durability,
        watch: &dyn Watch,
    ) -> Result<(), Stop> {
        if let Some(attributes) = &self.attributes {
            attributes.apply(&self.file).step(step::ATTRIBUTES)?;
        }
        if durable == Durability::Durable {
            flush(&self.file, watch)?;
        }
        if watch.interrupted() {
            return Err(Stop::Interrupted);
        }
        self.name_it(existing).step(step::RENAME)?;
        self.file.unlock();
        self.remove_notes();
        match durable {
            Durability::Durable => self.entry.directory.flush(&self.file).step(step::FLUSH_DIRECTORY),
            Durability::Fast => Ok(()),
        }
    }

    fn name_it(&self, existing: Existing) -> io::Result<()> {
        match temp::take_name(&self.entry, &self.file, &self.name, existing) {
            Ok(()) => Ok(()),
            Err(Refused::Fault(fault)) => Err(fault),
            Err(Refused::Link | Refused::Rename) => Err(disk::unsupported()),
        }
    }

    /// Removes what was made, as far as it still has the name it had.
    pub(crate) fn discard(&self) {
        remove_if(&self.entry, &self.name, &self.file);
        self.remove_notes();
    }

    fn remove_notes(&self) {
        if let Some(notes) = &self.notes {
            remove_if(&self.entry, &temp::notes_name(&self.entry.name), notes);
        }
    }
}

/// `source` kept the notes of this file from being read or written.
pub(crate) fn journal_fault(path: &Path, source: io::Error) -> Error {
    let step = step::JOURNAL;
    Stop::Fault { step, source }.about(path, 0)
}

/// That another writer has locked the file `name` beside `path`.
pub(super) fn busy(entry: &DirectoryEntry, name: &OsStr, path: &Path) -> Error {
    let locked = entry.directory.file(name, Opening::Read);
    let holder = locked.ok().and_then(|file| disk::lock_holder(&file));
    EditError::Busy { holder }.about(path)
}

/// Who else may have the notes open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Company {
    /// All who fill the file.
    Others,
    /// Nobody: whoever had a part in filling the file is gone.
    Alone,
}

/// The notes; `None` where there are none to be opened, or some where new ones are to be made, or others keep them from
/// being locked. A lock that all share who have them open keeps them from being taken for ones that were left behind.
fn locked_notes(entry: &DirectoryEntry, opening: Opening, company: Company) -> io::Result<Option<Locked>> {
    let none = match opening {
        Opening::NewNotes => io::ErrorKind::AlreadyExists,
        _ => io::ErrorKind::NotFound,
    };
    let file = match entry.directory.file(&temp::notes_name(&entry.name), opening) {
        Err(fault) if fault.kind() == none => return Ok(None),
        opened => opened?,
    };
    let file = Locked::new(file);
    Ok(lock_notes(&file, company)?.then_some(file))
}

/// Locks the notes. False when others keep them from it, and when `file` has no name any more: a save that cleans up may
/// have been quicker.
fn lock_notes(file: &File, company: Company) -> io::Result<bool> {
    let (lock, tries) = match company {
        // Whoever is alone with them is so for a moment only.
        Company::Others => (Lock::Shared, LOCK_TRIES),
        Company::Alone => (Lock::Exclusive, 1),
    };
    for left in (0..tries).rev() {
        match try_lock(file, lock) {
            Ok(false) if left == 0 => return Ok(false),
            Ok(false) => std::thread::sleep(LOCK_PAUSE),
            // Without locks, nothing is ever cleaned up either.
            _ => break,
        }
    }
    has_any_name(file)
}

fn has_any_name(file: &File) -> io::Result<bool> {
    Ok(disk::facts(file)?.names > 0)
}

/// Removes `name` if `file` has it.
fn remove_if(entry: &DirectoryEntry, name: &OsStr, file: &File) {
    if has_name(&entry.directory, name, file) {
        let _ = entry.directory.retire(name, &temp::temp_name(&entry.name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::Unwatched;

    #[test]
    fn a_lock_that_somebody_has_for_a_moment_is_waited_for() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("notes");
        let notes = File::create(&path)?;
        let open = || File::options().write(true).open(&path);
        let theirs = open()?;
        assert!(try_lock(&theirs, Lock::Exclusive)?);
        assert!(!lock_notes(&notes, Company::Alone)?);
        let is_locked = std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(3 * LOCK_PAUSE);
                drop(theirs);
            });
            lock_notes(&notes, Company::Others)
        });
        assert!(is_locked?);
        assert!(!try_lock(&open()?, Lock::Exclusive)?);
        Ok(())
    }

    #[test]
    #[cfg(unix)]
    fn notes_without_a_name_are_locked_by_nobody() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("notes");
        let notes = File::create(&path)?;
        std::fs::remove_file(&path)?;
        assert!(!lock_notes(&notes, Company::Alone)?);
        Ok(())
    }

    #[test]
    fn only_the_temporary_file_of_the_same_path_is_joined() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let draft = Draft::create(&path, 10, &SaveOptions::default(), &Unwatched).unwrap();
        let notes = || Locked::new(draft.notes().unwrap());
        let join = |name: &OsStr| Draft::join(&path, name, notes(), &Unwatched);
        let joined = join(draft.name()).unwrap().unwrap();
        draft.write(b"0123456789", 0).unwrap();
        assert!(joined.is_unnamed() && joined.file().metadata().unwrap().len() == 10);
        let of_another = temp::temp_name(OsStr::new("b"));
        std::fs::write(folder.path().join(&of_another), b"").unwrap();
        let of_nobody = temp::temp_name(OsStr::new("a"));
        for name in [of_another, of_nobody, temp::notes_name(OsStr::new("a"))] {
            assert!(join(&name).unwrap().is_none(), "{}", name.display());
        }
        let folder_of_that_name = temp::temp_name(OsStr::new("a"));
        std::fs::create_dir(folder.path().join(&folder_of_that_name)).unwrap();
        assert!(join(&folder_of_that_name).is_err());
    }

    #[test]
    fn notes_that_cannot_be_opened_are_not_taken_for_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        assert!(
            Draft::notes_of(&path, Company::Others, &Unwatched)
                .unwrap()
                .is_none()
        );
        std::fs::create_dir(folder.path().join(temp::notes_name(OsStr::new("a")))).unwrap();
        assert!(Draft::notes_of(&path, Company::Others, &Unwatched).is_err());
    }

    #[test]
    fn a_draft_has_its_own_name_until_it_gets_that_of_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut draft = Draft::create(&path, 10, &SaveOptions::default(), &Unwatched).unwrap();
        assert!(draft.is_unnamed());
        draft.write(b"0123456789", 0).unwrap();
        std::fs::write(&path, "old").unwrap();
        let refused = draft.publish(Existing::Refuse, Durability::Fast, &Unwatched);
        assert_eq!(
            refused.unwrap_err().to_string(),
            target::is_there(&path).to_string()
        );
        assert!(draft.is_unnamed());
        draft.grow_to(20);
        draft
            .publish(Existing::Replace, Durability::Fast, &Unwatched)
            .unwrap();
        assert!(!draft.is_unnamed());
        assert_eq!(std::fs::read(&path).unwrap(), b"0123456789");
        // It has lost the name that it is published from.
        let gone = draft
            .publish(Existing::Replace, Durability::Fast, &Unwatched)
            .unwrap_err();
        assert_ne!(gone.to_string(), target::is_there(&path).to_string());
        assert!(gone.to_string().contains("20 bytes"), "{gone}");
    }
}
