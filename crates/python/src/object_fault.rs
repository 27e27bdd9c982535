//! What an object of Python that is read from did wrong, as it travels in an error of `ingot-io` and is found there again.

use std::fmt;

use ingot_io::Error;
use pyo3::prelude::*;

/// What an object raised. It is named here and not repeated: what it says may hold the secrets of a store, and stands in
/// the exception itself, which becomes the cause of ours.
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

/// An object gave more bytes than it was asked for, or fewer.
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

/// What an object raised, where `error` comes of that.
pub(crate) fn raised(error: &Error) -> Option<&PyErr> {
    Some(&inner::<Raised>(error)?.0)
}

/// How many bytes an object was asked for, and how many it gave, where `error` comes of that.
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
