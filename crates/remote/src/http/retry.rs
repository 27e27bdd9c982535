//! Retries.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use ingot_format::StopFlag;

use crate::fault::{Fault, Result};
use crate::http::pace::{Deadline, sleep};
use crate::options::RemoteOptions;

/// The first pause. Each pause is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause, unless the server asks for a longer one.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The longest pause that a server may ask for. A longer one is an error at once.
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

    /// Return the attempts of a request that is part of another and has its deadline.
    pub(crate) fn until(deadline: Deadline<'f>, options: &RemoteOptions) -> Tries<'f> {
        Tries {
            made: 0,
            most: options.retries.saturating_add(1),
            deadline,
        }
    }

    /// Make attempts until one succeeds or fails for good.
    pub(crate) fn run<T>(&mut self, mut attempt: impl FnMut(Deadline<'f>) -> Result<T>) -> Result<T> {
        loop {
            match attempt(self.deadline) {
                Ok(done) => return Ok(done),
                Err(fault) => self.after(fault)?,
            }
        }
    }

    /// Wait before the next attempt. Returns the fault if it was the last one.
    pub(crate) fn after(&mut self, fault: Fault) -> Result<()> {
        self.made += 1;
        let pause = fault.wait().unwrap_or_else(|| pause(self.made)).max(FIRST_PAUSE);
        let left = self.deadline.at.saturating_duration_since(Instant::now());
        if !fault.is_transient() || self.made >= self.most || pause > LONGEST_WAIT || pause >= left {
            return Err(fault.after(self.made));
        }
        sleep(pause, self.deadline.stop)
    }
}

/// Return a random pause between half of the longest one and all of it, so that clients that failed together do not
/// return together.
fn pause(made: u32) -> Duration {
    let doubled = FIRST_PAUSE.saturating_mul(1 << made.saturating_sub(1).min(16));
    let most = doubled.min(LONGEST_PAUSE);
    let any = u32::try_from(RandomState::new().hash_one(made) % 1024).unwrap_or(0);
    most / 2 + most / 2 * any / 1024
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::{FaultKind, Refusal};

    fn status(status: u16, wait: Option<u64>) -> Fault {
        let wait = wait.map(Duration::from_secs);
        let refusal = Refusal {
            status,
            wait,
            ..Refusal::default()
        };
        FaultKind::Status(refusal).into()
    }

    #[test]
    fn pauses_grow_up_to_a_limit() {
        for made in 1..40 {
            let pause = pause(made);
            assert!(pause >= FIRST_PAUSE / 2 && pause <= LONGEST_PAUSE, "{pause:?}");
        }
        assert!(pause(1) <= FIRST_PAUSE && pause(9) >= LONGEST_PAUSE / 2);
    }

    #[test]
    fn permanent_faults_are_not_retried() {
        let options = RemoteOptions::default();
        for fault in [
            status(404, None),
            status(403, None),
            status(503, Some(u64::MAX)),
            FaultKind::Changed(None).into(),
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
