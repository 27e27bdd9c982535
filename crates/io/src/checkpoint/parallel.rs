//! Opening many files at once.

use std::num::NonZero;
use std::sync::OnceLock;
use std::thread;

use ingot_remote::StopFlag;

use crate::error::{Error, Failure};
use crate::watch::Watch;
use crate::workers::{Reading, share};

/// Threads that open files of a directory. More than there are cores, because they mostly wait where the disk is far.
const MAX_OPENERS: usize = 16;

/// How files of a directory are opened.
pub(super) fn of_directory() -> Reading {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    Reading::on((2 * cores).min(MAX_OPENERS))
}

/// What `work` makes of each of `numbers`, in their order.
///
/// # Errors
/// That of the first number, in their order, which fails; what was not begun by then is dropped. That `watch` wants no
/// more.
pub(crate) fn in_parallel<T: Send + Sync>(
    reading: Reading,
    numbers: &[usize],
    work: impl Fn(usize, StopFlag<'_>) -> Result<T, Error> + Sync,
    watch: &dyn Watch,
) -> Result<Vec<T>, Error> {
    let done: Vec<OnceLock<Result<T, Error>>> = numbers.iter().map(|_| OnceLock::new()).collect();
    let run = |rank: usize, stop: StopFlag<'_>| {
        let outcome = work(numbers[rank], stop);
        let failed = outcome.is_err();
        // Each rank is given out once, so the slot is free.
        let _ = done[rank].set(outcome);
        match failed {
            // Stops the others; what went wrong is in the slot.
            true => Err(Failure::Interrupted),
            false => Ok(0),
        }
    };
    let ranks = (0..numbers.len()).collect();
    let shared = share(reading, ranks, 0, run, watch);
    let mut made = Vec::with_capacity(numbers.len());
    for outcome in done.into_iter().filter_map(OnceLock::into_inner) {
        match outcome {
            // It was stopped because another failed, or because nobody wants it any more.
            Err(error) if error.code() == Error::Interrupted.code() => {}
            outcome => made.push(outcome?),
        }
    }
    shared?;
    Ok(made)
}
