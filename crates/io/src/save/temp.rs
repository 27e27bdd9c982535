//! The file that is written before it gets its name.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

#[cfg(target_os = "linux")]
use rustix::fs::RenameFlags;
use rustix::fs::{self, AtFlags, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use super::resolved::{Directory, DirectoryEntry};
use super::space;
use crate::options::Existing;

const SUFFIX: &[u8] = b".ingot-tmp";
const RANDOM: usize = 16;
/// Bytes of the target's name that stand in a temporary one. 100, so that the whole fits in the 143 bytes that
/// encrypting file systems leave of the usual 255.
const STEM: usize = 100;
/// Names that are tried. They are 64 random bits, so a second one is needed only when somebody plays tricks.
const TRIES: usize = 100;

/// A file in the target's directory that nobody sees, or under a name that says what it is.
///
/// It is locked (`flock`) as long as it is open, which the kernel undoes however the process ends. A temporary file
/// without a lock is therefore one that was left behind.
pub(super) struct Temp<'p> {
    entry: &'p DirectoryEntry,
    file: File,
    /// `None` when it has no name yet, or has the target's.
    name: Option<OsString>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TempKind {
    /// `O_TMPFILE`: vanishes by itself when the process ends. Not every file system can.
    Unnamed,
    Named,
}

/// Why the new file did not get the target's name.
pub(super) enum Refused {
    /// An unnamed file cannot be named here; a named one has to be written.
    Link,
    /// The file system renames no file over another.
    Rename,
    Fault(io::Error),
}

impl<'p> Temp<'p> {
    /// `mode` is cut by the umask, as for every new file.
    pub(super) fn create(entry: &'p DirectoryEntry, mode: Mode, kind: TempKind) -> io::Result<Temp<'p>> {
        if kind == TempKind::Unnamed
            && let Some(file) = unnamed(&entry.directory, mode)
        {
            lock(&file);
            return Ok(Temp {
                entry,
                file,
                name: None,
            });
        }
        let (file, name) = named(&entry.directory, &entry.name, mode)?;
        Ok(Temp {
            entry,
            file,
            name: Some(name),
        })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn kind(&self) -> TempKind {
        match self.name {
            None => TempKind::Unnamed,
            Some(_) => TempKind::Named,
        }
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
        Existing::Refuse => match name_new(entry, name) {
            Some(named) => named.map_err(Refused::Fault),
            None => rename(entry, file, name),
        },
        Existing::Replace => rename(entry, file, name),
    }
}

fn rename(entry: &DirectoryEntry, file: &File, name: &OsStr) -> Result<(), Refused> {
    let directory = &entry.directory;
    let replaced = space::keep(entry, file);
    match retry_on_intr(|| fs::renameat(directory, name, directory, &*entry.name)) {
        Ok(()) => {
            if let Some(replaced) = replaced {
                space::release(replaced);
            }
            Ok(())
        }
        Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::XDEV) => Err(Refused::Rename),
        Err(fault) => Err(Refused::Fault(fault.into())),
    }
}

impl Drop for Temp<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = fs::unlinkat(&self.entry.directory, &**name, AtFlags::empty());
        }
    }
}

/// Gives the file `name` the target's name, where nothing has that. `None` where only a rename can that replaces what
/// has it, since the file system has no links.
fn name_new(entry: &DirectoryEntry, name: &OsStr) -> Option<io::Result<()>> {
    let directory = &entry.directory;
    // Unlike a plain rename, a link replaces nothing that was made in the meantime.
    match fs::linkat(directory, name, directory, &*entry.name, AtFlags::empty()) {
        Ok(()) => {
            // The file has its name. Where it keeps the other one too, the next save takes that away.
            let _ = fs::unlinkat(directory, name, AtFlags::empty());
            Some(Ok(()))
        }
        Err(Errno::EXIST) => Some(Err(Errno::EXIST.into())),
        Err(_) => rename_new(entry, name),
    }
}

