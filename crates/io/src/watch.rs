//! Cancelling a long call, and reporting its progress.

use std::time::Duration;

use ingot_format::StopFlag;

/// The time between two checks of the watch: half of the documented 100 ms.
pub(crate) const POLL: Duration = Duration::from_millis(50);

/// Stops a call and receives its progress. Called regularly, on the thread that made the call.
///
/// ```
/// use std::sync::atomic::{AtomicBool, Ordering};
///
/// use ingot_io::{Algorithm, Error, Watch, hash};
///
/// struct Cancelled(AtomicBool);
///
/// impl Watch for Cancelled {
///     fn interrupted(&self) -> bool {
///         self.0.load(Ordering::Relaxed)
///     }
/// }
///
/// let file = tempfile::NamedTempFile::new()?;
/// std::fs::write(&file, "abc")?;
/// let cancelled = Cancelled(AtomicBool::new(true));
/// let outcome = hash(file.path(), Algorithm::Blake3, &cancelled);
/// assert!(outcome.as_ref().is_err_and(Error::is_interrupted));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Watch: Sync {
    /// Return whether to stop. Called at least every 100 ms.
    fn interrupted(&self) -> bool {
        false
    }

    /// Receive the number of bytes that are done, and the total. Called before [`Watch::interrupted`], so that a watch can
    /// stop at some point, and once at the end. `done` never decreases.
    fn progressed(&self, _done: u64, _total: u64) {}
}

/// Never stops.
///
/// ```
/// use ingot_io::{Algorithm, Unwatched, hash};
///
/// let file = tempfile::NamedTempFile::new()?;
/// std::fs::write(&file, "abc")?;
/// assert_eq!(hash(file.path(), Algorithm::Sha256, &Unwatched)?, Algorithm::Sha256.digest(b"abc"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl Watch for Unwatched {}

/// A stop flag for the threads of a call, which is set when the call is stopped.
impl Watch for StopFlag<'_> {
    fn interrupted(&self) -> bool {
        self.is_set()
    }
}

/// Asks the watch of the whole call whether to stop, and reports no progress: only the loop of the whole call knows it.
pub(crate) struct Asked<'w>(pub(crate) &'w dyn Watch);

impl Watch for Asked<'_> {
    fn interrupted(&self) -> bool {
        self.0.interrupted()
    }
}

/// Reports the progress of one part of the work as progress of the whole.
pub struct After<'w> {
    /// The watch of the whole.
    pub watch: &'w dyn Watch,
    /// Bytes that were done before.
    pub before: u64,
    /// Bytes of the whole.
    pub total: u64,
}

impl Watch for After<'_> {
    fn interrupted(&self) -> bool {
        self.watch.interrupted()
    }

    fn progressed(&self, done: u64, _: u64) {
        self.watch
            .progressed(self.before.saturating_add(done), self.total);
    }
}
