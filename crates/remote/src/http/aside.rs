//! Calls of the system that nothing can break off, such as the one that resolves a name.
//!
//! A thread of its own makes such a call, and is joined when the call has ended. Only where the caller is interrupted, or
//! its time is over, does the thread stay behind: it ends with the call, by the time limits of the system (half a minute,
//! for a nameserver that is silent), and what it found is dropped. The library that could be asked instead without a
//! thread, hickory-resolver, needs a runtime, and does not read all that the system's resolver does.

use std::io;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use crate::fault::Fault;
use crate::http::pace::{Deadline, TICK};

/// As many such calls are under way in a process, whether somebody waits for them or not: one for each of the connections
/// that are made at once. The next one waits for one of them to end.
const MOST: u64 = 64;

/// The process that counts, in the upper half, and how many are under way in it. A forked process has the count of its
/// parent, and none of its threads.
static UNDER_WAY: AtomicU64 = AtomicU64::new(0);

/// One of the places of the process, until it is dropped.
struct Place;

impl Place {
    fn take() -> Option<Place> {
        let process = u64::from(process::id()) << 32;
        let taken = |counted: u64| {
            let count = counted.checked_sub(process).filter(|&count| count <= MOST);
            let count = count.unwrap_or(0);
            (count < MOST).then_some(process + count + 1)
        };
        let counted = UNDER_WAY.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken);
        counted.ok().map(|_| Place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What `call` gives, or that the time is over.
///
/// # Errors
/// When nobody wants it any more.
pub(crate) fn aside<T: Send + 'static>(
    call: impl FnOnce() -> io::Result<T> + Send + 'static,
    deadline: Deadline<'_>,
) -> Result<io::Result<T>, Fault> {
    let place = loop {
        let left = deadline.left()?;
        match Place::take() {
            Some(place) => break place,
            None if left.is_zero() => return Ok(Err(io::ErrorKind::TimedOut.into())),
            None => thread::sleep(left.min(TICK)),
        }
    };
    let (teller, told) = mpsc::channel();
    let call = move || {
        let outcome = call();
        drop(place);
        // Whoever asked may be gone.
        let _ = teller.send(outcome);
    };
    let thread = match thread::Builder::new().name("ingot-aside".to_owned()).spawn(call) {
        Ok(thread) => thread,
        Err(fault) => return Ok(Err(fault)),
    };
    loop {
        let left = deadline.left()?;
        match told.recv_timeout(left.min(TICK)) {
            Ok(outcome) => {
                // It has nothing left to do.
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

    /// All in one test: the places are those of the process.
    #[test]
    fn a_call_is_left_behind_when_nobody_wants_it_and_so_many_are_at_most() {
        let soon = || Deadline::within(Duration::from_millis(1), StopFlag::never());
        let (open, closed) = mpsc::channel::<()>();
        let closed = std::sync::Arc::new(std::sync::Mutex::new(closed));
        let waits = || {
            let closed = std::sync::Arc::clone(&closed);
            move || {
                // Fails once nobody can send any more.
                let _ = closed.lock().unwrap().recv();
                Ok(())
            }
        };
        for _ in 0..MOST {
            let outcome = aside(waits(), soon()).unwrap();
            assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
        assert!(Place::take().is_none());
        let outcome = aside(|| Ok(()), soon()).unwrap();
        assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let stopped = AtomicBool::new(true);
        let stop = Deadline::within(Duration::MAX, StopFlag::from(&stopped));
        assert_eq!(aside(|| Ok(()), stop).unwrap_err().code(), "interrupted");

        drop(open);
        let later = Deadline::within(Duration::from_secs(60), StopFlag::never());
        assert_eq!(aside(|| Ok(7), later).unwrap().unwrap(), 7);
        let failed = aside(|| Err::<(), _>(io::ErrorKind::NotFound.into()), later).unwrap();
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