#[cfg(target_os = "linux")]
fn rename_new(entry: &DirectoryEntry, name: &OsStr) -> Option<io::Result<()>> {
    let directory = &entry.directory;
    match fs::renameat_with(directory, name, directory, &*entry.name, RenameFlags::NOREPLACE) {
        Ok(()) => Some(Ok(())),
        Err(Errno::EXIST) => Some(Err(Errno::EXIST.into())),
        Err(_) => None,
    }
}

#[cfg(not(target_os = "linux"))]
fn rename_new(_: &DirectoryEntry, _: &OsStr) -> Option<io::Result<()>> {
    None
}

/// A file in `directory` that has no name and never gets one. `target` is the file that is being saved.
pub(super) fn scratch(directory: &Directory, target: &OsStr) -> io::Result<File> {
    let mode = Mode::from_raw_mode(0o600);
    if let Some(file) = unnamed(directory, mode) {
        return Ok(file);
    }
    let (file, name) = named(directory, target, mode)?;
    fs::unlinkat(directory, &*name, AtFlags::empty())?;
    Ok(file)
}

/// Removes temporary files for `entry` that a process left behind. Whatever cannot be removed, stays; and so does all as
/// long as somebody has the notes open of those who fill it together, who may finish it without whoever began it.
pub(super) fn remove_stale(entry: &DirectoryEntry) {
    let Ok(entries) = Dir::read_from(&entry.directory) else {
        return;
    };
    let names = entries.flatten().map(|entry| entry.file_name().to_owned());
    let mut stale: Vec<_> = names
        .filter(|name| is_temp_of(name.to_bytes(), &entry.name))
        .collect();
    // By their zeros the notes come first.
    stale.sort();
    let notes = notes_name(&entry.name);
    for name in stale {
        let name = OsStr::from_bytes(name.to_bytes());
        let is_held = !remove_unlocked(&entry.directory, name);
        if is_held && name == notes {
            return;
        }
    }
}

/// Removes a file that nobody has the lock of. False when somebody has.
fn remove_unlocked(directory: &Directory, name: &OsStr) -> bool {
    // In a directory that others may write to, the name may be a link or a pipe.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let open = |access| directory.file(name, flags | access, Mode::empty());
    // NFS locks only what is open for writing; a copy of a read-only file is not open for it.
    let Ok(fd) = open(OFlags::RDWR).or_else(|_| open(OFlags::RDONLY)) else {
        return true;
    };
    let is_file =
        fs::fstat(&fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
    if !is_file {
        return true;
    }
    match fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => drop(fs::unlinkat(directory, name, AtFlags::empty())),
        Err(Errno::WOULDBLOCK) => return false,
        Err(_) => {}
    }
    true
}

#[cfg(target_os = "linux")]
fn unnamed(directory: &Directory, mode: Mode) -> Option<File> {
    // Whatever the reason that there is none, creating a named file finds it too, or works.
    let made = directory.file(".".as_ref(), OFlags::TMPFILE | OFlags::RDWR, mode);
    let file = made.ok()?;
    // Before Linux 6.1, the umask is forgotten where a file system has no ACLs. A mode that nothing was cut from is
    // rare enough to always get it from a named file.
    let cut = fs::fstat(&file).ok()?.st_mode & 0o777;
    (cut != 0o666).then_some(file)
}

#[cfg(not(target_os = "linux"))]
fn unnamed(_: &Directory, _: Mode) -> Option<File> {
    None
}

/// A new file with a temporary name, and the name.
pub(super) fn named(directory: &Directory, target: &OsStr, mode: Mode) -> io::Result<(File, OsString)> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    for _ in 0..TRIES {
        let name = temp_name(target);
        let file = match directory.file(&name, flags, mode) {
            Err(Errno::EXIST) => continue,
            made => made?,
        };
        // Between creation and lock, another save may have taken the file for one left behind.
        if lock(&file) && fs::fstat(&file).is_ok_and(|stat| stat.st_nlink > 0) {
            return Ok((file, name));
        }
        let _ = fs::unlinkat(directory, &*name, AtFlags::empty());
    }
    Err(Errno::EXIST.into())
}

