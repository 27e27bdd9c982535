//! Pauses of Python's garbage collector.

use pyo3::prelude::*;

/// New objects after which the collector runs (`gc.get_threshold()`).
const LEAST: usize = 700;

/// A time in which the collector does not run.
///
/// New tensors are no garbage, but the collector examines all of them repeatedly: making 200,000 tensors takes 0.22 s without it
/// and 0.33 to 0.42 s with it, and every fifth of consecutive loads of 20,000 tensors takes 0.1 s longer (2026-11).
pub(crate) struct Pause<'py>(Option<Bound<'py, PyModule>>);

impl<'py> Pause<'py> {
    /// Pause the collector until this is dropped, if `count` objects would make it run.
    pub(crate) fn for_objects(py: Python<'py>, count: usize) -> PyResult<Pause<'py>> {
        if count < LEAST {
            return Ok(Pause(None));
        }
        let gc = py.import("gc")?;
        if !gc.call_method0("isenabled")?.is_truthy()? {
            return Ok(Pause(None));
        }
        gc.call_method0("disable")?;
        Ok(Pause(Some(gc)))
    }
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        if let Some(gc) = &self.0
            && let Err(fault) = gc.call_method0("enable")
        {
            fault.write_unraisable(gc.py(), Some(gc));
        }
    }
}
