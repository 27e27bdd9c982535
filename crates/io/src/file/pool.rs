//! The files that stay open between reads.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Mutex};

use ingot_format::briefly;

use crate::disk;

/// The files that were opened last. A file that leaves the list is closed when no thread reads it.
///
/// A fork may leave the lock closed for good. No file is kept open then.
#[derive(Debug)]
pub(super) struct OpenFiles<F> {
    most: usize,
    pub(super) files: Mutex<VecDeque<Arc<F>>>,
}

impl<F> OpenFiles<F> {
    pub(super) const fn new(most: usize) -> OpenFiles<F> {
        OpenFiles {
            most,
            files: Mutex::new(VecDeque::new()),
        }
    }

    /// Return how many files stay open: at most a quarter of the descriptors that the process may have.
    pub(super) fn most(&self) -> usize {
        self.most.min(disk::descriptors_allowed() / 4)
    }

    /// Keep `file` open until as many other files were opened after it.
    pub(super) fn keep(&self, file: Arc<F>) {
        let Some(mut files) = briefly(&self.files) else {
            return;
        };
        files.push_back(file);
        let surplus = files.len().saturating_sub(self.most());
        let closed: Vec<_> = files.drain(..surplus).collect();
        // Closing may take time on a network file system, so the lock is released first.
        drop((files, closed));
    }

    /// Stop keeping `file` open.
    pub(super) fn release(&self, file: &Arc<F>) {
        if let Some(mut files) = briefly(&self.files) {
            files.retain(|kept| !Arc::ptr_eq(kept, file));
        }
    }

    /// Stop keeping files open.
    pub(super) fn clear(&self) {
        drop(briefly(&self.files).map(|mut files| mem::take(&mut *files)));
    }
}
