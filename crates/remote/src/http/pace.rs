//! How long a server may take.

use std::thread;
use std::time::{Duration, Instant};

use crate::fault::{Fault, FaultKind};
use crate::options::RemoteOptions;
use ingot_format::StopFlag;

/// The longest single wait before the stop flag and the deadline are looked at again. With the 50 ms after which the
/// calling thread looks for signals, a call ends within 100 ms of an interrupt.
pub(crate) const TICK: Duration = Duration::from_millis(25);

/// Payload that renews the deadline of a request. A whole file from a server without ranges may take any time while it
/// arrives.
const PROGRESS_NBYTES: u64 = 1 << 20;

/// When a request is given up: at that time, or once nobody wants it any more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline<'f> {
    pub(crate) at: Instant,
    /// The time that it allowed from the start.
    time: Duration,
    pub(crate) stop: StopFlag<'f>,
}

impl<'f> Deadline<'f> {
    /// So long from now on. More time than a clock can count is a day here.
    pub(crate) fn within(time: Duration, stop: StopFlag<'f>) -> Deadline<'f> {
        let now = Instant::now();
        let at = now.checked_add(time);
        let at = at.unwrap_or(now + Duration::from_secs(86_400));
        Deadline { at, time, stop }
    }

    /// The same time from now on.
    fn renewed(self) -> Deadline<'f> {
        Deadline::within(self.time, self.stop)
    }

    /// The same, but so long from now at most.
    pub(crate) fn no_longer_than(self, time: Duration) -> Deadline<'f> {
        let at = self.at.min(Deadline::within(time, self.stop).at);
        Deadline { at, ..self }
    }

    /// How much of it is left, which is none once it is over.
    ///
    /// # Errors
    /// When nobody wants it any more.
    pub(crate) fn left(self) -> Result<Duration, Fault> {
        if self.stop.is_set() {
            Err(FaultKind::Stopped.into())
        } else {
            Ok(self.at.saturating_duration_since(Instant::now()))
        }
    }
}

/// Watches over one exchange with a server: in each window of time it has to bring so many bytes of payload, and each
/// [`PROGRESS_NBYTES`] of them renew the deadline.
#[derive(Debug)]
pub(crate) struct Pace<'f> {
    window: Duration,
    window_nbytes: u64,
    /// When the present window began, and what has come since.
    since: Instant,
    nbytes: u64,
    /// Bytes since the deadline was renewed.
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

    /// When the exchange is given up, by the progress until now.
    pub(crate) fn deadline(&self) -> Deadline<'f> {
        self.deadline
    }

    /// Begins another window where one is over: what the caller did between two reads is not the server's time.
    pub(crate) fn resume(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.since) >= self.window {
            (self.since, self.nbytes) = (now, 0);
        }
    }

    /// Notes that payload came.
    pub(crate) fn came(&mut self, nbytes: u64) {
        self.nbytes = self.nbytes.saturating_add(nbytes);
        self.progress = self.progress.saturating_add(nbytes);
        if self.progress >= PROGRESS_NBYTES {
            (self.deadline, self.progress) = (self.deadline.renewed(), 0);
        }
    }

    /// Whether to go on waiting. Asked after every wait and every read, so that bytes that trickle in count too.
    pub(crate) fn check(&mut self) -> Result<(), Fault> {
        let now = Instant::now();
        let slow = |what| {
            let after = self.begun.elapsed();
            Err(FaultKind::Slow { what, after }.into())
        };
        if self.deadline.stop.is_set() {
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
    let deadline = Deadline::within(time, stop);
    loop {
        match deadline.left()? {
            Duration::ZERO => return Ok(()),
            left => thread::sleep(left.min(TICK)),
        }
    }
}
