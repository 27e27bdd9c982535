//! The parts of shuttle that replace the standard library's, and the parts that it lacks.

pub(crate) use shuttle::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// As [`ingot_format::locked`].
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) mod thread {
    use std::io;

    use shuttle::rand::{Rng, thread_rng};
    use shuttle::thread::ScopedJoinHandle;
    pub(crate) use shuttle::thread::{
        JoinHandle, Scope, Thread, ThreadId, current, park_timeout, sleep, yield_now,
    };
    pub(crate) use std::thread::available_parallelism;

    /// Keep one thread of the scope alive until `work` is over: when the last thread of a scope ends, shuttle wakes the
    /// thread that opened the scope, from any wait.
    pub(crate) fn scope<'env, R>(work: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> R) -> R {
        let (over, is_over) = shuttle::sync::mpsc::channel::<()>();
        shuttle::thread::scope(|scope| {
            scope.spawn(move || is_over.recv().is_err());
            let outcome = work(scope);
            drop(over);
            outcome
        })
    }

    /// Starts threads, and sometimes fails to, as the system may.
    pub(crate) struct Builder;

    impl Builder {
        pub(crate) fn new() -> Builder {
            Builder
        }

        pub(crate) fn name(self, _: String) -> Builder {
            self
        }

        pub(crate) fn spawn<F, T>(self, work: F) -> io::Result<JoinHandle<T>>
        where
            F: FnOnce() -> T + Send + 'static,
            T: Send + 'static,
        {
            is_allowed()?;
            Ok(shuttle::thread::spawn(work))
        }

        pub(crate) fn spawn_scoped<'scope, F, T>(
            self,
            scope: &'scope Scope<'scope, '_>,
            work: F,
        ) -> io::Result<ScopedJoinHandle<'scope, T>>
        where
            F: FnOnce() -> T + Send + 'scope,
            T: Send + 'scope,
        {
            is_allowed()?;
            Ok(scope.spawn(work))
        }
    }

    fn is_allowed() -> io::Result<()> {
        if thread_rng().gen_ratio(1, 16) {
            Err(io::ErrorKind::WouldBlock.into())
        } else {
            Ok(())
        }
    }
}
