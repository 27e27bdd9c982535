//! Deadlines and minimum rates.

use std::thread;
use std::time::{Duration, Instant};

use ingot_format::StopFlag;

use crate::fault::{FaultKind, Result};
use crate::options::RemoteOptions;

/// The longest wait before the stop flag and the deadline are checked again. With the 50 ms after which the calling
/// thread checks for signals, a call ends within 100 ms of an interrupt.
pub(crate) const TICK: Duration = Duration::from_millis(25);

/// Payload that renews the deadline of a request. A whole file from a server without ranges may take any time while it
/// arrives.
const PROGRESS_NBYTES: u64 = 1 << 20;

/// The end of a request: a time, or the stop flag.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline<'f> {
    pub(crate) at: Instant,
    /// The time from the start to the end.
    time: Duration,
    pub(crate) stop: StopFlag<'f>,
}

impl<'f> Deadline<'f> {
    /// Return a deadline after `time`, or after a day if the clock cannot represent that.
    pub(crate) fn within(time: Duration, stop: StopFlag<'f>) -> Deadline<'f> {
        let now = Instant::now();
        let at = now.checked_add(time);
        let at = at.unwrap_or(now + Duration::from_secs(86_400));
        Deadline { at, time, stop }
    }

    /// Return a deadline with the same time, from now on.
    fn renewed(self) -> Deadline<'f> {
        Deadline::within(self.time, self.stop)
    }

    /// Return the earlier of this deadline and `time` from now.
    pub(crate) fn no_longer_than(self, time: Duration) -> Deadline<'f> {
        let at = self.at.min(Deadline::within(time, self.stop).at);
        Deadline { at, ..self }
    }

    /// Return the time that is left, which is zero after the deadline.
    ///
    /// # Errors
    /// If the stop flag is set.
    pub(crate) fn left(self) -> Result<Duration> {
        if self.stop.is_set() {
            return Err(FaultKind::Stopped.into());
        }
        Ok(self.at.saturating_duration_since(Instant::now()))
    }
}

/// The progress of one exchange with a server. Each window of time must bring a minimum of payload, and each
/// [`PROGRESS_NBYTES`] of payload renew the deadline.
#[derive(Debug)]
pub(crate) struct Pace<'f> {
    window: Duration,
    window_nbytes: u64,
    /// The start of the current window, and the payload since then.
    since: Instant,
    nbytes: u64,
    /// The payload since the deadline was renewed.
    progress: u64,
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
            progress: 0,
            deadline,
            begun: Instant::now(),
        }
    }

    /// Return the pace of an exchange that may be silent until its deadline.
    pub(crate) fn patient(deadline: Deadline<'f>) -> Pace<'f> {
        Pace {
            window: deadline.time,
            window_nbytes: 1,
            since: Instant::now(),
            nbytes: 0,
            progress: 0,
            deadline,
            begun: Instant::now(),
        }
    }

    /// Return the deadline as the progress has renewed it.
    pub(crate) fn deadline(&self) -> Deadline<'f> {
        self.deadline
    }

    /// Start a new window if the current one is over. The time that the caller spends between two reads does not count.
    pub(crate) fn resume(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.since) >= self.window {
            (self.since, self.nbytes) = (now, 0);
        }
    }

    /// Count payload that was received or sent.
    pub(crate) fn moved(&mut self, nbytes: u64) {
        self.nbytes = self.nbytes.saturating_add(nbytes);
        self.progress = self.progress.saturating_add(nbytes);
        if self.progress >= PROGRESS_NBYTES {
            (self.deadline, self.progress) = (self.deadline.renewed(), 0);
        }
    }

    /// Check the stop flag, the deadline and the rate. Called after every wait and every read, so that a trickle of
    /// bytes is noticed.
    pub(crate) fn check(&mut self) -> Result<()> {
        let now = Instant::now();
        let slow = |what| Err(FaultKind::Slow(what, self.begun.elapsed()).into());
        if self.deadline.stop.is_set() {
            return Err(FaultKind::Stopped.into());
        }
        if now >= self.deadline.at {
            return slow("the request timed out");
        }
        if now.duration_since(self.since) >= self.window {
            if self.nbytes == 0 {
                return slow("the server sent nothing more");
            }
            if self.nbytes < self.window_nbytes {
                return slow("the server sends too slowly");
            }
            (self.since, self.nbytes) = (now, 0);
        }
        Ok(())
    }
}

/// Return the bytes that this rate brings in `time`, at least one.
fn bytes_in(time: Duration, rate: u64) -> u64 {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    (rate.saturating_mul(millis) / 1000).max(1)
}

/// Sleep for `time`, unless the stop flag is set.
pub(crate) fn sleep(time: Duration, stop: StopFlag<'_>) -> Result<()> {
    let deadline = Deadline::within(time, stop);
    loop {
        match deadline.left()? {
            Duration::ZERO => return Ok(()),
            left => thread::sleep(left.min(TICK)),
        }
    }
}
