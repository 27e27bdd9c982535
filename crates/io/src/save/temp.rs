//! The file that is written before it gets its name.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;

use super::space;
use crate::disk::{
    self, Birth, Directory, DirectoryEntry, Kind, Lock, Locked, Opening, Unlinked, cut, is_replaced_by_copy,
    try_lock,
};
use crate::options::Existing;

const SUFFIX: &str = ".ingot-tmp";
/// Of a file that was replaced, where it had to be moved out of the way first.
const OLD_SUFFIX: &str = ".ingot-old";
const RANDOM: usize = 16;
/// Bytes of the target's name that stand in a temporary one. 100, so that the whole fits in the 143 bytes that
/// encrypting file systems leave of the usual 255.
const STEM: usize = 100;
/// Names that are tried. They are 64 random bits, so a second one is needed only when somebody plays tricks.
const TRIES: usize = 100;

/// A file in the target's directory that nobody sees, or under a name that says what it is.
///
/// It is locked until it gets the target's name or is dropped, and the system removes the lock however the process ends. A
/// temporary file without a lock is therefore one that was left behind.
pub(super) struct Temp<'p> {
    entry: &'p DirectoryEntry,
    file: Locked,
    /// `None` when it has no name yet, or has the target's.
    name: Option<OsString>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TempKind {
    /// It vanishes by itself when the process ends. Not every file system can.
    Unnamed,
    Named,
}

/// Why the new file did not get the target's name.
pub(super) enum Refused {
    /// An unnamed file cannot be named here; one that has a name has to be written.
    Link,
    /// The file system renames no file over another.
    Rename,
    Fault(io::Error),
}

impl<'p> Temp<'p> {
    pub(super) fn create(entry: &'p DirectoryEntry, birth: Birth, kind: TempKind) -> io::Result<Temp<'p>> {
        if kind == TempKind::Unnamed
            && let Some(file) = entry.directory.unnamed(birth)
        {
            lock(&file);
            return Ok(Temp {
                entry,
                file: Locked::new(file),
                name: None,
            });
        }
        let (file, name) = named(&entry.directory, &entry.name, birth)?;
        Ok(Temp {
            entry,
            file,
            name: Some(name),
        })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file the target's name, which takes it from the file that had it, if that may be.
    pub(super) fn publish(&mut self, existing: Existing) -> Result<(), Refused> {
        let directory = &self.entry.directory;
        let name = match self.name.take() {
            Some(name) => name,
            None => link(directory, &self.entry.name, &self.file)?,
        };
        let name = self.name.insert(name);
        take_name(self.entry, &self.file, name, existing)?;
        self.name = None;
        self.file.unlock();
        Ok(())
    }
}

/// Gives `file`, which has the `name`, that of the target.
pub(super) fn take_name(
    entry: &DirectoryEntry,
    file: &File,
    name: &OsStr,
    existing: Existing,
) -> Result<(), Refused> {
    match existing {
        Existing::Refuse => match entry.directory.rename_new(name, &entry.name) {
            Some(named) => named.map_err(Refused::Fault),
            None => rename(entry, file, name),
        },
        Existing::Replace => rename(entry, file, name),
    }
}

fn rename(entry: &DirectoryEntry, file: &File, name: &OsStr) -> Result<(), Refused> {
    let replaced = space::keep(entry, file);
    match entry.directory.rename(name, &entry.name, &old_name(&entry.name)) {
        Ok(()) => {
            if let Some(replaced) = replaced {
                space::release(replaced);
            }
            Ok(())
        }
        Err(fault) if is_replaced_by_copy(&fault) => Err(Refused::Rename),
        Err(fault) => Err(Refused::Fault(fault)),
    }
}

impl Drop for Temp<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = self.entry.directory.remove(name);
        }
    }
}

/// A file in `directory` that has no name and never gets one. `target` is the file that is being saved.
pub(super) fn scratch(directory: &Directory, target: &OsStr) -> io::Result<File> {
    if let Some(file) = directory.unnamed(Birth::Private) {
        return Ok(file);
    }
    let (file, name) = named(directory, target, Birth::Private)?;
    directory.remove(&name)?;
    file.try_clone()
}

