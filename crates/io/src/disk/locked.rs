//! Files that are unlocked when this process is done with them.

use std::fs::File;
use std::io;
use std::ops::Deref;

use super::unlock;

/// A file that may be locked. Dropping it removes the lock.
///
/// Closing the file would not be enough: a lock belongs to the open file, and a child of a fork, or a thread that still
/// flushes it, has the same one open.
#[derive(Debug)]
pub(crate) struct Locked {
    file: File,
    process: u32,
}

impl Locked {
    pub(crate) fn new(file: File) -> Locked {
        Locked {
            file,
            process: std::process::id(),
        }
    }

    /// As `new`, for a file that stays open for longer than it is locked.
    pub(crate) fn of(file: &File) -> io::Result<Locked> {
        file.try_clone().map(Locked::new)
    }

    /// Removes the lock of this process. In a child of a fork the lock is still its parent's.
    pub(crate) fn unlock(&self) {
        if self.process == std::process::id() {
            // Where there are no locks, this fails.
            let _ = unlock(&self.file);
        }
    }
}

impl Deref for Locked {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.unlock();
    }
}
