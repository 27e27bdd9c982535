//! Faults of a Python object that is read from: they travel in an error of `ingot-io` and are extracted here.

use std::fmt;

use ingot_io::Error;
use pyo3::prelude::*;

/// An exception of an object. This error names only its class, because its message may contain secrets of a store. The
/// exception itself becomes the cause of the error in Python.
#[derive(Debug)]
pub(crate) struct Raised(pub(crate) PyErr);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let class = Python::try_attach(|py| self.0.get_type(py).name().map(|name| name.to_string()));
        let class = class.and_then(Result::ok).unwrap_or_default();
        write!(f, "the object raised {}", ingot_format::Escaped(&class))
    }
}

impl std::error::Error for Raised {}

/// An object returned more or fewer bytes than requested.
#[derive(Debug)]
pub(crate) struct WrongLength {
    pub(crate) expected: u64,
    pub(crate) found: u64,
}

impl fmt::Display for WrongLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WrongLength { expected, found } = self;
        write!(f, "expected {expected} bytes of the object, found {found}")
    }
}

impl std::error::Error for WrongLength {}

/// Return the exception of an object, if it caused `error`.
pub(crate) fn raised(error: &Error) -> Option<&PyErr> {
    Some(&inner::<Raised>(error)?.0)
}

/// Return the requested and the returned number of bytes, if such a fault caused `error`.
pub(crate) fn wrong_length(error: &Error) -> Option<(u64, u64)> {
    inner::<WrongLength>(error).map(|wrong| (wrong.expected, wrong.found))
}

fn inner<E: std::error::Error + 'static>(error: &Error) -> Option<&E> {
    let inner = error.system()?.get_ref()?;
    // The error of a credentials provider is the source of the request's fault.
    let provider = || {
        inner
            .source()?
            .downcast_ref::<std::io::Error>()?
            .get_ref()?
            .downcast_ref()
    };
    inner.downcast_ref().or_else(provider)
}
