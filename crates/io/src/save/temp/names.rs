//! Names of temporary files, and the removal of abandoned ones.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;

use xxhash_rust::xxh3::xxh3_64;

use crate::disk::{
    self, Birth, Directory, DirectoryEntry, Kind, Lock, Locked, Opening, Unlinked, cut, try_lock,
};

const SUFFIX: &str = ".ingot-tmp";
/// The name of a replaced file that had to be moved away first.
const OLD_SUFFIX: &str = ".ingot-old";
const DIGITS: usize = 16;
/// Bytes of the target's name in a temporary name. 80, so that the whole, with a hash of the rest, fits in the 143 bytes
/// that encrypting file systems leave of the usual 255.
const STEM: usize = 80;
/// Numbers of temporary names that are tried. Each save takes the lowest free number, so that the next save finds abandoned
/// files without listing the directory, which may have any number of files.
const TRIES: u64 = 100;
/// The numbers that each save looks up. Higher ones are looked up only if each of them exists: that many simultaneous
/// saves to one target are rare.
const LOOKED_UP: u64 = 8;

/// Create a file in `directory` that never gets a name. `target` is the file that is being saved.
pub(in crate::save) fn scratch(directory: &Directory, target: &OsStr) -> io::Result<File> {
    if let Some(file) = directory.unnamed(Birth::Private) {
        return Ok(file);
    }
    let (file, name) = named(directory, target, Birth::Private)?;
    directory.remove(&name)?;
    file.try_clone()
}

/// Remove abandoned temporary files for `entry`. Errors are ignored. All of them stay while another process has the journal
/// open: it may finish the file.
pub(in crate::save) fn remove_stale(entry: &DirectoryEntry) {
    remove_old(entry);
    for number in 0..TRIES {
        match remove_unlocked(&entry.directory, &numbered(&entry.name, number, SUFFIX)) {
            // The journal.
            Left::Held if number == 0 => return,
            Left::Absent if number >= LOOKED_UP => return,
            _ => {}
        }
    }
}

/// Remove replaced files. Each is the whole old file, so it gets its name back if no file has that.
fn remove_old(entry: &DirectoryEntry) {
    // Saves at the same time remove them in any order. Only Windows ever makes one.
    let looked_up = if cfg!(windows) { LOOKED_UP } else { 1 };
    let names = (1..=TRIES).map(|number| {
        let name = numbered(&entry.name, number, OLD_SUFFIX);
        let is_there = !is_free(&entry.directory, &name);
        (number, name, is_there)
    });
    let there: Vec<OsString> = names
        .take_while(|(number, _, is_there)| *is_there || *number < looked_up)
        .filter_map(|(_, name, is_there)| is_there.then_some(name))
        .collect();
    // The last is the newest.
    for name in there.iter().rev() {
        match entry.existing {
            Some(_) => drop(entry.directory.remove(name)),
            None => drop(entry.directory.rename_new(name, &entry.name)),
        }
    }
}

/// Return a name for the file that is being replaced.
pub(super) fn free_old_name(entry: &DirectoryEntry) -> OsString {
    let mut names = (1..=TRIES).map(|number| numbered(&entry.name, number, OLD_SUFFIX));
    let free = names.find(|name| is_free(&entry.directory, name));
    free.unwrap_or_else(|| random_name(&entry.name, OLD_SUFFIX))
}

fn is_free(directory: &Directory, name: &OsStr) -> bool {
    matches!(directory.facts(name), Ok(None))
}

/// The state of a temporary name.
enum Left {
    Absent,
    /// A file that another process has locked.
    Held,
    /// A file that was removed, or cannot be.
    Behind,
}

