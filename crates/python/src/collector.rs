//! Python's garbage collector, out of the way.

use pyo3::prelude::*;

/// From so many new objects on, the collector starts of itself (`gc.get_threshold()`).
const LEAST: usize = 700;

/// A time in which the collector does not run.
///
/// Of objects that are being made none is garbage, and it looks at all of them, again and again: 200,000 tensors take
/// 0.22 s without it and 0.33 to 0.42 s with it; of loads of 20,000 in a row every fifth takes 0.1 s longer (2026-11).
pub(crate) struct Pause<'py>(Option<Bound<'py, PyModule>>);

impl<'py> Pause<'py> {
    /// From now on and until the drop of this, where `count` objects are worth it.
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
