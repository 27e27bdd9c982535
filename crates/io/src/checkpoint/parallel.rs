//! Opening many files at once.

use std::num::NonZero;
use std::sync::OnceLock;
use std::thread;

use crate::execute::Reading;
use crate::failure::Failure;
use crate::watch::Unwatched;
use crate::workers::share;

/// Threads that open files. More than there are cores, because they mostly wait where the disk is far.
const MAX_OPENERS: usize = 16;

/// What `work` makes of each number below `count`.
pub(super) fn in_parallel<T: Send + Sync>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let done: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    let numbers: Vec<usize> = (0..count).collect();
    let run = |number: usize| {
        // Each number is given out once, so the slot is free.
        let _ = done[number].set(work(number));
        Ok::<usize, Failure>(0)
    };
    // Nothing fails here, and nobody interrupts it: what goes wrong is in the results.
    let _ = share(
        Reading::on((2 * cores).min(MAX_OPENERS)),
        numbers,
        0,
        run,
        &Unwatched,
    );
    done.into_iter().filter_map(OnceLock::into_inner).collect()
}
