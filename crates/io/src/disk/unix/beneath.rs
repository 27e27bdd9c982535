//! Opening files that are inside a directory.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::disk::Refusal;
use crate::disk::facts::LINK;

/// An open directory, from which nothing leads out.
#[derive(Debug)]
pub(crate) struct Beneath {
    directory: OwnedFd,
}

impl Beneath {
    pub(crate) fn of(path: &Path) -> io::Result<Beneath> {
        let directory = rustix::fs::open(path, DIRECTORY, Mode::empty())?;
        Ok(Beneath { directory })
    }

    /// Open a file by its name relative to the directory: part by part, each in the directory that was opened before
    /// it, so that no link created by another process leads outside.
    pub(crate) fn open(&self, name: &OsStr) -> Result<File, Refusal> {
        let parts: Vec<&OsStr> = name
            .as_bytes()
            .split(|&byte| byte == b'/')
            .map(OsStr::from_bytes)
            .collect();
        let (last, folders) = parts.split_last().ok_or(Refusal::Elsewhere("it has no name"))?;
        let open = |above: &Option<OwnedFd>, part: &OsStr, flags| {
            let directory = above.as_ref().unwrap_or(&self.directory);
            if matches!(part.as_bytes(), b"" | b"." | b"..") {
                return Err(Refusal::Elsewhere("it is outside the directory"));
            }
            match rustix::fs::openat(directory, part, flags | OFlags::NOFOLLOW, Mode::empty()) {
                Ok(file) => Ok(file),
                Err(Errno::LOOP | Errno::MLINK) => Err(Refusal::Elsewhere(LINK)),
                // A link in place of a directory.
                Err(Errno::NOTDIR) if is_link(directory, part) => Err(Refusal::Elsewhere(LINK)),
                Err(errno) => Err(Refusal::System(errno.into())),
            }
        };
        let mut above = None;
        for part in folders {
            above = Some(open(&above, part, DIRECTORY)?);
        }
        open(&above, last, READ).map(File::from)
    }
}

fn is_link(directory: &OwnedFd, part: &OsStr) -> bool {
    rustix::fs::statat(directory, part, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Symlink)
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// As in [`open_for_reading`](super::file::open_for_reading): without waiting for a process that writes to a FIFO.
const READ: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_plain_file_is_opened_and_a_link_anywhere_is_not() {
        let outer = tempfile::tempdir().unwrap();
        let inner = outer.path().join("model");
        fs::create_dir_all(inner.join("sub")).unwrap();
        fs::write(outer.path().join("secret"), b"x").unwrap();
        fs::write(inner.join("plain"), b"x").unwrap();
        fs::write(inner.join("sub/plain"), b"x").unwrap();
        symlink("../secret", inner.join("link")).unwrap();
        symlink("plain", inner.join("near")).unwrap();
        symlink("sub", inner.join("linked")).unwrap();
        symlink("/", inner.join("root")).unwrap();
        let beneath = Beneath::of(&inner).unwrap();
        for (name, expected) in [
            ("plain", None),
            ("sub/plain", None),
            ("link", Some(LINK)),
            ("near", Some(LINK)),
            ("linked/plain", Some(LINK)),
            ("root/etc/passwd", Some(LINK)),
            ("../secret", Some("it is outside the directory")),
            ("sub/../../secret", Some("it is outside the directory")),
            ("absent", Some("system")),
        ] {
            let found = match beneath.open(OsStr::new(name)) {
                Ok(_) => None,
                Err(Refusal::Elsewhere(reason)) => Some(reason),
                Err(Refusal::System(_)) => Some("system"),
            };
            assert_eq!(found, expected, "{name}");
        }
    }
}
