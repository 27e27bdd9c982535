//! Waiting for the disk without becoming deaf.

use std::fs::File;
use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use super::{POLL, Step, Stop, Watch, step};

/// Makes the bytes of `file` durable. That may take seconds and cannot be broken off, so a thread does it; when the
/// watch asks to stop, the thread is left alone with a file that nobody will ever see.
pub(super) fn flush(file: &File, watch: &dyn Watch) -> Result<(), Stop> {
    let (sender, outcome) = mpsc::channel();
    let copy = file.try_clone().step(step::FLUSH)?;
    let run = move || {
        // Nobody listens after an interruption.
        let _ = sender.send(sync(&copy));
    };
    // 64 KiB is more than one system call needs.
    let thread = thread::Builder::new()
        .name("ingot-flush".into())
        .stack_size(64 << 10);
    if thread.spawn(run).is_err() {
        return sync(file).step(step::FLUSH);
    }
    loop {
        match outcome.recv_timeout(POLL) {
            Ok(outcome) => return outcome.step(step::FLUSH),
            Err(RecvTimeoutError::Timeout) if watch.interrupted() => return Err(Stop::Interrupted),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return sync(file).step(step::FLUSH),
        }
    }
}

/// Flushes what can be flushed; pipes and terminals cannot, and there is nothing to lose in them.
pub(super) fn sync(file: &File) -> io::Result<()> {
    match file.sync_all() {
        Err(fault)
            if matches!(
                fault.kind(),
                io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
            ) =>
        {
            Ok(())
        }
        outcome => outcome,
    }
}
