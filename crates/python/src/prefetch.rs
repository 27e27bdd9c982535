//! Tensors that are read in the background.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, PoisonError, RwLock};

use ingot_format::Entry;
use ingot_io::{Error, Fetched, Prefetch, ReadOptions, Request};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::errors::raise;
use crate::index;
use crate::watch::Signals;
use crate::wrap::Wrap;

/// The tensors of one archive, read in the background and handed out once each.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Stream {
    archive: Arc<ingot_io::Archive>,
    /// Places in the header's order of data, in the order of the requests.
    numbers: Vec<usize>,
    /// The place among the requests of each number.
    ranks: HashMap<usize, usize>,
    /// `None` once closed.
    prefetch: RwLock<Option<Arc<Prefetch>>>,
}

#[pymethods]
impl Stream {
    /// The next tensor in the order of the requests that was not handed out, with its name, as soon as it is read.
    fn next<'py>(
        &self,
        py: Python<'py>,
        wrap: &Wrap,
    ) -> PyResult<Option<(Bound<'py, PyString>, Bound<'py, PyAny>)>> {
        let prefetch = self.opened(py)?;
        let Some((rank, part)) = Signals::detach(py, |signals| prefetch.next(signals))? else {
            return Ok(None);
        };
        let Some(tensor) = self.archive.tensor(self.numbers[rank]) else {
            return Ok(None);
        };
        let name = PyString::new(py, tensor.entry().name);
        Ok(Some((name, self.wrapped(py, tensor.entry(), &part, wrap)?)))
    }

    /// The tensor of this name, as soon as it is read; `None` where it is not to come or was handed out.
    fn take<'py>(&self, py: Python<'py>, name: &str, wrap: &Wrap) -> PyResult<Option<Bound<'py, PyAny>>> {
        let prefetch = self.opened(py)?;
        let tensor = self.archive.find(name).map_err(|error| raise(py, &error))?;
        let Some(&rank) = self.ranks.get(&tensor.number()) else {
            return Ok(None);
        };
        let part = Signals::detach(py, |signals| prefetch.take(rank, signals))?;
        part.map(|part| self.wrapped(py, tensor.entry(), &part, wrap))
            .transpose()
    }

    /// Stops reading, waits for the thread, and lets go of what was not handed out.
    fn close(&self, py: Python<'_>) {
        let prefetch = self
            .prefetch
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(prefetch) = prefetch {
            py.detach(|| prefetch.close());
        }
    }
}

impl Stream {
    /// Starts to read. Each request is a place in the header's order of data, and what to take of the tensor there.
    pub(crate) fn new(
        archive: Arc<ingot_io::Archive>,
        requests: Vec<Request>,
        ahead: u64,
        threads: Option<NonZeroUsize>,
    ) -> Stream {
        let numbers: Vec<usize> = requests.iter().map(|request| request.number).collect();
        let prefetch = Prefetch::new(Arc::clone(&archive), requests, ahead, ReadOptions { threads });
        Stream {
            ranks: numbers
                .iter()
                .enumerate()
                .map(|(rank, &number)| (number, rank))
                .collect(),
            numbers,
            prefetch: RwLock::new(Some(Arc::new(prefetch))),
            archive,
        }
    }

    fn opened(&self, py: Python<'_>) -> PyResult<Arc<Prefetch>> {
        let prefetch = self.prefetch.read().unwrap_or_else(PoisonError::into_inner);
        prefetch.clone().ok_or_else(|| {
            let path = self.archive.path().map(ToOwned::to_owned);
            raise(py, &Error::Closed { path })
        })
    }

    fn wrapped<'py>(
        &self,
        py: Python<'py>,
        entry: &Entry<'_>,
        part: &Fetched,
        wrap: &Wrap,
    ) -> PyResult<Bound<'py, PyAny>> {
        let entry = Entry {
            shape: part.shape.as_deref().unwrap_or(entry.shape),
            ..*entry
        };
        wrap.accepts(py, self.archive.path(), &entry)?;
        wrap.wrap(py, self.archive.path(), &part.region, &entry, &mut None)
    }
}

/// What a request takes of a tensor: all of it, or what stands between the brackets.
pub(crate) fn request(number: usize, index: &Bound<'_, PyAny>) -> PyResult<Request> {
    let index = if index.is_none() {
        None
    } else {
        Some(index::parts(index)?)
    };
    Ok(Request { number, index })
}
