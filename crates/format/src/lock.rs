//! Locks, for data that the threads of one call share and for data that outlives a call.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

/// Locks a mutex that lives no longer than the call. A panic of a thread that held it is reported when the thread is
/// joined.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Number of attempts to take a lock before the thread sleeps between attempts.
const YIELDS: usize = 200;

/// Number of attempts with a sleep of [`PAUSE`] before each: 100 ms in all, enough for a holder that was preempted on a
/// busy machine.
const SLEEPS: usize = 100;

const PAUSE: Duration = Duration::from_millis(1);

/// Locks a mutex that is never held for longer than a few instructions. `None` if it stays locked, as it does forever
/// in a process that was forked while another thread held it; the caller must be able to work without the data.
pub fn briefly<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    for attempt in 0..YIELDS + SLEEPS {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if attempt < YIELDS => thread::yield_now(),
            Err(TryLockError::WouldBlock) => thread::sleep(PAUSE),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_lock_that_stays_closed_is_done_without_and_one_that_broke_is_opened() {
        let mutex = Mutex::new(1);
        let held = locked(&mutex);
        assert!(briefly(&mutex).is_none());
        drop(held);
        assert_eq!(briefly(&mutex).map(|guard| *guard), Some(1));
        // `briefly` waits for a holder that does not run for a moment. On a busy machine the moment may be too long.
        let (held, begin) = (locked(&mutex), Instant::now());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| briefly(&mutex).map(|guard| *guard));
            thread::sleep(5 * PAUSE);
            drop(held);
            let was_long = begin.elapsed() >= PAUSE * u32::try_from(SLEEPS).unwrap();
            let found = waiting.join().unwrap();
            assert!(found == Some(1) || was_long, "{found:?}");
        });
        let broken = std::thread::scope(|scope| {
            let holding = scope.spawn(|| {
                let _held = locked(&mutex);
                std::panic::resume_unwind(alloc::boxed::Box::new(()));
            });
            holding.join()
        });
        assert!(broken.is_err());
        assert_eq!(*locked(&mutex), 1);
        assert_eq!(briefly(&mutex).map(|guard| *guard), Some(1));
    }
}
