//! Files of any content that get their name when they are whole.

use std::ffi::{OsStr, OsString};
use std::sync::{Mutex, MutexGuard, PoisonError};

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
            // Not held meanwhile, since a child of a fork would wait for it for ever.
            let mut aside = self.locked().take().ok_or(Error::Closed { path: None })?;
            let committed = aside.commit(existing(overwrite), signals);
            *self.locked() = Some(aside);
            committed
        })
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.locked().take()));
    }
}

impl Aside {
    fn locked(&self) -> MutexGuard<'_, Option<ingot_io::Aside>> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