/// Remove a file that no process has locked.
fn remove_unlocked(directory: &Directory, name: &OsStr) -> Left {
    let open = |opening| directory.file(name, opening);
    // NFS locks only files that are open for writing; a copy of a read-only file cannot be opened for writing.
    let file = match open(Opening::Both) {
        Err(fault) if fault.kind() == io::ErrorKind::NotFound => return Left::Absent,
        opened => opened.or_else(|_| open(Opening::Read)),
    };
    let Ok(file) = file.map(Locked::new) else {
        return Left::Behind;
    };
    if !disk::facts(&file).is_ok_and(|facts| facts.kind == Kind::File) {
        return Left::Behind;
    }
    match try_lock(&file, Lock::Exclusive) {
        // It may have been renamed to the target, and another save may have this name now.
        Ok(true) if has_name(directory, name, &file) => drop(directory.remove(name)),
        Ok(false) => return Left::Held,
        _ => {}
    }
    Left::Behind
}

/// Remove `name` if it leads to `file`.
pub(super) fn remove_if(entry: &DirectoryEntry, name: &OsStr, file: &File) {
    if has_name(&entry.directory, name, file) {
        let _ = entry.directory.retire(name, &temp_name(&entry.name));
    }
}

/// Return whether `name` leads to `file`.
pub(super) fn has_name(directory: &Directory, name: &OsStr, file: &File) -> bool {
    matches!(
        (directory.facts(name), disk::facts(file)),
        (Ok(Some(named)), Ok(ours)) if named.identity == ours.identity
    )
}

/// A new file with a temporary name, and the name.
pub(super) fn named(directory: &Directory, target: &OsStr, birth: Birth) -> io::Result<(Locked, OsString)> {
    for name in temp_names(target) {
        let file = match directory.file(&name, Opening::New(birth)) {
            Err(fault) if fault.kind() == io::ErrorKind::AlreadyExists => continue,
            made => Locked::new(made?),
        };
        // Between creation and lock, another save may have taken the file for an abandoned one, and removed its name.
        let is_locked = lock(&file);
        let has_name = disk::facts(&file).map(|facts| facts.names > 0);
        if is_locked && matches!(has_name, Ok(true)) {
            return Ok((file, name));
        }
        if has_name.unwrap_or(true) {
            let _ = directory.remove(&name);
        }
    }
    Err(disk::exists())
}

/// Lock `file`. Return false if another process has the lock, and true if there are no locks, since no process can then
/// take one to remove the file.
pub(super) fn lock(file: &File) -> bool {
    try_lock(file, Lock::Exclusive).unwrap_or(true)
}

/// Link the unnamed `file` to a temporary name.
pub(super) fn link(entry: &DirectoryEntry, file: &File) -> Result<OsString, Unlinked> {
    for name in temp_names(&entry.name) {
        match entry.directory.link(file, &name) {
            Ok(()) => return Ok(name),
            Err(Unlinked::Exists) => {}
            Err(unlinked) => return Err(unlinked),
        }
    }
    Err(Unlinked::Exists)
}

/// The names to try for a temporary file: `.{target}.{number}.ingot-tmp`.
fn temp_names(target: &OsStr) -> impl Iterator<Item = OsString> {
    let several = (1..=TRIES).map(|number| numbered(target, number, SUFFIX));
    // The last name is random, in case all numbered names are taken.
    several.chain(std::iter::once_with(|| temp_name(target)))
}

/// A temporary name that no other file has.
pub(super) fn temp_name(target: &OsStr) -> OsString {
    random_name(target, SUFFIX)
}

fn random_name(target: &OsStr, suffix: &str) -> OsString {
    // The standard library seeds its hashers from the system's randomness.
    numbered(target, RandomState::new().build_hasher().finish(), suffix)
}

fn numbered(target: &OsStr, number: u64, suffix: &str) -> OsString {
    let mut name = temp_prefix(target);
    name.push(format!("{number:0DIGITS$x}{suffix}"));
    name
}

/// The name of the journal. It has the form of a temporary name, so that an abandoned journal is removed too.
pub(super) fn journal_name(target: &OsStr) -> OsString {
    numbered(target, 0, SUFFIX)
}

