//! How long a server may take.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::fault::{Fault, FaultKind};
use super::options::RemoteOptions;

/// How long one wait is at most, before it is looked whether to go on.
pub(crate) const TICK: Duration = Duration::from_millis(100);

thread_local! {
    /// Whether the call that this thread works for is to stop.
    static STOP: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Whether nobody wants what this thread does any more. Work that waits looks now and then, and gives up.
pub(crate) fn stopped() -> bool {
    STOP.with_borrow(|stop| stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)))
}

/// Has what this thread waits for end when `stop` says so.
pub(crate) fn heed(stop: &Arc<AtomicBool>) {
    STOP.set(Some(Arc::clone(stop)));
}

/// Watches over one exchange with a server: in each window of time it has to bring so many bytes.
#[derive(Debug)]
pub(crate) struct Pace {
    window: Duration,
    window_nbytes: u64,
    /// When the present window began, and what has come since.
    since: Instant,
    nbytes: u64,
    deadline: Instant,
    begun: Instant,
}

impl Pace {
    pub(crate) fn new(options: &RemoteOptions, deadline: Instant) -> Pace {
        let window = options.stall_timeout;
        Pace {
            window,
            window_nbytes: bytes_in(window, options.min_rate),
            since: Instant::now(),
            nbytes: 0,
            deadline,
            begun: Instant::now(),
        }
    }

    /// Notes that bytes came.
    pub(crate) fn came(&mut self, nbytes: u64) {
        self.nbytes = self.nbytes.saturating_add(nbytes);
    }

    /// Whether to go on waiting. Asked after every wait and every read, so that bytes that trickle in count too.
    pub(crate) fn check(&mut self) -> Result<(), Fault> {
        let now = Instant::now();
        let slow = |what| {
            let after = self.begun.elapsed();
            Err(FaultKind::Slow { what, after }.into())
        };
        if stopped() {
            return Err(FaultKind::Stopped.into());
        }
        if now >= self.deadline {
            return slow("the time for the request was over");
        }
        if now.duration_since(self.since) >= self.window {
            if self.nbytes < self.window_nbytes {
                return slow(match self.nbytes {
                    0 => "nothing more came from the server",
                    _ => "the server sends too slowly",
                });
            }
            (self.since, self.nbytes) = (now, 0);
        }
        Ok(())
    }
}

/// Bytes that come at this rate. At least one, whatever the rate.
fn bytes_in(time: Duration, rate: u64) -> u64 {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    (rate.saturating_mul(millis) / 1000).max(1)
}

/// Waits, unless nobody wants it any more.
pub(crate) fn sleep(time: Duration) -> Result<(), Fault> {
    let end = Instant::now() + time;
    loop {
        if stopped() {
            return Err(FaultKind::Stopped.into());
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(TICK));
    }
}
