//! Tensors whose bytes a Python function fetches.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use ingot_format::{Dtype, to_u64};
use ingot_io::Produce;
use ingot_io::binding::StopFlag;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::tensor::Imported;

/// The exceptions of the functions, for the caller of the save.
#[derive(Clone, Default)]
pub(crate) struct Raised(Arc<Mutex<Option<PyErr>>>);

impl Raised {
    /// Return the exception of a function or, if none was raised, `fault`.
    pub(crate) fn or(&self, fault: impl Into<PyErr>) -> PyErr {
        let raised = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        raised.unwrap_or_else(|| fault.into())
    }

    fn keep(&self, raised: PyErr) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(raised);
    }
}

/// A function of `(begin, end)` that returns these bytes, as a capsule or a buffer.
pub(crate) struct Producer {
    fetch: Py<PyAny>,
    nbytes: u64,
    raised: Raised,
}

impl Producer {
    pub(crate) fn new(fetch: Py<PyAny>, nbytes: u64, raised: Raised) -> Producer {
        Producer {
            fetch,
            nbytes,
            raised,
        }
    }

    fn fetched(&self, py: Python<'_>, begin: u64, len: usize) -> PyResult<Imported> {
        let bytes = self.fetch.call1(py, (begin, begin + to_u64(len)))?.into_bound(py);
        let wrong = || PyValueError::new_err(format!("expected {len} bytes from byte {begin} on"));
        if !bytes.is_instance_of::<PyCapsule>() {
            let buffer = PyUntypedBuffer::get(&bytes)?;
            return Imported::from_buffer(Dtype::U8, vec![to_u64(len)], buffer);
        }
        let fetched = Imported::from_capsule(&bytes)?.ok_or_else(wrong)?;
        if fetched.payload().nbytes() == to_u64(len) {
            Ok(fetched)
        } else {
            Err(wrong())
        }
    }
}

impl Produce for Producer {
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    fn produce(&self, begin: u64, into: &mut [u8]) -> io::Result<()> {
        Python::attach(|py| {
            let fetched = self.fetched(py, begin, into.len());
            let copied = fetched.and_then(|bytes| Ok(bytes.payload().read(0, into, StopFlag::never())?));
            copied.map_err(|raised| {
                self.raised.keep(raised);
                io::Error::other("an exception was raised")
            })
        })
    }
}

impl std::fmt::Debug for Producer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Producer({} bytes)", self.nbytes)
    }
}
