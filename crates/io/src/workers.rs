//! Work that several threads share while the calling thread polls the watch.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use ingot_format::{Caller, StopFlag, saturating_usize, to_u64};

use crate::device::Device;
use crate::error::{Error, Failure};
use crate::file::{ReadAt, threads_of_environment};
use crate::options::ReadOptions;
use crate::sync::thread::{self, Thread, ThreadId};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, locked};
use crate::watch::{POLL, Watch};

/// Bytes that one thread reads at once: large enough to make the cost of a call negligible, and small enough that all threads
/// finish together and an interruption is noticed soon. A whole number of huge pages.
const CHUNK_NBYTES: usize = 8 << 20;

/// If reads wait, chunks may be as small as this, so that all threads have some. Smaller ones would not pay, since a
/// read takes so long.
const WAITING_CHUNK_NBYTES: usize = 1 << 20;

/// Below this, starting a thread takes longer than reading.
const ALONE_NBYTES: u64 = 4 << 20;

/// More threads than this have not been seen to make copying from the page cache faster.
const MAX_THREADS: usize = 16;

/// The number of parallel reads from a local disk: enough to keep it busy.
const COLD_THREADS: usize = 8;

/// How a number of bytes is read: on how many threads, and how much at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) threads: usize,
    pub(crate) chunk_nbytes: usize,
    /// Whether each read waits for a network.
    pub(crate) waits: bool,
}

impl Reading {
    /// Return a reading on this many threads, without waits.
    pub(crate) fn on(threads: usize) -> Reading {
        Reading {
            threads,
            chunk_nbytes: CHUNK_NBYTES,
            waits: false,
        }
    }

    /// Return the same for reads that may wait for another machine.
    pub(crate) fn waiting(self, waits: bool) -> Reading {
        Reading { waits, ..self }
    }

    /// The same for bytes that pass through slots of these devices. Reads that wait for a network do not hold slots.
    pub(crate) fn onto<'d>(self, devices: impl Iterator<Item = &'d Device>) -> Reading {
        let least = devices.map(Device::chunk_nbytes).min();
        Reading {
            chunk_nbytes: match least {
                Some(least) if !self.waits => self.chunk_nbytes.min(least),
                _ => self.chunk_nbytes,
            },
            ..self
        }
    }

    /// Choose threads and chunks for `nbytes` bytes of these spans of sources. The slowest source decides.
    pub(crate) fn of(nbytes: u64, spans: &[(&dyn ReadAt, Range<u64>)], options: &ReadOptions) -> Reading {
        Reading::above(ALONE_NBYTES, nbytes, spans, options)
    }

    /// As [`Reading::of`], but up to `alone_nbytes` bytes of sources that do not wait are read by one thread.
    pub(crate) fn above(
        alone_nbytes: u64,
        nbytes: u64,
        spans: &[(&dyn ReadAt, Range<u64>)],
        options: &ReadOptions,
    ) -> Reading {
        // The variable was checked when the file was opened.
        let threads = options
            .threads
            .or_else(|| threads_of_environment().ok().flatten())
            .map(NonZeroUsize::get);
        let waiting = spans.iter().filter(|(source, _)| source.waits());
        // A waiting thread needs no core.
        let Some(at_once) = waiting.map(|(source, _)| source.reads_at_once()).min() else {
            let cores = || {
                thread::available_parallelism()
                    .map_or(1, usize::from)
                    .min(MAX_THREADS)
            };
            let is_cold = |(source, span): &(&dyn ReadAt, Range<u64>)| source.is_cold(span);
            let suits = || match nbytes {
                _ if nbytes <= alone_nbytes => 1,
                _ if nbytes > ALONE_NBYTES && spans.iter().any(is_cold) => COLD_THREADS,
                _ => cores(),
            };
            return Reading::on(threads.unwrap_or_else(suits));
        };
        let threads = threads.unwrap_or(at_once);
        Reading {
            threads,
            chunk_nbytes: each(nbytes, threads, WAITING_CHUNK_NBYTES),
            waits: true,
        }
    }
}

/// The size of each of this many chunks: a multiple of `least`.
pub(crate) fn each(nbytes: u64, chunks: usize, least: usize) -> usize {
    let each = saturating_usize(nbytes) / chunks;
    each.clamp(least, CHUNK_NBYTES).next_multiple_of(least)
}

