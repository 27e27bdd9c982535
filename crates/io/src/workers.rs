//! Work that threads share while their caller watches.

use std::cell::RefCell;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

use ingot_format::to_u64;

use crate::error::Failure;
use crate::read::execute::Reading;
use crate::watch::Watch;

/// How often the calling thread looks whether to stop.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

thread_local! {
    /// Whether the call that this thread works for is to stop.
    static STOP: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Whether nobody wants what this thread does any more. Work that waits looks now and then, and gives up.
#[cfg_attr(
    not(feature = "remote"),
    expect(dead_code, reason = "only remote sources wait")
)]
pub(crate) fn unwanted() -> bool {
    STOP.with_borrow(|stop| stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)))
}

/// Has what this thread waits for end when `stop` says so.
pub(crate) fn heed(stop: &Arc<AtomicBool>) {
    STOP.set(Some(Arc::clone(stop)));
}

/// Does `work` on every task, first to last, on as many threads as `reading` says at most. `work` says how many bytes it has done, of
/// the `total` that `watch` is told.
///
/// Where the system refuses threads there are fewer, and with none at all the caller does the work. It does so too where
/// there is work for one thread only, unless that waits: then the caller has to watch. The threads end
/// before this returns, so nothing of them outlives a call: a fork between two calls meets no threads and no locks.
///
/// # Errors
/// The first failure of `work`, or that `watch` wants no more. Tasks that were begun are finished, others dropped.
pub(crate) fn share<T: Send, E: Send + From<Failure>>(
    reading: Reading,
    tasks: Vec<T>,
    total: u64,
    work: impl Fn(T) -> Result<usize, E> + Sync,
    watch: &dyn Watch,
) -> Result<(), E> {
    let threads = reading.threads.min(tasks.len());
    let shared = Shared::new(tasks, total, work);
    let least = if reading.waits { 1 } else { 2 };
    if threads < least || !shared.spread(threads, watch) {
        shared.alone(watch);
    }
    if !shared.stopped() {
        shared.look(watch);
    }
    locked(&shared.failure).take().map_or(Ok(()), Err)
}

/// Does `work`, which waits, while the caller watches.
///
/// # Errors
/// That `watch` wants no more.
#[cfg(feature = "remote")]
pub(crate) fn watched<R: Send>(work: impl FnOnce() -> R + Send, watch: &dyn Watch) -> Result<R, Failure> {
    let outcome = Mutex::new(None);
    let task = |work: Box<dyn FnOnce() -> R + Send + '_>| {
        *locked(&outcome) = Some(work());
        Ok::<usize, Failure>(0)
    };
    let tasks = vec![Box::new(work) as Box<_>];
    share(Reading::waiting(1), tasks, 0, task, watch)?;
    outcome
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
        .ok_or(Failure::Interrupted)
}

/// What the threads of one call have in common.
struct Shared<T, W, E> {
    /// Those not begun, the first last.
    tasks: Mutex<Vec<T>>,
    work: W,
    total: u64,
    done: AtomicU64,
    stop: Arc<AtomicBool>,
    failure: Mutex<Option<E>>,
    running: AtomicUsize,
}

impl<T: Send, W: Fn(T) -> Result<usize, E> + Sync, E: Send + From<Failure>> Shared<T, W, E> {
    fn new(mut tasks: Vec<T>, total: u64, work: W) -> Shared<T, W, E> {
        tasks.reverse();
        Shared {
            tasks: Mutex::new(tasks),
            work,
            total,
            done: AtomicU64::new(0),
            stop: Arc::default(),
            failure: Mutex::new(None),
            running: AtomicUsize::new(0),
        }
    }

    /// Lets threads do everything; `false` where the system gives none.
    fn spread(&self, threads: usize, watch: &dyn Watch) -> bool {
        let caller = thread::current();
        thread::scope(|scope| {
            let mut started = Vec::new();
            for _ in 0..threads {
                self.running.fetch_add(1, Ordering::Relaxed);
                // Dropped, and the caller woken, even if `work` panics or the thread never runs.
                let leave = Leave {
                    running: &self.running,
                    caller: &caller,
                };
                let spawned =
                    thread::Builder::new()
                        .name("ingot-read".to_owned())
                        .spawn_scoped(scope, move || {
                            let _leave = leave;
                            heed(&self.stop);
                            while self.step() {}
                        });
                match spawned {
                    Ok(thread) => started.push(thread),
                    Err(_) => break,
                }
            }
            while self.running.load(Ordering::Acquire) > 0 {
                self.look(watch);
                thread::park_timeout(WATCH_INTERVAL);
            }
            let has_started = !started.is_empty();
            for thread in started {
                // The scope alone would wait for the work, and not for the threads.
                if let Err(panic) = thread.join() {
                    resume_unwind(panic);
                }
            }
            has_started
        })
    }

    fn alone(&self, watch: &dyn Watch) {
        while !self.stopped() && self.step() {
            self.look(watch);
        }
    }

    /// Does one task; `false` when there is none left to do.
    fn step(&self) -> bool {
        if self.stopped() {
            return false;
        }
        let Some(task) = locked(&self.tasks).pop() else {
            return false;
        };
        match (self.work)(task) {
            Ok(nbytes) => {
                self.done.fetch_add(to_u64(nbytes), Ordering::Relaxed);
            }
            Err(failure) => self.fail(failure),
        }
        true
    }

    /// Tells `watch` how far it is, and asks it whether to go on.
    fn look(&self, watch: &dyn Watch) {
        watch.progressed(self.done.load(Ordering::Relaxed), self.total);
        if watch.interrupted() {
            self.fail(Failure::Interrupted.into());
        }
    }

    fn fail(&self, failure: E) {
        locked(&self.failure).get_or_insert(failure);
        self.stop.store(true, Ordering::Relaxed);
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Says, when dropped, that a thread has ended.
struct Leave<'a> {
    running: &'a AtomicUsize,
    caller: &'a Thread,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.running.fetch_sub(1, Ordering::Release);
        self.caller.unpark();
    }
}

/// The contents of a lock. A thread that panicked while holding it is reported by the scope, not here.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
