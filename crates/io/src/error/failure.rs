//! Failures below the layer that knows paths and names, and the errors that they become.

use std::io;
use std::path::Path;

use ingot_format::{FormatError, to_u64, to_usize};

use super::Error;
use super::faults::{CheckpointFault, EditError, step};
use crate::device::{DeviceFault, Refusal};

/// A failure to read bytes.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The memory cannot be allocated.
    OutOfMemory { nbytes: u64, source: Option<io::Error> },
    /// Reading failed, or returned fewer bytes than expected (then there is no `source`).
    Read {
        position: u64,
        expected: usize,
        found: usize,
        source: Option<io::Error>,
    },
    /// A device cannot be used.
    Device(DeviceFault),
    /// A framework cannot allocate memory of a device.
    Refused(Refusal),
    /// The caller interrupted the call.
    Interrupted,
}

impl Failure {
    /// Return the error about `tensor` of the file at `path`.
    pub(crate) fn about(self, path: Option<&Path>, tensor: Option<&str>) -> Error {
        match self {
            Failure::Interrupted => Error::Interrupted,
            Failure::Device(fault) => Error::Device {
                path: path.map(Path::to_owned),
                tensor: tensor.map(ToOwned::to_owned),
                fault: Box::new(fault),
            },
            Failure::Refused(source) => Error::Refused {
                path: path.map(Path::to_owned),
                source,
            },
            Failure::OutOfMemory { nbytes, source } => Error::OutOfMemory {
                path: path.map(Path::to_owned),
                nbytes,
                source,
            },
            Failure::Read {
                position,
                expected,
                found,
                source,
            } => Error::Read {
                path: path.map(Path::to_owned),
                tensor: tensor.map(ToOwned::to_owned),
                position,
                expected: to_u64(expected),
                found: to_u64(found),
                source,
            },
        }
    }
}

impl From<DeviceFault> for Failure {
    fn from(fault: DeviceFault) -> Failure {
        match fault {
            DeviceFault::Interrupted => Failure::Interrupted,
            fault => Failure::Device(fault),
        }
    }
}

impl From<DeviceFault> for Error {
    /// Convert a fault that occurs before anything is read.
    fn from(fault: DeviceFault) -> Error {
        Failure::from(fault).into()
    }
}

impl From<Failure> for Error {
    /// Convert a failure that concerns no file.
    fn from(failure: Failure) -> Error {
        failure.about(None, None)
    }
}

/// A failure, and the number of the file that it concerns, if any.
#[derive(Debug)]
pub(crate) struct InFile {
    pub(crate) file: Option<usize>,
    pub(crate) failure: Failure,
}

impl From<Failure> for InFile {
    fn from(failure: Failure) -> InFile {
        InFile { file: None, failure }
    }
}

/// Convert `nbytes` to a size in memory. Fail if no memory is so large.
pub(crate) fn size(nbytes: u64) -> Result<usize, Failure> {
    to_usize(nbytes)
        .filter(|&nbytes| nbytes <= usize::MAX / 4)
        .ok_or(Failure::OutOfMemory { nbytes, source: None })
}

impl EditError {
    /// Return the error about the file at `path`.
    pub(crate) fn about(self, path: &Path) -> Error {
        let path = path.to_owned();
        Error::Edit { path, fault: self }
    }
}

impl CheckpointFault {
    /// Return the error about the checkpoint at `path`.
    pub(crate) fn about(self, path: &Path) -> Error {
        let path = path.to_owned();
        Error::Checkpoint { path, fault: self }
    }
}

/// Return a function that makes an error of a failure to open the file at `path`.
pub(crate) fn unopened(path: &Path) -> impl Fn(io::Error) -> Error + Copy {
    move |source| {
        let path = path.to_owned();
        Error::Open { path, source }
    }
}

/// Return a function that makes an error of a failure to lay out the tensors of the file at `path`.
pub(crate) fn unstorable(path: &Path) -> impl Fn(FormatError) -> Error + Copy {
    move |fault| {
        let path = Some(path.to_owned());
        Error::Unstorable { path, fault }
    }
}

/// A reason why a save ended early. [`save`](crate::save) adds the path.
pub(crate) enum Stop {
    Fault { step: &'static str, source: io::Error },
    Refused(EditError),
    Interrupted,
}

impl From<io::Error> for Stop {
    fn from(source: io::Error) -> Stop {
        Stop::of(step::READ, source)
    }
}

impl Stop {
    /// Return the reason for an error of the operating system. An interruption while a payload is read comes as such an error
    /// too.
    pub(crate) fn of(step: &'static str, source: io::Error) -> Stop {
        let inner = source.get_ref();
        let by_watch = inner.and_then(|inner| inner.downcast_ref());
        let by_device = inner.and_then(|inner| inner.downcast_ref());
        match (by_watch, by_device) {
            (Some(Error::Interrupted), _) | (_, Some(DeviceFault::Interrupted)) => Stop::Interrupted,
            _ => Stop::Fault { step, source },
        }
    }

    /// Return the error about the file at `path`, which takes `nbytes` bytes. If reading a payload failed, that is the error of
    /// the payload's source.
    pub(crate) fn about(self, path: &Path, nbytes: u64) -> Error {
        let (step, source) = match self {
            Stop::Interrupted => return Error::Interrupted,
            Stop::Refused(fault) => return fault.about(path),
            Stop::Fault { step, source } => (step, source),
        };
        let of_device = |fault: DeviceFault| Failure::from(fault).about(Some(path), None);
        let source = match source.downcast::<DeviceFault>() {
            Ok(fault) => return of_device(fault),
            Err(source) => source,
        };
        source.downcast::<Error>().unwrap_or_else(|source| Error::Write {
            path: path.to_owned(),
            step,
            nbytes,
            source,
        })
    }
}

/// Adds the step of a save to an error of the operating system.
pub(crate) trait Step<T> {
    fn step(self, step: &'static str) -> Result<T, Stop>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, step: &'static str) -> Result<T, Stop> {
        self.map_err(|source| Stop::of(step, source.into()))
    }
}
