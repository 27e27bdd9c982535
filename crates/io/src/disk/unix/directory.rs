//! A directory, held open, and the names in it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

#[cfg(target_os = "linux")]
use rustix::fs::RenameFlags;
use rustix::fs::{self, Access, AtFlags, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use super::file::of_stat;
use crate::disk::{Birth, Facts, Opening, Unlinked};

/// The mode of a new file, before the umask is applied.
fn mode(birth: Birth) -> Mode {
    match birth {
        Birth::Usual => Mode::from_raw_mode(0o666),
        Birth::Private => Mode::from_raw_mode(0o600),
    }
}

/// A directory, held open: it stays the same one when it is renamed.
pub(crate) struct Directory {
    fd: OwnedFd,
    /// The path as given, for programs that open files by path.
    path: PathBuf,
}

impl Directory {
    /// Open the directory at `path`. It stays the same one if the process changes its working directory.
    pub(crate) fn at(path: &Path) -> io::Result<Directory> {
        Directory::open(None, path)
    }

    /// The directory at `path`, which is relative to `from`.
    pub(super) fn open(from: Option<&Directory>, path: &Path) -> io::Result<Directory> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let base = from.map_or(fs::CWD, AsFd::as_fd);
        let open = |flags| retry_on_intr(|| fs::openat(base, path, flags, Mode::empty()));
        let fd = match open(flags | OFlags::RDONLY) {
            // Files can be made in a directory that cannot be listed.
            #[cfg(target_os = "linux")]
            Err(Errno::ACCESS) => open(flags | OFlags::PATH),
            result => result,
        }?;
        let path = from.map_or_else(|| path.to_owned(), |from| from.path.join(path));
        Ok(Directory { fd, path })
    }

    /// The path of the file `name` in it.
    pub(crate) fn path(&self, name: &OsStr) -> PathBuf {
        self.path.join(name)
    }

    /// Open the file `name` in it.
    pub(crate) fn file(&self, name: &OsStr, opening: Opening) -> io::Result<File> {
        const NEW: OFlags = OFlags::CREATE.union(OFlags::EXCL);
        // In a directory that others may write to, the name may be a link or a pipe.
        let waits_not = OFlags::NONBLOCK | OFlags::NOCTTY;
        let (flags, mode) = match opening {
            Opening::Read => (OFlags::RDONLY | waits_not, Mode::empty()),
            Opening::Write => (OFlags::WRONLY | OFlags::NOCTTY, Mode::empty()),
            Opening::Both => (OFlags::RDWR | waits_not, Mode::empty()),
            Opening::Journal => (OFlags::RDWR | OFlags::APPEND | waits_not, Mode::empty()),
            Opening::New(birth) => (OFlags::RDWR | NEW, mode(birth)),
            #[cfg(feature = "remote")]
            Opening::Left(birth) => (OFlags::RDWR | OFlags::CREATE | waits_not, mode(birth)),
            Opening::NewJournal => (OFlags::RDWR | OFlags::APPEND | NEW, mode(Birth::Private)),
        };
        Ok(self.open_file(name, flags | OFlags::NOFOLLOW, mode)?)
    }

    /// Open the file `name` in it. If `flags` create the file, it gets `mode`, reduced by the umask.
    pub(super) fn open_file(&self, name: &OsStr, flags: OFlags, mode: Mode) -> rustix::io::Result<File> {
        let flags = flags | OFlags::CLOEXEC;
        retry_on_intr(|| fs::openat(&self.fd, name, flags, mode)).map(File::from)
    }

    /// A new file that has no name, and vanishes by itself when the process ends. `None` if the file system does not
    /// support such files.
    #[cfg(target_os = "linux")]
    pub(crate) fn unnamed(&self, birth: Birth) -> Option<File> {
        // The reason for a failure does not matter: creating a named file works, or reports it.
        let made = self.open_file(".".as_ref(), OFlags::TMPFILE | OFlags::RDWR, mode(birth));
        let file = made.ok()?;
        // Before Linux 6.1, unnamed files ignore the umask on a file system without ACLs. If the umask seems to have removed
        // nothing, which is rare, a named file is made instead.
        let cut = fs::fstat(&file).ok()?.st_mode & 0o777;
        (cut != 0o666).then_some(file)
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn unnamed(&self, _: Birth) -> Option<File> {
        None
    }

    /// Link the unnamed `file` to a name.
    #[cfg(target_os = "linux")]
    pub(crate) fn link(&self, file: &File, name: &OsStr) -> Result<(), Unlinked> {
        use std::os::fd::AsRawFd;
        // Linking the file itself needs a privilege; linking its path in /proc does not.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        match fs::linkat(fs::CWD, &*path, self, name, AtFlags::SYMLINK_FOLLOW) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(Unlinked::Exists),
            Err(fault @ (Errno::NOSPC | Errno::DQUOT | Errno::IO)) => Err(Unlinked::Fault(fault.into())),
            Err(_) => Err(Unlinked::Impossible),
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn link(&self, _: &File, _: &OsStr) -> Result<(), Unlinked> {
        Err(Unlinked::Impossible)
    }

    /// Return the facts of a name; `None` if no file has it.
    pub(crate) fn facts(&self, name: &OsStr) -> io::Result<Option<Facts>> {
        match fs::statat(self, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(of_stat(&stat))),
            Err(Errno::NOENT) => Ok(None),
            Err(fault) => Err(fault.into()),
        }
    }

    /// Fail if this process may not write to the file `name`.
    pub(crate) fn check_writable(&self, name: &OsStr) -> io::Result<()> {
        match fs::accessat(self, name, Access::WRITE_OK, AtFlags::EACCESS) {
            // The file was removed a moment ago, or the kernel cannot check the permissions of the effective user.
            Ok(()) | Err(Errno::NOENT | Errno::NOSYS | Errno::INVAL) => Ok(()),
            Err(fault) => Err(fault.into()),
        }
    }

    pub(crate) fn remove(&self, name: &OsStr) -> io::Result<()> {
        Ok(fs::unlinkat(self, name, AtFlags::empty())?)
    }

    /// Remove the file `name`, which another process may have open. The name is free afterwards.
    pub(crate) fn retire(&self, name: &OsStr, _: &OsStr) -> io::Result<()> {
        self.remove(name)
    }

    /// Rename the file `from` to `to`, and replace a file of that name.
    pub(crate) fn rename(&self, from: &OsStr, to: &OsStr, _: &dyn Fn() -> OsString) -> io::Result<()> {
        Ok(retry_on_intr(|| fs::renameat(self, from, self, to))?)
    }

    /// Rename the file `from` to `to` if that name is free. `None` if the file system has no links, so that only a
    /// replacing rename is possible.
    pub(crate) fn rename_new(&self, from: &OsStr, to: &OsStr) -> Option<io::Result<()>> {
        // Unlike a plain rename, a link replaces nothing that was made in the meantime.
        match fs::linkat(self, from, self, to, AtFlags::empty()) {
            Ok(()) => {
                // The file has its new name. If it also keeps the other name, the next save removes that.
                let _ = self.remove(from);
                Some(Ok(()))
            }
            Err(Errno::EXIST) => Some(Err(Errno::EXIST.into())),
            Err(_) => self.rename_replacing_nothing(from, to),
        }
    }

    #[cfg(target_os = "linux")]
    fn rename_replacing_nothing(&self, from: &OsStr, to: &OsStr) -> Option<io::Result<()>> {
        match fs::renameat_with(self, from, self, to, RenameFlags::NOREPLACE) {
            Ok(()) => Some(Ok(())),
            Err(Errno::EXIST) => Some(Err(Errno::EXIST.into())),
            Err(_) => None,
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn rename_replacing_nothing(&self, _: &OsStr, _: &OsStr) -> Option<io::Result<()>> {
        None
    }

    /// Keep the file `name`, which is about to be replaced, so that replacing it does not free its blocks. `None` if that
    /// is impossible.
    #[cfg(target_os = "linux")]
    pub(crate) fn keep(&self, name: &OsStr) -> Option<File> {
        // This works without the permission to read it, too.
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        self.open_file(name, flags, Mode::empty()).ok()
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn keep(&self, _: &OsStr) -> Option<File> {
        None
    }

    /// Make names in this directory durable. `file` is on the same file system.
    pub(crate) fn flush(&self, file: &File) -> io::Result<()> {
        match retry_on_intr(|| fs::fsync(&self.fd)) {
            // Opened without the right to list it, so only the whole file system can be flushed.
            Err(Errno::BADF) => flush_system(file),
            // Some network file systems have no such call for directories; they make names durable at once.
            Ok(()) | Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Ok(()),
            Err(fault) => Err(fault.into()),
        }
    }

    #[cfg(target_os = "linux")]
    pub(super) fn is_proc(&self) -> bool {
        fs::fstatfs(&self.fd).is_ok_and(|system| system.f_type == fs::PROC_SUPER_MAGIC)
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn is_proc(&self) -> bool {
        false
    }
}

/// Return the result of resolving `path`, relative to a directory.
pub(super) fn facts_of_target(from: Option<&Directory>, path: &Path) -> Option<Facts> {
    let base = from.map_or(fs::CWD, AsFd::as_fd);
    fs::statat(base, path, AtFlags::empty())
        .as_ref()
        .map(of_stat)
        .ok()
}

#[cfg(target_os = "linux")]
fn flush_system(file: &File) -> io::Result<()> {
    Ok(fs::syncfs(file)?)
}

#[cfg(not(target_os = "linux"))]
fn flush_system(_: &File) -> io::Result<()> {
    Err(Errno::BADF.into())
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