/// Run `work` on every task, in order, on at most as many threads as `reading` allows. `work` returns how many bytes it
/// processed, of the `total` that `watch` reports, and stops waiting when its stop flag is set. Tasks are taken from the
/// iterator as threads become free, so that a list of tasks takes no memory for work that has not begun.
///
/// The system may refuse threads: with fewer threads the work continues, and with none the caller does it. The caller
/// also does work for a single thread, unless the work waits: then the caller must be free to watch.
///
/// # Errors
/// The first failure of `work`, or an interruption by `watch`. Tasks that have begun are finished, others are dropped.
pub(crate) fn share<T: Send, E: Send + From<Failure>>(
    reading: Reading,
    tasks: impl IntoIterator<Item = T, IntoIter: Send>,
    total: u64,
    work: impl Fn(T, StopFlag<'_>) -> Result<usize, E> + Sync,
    watch: &dyn Watch,
) -> Result<(), E> {
    let mut tasks = tasks.into_iter();
    // One task for each thread: fewer tasks need fewer threads.
    let first: Vec<T> = tasks.by_ref().take(reading.threads).collect();
    let threads = first.len();
    let tasks = Mutex::new(first.into_iter().chain(tasks));
    let team = Team::new(total, watch);
    let step = || {
        let task = if team.stopped() {
            None
        } else {
            locked(&tasks).next()
        };
        match task.map(|task| work(task, team.stop())) {
            None => return false,
            Some(Ok(nbytes)) => {
                team.did(to_u64(nbytes));
            }
            Some(Err(failure)) => team.fail(failure),
        }
        true
    };
    let least = if reading.waits { 1 } else { 2 };
    let work = || while step() {};
    if threads < least || !team.spread("ingot-read", threads, work, || ()) {
        while step() {
            team.poll();
        }
    }
    team.poll();
    team.outcome()
}

/// Run `work` while the caller polls the watch: on a thread of its own if it `waits`, and otherwise on this one. For a part of
/// a larger call, pass [`Asked`](crate::watch::Asked) as the watch, since the bytes are not counted here.
///
/// # Errors
/// An interruption by `watch`.
pub(crate) fn watched<R: Send, W: FnOnce(StopFlag<'_>) -> R + Send>(
    waits: bool,
    work: W,
    watch: &dyn Watch,
) -> Result<R, Failure> {
    let outcome = Mutex::new(None);
    let run = |work: W, stop: StopFlag<'_>| {
        *locked(&outcome) = Some(work(stop));
        Ok::<usize, Failure>(0)
    };
    share(Reading::on(1).waiting(waits), Some(work), 0, run, watch)?;
    let outcome = locked(&outcome).take();
    outcome.ok_or(Failure::Interrupted)
}

/// The number of threads that open files of a directory. More than cores, because they mostly wait for a remote disk.
const MAX_OPENERS: usize = 16;

/// Return the threads for opening files of a directory.
pub(crate) fn of_directory() -> Reading {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    Reading::on((2 * cores).min(MAX_OPENERS))
}

/// Return the results of `work` for each of `numbers`, in order.
///
/// # Errors
/// The error of the first number, in their order, that fails; later work that has not begun is dropped.
/// [`Failure::Interrupted`].
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
        // Each rank is assigned once, so the slot is free.
        let _ = done[rank].set(outcome);
        // Stops the other threads. The failure is in the slot.
        if failed { Err(Failure::Interrupted) } else { Ok(0) }
    };
    let ranks = 0..numbers.len();
    let shared = share(reading, ranks, 0, run, watch);
    let mut made = Vec::with_capacity(numbers.len());
    for outcome in done.into_iter().filter_map(OnceLock::into_inner) {
        match outcome {
            // It was stopped because another failed, or because the watch stopped the call.
            Err(error) if error.is_interrupted() => {}
            outcome => made.push(outcome?),
        }
    }
    shared?;
    Ok(made)
}

/// The state that the threads of one call share with the caller that polls the watch.
pub(crate) struct Team<'w, E> {
    /// The thread that made the call.
    caller: ThreadId,
    watch: &'w dyn Watch,
    total: u64,
    done: AtomicU64,
    stop: AtomicBool,
    failure: Mutex<Option<E>>,
}

