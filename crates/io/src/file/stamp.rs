//! The version of a file.

use crate::disk::Facts;

/// The identity, size and time of modification of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp {
    /// The device, and the number of the file there.
    identity: (u64, u64),
    nbytes: u64,
    modified: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(facts: &Facts) -> Stamp {
        Stamp {
            identity: facts.identity,
            nbytes: facts.nbytes,
            modified: facts.modified,
        }
    }

    pub(crate) fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Return text that other machines with this file system compare. It leaves out the number of the file, which may
    /// differ between machines.
    pub(crate) fn version(&self) -> String {
        format!("written {} {}", self.modified.0, self.modified.1)
    }

    /// Return text that differs between versions. It leaves out the number of the file, which may differ between
    /// containers.
    pub(crate) fn identity(&self) -> String {
        format!("{} bytes, {}", self.nbytes, self.version())
    }

    /// Return the size in `now`; `None` if the file changed and its size does not show that. The numbers of the files are
    /// compared unless `is_renumbered`.
    pub(super) fn nbytes_now(&self, now: &Stamp, is_renumbered: bool) -> Option<u64> {
        (now.nbytes != self.nbytes || self.is_in_its_place(now, is_renumbered)).then_some(now.nbytes)
    }

    /// Return whether the file was not written to between this stamp and `now`.
    pub(crate) fn is_unwritten(&self, now: &Stamp) -> bool {
        // Not the inode's change time or link count: replacing the file by rename alters them, and an open descriptor
        // still reads the old file unharmed.
        now.nbytes == self.nbytes && now.modified == self.modified
    }

    /// Return whether `now` belongs to the same file, which may have been written to.
    pub(crate) fn is_same_file(&self, now: &Stamp) -> bool {
        now.identity == self.identity
    }

    /// Return whether the file that now has the path is the same file, and unwritten. A file system that `waits` for a
    /// network or another process may number a file anew at each opening (FUSE, CIFS): there size and time decide alone.
    pub(crate) fn is_in_its_place(&self, now: &Stamp, waits: bool) -> bool {
        self.is_unwritten(now) && (waits || self.is_same_file(now))
    }
}
