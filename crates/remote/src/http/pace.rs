//! How long a server may take.

use std::thread;
use std::time::{Duration, Instant};

use crate::fault::{Fault, FaultKind};
use crate::options::RemoteOptions;
use crate::stop::StopFlag;

/// How long one wait is at most, before it is looked whether to go on.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// When a request is given up: at that time, or once nobody wants it any more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline<'f> {
    pub(crate) at: Instant,
    pub(crate) stop: StopFlag<'f>,
}

impl<'f> Deadline<'f> {
    /// So long from now on. More time than a clock can count is a day here.
    pub(crate) fn within(time: Duration, stop: StopFlag<'f>) -> Deadline<'f> {
        let now = Instant::now();
        let at = now.checked_add(time);
        let at = at.unwrap_or(now + Duration::from_secs(86_400));
        Deadline { at, stop }
    }
}

/// Watches over one exchange with a server: in each window of time it has to bring so many bytes.
#[derive(Debug)]
pub(crate) struct Pace<'f> {
    window: Duration,
    window_nbytes: u64,
    /// When the present window began, and what has come since.
    since: Instant,
    nbytes: u64,
    deadline: Deadline<'f>,
    begun: Instant,
}

impl<'f> Pace<'f> {
    pub(crate) fn new(options: &RemoteOptions, deadline: Deadline<'f>) -> Pace<'f> {
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

    /// What says that nobody wants the answer any more.
    pub(crate) fn stop(&self) -> StopFlag<'f> {
        self.deadline.stop
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
        if self.stop().is_set() {
            return Err(FaultKind::Stopped.into());
        }
        if now >= self.deadline.at {
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
pub(crate) fn sleep(time: Duration, stop: StopFlag<'_>) -> Result<(), Fault> {
    let end = Instant::now() + time;
    loop {
        if stop.is_set() {
            return Err(FaultKind::Stopped.into());
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(TICK));
    }
}
