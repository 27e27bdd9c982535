//! A save that is called off when what it goes by is no longer true.

use std::sync::{Mutex, PoisonError};

use crate::error::Error;
use crate::watch::Watch;

/// Asks `check` whenever a save asks whether to stop, the last time right before the new file gets its name.
pub(crate) struct Guard<'a> {
    watch: &'a dyn Watch,
    check: &'a (dyn Fn() -> Result<(), Error> + Sync),
    fault: Mutex<Option<Error>>,
}

impl<'a> Guard<'a> {
    pub(crate) fn new(watch: &'a dyn Watch, check: &'a (dyn Fn() -> Result<(), Error> + Sync)) -> Guard<'a> {
        Guard {
            watch,
            check,
            fault: Mutex::new(None),
        }
    }

    /// What came of the save: the fault that `check` found, where that is why it stopped.
    pub(crate) fn outcome<T>(self, saved: Result<T, Error>) -> Result<T, Error> {
        match (
            saved,
            self.fault.into_inner().unwrap_or_else(PoisonError::into_inner),
        ) {
            (Err(Error::Interrupted), Some(fault)) => Err(fault),
            (saved, _) => saved,
        }
    }
}

impl Watch for Guard<'_> {
    fn interrupted(&self) -> bool {
        if self.watch.interrupted() {
            return true;
        }
        let Err(fault) = (self.check)() else {
            return false;
        };
        self.fault
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(fault);
        true
    }

    fn progressed(&self, done: u64, total: u64) {
        self.watch.progressed(done, total);
    }
}
