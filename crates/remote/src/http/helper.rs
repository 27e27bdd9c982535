//! Calls that cannot be interrupted, such as resolving a name, on threads of their own.
//!
//! The thread is joined when the call ends. If the caller is interrupted or its time is over, the thread continues until
//! the call ends, by the time limits of the system (half a minute for a nameserver that does not answer), and its result
//! is dropped. hickory-resolver, which would need no thread, needs a runtime and does not read all of the system's
//! configuration.

use std::io;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use crate::fault::Result;
use crate::http::pace::{Deadline, TICK};

/// Most such calls of a process at once, abandoned ones included. Further calls wait for one of them to end.
const MOST: u64 = 64;

/// The process that counts, in the upper half, and its number of calls. A child of a fork has the count of its parent,
/// and none of its threads.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// The permission to make a call, until it is dropped.
struct Permit(&'static AtomicU64);

impl Permit {
    fn take(count: &'static AtomicU64) -> Option<Permit> {
        let process = u64::from(process::id()) << 32;
        let taken = |counted: u64| {
            let count = counted.checked_sub(process).filter(|&count| count <= MOST);
            let count = count.unwrap_or(0);
            (count < MOST).then_some(process + count + 1)
        };
        let counted = count.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken);
        counted.ok().map(|_| Permit(count))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Return the result of `call`, or `TimedOut` after the deadline.
///
/// # Errors
/// If the stop flag is set.
pub(crate) fn on_helper_thread<T: Send + 'static>(
    call: impl FnOnce() -> io::Result<T> + Send + 'static,
    deadline: Deadline<'_>,
) -> Result<io::Result<T>> {
    counted(&COUNT, call, deadline)
}

/// Like [`on_helper_thread`], as one of the calls that `count` counts.
fn counted<T: Send + 'static>(
    count: &'static AtomicU64,
    call: impl FnOnce() -> io::Result<T> + Send + 'static,
    deadline: Deadline<'_>,
) -> Result<io::Result<T>> {
    let permit = loop {
        let left = deadline.left()?;
        match Permit::take(count) {
            Some(permit) => break permit,
            None if left.is_zero() => return Ok(Err(io::ErrorKind::TimedOut.into())),
            None => thread::sleep(left.min(TICK)),
        }
    };
    let (sender, receiver) = mpsc::channel();
    let call = move || {
        let outcome = call();
        drop(permit);
        // The caller may have stopped waiting.
        let _ = sender.send(outcome);
    };
    let thread = match thread::Builder::new().name("ingot-helper".to_owned()).spawn(call) {
        Ok(thread) => thread,
        Err(fault) => return Ok(Err(fault)),
    };
    loop {
        let left = deadline.left()?;
        match receiver.recv_timeout(left.min(TICK)) {
            Ok(outcome) => {
                // The thread ends without further work.
                let _ = thread.join();
                return Ok(outcome);
            }
            Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                return Ok(Err(io::ErrorKind::TimedOut.into()));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(Err(io::Error::other("it panicked"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;
    use ingot_format::StopFlag;

    #[test]
    fn abandoned_calls_continue_and_their_number_is_limited() {
        // Other tests take permits of the process's count.
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let soon = || Deadline::within(Duration::from_millis(1), StopFlag::never());
        let (open, closed) = mpsc::channel::<()>();
        let closed = std::sync::Arc::new(std::sync::Mutex::new(closed));
        let waits = || {
            let closed = std::sync::Arc::clone(&closed);
            move || {
                // Fails once the sender is dropped.
                let _ = closed.lock().unwrap().recv();
                Ok(())
            }
        };
        for _ in 0..MOST {
            let outcome = counted(&COUNT, waits(), soon()).unwrap();
            assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
        assert!(Permit::take(&COUNT).is_none());
        let outcome = counted(&COUNT, || Ok(()), soon()).unwrap();
        assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let stopped = AtomicBool::new(true);
        let stop = Deadline::within(Duration::MAX, StopFlag::from(&stopped));
        assert_eq!(
            counted(&COUNT, || Ok(()), stop).unwrap_err().code(),
            "interrupted"
        );

        drop(open);
        let later = Deadline::within(Duration::from_secs(60), StopFlag::never());
        assert_eq!(counted(&COUNT, || Ok(7), later).unwrap().unwrap(), 7);
        let failed = counted(&COUNT, || Err::<(), _>(io::ErrorKind::NotFound.into()), later).unwrap();
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