impl<'w, E: Send + From<Failure>> Team<'w, E> {
    /// Return the team before any work of `total` bytes.
    pub(crate) fn new(total: u64, watch: &'w dyn Watch) -> Team<'w, E> {
        Team {
            caller: thread::current().id(),
            watch,
            total,
            done: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// Run `work` on threads of this `name`, and `meanwhile` on the calling thread, which then watches. Return false, and
    /// do nothing, if the system refuses threads.
    ///
    /// The threads have ended when this returns, so nothing of them outlives a call: a fork between two calls meets no
    /// threads and no locks.
    pub(crate) fn spread(
        &self,
        name: &str,
        threads: usize,
        work: impl Fn() + Sync,
        meanwhile: impl FnOnce(),
    ) -> bool {
        let (caller, running) = (thread::current(), AtomicUsize::new(0));
        let work = &work;
        thread::scope(|scope| {
            let mut started = Vec::new();
            for _ in 0..threads {
                running.fetch_add(1, Ordering::Relaxed);
                // Dropped, and the caller woken, even if `work` panics or the thread never runs.
                let leave = ThreadEnd {
                    running: &running,
                    caller: &caller,
                    stop: &self.stop,
                };
                let run = move || {
                    let _leave = leave;
                    work();
                };
                match thread::Builder::new()
                    .name(name.to_owned())
                    .spawn_scoped(scope, run)
                {
                    Ok(thread) => started.push(thread),
                    Err(_) => break,
                }
            }
            let has_started = !started.is_empty();
            if has_started {
                meanwhile();
            }
            while running.load(Ordering::Acquire) > 0 {
                self.poll();
                thread::park_timeout(POLL);
            }
            for thread in started {
                // The scope alone would wait for the work, and not for the threads.
                if let Err(panic) = thread.join() {
                    resume_unwind(panic);
                }
            }
            has_started
        })
    }

    /// Report the progress to the watch, and ask it whether to continue. Return whether to continue. For the calling thread
    /// only.
    pub(crate) fn poll(&self) -> bool {
        if !self.stopped() {
            self.tell();
            if self.watch.interrupted() {
                self.fail(Failure::Interrupted.into());
            }
        }
        !self.stopped()
    }

    /// Report the progress to the watch.
    pub(crate) fn tell(&self) {
        self.watch.progressed(self.done(), self.total);
    }

    /// Record that `nbytes` more are done, and return the sum.
    pub(crate) fn did(&self, nbytes: u64) -> u64 {
        self.done.fetch_add(nbytes, Ordering::Relaxed) + nbytes
    }

    /// The number of bytes that are done.
    pub(crate) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// End the work: threads finish the tasks that they have begun. The first failure is the outcome.
    pub(crate) fn fail(&self, failure: E) {
        locked(&self.failure).get_or_insert(failure);
        self.stop.store(true, Ordering::Relaxed);
    }

    /// The flag that stops work which waits.
    pub(crate) fn stop(&self) -> StopFlag<'_> {
        StopFlag::of(&self.stop, self)
    }

    /// Return whether to stop.
    pub(crate) fn stopped(&self) -> bool {
        self.stop().is_set()
    }

    /// Return the outcome.
    ///
    /// # Errors
    /// The first failure, or an interruption.
    pub(crate) fn outcome(&self) -> Result<(), E> {
        locked(&self.failure).take().map_or(Ok(()), Err)
    }
}

impl<E: Send + From<Failure>> Caller for Team<'_, E> {
    fn ask(&self) {
        if thread::current().id() == self.caller {
            self.poll();
        }
    }
}

/// Records, when dropped, that a thread has ended, and stops the others if it panicked: they may wait for its work.
struct ThreadEnd<'a> {
    running: &'a AtomicUsize,
    caller: &'a Thread,
    stop: &'a AtomicBool,
}

