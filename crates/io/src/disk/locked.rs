//! Files that are unlocked when they are dropped.

use std::borrow::Borrow;
use std::fs::File;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};

use super::unlock;

/// A file that may be locked. Dropping it removes the lock.
///
/// Closing the file is not enough: a lock belongs to the open file description, which a child of a fork, or a thread that
/// still flushes the file, shares.
#[derive(Debug)]
pub(crate) struct Locked {
    file: File,
    process: u32,
    unlocked: AtomicBool,
}

impl Locked {
    pub(crate) fn new(file: File) -> Locked {
        Locked {
            file,
            process: std::process::id(),
            unlocked: AtomicBool::new(false),
        }
    }

    /// Return false in a child after a fork, whose parent holds the lock.
    pub(crate) fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    /// Remove the lock, once. In a child of a fork the lock stays: it is the parent's.
    pub(crate) fn unlock(&self) {
        if !self.unlocked.swap(true, Ordering::Relaxed) && self.is_ours() {
            // Fails on file systems without locks.
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

impl Borrow<File> for Locked {
    fn borrow(&self) -> &File {
        &self.file
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.unlock();
    }
}
