//! What a path leads to.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{self, Access, AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::{Errno, retry_on_intr};

use crate::error::{Step, Stop, step};
use crate::options::{Existing, ReadOnly, SaveOptions};
use crate::watch::{POLL, Watch};

/// As many links as Linux follows.
const LINKS: usize = 40;

/// What a path leads to, every symlink followed.
pub(super) enum Resolved {
    /// A name in a directory. A regular file has it, or nothing.
    Entry(DirectoryEntry),
    /// A regular file that has no name that could be given to another: what a link of /proc points to.
    Nameless(File),
    /// Something that takes bytes in order: a pipe, a terminal, another device.
    Stream(File),
}

/// A name in a directory, for a regular file. The directory stays the same one when it is renamed, or when the
/// program changes its working directory.
pub(super) struct DirectoryEntry {
    pub(super) directory: Directory,
    pub(super) name: OsString,
    /// `None` when nothing has the name.
    pub(super) existing: Option<Stat>,
}

/// A directory, held open.
pub(super) struct Directory {
    fd: OwnedFd,
}

impl Resolved {
    pub(super) fn find(path: &Path, watch: &dyn Watch) -> Result<Resolved, Stop> {
        match fs::stat(path).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            Ok(FileType::Directory) => return Err(Errno::ISDIR).step(step::OPEN),
            Ok(FileType::RegularFile) | Err(Errno::NOENT) => {}
            Ok(kind) => return open_stream(path, kind, watch),
            Err(fault) => return Err(fault).step(step::OPEN),
        }
        follow(path).step(step::OPEN)
    }
}

/// Follows symlinks one by one, because the last directory on the way is where the new file has to be made.
fn follow(path: &Path) -> io::Result<Resolved> {
    let mut path = path.to_path_buf();
    let mut from: Option<Directory> = None;
    for _ in 0..LINKS {
        if let Some(file) = standard_stream(&path) {
            return file.map(Resolved::Stream);
        }
        let (parent, name) = split(&path)?;
        let base = from.as_ref().map_or(CWD, AsFd::as_fd);
        let directory = Directory::open(base, parent)?;
        let existing = match fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(stat),
            Err(Errno::NOENT) => None,
            Err(fault) => return Err(fault.into()),
        };
        match existing.map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            None | Some(FileType::RegularFile) => {
                let name = name.to_owned();
                return Ok(Resolved::Entry(DirectoryEntry {
                    directory,
                    name,
                    existing,
                }));
            }
            // Its text is no path that leads there: `/memfd:x (deleted)`.
            Some(FileType::Symlink) if directory.is_proc() => {
                let file = directory.file(name, OFlags::WRONLY | OFlags::NOCTTY, Mode::empty())?;
                return Ok(Resolved::Nameless(file));
            }
            Some(FileType::Symlink) => {
                let link = fs::readlinkat(&directory, name, Vec::new())?;
                path = PathBuf::from(OsString::from_vec(link.into_bytes()));
                from = Some(directory);
            }
            Some(FileType::Directory) => return Err(Errno::ISDIR.into()),
            // It was a regular file, or nothing, a moment ago.
            Some(_) => return Err(Errno::BUSY.into()),
        }
    }
    Err(Errno::LOOP.into())
}

/// The directory and the name of the last component, as the system would read them: `a/` and `a/.` name a directory.
fn split(path: &Path) -> io::Result<(&OsStr, &OsStr)> {
    let bytes = path.as_os_str().as_bytes();
    let (parent, name) = match bytes.iter().rposition(|&byte| byte == b'/') {
        Some(slash) => bytes.split_at(slash + 1),
        None => (&b"."[..], bytes),
    };
    match name {
        _ if bytes.is_empty() => Err(Errno::NOENT.into()),
        b"" | b"." | b".." => Err(Errno::ISDIR.into()),
        name => Ok((OsStr::from_bytes(parent), OsStr::from_bytes(name))),
    }
}

/// Our own standard output or error, when `path` is a name for it. Opening the name of a regular file would begin at
/// its start, over what the shell or the program wrote before; the open stream stands where it should.
fn standard_stream(path: &Path) -> Option<io::Result<File>> {
    let fd = match path.to_str()? {
        "/dev/stdout" | "/dev/fd/1" | "/proc/self/fd/1" => {
            // What `print!` holds back belongs in front.
            if let Err(fault) = io::stdout().flush() {
                return Some(Err(fault));
            }
            io::stdout().as_fd().try_clone_to_owned()
        }
        "/dev/stderr" | "/dev/fd/2" | "/proc/self/fd/2" => io::stderr().as_fd().try_clone_to_owned(),
        _ => return None,
    };
    Some(fd.map(File::from))
}

