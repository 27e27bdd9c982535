//! Facts about files, and the ways to open, lock and grow them.

use std::io;

/// Facts about a name or an open file.
#[allow(dead_code, reason = "Windows says otherwise whose a file is")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) kind: Kind,
    /// The device and the number of the file on it.
    pub(crate) identity: (u64, u64),
    pub(crate) nbytes: u64,
    /// The time of the last write, as the system's two numbers, which are only compared.
    pub(crate) modified: (i64, i64),
    /// How many names it has.
    pub(crate) names: u64,
    /// The mode on Unix, the attributes on Windows.
    pub(crate) mode: u32,
    /// The user and the group that own it. Windows reports neither here.
    pub(crate) owner: (u32, u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Link,
    /// A pipe, a socket, a device.
    Other,
}

/// How a file of a directory is opened: never through a link, and without waiting for the other end of a pipe.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Opening {
    Read,
    Write,
    Both,
    /// For [`append`](super::append).
    Journal,
    /// For reading and writing, if no file has the name.
    New(Birth),
    /// For reading and writing, as `New` if no file has the name: a file that an interrupted call left is filled again.
    #[cfg(feature = "remote")]
    Left(Birth),
    /// As a journal that only its owner can read, if no file has the name.
    NewJournal,
}

/// Who may read a file until its attributes are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Birth {
    /// Everyone whom the umask allows to read new files.
    Usual,
    /// Only the owner: a file that replaces a private one is private from its first byte on.
    Private,
}

/// The other locks that a lock excludes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lock {
    /// Excludes all other locks.
    Exclusive,
    /// Excludes exclusive locks.
    Shared,
}

/// The size of a file after space is reserved for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// The reserved size: for a file that is removed on failure. Writing is then a fifth faster, since no write has to
    /// move the end (1 GiB, ext4, 2 threads: 0.26 s against 0.30 s at best, November 2026).
    Set,
    /// As `Set`, for a file that is written in any order.
    Scattered,
    /// The given size, and nothing is reserved: the blocks will be shared with another file.
    Sparse,
    /// Unchanged: a file that is to be overwritten must not grow if this fails.
    Kept,
}

/// Why an unnamed file has no name yet.
#[allow(dead_code, reason = "where there are no such files there is one reason")]
pub(crate) enum Unlinked {
    /// Something has that name.
    Exists,
    /// Unnamed files cannot be linked here: no /proc, a sandbox, a file system without them.
    Impossible,
    Fault(io::Error),
}

/// Why a file beneath a directory was not opened.
pub(crate) enum Refusal {
    Elsewhere(&'static str),
    System(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(source: io::Error) -> Refusal {
        Refusal::System(source)
    }
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> io::Error {
        match refusal {
            Refusal::Elsewhere(reason) => io::Error::other(reason),
            Refusal::System(source) => source,
        }
    }
}

/// The reason for refusing a file behind a link.
pub(crate) const LINK: &str = "it is a symbolic link, or is behind one";
