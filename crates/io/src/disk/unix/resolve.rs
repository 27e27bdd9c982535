//! Resolving the destination of a path.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{self, FileType, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use super::directory::{Directory, facts_of_target};
use crate::disk::entry::{BESIDE_BLOBS, BLOBS, Entered, Walk, is_digest};
use crate::disk::{Kind, Resolved};
use crate::error::{Error, Failure, Step, step};
use crate::watch::{POLL, Watch};

/// The most links to follow, as on Linux.
const LINKS: usize = 40;

/// Follows `path` to its end.
pub(crate) fn resolve(path: &Path, watch: &dyn Watch) -> Result<Resolved, Error> {
    match fs::stat(path).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
        Ok(FileType::Directory) => return Err(Errno::ISDIR).step(step::OPEN),
        Ok(FileType::RegularFile) | Err(Errno::NOENT) => {}
        Ok(kind) => return open_stream(path, kind, watch),
        Err(fault) => return Err(fault).step(step::OPEN),
    }
    follow(path)
}

fn follow(path: &Path) -> Result<Resolved, Error> {
    let mut path = path.to_path_buf();
    let mut walk = Walk::default();
    for _ in 0..LINKS {
        if let Some(file) = standard_stream(&path) {
            return file.map(Resolved::Stream).step(step::OPEN);
        }
        let (parent, name) = split(&path).step(step::OPEN)?;
        let parent = Path::new(parent);
        let base = walk.link.as_ref().map(|(directory, _)| directory);
        let directory = Directory::open(base, parent).step(step::OPEN)?;
        let of_blobs = is_digest(name) && is_of_blobs(&directory, parent, base);
        let (directory, name) = match walk.enter(directory, name, of_blobs)? {
            Entered::End(entry) => return Ok(Resolved::Entry(entry)),
            Entered::Link(link) => link,
        };
        if directory.is_proc() {
            // The text of this link is not a usable path: `/memfd:x (deleted)`.
            let file = directory.open_file(name, OFlags::WRONLY | OFlags::NOCTTY, Mode::empty());
            return file.map(Resolved::Nameless).step(step::OPEN);
        }
        let link = fs::readlinkat(directory, name.as_os_str(), Vec::new()).step(step::OPEN)?;
        path = PathBuf::from(OsString::from_vec(link.into_bytes()));
    }
    Err(Errno::LOOP).step(step::OPEN)
}

/// Return whether `directory`, which is `parent` seen from `base`, has the blobs of a content-addressed store. It may have that
/// name in its own parent directory, or in the path.
fn is_of_blobs(directory: &Directory, parent: &Path, base: Option<&Directory>) -> bool {
    let is_beside = |from: Option<&Directory>, above: &Path| {
        let facts = |name| facts_of_target(from, &above.join(name));
        BESIDE_BLOBS
            .into_iter()
            .filter_map(facts)
            .any(|facts| facts.kind == Kind::Directory)
    };
    let identity = |path: &Path| facts_of_target(Some(directory), path).map(|facts| facts.identity);
    let above = Path::new("..");
    let has_name = identity(&above.join(BLOBS)).is_some_and(|found| Some(found) == identity(Path::new(".")));
    if has_name && is_beside(Some(directory), above) {
        return true;
    }
    // `blobs` may be a link to a directory elsewhere.
    parent.file_name() == Some(BLOBS.as_ref()) && parent.parent().is_some_and(|above| is_beside(base, above))
}

/// Return the directory and the name of the last component, as the system reads them: `a/` and `a/.` name a directory.
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

/// Return our own standard output or error if `path` is a name for it. Opening the name of a regular file would begin at
/// its start, over the output that the shell or the program wrote before; the open stream is at the right position.
fn standard_stream(path: &Path) -> Option<io::Result<File>> {
    let fd = match path.to_str()? {
        "/dev/stdout" | "/dev/fd/1" | "/proc/self/fd/1" => {
            // Output that `print!` has buffered must come first.
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

/// Open a pipe or a device for writing. The call does not block, so that a save into a pipe without a reader can be
/// interrupted.
fn open_stream(path: &Path, kind: FileType, watch: &dyn Watch) -> Result<Resolved, Error> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    loop {
        if watch.interrupted() {
            return Err(Failure::Interrupted.into());
        }
        match retry_on_intr(|| fs::open(path, flags, Mode::empty())) {
            Ok(fd) => return Ok(Resolved::Stream(fd.into())),
            // A pipe without a reader.
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
