//! Files in a directory that lie nowhere else.

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
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Beneath { directory })
    }

    pub(crate) fn open(&self, name: &OsStr) -> Result<File, Refusal> {
        match self.resolved(name) {
            Some(outcome) => outcome,
            None => self.walked(name),
        }
    }

    /// By one call that the kernel resolves as a whole. `None` where it has no such call, or a sandbox forbids it.
    #[cfg(target_os = "linux")]
    fn resolved(&self, name: &OsStr) -> Option<Result<File, Refusal>> {
        use rustix::fs::ResolveFlags;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        match rustix::fs::openat2(&self.directory, name, READ, Mode::empty(), resolve) {
            Ok(file) => Some(Ok(File::from(file))),
            Err(Errno::NOSYS | Errno::PERM | Errno::INVAL) => None,
            Err(Errno::LOOP) => Some(Err(Refusal::Elsewhere(LINK))),
            Err(Errno::XDEV) => Some(Err(Refusal::Elsewhere("it lies outside of the directory"))),
            Err(errno) => Some(Err(Refusal::System(errno.into()))),
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn resolved(&self, _: &OsStr) -> Option<Result<File, Refusal>> {
        None
    }

    /// Part by part, each from the directory opened before it.
    fn walked(&self, name: &OsStr) -> Result<File, Refusal> {
        let parts: Vec<&OsStr> = name
            .as_bytes()
            .split(|&byte| byte == b'/')
            .map(OsStr::from_bytes)
            .collect();
        let (last, folders) = parts.split_last().ok_or(Refusal::Elsewhere("it has no name"))?;
        let mut directory = self.directory.try_clone()?;
        let open = |directory: &OwnedFd, part: &OsStr, flags| {
            if matches!(part.as_bytes(), b"" | b"." | b"..") {
                return Err(Refusal::Elsewhere("it lies outside of the directory"));
            }
            match rustix::fs::openat(directory, part, flags | OFlags::NOFOLLOW, Mode::empty()) {
                Ok(file) => Ok(file),
                Err(Errno::LOOP | Errno::MLINK) => Err(Refusal::Elsewhere(LINK)),
                // A link where a directory was asked for.
                Err(Errno::NOTDIR) if is_link(directory, part) => Err(Refusal::Elsewhere(LINK)),
                Err(errno) => Err(Refusal::System(errno.into())),
            }
        };
        for part in folders {
            directory = open(
                &directory,
                part,
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            )?;
        }
        open(&directory, last, READ).map(File::from)
    }
}

fn is_link(directory: &OwnedFd, part: &OsStr) -> bool {
    rustix::fs::statat(directory, part, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Symlink)
}

/// As [`open_for_reading`](super::file::open_for_reading) opens: without waiting for whoever writes to a FIFO.
const READ: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// Opens `name` both ways, and says how it went.
    fn outcomes(directory: &Path, name: &str) -> Vec<Option<&'static str>> {
        let beneath = Beneath::of(directory).unwrap();
        let mut ways = vec![beneath.walked(OsStr::new(name))];
        ways.extend(beneath.resolved(OsStr::new(name)));
        ways.into_iter()
            .map(|way| match way {
                Ok(_) => None,
                Err(Refusal::Elsewhere(reason)) => Some(reason),
                Err(Refusal::System(_)) => Some("system"),
            })
            .collect()
    }

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
        let all = |name: &str, expected: Option<&str>| {
            for outcome in outcomes(&inner, name) {
                assert_eq!(outcome, expected, "{name}");
            }
        };
        all("plain", None);
        all("sub/plain", None);
        all("link", Some(LINK));
        all("near", Some(LINK));
        all("linked/plain", Some(LINK));
        all("root/etc/passwd", Some(LINK));
        all("../secret", Some("it lies outside of the directory"));
        all("absent", Some("system"));
    }
}