/// Opens what takes bytes in order. It does not block, so that a save into a pipe without a reader can be
/// interrupted.
fn open_stream(path: &Path, kind: FileType, watch: &dyn Watch) -> Result<Resolved, Stop> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    loop {
        if watch.interrupted() {
            return Err(Stop::Interrupted);
        }
        match retry_on_intr(|| fs::open(path, flags, Mode::empty())) {
            Ok(fd) => return Ok(Resolved::Stream(fd.into())),
            // A pipe that nobody reads yet.
            Err(Errno::NXIO) if kind == FileType::Fifo => thread::sleep(POLL),
            Err(fault) => {
                // A socket cannot be opened by name, and a pipe of another user may not be.
                return match standard_stream(path) {
                    Some(file) => file.map(Resolved::Stream).step(step::OPEN),
                    None => Err(fault).step(step::OPEN),
                };
            }
        }
    }
}

impl DirectoryEntry {
    /// Whether the existing file, if there is one, may be replaced. Renaming over it needs no right to write to it,
    /// so this has to be asked.
    pub(super) fn check_writable(&self, read_only: ReadOnly) -> Result<(), Stop> {
        if self.existing.is_none() || read_only == ReadOnly::Replace {
            return Ok(());
        }
        match fs::accessat(&self.directory, &*self.name, Access::WRITE_OK, AtFlags::EACCESS) {
            // Removed a moment ago; or a kernel that cannot answer for the effective user.
            Ok(()) | Err(Errno::NOENT | Errno::NOSYS | Errno::INVAL) => Ok(()),
            Err(fault) => Err(fault).step(step::READ_ONLY),
        }
    }

    /// Whether what has the name, if anything has, may go.
    pub(super) fn check(&self, options: &SaveOptions) -> Result<(), Stop> {
        match self.existing {
            Some(_) if options.existing() == Existing::Refuse => Err(Errno::EXIST).step(step::OPEN),
            _ => self.check_writable(options.read_only),
        }
    }

    /// Opens the file for writing in place, or makes it; says whether it made it.
    pub(super) fn open(&self) -> io::Result<(File, bool)> {
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NOCTTY;
        let mode = Mode::from_raw_mode(0o666);
        let open = |flags| self.directory.file(&self.name, flags, mode);
        loop {
            match open(flags) {
                Ok(file) => return Ok((file, false)),
                Err(Errno::NOENT) => {}
                Err(fault) => return Err(fault.into()),
            }
            match open(flags | OFlags::CREATE | OFlags::EXCL) {
                Ok(file) => return Ok((file, true)),
                Err(Errno::EXIST) => {}
                Err(fault) => return Err(fault.into()),
            }
        }
    }

    /// Takes the name away again from a file that was made and could not be filled.
    pub(super) fn remove(&self) {
        let _ = fs::unlinkat(&self.directory, &*self.name, AtFlags::empty());
    }
}

impl Directory {
    pub(super) fn open(from: BorrowedFd<'_>, path: impl rustix::path::Arg + Copy) -> io::Result<Directory> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |flags| retry_on_intr(|| fs::openat(from, path, flags, Mode::empty()));
        let fd = match open(flags | OFlags::RDONLY) {
            // Files can be made in a directory that cannot be listed.
            #[cfg(target_os = "linux")]
            Err(Errno::ACCESS) => open(flags | OFlags::PATH),
            result => result,
        }?;
        Ok(Directory { fd })
    }

    /// Opens the file `name` in it. One that `flags` ask to make gets `mode`.
    pub(super) fn file(&self, name: &OsStr, flags: OFlags, mode: Mode) -> rustix::io::Result<File> {
        let flags = flags | OFlags::CLOEXEC;
        retry_on_intr(|| fs::openat(&self.fd, name, flags, mode)).map(File::from)
    }

    /// Makes names in this directory durable. `file` is on the same file system.
    pub(super) fn flush(&self, file: &File) -> io::Result<()> {
        match retry_on_intr(|| fs::fsync(&self.fd)) {
            // Opened without the right to list it, so only the whole file system can be flushed.
            Err(Errno::BADF) => flush_system(file),
            // Some network file systems have no such call for directories; they make names durable at once.
            Ok(()) | Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Ok(()),
            Err(fault) => Err(fault.into()),
        }
    }

    #[cfg(target_os = "linux")]
    fn is_proc(&self) -> bool {
        fs::fstatfs(&self.fd).is_ok_and(|system| system.f_type == fs::PROC_SUPER_MAGIC)
    }

    #[cfg(not(target_os = "linux"))]
    fn is_proc(&self) -> bool {
        false
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(path: &str) -> Option<(&str, &str)> {
        let (parent, name) = split(Path::new(path)).ok()?;
        Some((parent.to_str()?, name.to_str()?))
    }

    #[test]
    fn splits_as_the_system_does() {
        assert_eq!(parts("a"), Some((".", "a")));
        assert_eq!(parts("/a"), Some(("/", "a")));
        assert_eq!(parts("b/../a"), Some(("b/../", "a")));
        for path in ["", "/", "a/", "a/.", "a/..", ".", ".."] {
            assert_eq!(parts(path), None, "{path}");
        }
    }
}