/// Locks `file`. False when somebody else has the lock; true also where there are no locks, since nobody can then
/// take one to remove the file.
fn lock(file: &File) -> bool {
    fs::flock(file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK)
}

/// Gives the unnamed `file` a temporary name.
#[cfg(target_os = "linux")]
fn link(directory: &Directory, target: &OsStr, file: &File) -> Result<OsString, Refused> {
    use std::os::fd::AsRawFd;
    // Linking the file itself needs a privilege; linking what /proc says it is does not.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    for _ in 0..TRIES {
        let name = temp_name(target);
        match fs::linkat(fs::CWD, &*path, directory, &*name, AtFlags::SYMLINK_FOLLOW) {
            Ok(()) => return Ok(name),
            Err(Errno::EXIST) => {}
            Err(fault @ (Errno::NOSPC | Errno::DQUOT | Errno::IO)) => {
                return Err(Refused::Fault(fault.into()));
            }
            // No /proc, a sandbox, a file system that only pretends.
            Err(_) => return Err(Refused::Link),
        }
    }
    Err(Refused::Link)
}

#[cfg(not(target_os = "linux"))]
fn link(_: &Directory, _: &OsStr, _: &File) -> Result<OsString, Refused> {
    Err(Refused::Link)
}

/// `.{target}.{random}.ingot-tmp`
fn temp_name(target: &OsStr) -> OsString {
    // The standard library seeds its hashers from the system's randomness. A name that comes twice, as after a fork,
    // costs one more try.
    let random = RandomState::new().build_hasher().finish();
    let mut name = temp_prefix(target);
    name.extend(format!("{random:0RANDOM$x}").as_bytes());
    name.extend(SUFFIX);
    OsString::from_vec(name)
}

/// The one temporary name that is known without looking for it: of what those who fill a file together note. It looks
/// like the others, so that it is removed like them when it is left behind.
pub(super) fn notes_name(target: &OsStr) -> OsString {
    let mut name = temp_prefix(target);
    name.extend([b'0'; RANDOM]);
    name.extend(SUFFIX);
    OsString::from_vec(name)
}

/// What all names of such files for `target` begin with.
pub(super) fn temp_prefix(target: &OsStr) -> Vec<u8> {
    let stem = target.as_bytes();
    let stem = match target.to_str() {
        _ if stem.len() <= STEM => stem,
        // Some systems refuse names that are not UTF-8, so a character is not cut in two.
        Some(text) => {
            let cut = (0..=STEM).rev().find(|&cut| text.is_char_boundary(cut));
            &stem[..cut.unwrap_or(0)]
        }
        None => &stem[..STEM],
    };
    [b".", stem, b"."].concat()
}

/// Whether a temporary file for `target` may have this name.
pub(super) fn is_temp_of(name: &[u8], target: &OsStr) -> bool {
    let random = name
        .strip_prefix(&*temp_prefix(target))
        .and_then(|rest| rest.strip_suffix(SUFFIX));
    random.is_some_and(|random| random.len() == RANDOM && random.iter().all(u8::is_ascii_hexdigit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_from_those_of_other_targets() {
        let name = temp_name(OsStr::new("a"));
        assert!(is_temp_of(name.as_bytes(), OsStr::new("a")));
        assert!(!is_temp_of(name.as_bytes(), OsStr::new("b")));
        assert!(!is_temp_of(b".a.b.0123456789abcdef.ingot-tmp", OsStr::new("a")));
        assert!(!is_temp_of(b".a..ingot-tmp", OsStr::new("a")));
        assert!(!is_temp_of(b"a", OsStr::new("a")));
        assert!(is_temp_of(
            notes_name(OsStr::new("a")).as_bytes(),
            OsStr::new("a")
        ));
    }

    #[test]
    fn names_fit_the_file_system_and_stay_text() {
        let long = "ä".repeat(127);
        let name = temp_name(OsStr::new(&long));
        assert!(name.len() <= 143, "{}", name.len());
        assert!(name.to_str().is_some());
        assert!(is_temp_of(name.as_bytes(), OsStr::new(&long)));
    }
}
