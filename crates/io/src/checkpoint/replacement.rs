//! A save that replaces a checkpoint while it is opened.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::error::{CheckpointFault, Error};

/// How often a checkpoint is opened again. With the pauses that takes a quarter of a second at most.
const TRIES: usize = 100;
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(2);
/// Clocks of file systems advance in steps, of 10 ms at most on Linux: changes within a step have one time.
const STEP: Duration = Duration::from_millis(20);

/// Decides whether to open a checkpoint again.
pub(super) struct Replacement<'p> {
    path: &'p Path,
    /// When a name in the directory changed last, as of the last failure.
    modified: Option<SystemTime>,
    left: usize,
}

impl<'p> Replacement<'p> {
    /// Costs nothing until an attempt fails.
    pub(super) fn of(path: &'p Path) -> Replacement<'p> {
        Replacement {
            path,
            modified: None,
            left: TRIES,
        }
    }

    /// Whether a replacement may be the reason for `fault`, so that it is worth another try. Waits for that.
    pub(super) fn explains(&mut self, fault: &Error) -> bool {
        if self.left == 0 || !self.may_pass(fault) {
            return false;
        }
        let now = modified(self.directory());
        // A changed file proves a replacement. Otherwise the directory shows one; the first failure has nothing to compare it
        // with, and is worth a second try. Two changes may have one time, and this thread may not have run for long.
        let is_proven = matches!(fault, Error::Changed { .. });
        if !is_proven && now == self.modified && !now.is_some_and(is_recent) {
            return false;
        }
        self.left -= 1;
        self.modified = now;
        std::thread::sleep(PAUSE);
        true
    }

    fn directory(&self) -> &Path {
        match self.path.parent() {
            Some(parent) if !self.path.is_dir() => parent,
            _ => self.path,
        }
    }

    fn may_pass(&self, fault: &Error) -> bool {
        match fault {
            Error::Changed { .. } => true,
            // A name that the index or the directory listed, not the name that the caller passed.
            Error::Open { path, source } => source.kind() == io::ErrorKind::NotFound && path != self.path,
            Error::Checkpoint { fault, .. } => matches!(
                fault,
                CheckpointFault::MissingShards { .. }
                    | CheckpointFault::MissingIndex { .. }
                    | CheckpointFault::Ambiguous { .. }
                    | CheckpointFault::NoCheckpoint
            ),
            _ => false,
        }
    }
}

fn modified(directory: &Path) -> Option<SystemTime> {
    let directory = if directory.as_os_str().is_empty() {
        Path::new(".")
    } else {
        directory
    };
    fs::metadata(directory).and_then(|facts| facts.modified()).ok()
}

fn is_recent(time: SystemTime) -> bool {
    // A clock that is ahead, as a server's may be, says nothing.
    time.elapsed().is_ok_and(|ago| ago < STEP)
}
