//! Ctrl-C during a long call.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ingot_io::{Error, Watch};
use pyo3::prelude::*;

use crate::errors::raise;

/// Runs Python's signal handlers during a call that has released the interpreter, calls a progress callable, and keeps the
/// exception that either of them raises.
#[derive(Default)]
pub(crate) struct Signals {
    /// Called with the bytes done and the total.
    progress: Option<Py<PyAny>>,
    raised: Mutex<Option<PyErr>>,
}

impl Watch for Signals {
    fn interrupted(&self) -> bool {
        self.keep(Python::attach(|py| py.check_signals()));
        locked(&self.raised).is_some()
    }

    fn progressed(&self, done: u64, total: u64) {
        if let Some(progress) = &self.progress {
            self.keep(Python::attach(|py| progress.call1(py, (done, total)).map(drop)));
        }
    }
}

impl Signals {
    /// Return signals that report to `progress`.
    pub(crate) fn telling(progress: Option<Bound<'_, PyAny>>) -> Signals {
        Signals {
            progress: progress.map(Bound::unbind),
            raised: Mutex::default(),
        }
    }

    /// Call `work` with the interpreter released, and convert its error to an exception.
    pub(crate) fn detach<T: Send>(
        py: Python<'_>,
        work: impl Send + FnOnce(&Signals) -> Result<T, Error>,
    ) -> PyResult<T> {
        Signals::default().run(py, work)
    }

    /// As [`Signals::detach`], for signals that report progress.
    pub(crate) fn run<T: Send>(
        self,
        py: Python<'_>,
        work: impl Send + FnOnce(&Signals) -> Result<T, Error>,
    ) -> PyResult<T> {
        let outcome = py.detach(|| work(&self));
        let raised = locked(&self.raised).take();
        outcome.map_err(|error| raised.unwrap_or_else(|| raise(py, &error)))
    }

    fn keep(&self, outcome: PyResult<()>) {
        if let Err(raised) = outcome {
            locked(&self.raised).get_or_insert(raised);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
