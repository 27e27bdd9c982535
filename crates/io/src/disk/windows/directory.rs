//! A directory, and the names in it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::windows::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use windows_sys::Win32::Foundation::{
    ERROR_ACCESS_DENIED, ERROR_USER_MAPPED_FILE, GENERIC_READ, GENERIC_WRITE,
};
use windows_sys::Win32::Storage::FileSystem::{
    FILE_ATTRIBUTE_READONLY, FILE_FLAG_BACKUP_SEMANTICS, FILE_FLAG_OPEN_REPARSE_POINT,
    MOVEFILE_REPLACE_EXISTING, MOVEFILE_WRITE_THROUGH, WRITE_DAC,
};

use super::calls;
use super::fault::{has_number, is_shared_by_nobody, numbered, patiently};
use super::file::{facts, looked_at};
use super::name::verbatim;
use crate::disk::{Birth, Facts, Kind, Opening, Unlinked, facts_at};

/// How long to retry replacing a file that another process has open, since readers close files soon.
const MOMENT: Duration = Duration::from_millis(100);

/// A directory, by its path from the root: it cannot be renamed while a file in it is open, and a program that changes its
/// working directory does not change it.
pub(crate) struct Directory {
    path: PathBuf,
}

impl Directory {
    /// Open the directory at `path`. It stays the same one if the process changes its working directory.
    pub(crate) fn at(path: &Path) -> io::Result<Directory> {
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        let path = verbatim(&std::path::absolute(path)?);
        match facts_at(&path)?.kind {
            Kind::Directory => Ok(Directory { path }),
            _ => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    /// The path of the file `name` in it.
    pub(crate) fn path(&self, name: &OsStr) -> PathBuf {
        self.path.join(name)
    }

    /// Open the file `name` in it.
    pub(crate) fn file(&self, name: &OsStr, opening: Opening) -> io::Result<File> {
        let mut options = File::options();
        match opening {
            Opening::Read => options.read(true),
            Opening::Write => options.write(true),
            Opening::Both | Opening::Journal => options.read(true).write(true),
            Opening::New(_) | Opening::NewJournal => options.read(true).write(true).create_new(true),
            #[cfg(feature = "remote")]
            Opening::Left(_) => options.read(true).write(true).create(true).truncate(false),
        };
        // A file that is written in place may be a placeholder that another program has to download first. Such files
        // are marked like links.
        if !matches!(opening, Opening::Write) {
            options.custom_flags(FILE_FLAG_OPEN_REPARSE_POINT);
        }
        match opening {
            Opening::New(Birth::Private) => self.opened_privately(name, &options),
            #[cfg(feature = "remote")]
            Opening::Left(Birth::Private) => self.opened_privately(name, &options),
            _ => self.opened(name, &options),
        }
    }

    fn opened(&self, name: &OsStr, options: &fs::OpenOptions) -> io::Result<File> {
        let path = self.path(name);
        patiently(is_shared_by_nobody, || options.open(&path))
    }

    /// Open it so that its access list can be changed too, which not every server allows.
    fn opened_privately(&self, name: &OsStr, options: &fs::OpenOptions) -> io::Result<File> {
        let mut private = options.clone();
        private.access_mode(GENERIC_READ | GENERIC_WRITE | WRITE_DAC);
        match self.opened(name, &private) {
            Err(fault) if fault.kind() == io::ErrorKind::PermissionDenied => self.opened(name, options),
            outcome => outcome,
        }
    }

    /// There are no files without a name.
    #[allow(clippy::unused_self, reason = "elsewhere there are")]
    pub(crate) fn unnamed(&self, _: Birth) -> Option<File> {
        None
    }

    #[allow(clippy::unused_self, reason = "elsewhere there are files without a name")]
    pub(crate) fn link(&self, _: &File, _: &OsStr) -> Result<(), Unlinked> {
        Err(Unlinked::Impossible)
    }

    /// Return the facts of a name; `None` if no file has it.
    pub(crate) fn facts(&self, name: &OsStr) -> io::Result<Option<Facts>> {
        match looked_at(&self.path(name), FILE_FLAG_OPEN_REPARSE_POINT) {
            Ok(file) => facts(&file).map(Some),
            Err(fault) if fault.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Fail if this process may not write to the file `name`.
    pub(crate) fn check_writable(&self, name: &OsStr) -> io::Result<()> {
        let is_read_only = |facts: Facts| facts.mode & FILE_ATTRIBUTE_READONLY != 0;
        if self.facts(name)?.is_some_and(is_read_only) {
            return Err(numbered(ERROR_ACCESS_DENIED));
        }
        match File::options().write(true).open(self.path(name)) {
            Err(fault) if has_number(&fault, ERROR_ACCESS_DENIED) => Err(fault),
            // The file was removed a moment ago, or another process has it.
            _ => Ok(()),
        }
    }

    /// Return all names in the directory.
    #[cfg(test)]
    pub(crate) fn names(&self) -> io::Result<Vec<OsString>> {
        Ok(fs::read_dir(&self.path)?
            .flatten()
            .map(|entry| entry.file_name())
            .collect())
    }

    pub(crate) fn remove(&self, name: &OsStr) -> io::Result<()> {
        let path = self.path(name);
        patiently(is_shared_by_nobody, || match fs::remove_file(&path) {
            Err(fault) if has_number(&fault, ERROR_ACCESS_DENIED) && make_writable(&path) => {
                fs::remove_file(&path)
            }
            outcome => outcome,
        })
    }

    /// Remove the file `name`, which another process may have open. While it is open, it may have the name `spare`.
    pub(crate) fn retire(&self, name: &OsStr, spare: &OsStr) -> io::Result<()> {
        match calls::rename(&self.path(name), &self.path(spare), 0) {
            Ok(()) => self.remove(spare),
            Err(_) => self.remove(name),
        }
    }

    /// Rename the file `from` to `to`, and replace a file of that name.
    ///
    /// Windows cannot replace a mapped file; older versions, and other file systems than NTFS, cannot replace an open one.
    /// But it renames both: a file that another process has for longer than a moment is renamed to `old`, and removed when
    /// it is closed. Between the two renames no file has the name `to`. A process that ends there leaves the old file under
    /// the name `old`, which the next save restores.
    pub(crate) fn rename(&self, from: &OsStr, to: &OsStr, old: &dyn Fn() -> OsString) -> io::Result<()> {
        let (from, to) = (self.path(from), self.path(to));
        let begin = Instant::now();
        let passes = |fault: &io::Error| may_pass(fault) && begin.elapsed() < MOMENT;
        match patiently(passes, || replace(&from, &to)) {
            Err(fault) if may_pass(&fault) => patiently(may_pass, || {
                let Err(fault) = replace(&from, &to) else {
                    return Ok(());
                };
                // A sharing violation is a more useful error than a refused replacement.
                rename_around(&from, &to, &self.path(&old())).map_err(|around| {
                    if is_shared_by_nobody(&around) {
                        around
                    } else {
                        fault
                    }
                })
            }),
            outcome => outcome,
        }
    }

    /// Rename the file `from` to `to` if that name is free.
    pub(crate) fn rename_new(&self, from: &OsStr, to: &OsStr) -> Option<io::Result<()>> {
        let (from, to) = (self.path(from), self.path(to));
        Some(patiently(is_shared_by_nobody, || {
            calls::rename(&from, &to, MOVEFILE_WRITE_THROUGH)
        }))
    }

    /// The system frees the blocks of a file by itself.
    #[allow(clippy::unused_self, reason = "elsewhere it is asked of the directory")]
    pub(crate) fn keep(&self, _: &OsStr) -> Option<File> {
        None
    }

    /// Make names in this directory durable. `file` is on the same file system.
    pub(crate) fn flush(&self, file: &File) -> io::Result<()> {
        let directory = File::options()
            .write(true)
            .custom_flags(FILE_FLAG_BACKUP_SEMANTICS)
            .open(&self.path);
        match directory.and_then(|directory| directory.sync_all()) {
            Ok(()) => Ok(()),
            // A process that may only add files cannot flush the directory. NTFS writes its journal with every file.
            Err(_) => file.sync_all(),
        }
    }
}

/// Return whether the file may be free a moment later.
fn may_pass(fault: &io::Error) -> bool {
    is_shared_by_nobody(fault)
        || has_number(fault, ERROR_ACCESS_DENIED)
        || has_number(fault, ERROR_USER_MAPPED_FILE)
}

/// Rename the file `from` to `to` atomically.
fn replace(from: &Path, to: &Path) -> io::Result<()> {
    let rename = || calls::rename(from, to, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH);
    let fault = match rename() {
        Err(fault) if may_pass(&fault) => fault,
        outcome => return outcome,
    };
    if has_number(&fault, ERROR_ACCESS_DENIED) && make_writable(to) {
        return rename().inspect_err(|_| drop(set_read_only(to, true)));
    }
    // The standard library's rename supports both ways of NTFS, including over an open file.
    fs::rename(from, to).map_err(|_| fault)
}

fn rename_around(from: &Path, to: &Path, old: &Path) -> io::Result<()> {
    calls::rename(to, old, MOVEFILE_WRITE_THROUGH)?;
    if let Err(fault) = calls::rename(from, to, MOVEFILE_WRITE_THROUGH) {
        // The path must not stay empty.
        let _ = calls::rename(old, to, MOVEFILE_WRITE_THROUGH);
        return Err(fault);
    }
    // A mapped file stays until the next save.
    let _ = fs::remove_file(old);
    Ok(())
}

/// Make a read-only file writable, so that it can be replaced. Return false if it is not read-only, or cannot be changed.
fn make_writable(path: &Path) -> bool {
    let is_read_only =
        fs::symlink_metadata(path).is_ok_and(|found| found.is_file() && found.permissions().readonly());
    is_read_only && set_read_only(path, false).is_ok()
}

fn set_read_only(path: &Path, read_only: bool) -> io::Result<()> {
    let mut permissions = fs::metadata(path)?.permissions();
    permissions.set_readonly(read_only);
    fs::set_permissions(path, permissions)
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(feature = "remote")]
    use crate::disk::facts;

    fn folder() -> (tempfile::TempDir, Directory) {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        for name in ["new", "old"] {
            fs::write(directory.path(name.as_ref()), name).unwrap();
        }
        (folder, directory)
    }

    fn read(directory: &Directory, name: &str) -> Option<Vec<u8>> {
        fs::read(directory.path(name.as_ref())).ok()
    }

    #[test]
    fn a_name_is_taken_from_the_file_that_had_it_only_where_that_is_meant() {
        let (_folder, directory) = folder();
        let [new, old, spare] = ["new", "old", "spare"].map(OsStr::new);
        let refused = directory.rename_new(new, old).unwrap().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(read(&directory, "old").unwrap(), b"old");
        let reader = directory.file(old, Opening::Read).unwrap();
        directory.rename(new, old, &|| spare.to_owned()).unwrap();
        assert_eq!(read(&directory, "old").unwrap(), b"new");
        assert_eq!(read(&directory, "new"), None);
        assert_eq!(reader.metadata().unwrap().len(), 3);
        drop(reader);
        directory.rename_new(old, new).unwrap().unwrap();
        assert_eq!(read(&directory, "new").unwrap(), b"new");
        assert!(directory.facts(old).unwrap().is_none());
    }

    #[test]
    fn what_is_read_only_is_not_writable_and_goes_all_the_same() {
        let (_folder, directory) = folder();
        let old = OsStr::new("old");
        directory.check_writable(old).unwrap();
        set_read_only(&directory.path(old), true).unwrap();
        let refused = directory.check_writable(old).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        directory.remove(old).unwrap();
        assert_eq!(directory.names().unwrap(), ["new"]);
        let new = directory.file("new".as_ref(), Opening::Both).unwrap();
        directory.flush(&new).unwrap();
        directory.retire("new".as_ref(), "spare".as_ref()).unwrap();
        drop(new);
        assert_eq!(directory.names().unwrap(), [""; 0]);
    }

    #[cfg(feature = "remote")]
    #[test]
    fn what_was_left_is_opened_as_it_is() {
        let (_folder, directory) = folder();
        for birth in [Birth::Usual, Birth::Private] {
            let open = || directory.file("part".as_ref(), Opening::Left(birth)).unwrap();
            let before = facts(&open()).unwrap();
            fs::write(directory.path("part".as_ref()), b"abc").unwrap();
            let after = facts(&open()).unwrap();
            assert_eq!((after.identity, after.nbytes), (before.identity, 3));
        }
    }
}
