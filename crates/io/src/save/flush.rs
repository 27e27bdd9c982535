//! Flushing on a thread, so that the caller can be interrupted.

use std::fs::File;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::disk::{self, Kind};
use crate::error::{Error, Failure, Step, step};
use crate::watch::{POLL, Watch};

/// The number of bytes that are sent to the disk at once while others are written. Enough for long runs on the disk.
const AHEAD: u64 = 32 << 20;

/// A thread that flushes a file. Flushing may take seconds and cannot be interrupted. If the watch stops the save, the
/// thread is left alone with a file that is never published.
pub(super) struct Flusher {
    /// Takes how many bytes are written; closed when it is all.
    written: Sender<u64>,
    /// Only [`Flusher::finish`] receives. Behind a lock, so that the writing threads can share this.
    outcome: Mutex<Receiver<io::Result<()>>>,
}

impl Flusher {
    /// `None` if no thread could be started.
    pub(super) fn start(file: &File) -> Option<Flusher> {
        let copy = file.try_clone().ok()?;
        let (written, progress) = mpsc::channel();
        let (sender, outcome) = mpsc::channel();
        let run = move || {
            // After an interruption, no thread receives.
            let _ = sender.send(run(&copy, &progress));
        };
        // 64 KiB is more than system calls need.
        let thread = thread::Builder::new()
            .name("ingot-flush".into())
            .stack_size(64 << 10);
        thread.spawn(run).ok()?;
        Some(Flusher {
            written,
            outcome: Mutex::new(outcome),
        })
    }

    /// Report that `done` bytes are written, anywhere in the file.
    pub(super) fn wrote(&self, done: u64) {
        // The thread has ended if a flush failed. `finish` reports that.
        let _ = self.written.send(done);
    }

    /// Flush the rest, and wait.
    pub(super) fn finish(self, file: &File, watch: &dyn Watch) -> Result<(), Error> {
        drop(self.written);
        let outcome = self.outcome.into_inner().unwrap_or_else(PoisonError::into_inner);
        loop {
            match outcome.recv_timeout(POLL) {
                Ok(outcome) => return outcome.step(step::FLUSH),
                Err(RecvTimeoutError::Timeout) if watch.interrupted() => {
                    return Err(Failure::Interrupted.into());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return sync(file).step(step::FLUSH),
            }
        }
    }
}

fn run(file: &File, written: &Receiver<u64>) -> io::Result<()> {
    let mut flushed = 0;
    while let Ok(done) = written.recv() {
        // The number of bytes written during the last flush.
        let done = written.try_iter().last().unwrap_or(done);
        if done >= flushed + AHEAD {
            // The file has its reserved size already, so only the bytes have to be flushed.
            file.sync_data()?;
            flushed = done;
        }
    }
    sync(file)
}

/// Make the bytes of `file` durable.
pub(super) fn flush(file: &File, watch: &dyn Watch) -> Result<(), Error> {
    match Flusher::start(file) {
        Some(flusher) => flusher.finish(file, watch),
        None => sync(file).step(step::FLUSH),
    }
}

/// Flush what can be flushed; pipes and terminals cannot, and there is nothing to lose in them.
pub(super) fn sync(file: &File) -> io::Result<()> {
    let has_nothing = |fault: &io::Error| match fault.kind() {
        io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => true,
        // Windows' error for a device.
        io::ErrorKind::PermissionDenied => disk::facts(file).is_ok_and(|facts| facts.kind == Kind::Other),
        _ => false,
    };
    file.sync_all()
        .or_else(|fault| if has_nothing(&fault) { Ok(()) } else { Err(fault) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::Unwatched;

    struct Now;
    impl Watch for Now {
        fn interrupted(&self) -> bool {
            true
        }
    }

    /// A flusher whose thread reports the outcome that is sent here.
    fn flusher() -> (Sender<io::Result<()>>, Flusher) {
        let (sender, outcome) = mpsc::channel();
        let flusher = Flusher {
            written: mpsc::channel().0,
            outcome: Mutex::new(outcome),
        };
        (sender, flusher)
    }

    #[test]
    fn a_flush_that_takes_long_is_waited_for_until_the_watch_says_no() {
        let file = tempfile::tempfile().unwrap();
        let (sender, slow) = flusher();
        let finished = thread::scope(|scope| {
            scope.spawn(move || {
                thread::sleep(3 * POLL);
                sender.send(Ok(())).unwrap();
            });
            slow.finish(&file, &Unwatched)
        });
        assert!(finished.is_ok());
        let (_sender, endless) = flusher();
        assert!(
            endless
                .finish(&file, &Now)
                .is_err_and(|fault| fault.is_interrupted())
        );
    }

    #[test]
    fn what_the_thread_says_is_the_outcome_and_its_end_is_none() {
        let file = tempfile::tempfile().unwrap();
        let (sender, failed) = flusher();
        sender.send(Err(io::ErrorKind::StorageFull.into())).unwrap();
        let failed = failed.finish(&file, &Unwatched).unwrap_err();
        assert_eq!(failed.system().unwrap().kind(), io::ErrorKind::StorageFull);
        let (sender, ended) = flusher();
        drop(sender);
        assert!(ended.finish(&file, &Unwatched).is_ok());
    }
}
