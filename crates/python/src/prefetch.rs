//! Tensors that are read in the background.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, PoisonError, RwLock};

use ingot_io::binding::{Prefetch, Request, TensorId};
use ingot_io::{Checkpoint, Failure, ReadOptions};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::device::{Current, Devices};
use crate::errors::raise;
use crate::watch::Signals;
use crate::wrap::Wrap;

/// Tensors that are read in the background. Each is returned once.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Stream {
    checkpoint: Arc<Checkpoint>,
    /// In the order of the requests.
    tensors: Vec<TensorId>,
    /// The devices that they are read onto; `None` for the host.
    devices: Option<Devices>,
    /// The place of each among the requests.
    ranks: HashMap<TensorId, usize>,
    /// `None` once closed.
    prefetch: RwLock<Option<Arc<Prefetch>>>,
}

#[pymethods]
impl Stream {
    /// Return the next tensor in request order that was not returned yet, with its name, as soon as it is read.
    fn next<'py>(
        &self,
        py: Python<'py>,
        wrap: &Wrap,
    ) -> PyResult<Option<(Bound<'py, PyString>, Bound<'py, PyAny>)>> {
        let prefetch = self.opened(py)?;
        let streams = self.streams(py)?;
        let Some((rank, part)) = Signals::detach(py, |signals| prefetch.next(signals))? else {
            return Ok(None);
        };
        let tensor = self.checkpoint.tensor(self.tensors[rank]);
        let tensor = tensor.map_err(|error| raise(py, &error))?;
        let name = PyString::new(py, tensor.entry().name);
        streams.iter().try_for_each(|stream| stream.hold(py))?;
        let path = tensor.archive().path();
        Ok(Some((name, wrap.wrap_part(py, path, &part, tensor.entry())?)))
    }

    /// Return the tensor of this name, as soon as it is read; `None` if it was not requested or was already returned.
    fn take<'py>(&self, py: Python<'py>, name: &str, wrap: &Wrap) -> PyResult<Option<Bound<'py, PyAny>>> {
        let prefetch = self.opened(py)?;
        let (id, tensor) = py
            .detach(|| {
                let id = self.checkpoint.id(name)?;
                Ok((id, self.checkpoint.tensor(id)?))
            })
            .map_err(|error| raise(py, &error))?;
        let Some(&rank) = self.ranks.get(&id) else {
            return Ok(None);
        };
        let streams = self.streams(py)?;
        let part = Signals::detach(py, |signals| prefetch.take(rank, signals))?;
        streams.iter().try_for_each(|stream| stream.hold(py))?;
        let path = tensor.archive().path();
        part.map(|part| wrap.wrap_part(py, path, &part, tensor.entry()))
            .transpose()
    }

    /// Stop reading, wait for the thread, and drop the remaining tensors.
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

/// If the caller did not close it, the drop runs with the interpreter held, which the thread to wait for may need too.
impl Drop for Stream {
    fn drop(&mut self) {
        // Without an interpreter, the thread does not wait for it.
        Python::try_attach(|py| self.close(py));
    }
}

impl Stream {
    /// Start to read.
    pub(crate) fn new(
        checkpoint: Arc<Checkpoint>,
        requests: Vec<Request>,
        devices: Option<Devices>,
        ahead: u64,
        threads: Option<NonZeroUsize>,
    ) -> Stream {
        let tensors: Vec<TensorId> = requests.iter().map(|request| request.tensor).collect();
        let prefetch = Prefetch::new(
            Arc::clone(&checkpoint),
            requests,
            ahead,
            ReadOptions::new().threads(threads),
        );
        Stream {
            ranks: tensors
                .iter()
                .enumerate()
                .map(|(rank, &tensor)| (tensor, rank))
                .collect(),
            tensors,
            devices,
            prefetch: RwLock::new(Some(Arc::new(prefetch))),
            checkpoint,
        }
    }

    /// Return the caller's current streams on the devices.
    fn streams(&self, py: Python<'_>) -> PyResult<Vec<Current>> {
        self.devices
            .as_ref()
            .map_or(Ok(Vec::new()), |devices| devices.current(py))
    }

    fn opened(&self, py: Python<'_>) -> PyResult<Arc<Prefetch>> {
        let prefetch = self.prefetch.read().unwrap_or_else(PoisonError::into_inner);
        let closed = || raise(py, &Failure::Closed.about(self.checkpoint.path(), None));
        prefetch.clone().ok_or_else(closed)
    }
}
