//! Files of any content that get their name when they are whole.

use std::ffi::{OsStr, OsString};
use std::sync::{Mutex, PoisonError};

use ingot_io::{Error, Replace};
use pyo3::prelude::*;

use crate::paths::file_path;
use crate::serialize::{existing, save_options};
use crate::watch::Signals;

/// A file that others fill before it gets its name. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Aside {
    draft_path: OsString,
    /// `None` once closed.
    aside: Mutex<Option<ingot_io::Aside>>,
}

#[pymethods]
impl Aside {
    #[staticmethod]
    #[pyo3(signature = (path, *, durable = true, replace_read_only = false))]
    fn create(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        durable: bool,
        replace_read_only: bool,
    ) -> PyResult<Aside> {
        let path = file_path(path)?;
        let options = save_options(durable, Replace::Atomic, replace_read_only);
        let aside = Signals::detach(py, |signals| ingot_io::Aside::create(&path, &options, signals))?;
        Ok(Aside {
            draft_path: aside.draft_path().unwrap_or_default().into_os_string(),
            aside: Mutex::new(Some(aside)),
        })
    }

    #[getter]
    fn draft_path(&self) -> &OsStr {
        &self.draft_path
    }

    #[pyo3(signature = (*, overwrite = true))]
    fn commit(&self, py: Python<'_>, overwrite: bool) -> PyResult<()> {
        Signals::detach(py, |signals| {
            let mut aside = self.aside.lock().unwrap_or_else(PoisonError::into_inner);
            let aside = aside.as_mut().ok_or(Error::Closed { path: None })?;
            aside.commit(existing(overwrite), signals)
        })
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.aside.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}