/// Removes temporary files for `entry` that a process left behind. Whatever cannot be removed, stays; and so does all as
/// long as somebody has the notes open of those who fill it together, who may finish it without whoever began it.
pub(super) fn remove_stale(entry: &DirectoryEntry) {
    let Ok(names) = entry.directory.names() else {
        return;
    };
    let (mut stale, mut old) = (Vec::new(), Vec::new());
    for name in names {
        match what_is(&name, &entry.name) {
            Some(SUFFIX) => stale.push(name),
            Some(_) => old.push(name),
            None => {}
        }
    }
    for name in old {
        remove_old(entry, &name);
    }
    // By their zeros the notes come first.
    stale.sort();
    let notes = notes_name(&entry.name);
    for name in stale {
        let is_held = !remove_unlocked(&entry.directory, &name);
        if is_held && name == notes {
            return;
        }
    }
}

/// Removes what was replaced. It is the whole old file, so where nothing is in its place, it gets its name back.
fn remove_old(entry: &DirectoryEntry, name: &OsStr) {
    match entry.existing {
        Some(_) => drop(entry.directory.remove(name)),
        None => drop(entry.directory.rename_new(name, &entry.name)),
    }
}

/// Removes a file that nobody has the lock of. False when somebody has.
fn remove_unlocked(directory: &Directory, name: &OsStr) -> bool {
    let open = |opening| directory.file(name, opening);
    // NFS locks only what is open for writing; a copy of a read-only file is not open for it.
    let Ok(file) = open(Opening::Both).or_else(|_| open(Opening::Read)) else {
        return true;
    };
    if !disk::facts(&file).is_ok_and(|facts| facts.kind == Kind::File) {
        return true;
    }
    match try_lock(&file, Lock::Exclusive) {
        Ok(true) => drop(directory.remove(name)),
        Ok(false) => return false,
        Err(_) => {}
    }
    true
}

/// A new file with a temporary name, and the name.
pub(super) fn named(directory: &Directory, target: &OsStr, birth: Birth) -> io::Result<(Locked, OsString)> {
    for _ in 0..TRIES {
        let name = temp_name(target);
        let file = match directory.file(&name, Opening::New(birth)) {
            Err(fault) if fault.kind() == io::ErrorKind::AlreadyExists => continue,
            made => Locked::new(made?),
        };
        // Between creation and lock, another save may have taken the file for one left behind.
        if lock(&file) && disk::facts(&file).is_ok_and(|facts| facts.names > 0) {
            return Ok((file, name));
        }
        let _ = directory.remove(&name);
    }
    Err(disk::exists())
}

/// Locks `file`. False when somebody else has the lock; true also where there are no locks, since nobody can then
/// take one to remove the file.
fn lock(file: &File) -> bool {
    try_lock(file, Lock::Exclusive).unwrap_or(true)
}

/// Gives the unnamed `file` a temporary name.
fn link(directory: &Directory, target: &OsStr, file: &File) -> Result<OsString, Refused> {
    for _ in 0..TRIES {
        let name = temp_name(target);
        match directory.link(file, &name) {
            Ok(()) => return Ok(name),
            Err(Unlinked::Exists) => {}
            Err(Unlinked::Fault(fault)) => return Err(Refused::Fault(fault)),
            Err(Unlinked::Impossible) => return Err(Refused::Link),
        }
    }
    Err(Refused::Link)
}

/// `.{target}.{random}.ingot-tmp`
pub(super) fn temp_name(target: &OsStr) -> OsString {
    random_name(target, SUFFIX)
}

/// `.{target}.{random}.ingot-old`
fn old_name(target: &OsStr) -> OsString {
    random_name(target, OLD_SUFFIX)
}

fn random_name(target: &OsStr, suffix: &str) -> OsString {
    // The standard library seeds its hashers from the system's randomness. A name that comes twice, as after a fork,
    // costs one more try.
    let random = RandomState::new().build_hasher().finish();
    let mut name = temp_prefix(target);
    name.push(format!("{random:0RANDOM$x}{suffix}"));
    name
}

