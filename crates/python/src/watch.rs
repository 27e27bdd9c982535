//! Ctrl-C during a long call.

use std::sync::{Mutex, PoisonError};

use ingot_io::{Error, Watch};
use pyo3::prelude::*;

use crate::errors::raise;

/// Runs Python's signal handlers while a call goes on without the interpreter, and keeps what they raise.
#[derive(Default)]
pub(crate) struct Signals {
    raised: Mutex<Option<PyErr>>,
}

impl Watch for Signals {
    fn interrupted(&self) -> bool {
        let checked = Python::attach(|py| py.check_signals());
        match checked {
            Ok(()) => false,
            Err(raised) => {
                self.raised
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .get_or_insert(raised);
                true
            }
        }
    }
}

impl Signals {
    /// Calls `work` without holding the interpreter, and turns its failure into an exception.
    pub(crate) fn detach<T: Send>(
        py: Python<'_>,
        work: impl Send + FnOnce(&Signals) -> Result<T, Error>,
    ) -> PyResult<T> {
        let signals = Signals::default();
        let outcome = py.detach(|| work(&signals));
        outcome.map_err(|error| {
            match signals
                .raised
                .into_inner()
                .unwrap_or_else(PoisonError::into_inner)
            {
                Some(raised) => raised,
                None => raise(py, &error),
            }
        })
    }
}