impl Drop for ThreadEnd<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.stop.store(true, Ordering::Relaxed);
        }
        self.running.fetch_sub(1, Ordering::Release);
        self.caller.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::in_every_order;
    use crate::watch::Unwatched;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::Instant;

    /// Works until the flag is set, or for a minute.
    fn hears(stop: StopFlag<'_>) -> bool {
        let begun = Instant::now();
        while !stop.is_set() && begun.elapsed().as_secs() < 60 {
            std::thread::sleep(POLL / 10);
        }
        stop.is_set()
    }

    #[test]
    fn work_that_waits_hears_that_other_work_has_failed() {
        let heard = AtomicBool::new(false);
        let work = |fails: bool, stop: StopFlag<'_>| {
            if fails {
                Err(Failure::Interrupted)
            } else {
                heard.store(hears(stop), Ordering::Relaxed);
                Ok(0)
            }
        };
        assert!(share(Reading::on(2), vec![false, true], 0, work, &Unwatched).is_err());
        assert!(heard.into_inner());
    }

    #[test]
    fn work_that_waits_hears_that_other_work_has_panicked() {
        let heard = AtomicBool::new(false);
        let work = |panics: bool, stop: StopFlag<'_>| {
            assert!(!panics, "planted");
            heard.store(hears(stop), Ordering::Relaxed);
            Ok::<usize, Failure>(0)
        };
        let shared = || share(Reading::on(2), vec![false, true], 0, work, &Unwatched);
        assert!(catch_unwind(AssertUnwindSafe(shared)).is_err());
        assert!(heard.into_inner());
    }

    #[test]
    fn work_that_waits_hears_that_its_caller_is_stopped() {
        let stop = AtomicBool::new(true);
        let outcome = watched(true, hears, &StopFlag::from(&stop));
        assert!(matches!(outcome, Err(Failure::Interrupted)));
    }

    /// A watch that records the reported numbers, and stops the call at one check.
    #[derive(Default)]
    struct Recorder {
        done: Mutex<Vec<u64>>,
        stops_at: Option<usize>,
    }

    impl Watch for Recorder {
        fn interrupted(&self) -> bool {
            self.stops_at.is_some_and(|look| locked(&self.done).len() > look)
        }

        fn progressed(&self, done: u64, total: u64) {
            assert!(done <= total);
            locked(&self.done).push(done);
        }
    }

    #[test]
    fn in_every_order_of_threads_each_task_is_done_once_and_the_caller_is_told_of_all() {
        in_every_order(|| {
            let (seen, begun) = (Recorder::default(), Mutex::new(Vec::new()));
            let work = |task: usize, _: StopFlag<'_>| {
                locked(&begun).push(task);
                Ok::<_, Failure>(task)
            };
            share(Reading::on(3).waiting(true), vec![1, 2, 3, 4], 10, work, &seen).unwrap();
            let mut begun = begun.into_inner().unwrap();
            begun.sort_unstable();
            assert_eq!(begun, [1, 2, 3, 4]);
            let seen = seen.done.into_inner().unwrap();
            assert!(seen.is_sorted());
            assert_eq!(seen.last(), Some(&10));
        });
    }

    #[test]
    fn in_every_order_of_threads_the_failure_is_that_of_the_first_number_that_fails() {
        in_every_order(|| {
            let work = |number: usize, _: StopFlag<'_>| match number {
                11 | 13 => Err(Failure::InvalidThreads(number.to_string()).into()),
                _ => Ok(number),
            };
            let failed = in_parallel(Reading::on(3).waiting(true), &[10, 11, 12, 13], work, &Unwatched);
            let failed = failed.unwrap_err();
            assert!(matches!(failed.failure(), Failure::InvalidThreads(found) if found == "11"));
            let numbers = [14, 12, 10];
            let made = in_parallel(Reading::on(3).waiting(true), &numbers, work, &Unwatched).unwrap();
            assert_eq!(made, numbers);
        });
    }

    #[test]
    fn in_every_order_of_threads_who_is_stopped_leaves_with_no_thread_behind() {
        in_every_order(|| {
            let seen = Recorder {
                stops_at: Some(1),
                ..Recorder::default()
            };
            let at_work = AtomicUsize::new(0);
            let work = |_: usize, _: StopFlag<'_>| {
                at_work.fetch_add(1, Ordering::Relaxed);
                at_work.fetch_sub(1, Ordering::Relaxed);
                Ok::<_, Failure>(1)
            };
            let outcome = share(Reading::on(2), vec![0; 4], 4, work, &seen);
            assert_eq!(at_work.into_inner(), 0);
            match outcome {
                Err(Failure::Interrupted) => {}
                Ok(()) => assert_eq!(seen.done.into_inner().unwrap().last(), Some(&4)),
                Err(other) => panic!("{other:?}"),
            }
        });
    }
}