/// The one temporary name that is known without looking for it: of what those who fill a file together note. It looks
/// like the others, so that it is removed like them when it is left behind.
pub(super) fn notes_name(target: &OsStr) -> OsString {
    let mut name = temp_prefix(target);
    name.push(format!("{:0RANDOM$}{SUFFIX}", 0));
    name
}

/// What all names of such files for `target` begin with.
pub(super) fn temp_prefix(target: &OsStr) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(cut(target, STEM));
    prefix.push(".");
    prefix
}

/// Whether a temporary file for `target` may have this name.
pub(super) fn is_temp_of(name: &OsStr, target: &OsStr) -> bool {
    what_is(name, target) == Some(SUFFIX)
}

/// The suffix of a file beside `target` that has this name, where it is one of ours.
fn what_is(name: &OsStr, target: &OsStr) -> Option<&'static str> {
    let rest = name.as_encoded_bytes();
    let rest = rest.strip_prefix(temp_prefix(target).as_encoded_bytes())?;
    let (random, suffix) = rest.split_at_checked(RANDOM)?;
    let is_random = random.iter().all(u8::is_ascii_hexdigit);
    let ours = [SUFFIX, OLD_SUFFIX]
        .into_iter()
        .find(|ours| ours.as_bytes() == suffix);
    ours.filter(|_| is_random)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::save::draft::find;
    use crate::watch::Unwatched;

    #[test]
    fn names_are_told_apart_from_those_of_other_targets() {
        let is_of = |name: &str, target: &str| is_temp_of(OsStr::new(name), OsStr::new(target));
        let name = temp_name(OsStr::new("a"));
        assert!(is_temp_of(&name, OsStr::new("a")));
        assert!(!is_temp_of(&name, OsStr::new("b")));
        assert!(!is_of(".a.b.0123456789abcdef.ingot-tmp", "a"));
        assert!(!is_of(".a..ingot-tmp", "a"));
        assert!(!is_of("a", "a"));
        assert!(is_temp_of(&notes_name(OsStr::new("a")), OsStr::new("a")));
    }

    #[test]
    fn names_fit_the_file_system_and_stay_text() {
        let long = "ä".repeat(127);
        let name = temp_name(OsStr::new(&long));
        assert!(name.len() <= 143, "{}", name.len());
        assert!(name.to_str().is_some());
        assert!(is_temp_of(&name, OsStr::new(&long)));
    }

    /// Removes what was left behind for `file` in a folder: what is there then.
    fn after_removal(folder: &Path) -> Vec<String> {
        remove_stale(&find(&folder.join("file"), &Unwatched).unwrap());
        let names = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = names
            .map(|name| name.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn what_was_replaced_gets_its_name_back_where_nothing_has_it_and_goes_where_something_has() {
        let folder = tempfile::tempdir().unwrap();
        let replace =
            |bytes: &str| std::fs::write(folder.path().join(old_name("file".as_ref())), bytes).unwrap();
        for bytes in ["old", "older"] {
            replace(bytes);
            assert_eq!(after_removal(folder.path()), ["file"]);
            assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"old");
        }
    }

    #[test]
    fn what_was_left_behind_goes_but_what_is_held_and_nothing_while_its_notes_are() {
        let folder = tempfile::tempdir().unwrap();
        let make = |number: u64| {
            let name = format!(".file.{number:016x}{SUFFIX}");
            (File::create(folder.path().join(&name)).unwrap(), name)
        };
        let (held, held_name) = make(1);
        assert!(lock(&held));
        let left = || drop(make(2));
        left();
        assert_eq!(after_removal(folder.path()), [&held_name[..]]);
        let (notes, notes_are) = make(0);
        assert_eq!(notes_are, notes_name("file".as_ref()).into_string().unwrap());
        assert!(lock(&notes));
        left();
        assert_eq!(after_removal(folder.path()).len(), 3);
        drop(notes);
        assert_eq!(after_removal(folder.path()), [&held_name[..]]);
        drop(held);
        assert_eq!(after_removal(folder.path()), [""; 0]);
    }
}