/// The beginning of the names of all such files for `target`.
pub(super) fn temp_prefix(target: &OsStr) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(cut(target, STEM));
    if target.len() > STEM {
        // Others may begin with the same characters.
        prefix.push(format!("-{:016x}", xxh3_64(target.as_encoded_bytes())));
    }
    prefix.push(".");
    prefix
}

/// Return whether a temporary file for `target` may have this name.
pub(super) fn is_temp_of(name: &OsStr, target: &OsStr) -> bool {
    let rest = name.as_encoded_bytes();
    let rest = rest.strip_prefix(temp_prefix(target).as_encoded_bytes());
    let parts = rest.and_then(|rest| rest.split_at_checked(DIGITS));
    parts.is_some_and(|(number, suffix)| {
        number.iter().all(u8::is_ascii_hexdigit) && suffix == SUFFIX.as_bytes()
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::save::target::find;
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
        assert!(is_temp_of(&journal_name(OsStr::new("a")), OsStr::new("a")));
    }

    #[test]
    fn names_fit_the_file_system_and_stay_text() {
        let long = "ä".repeat(127);
        let name = temp_name(OsStr::new(&long));
        assert!(name.len() <= 143, "{}", name.len());
        assert!(name.to_str().is_some());
        assert!(is_temp_of(&name, OsStr::new(&long)));
    }

    #[test]
    fn a_long_name_shares_no_temporary_names_with_another() {
        let long = |end: &str| OsString::from("a".repeat(120) + end);
        assert!(!is_temp_of(&temp_name(&long("b")), &long("c")));
    }

    #[test]
    fn files_that_many_saves_left_are_all_removed() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let target = OsStr::new("file");
        let left: Vec<_> = (0..20)
            .map(|_| named(&directory, target, Birth::Usual).unwrap())
            .collect();
        assert_eq!(after_removal(folder.path()).len(), 20);
        drop(left);
        assert_eq!(after_removal(folder.path()), [""; 0]);
    }

    // On Windows a file keeps its name until it is closed.
    #[cfg(unix)]
    #[test]
    fn a_file_under_the_name_of_one_that_was_just_published_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let (first, name) = named(&directory, OsStr::new("file"), Birth::Usual).unwrap();
        let seen = first.try_clone().unwrap();
        directory.remove(&name).unwrap();
        drop(first);
        let (_second, same) = named(&directory, OsStr::new("file"), Birth::Usual).unwrap();
        assert_eq!(same, name);
        assert!(!has_name(&directory, &name, &seen));
    }

    /// Remove abandoned files for `file` in a folder, and return the names of the others.
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
        let replace = |bytes: &str| {
            std::fs::write(
                folder.path().join(numbered("file".as_ref(), 1, OLD_SUFFIX)),
                bytes,
            )
            .unwrap()
        };
        for bytes in ["old", "older"] {
            replace(bytes);
            assert_eq!(after_removal(folder.path()), ["file"]);
            assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"old");
        }
    }

    #[cfg(windows)]
    #[test]
    fn a_replaced_file_is_removed_although_lower_numbers_are_free() {
        let folder = tempfile::tempdir().unwrap();
        for name in [OsString::from("file"), numbered("file".as_ref(), 3, OLD_SUFFIX)] {
            std::fs::write(folder.path().join(name), b"").unwrap();
        }
        assert_eq!(after_removal(folder.path()), ["file"]);
    }

    #[test]
    fn what_was_left_behind_goes_but_what_is_held_and_nothing_while_its_journal_is() {
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
        let (journal, journal_is) = make(0);
        assert_eq!(journal_is, journal_name("file".as_ref()).into_string().unwrap());
        assert!(lock(&journal));
        left();
        assert_eq!(after_removal(folder.path()).len(), 3);
        drop(journal);
        assert_eq!(after_removal(folder.path()), [&held_name[..]]);
        drop(held);
        assert_eq!(after_removal(folder.path()), [""; 0]);
    }
}
