//! Python's cyclic garbage collector.

use pyo3::prelude::*;

/// While this is there the collector is off, where it was on before.
///
/// It starts by itself after every few hundred new objects. Making many tensors starts it again and again, and each
/// time it finds them all alive: an eighth of the time that loading many small ones takes.
pub(crate) struct Paused<'py> {
    collector: Option<Bound<'py, PyModule>>,
}

impl Paused<'_> {
    pub(crate) fn new(py: Python<'_>) -> PyResult<Paused<'_>> {
        let collector = py.import("gc")?;
        let was_on = collector.call_method0("isenabled")?.is_truthy()?;
        if was_on {
            collector.call_method0("disable")?;
        }
        Ok(Paused {
            collector: was_on.then_some(collector),
        })
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        if let Some(collector) = &self.collector
            && let Err(fault) = collector.call_method0("enable")
        {
            fault.write_unraisable(collector.py(), None);
        }
    }
}
