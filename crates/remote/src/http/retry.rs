//! Trying again.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use crate::fault::{Fault, FaultKind};
use crate::http::pace::{Deadline, sleep};
use crate::options::RemoteOptions;
use ingot_format::StopFlag;

/// The first pause. It doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause of our own making.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The longest that a server may have us wait. Whoever is told to come back later than this wants to know it now.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The attempts of one request.
#[derive(Debug)]
pub(crate) struct Tries<'f> {
    made: u32,
    most: u32,
    pub(crate) deadline: Deadline<'f>,
}

impl<'f> Tries<'f> {
    pub(crate) fn new(options: &RemoteOptions, stop: StopFlag<'f>) -> Tries<'f> {
        Tries::until(Deadline::within(options.timeout, stop), options)
    }

    /// The attempts of one that is a part of another, which has this deadline.
    pub(crate) fn until(deadline: Deadline<'f>, options: &RemoteOptions) -> Tries<'f> {
        Tries {
            made: 0,
            most: options.retries.saturating_add(1),
            deadline,
        }
    }

    /// Waits before the next attempt, or gives the fault back when there shall be none.
    pub(crate) fn after(&mut self, fault: Fault) -> Result<(), Fault> {
        self.made += 1;
        let told = match fault.kind() {
            FaultKind::Status { wait, .. } => *wait,
            _ => None,
        };
        let pause = told.unwrap_or_else(|| pause(self.made)).max(FIRST_PAUSE);
        let left = self.deadline.at.saturating_duration_since(Instant::now());
        if !fault.is_transient() || self.made >= self.most || pause > LONGEST_WAIT || pause >= left {
            return Err(fault.after(self.made));
        }
        sleep(pause, self.deadline.stop)
    }
}

/// Somewhere between half of the pause and all of it, so that many who failed together do not come back together.
fn pause(made: u32) -> Duration {
    let most = FIRST_PAUSE
        .saturating_mul(1 << made.saturating_sub(1).min(16))
        .min(LONGEST_PAUSE);
    let any = u32::try_from(RandomState::new().hash_one(made) % 1024).unwrap_or(0);
    most / 2 + most / 2 * any / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(status: u16, wait: Option<u64>) -> Fault {
        Fault::new(FaultKind::Status {
            status,
            reason: String::new(),
            said: None,
            wait: wait.map(Duration::from_secs),
            region: None,
        })
    }

    #[test]
    fn pauses_grow_and_stop_growing() {
        for made in 1..40 {
            let pause = pause(made);
            assert!(pause >= FIRST_PAUSE / 2 && pause <= LONGEST_PAUSE, "{pause:?}");
        }
        assert!(pause(1) <= FIRST_PAUSE && pause(9) >= LONGEST_PAUSE / 2);
    }

    #[test]
    fn what_will_not_pass_is_not_tried_again() {
        let options = RemoteOptions::default();
        for fault in [
            status(404, None),
            status(403, None),
            status(503, Some(u64::MAX)),
            FaultKind::Changed { nbytes_now: None }.into(),
        ] {
            assert!(Tries::new(&options, StopFlag::never()).after(fault).is_err());
        }
        let options = RemoteOptions {
            retries: 1,
            ..options
        };
        let mut tries = Tries::new(&options, StopFlag::never());
        assert!(tries.after(status(503, None)).is_ok());
        let fault = tries.after(status(503, None)).unwrap_err();
        assert!(fault.to_string().ends_with(", 2 times"), "{fault}");
    }
}
