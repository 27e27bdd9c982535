//! Errors. [`Error`] is the type that callers receive: a [`Failure`], with path and tensor once they are known.

mod failure;
mod faults;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ingot_format::{Escaped, FormatError, Quoted, to_usize};

use crate::device::DeviceFault;

pub use failure::Failure;
pub(crate) use faults::step;
pub use faults::{CheckpointFault, EditError, Misfit, PatchFault};

/// A failure to open, read or save, with the facts that help to fix it.
///
/// `Display` writes one line: path, tensor, fault, expected and found. Names and paths are escaped in it; the methods
/// return them unchanged.
///
/// ```
/// use std::path::Path;
///
/// use ingot_io::{Archive, Failure, OpenOptions};
///
/// let error = Archive::open(Path::new("missing.safetensors"), &OpenOptions::default()).unwrap_err();
/// assert_eq!((error.code(), error.path()), ("open", Some(Path::new("missing.safetensors"))));
/// match error.failure() {
///     Failure::Open(source) => println!("cannot open it: {source}"),
///     failure => println!("{failure:?}"),
/// }
/// ```
#[derive(Debug)]
pub struct Error {
    path: Option<PathBuf>,
    tensor: Option<String>,
    /// In a box, because it is large.
    failure: Box<Failure>,
}

impl Error {
    /// Return what failed.
    #[must_use]
    pub fn failure(&self) -> &Failure {
        &self.failure
    }

    /// Return a stable name for the failure, in kebab-case; programs may match it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.failure.row().0
    }

    /// Return the text of the failure, without path and tensor.
    #[must_use]
    pub fn reason(&self) -> String {
        self.failure.row().1
    }

    /// Return the file that the failure concerns: `None` for bytes in memory, the environment, and an interrupted call. For
    /// a failed save this is the file to be written, never a temporary one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Return the tensor that the failure concerns.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        self.tensor.as_deref().or_else(|| self.failure.tensor())
    }

    /// Return the expected and the found size in bytes, for a failure of sizes.
    #[must_use]
    pub fn expected_found(&self) -> Option<(u64, u64)> {
        match &*self.failure {
            Failure::Header(fault) | Failure::Unstorable(fault) => fault.expected_found(),
            Failure::Index(fault) => fault.expected_found(),
            Failure::Read { expected, found, .. }
            | Failure::Edit(
                EditError::NotFilled { expected, found } | EditError::ReserveFull { expected, found },
            )
            | Failure::Changed {
                nbytes_at_open: expected,
                nbytes_now: Some(found),
            } => Some((*expected, *found)),
            _ => None,
        }
    }

    /// Return the range of bytes that the failure concerns: of the data section for a fault of the header, of the file for a
    /// failed read.
    #[must_use]
    pub fn range(&self) -> Option<(u64, u64)> {
        match &*self.failure {
            Failure::Header(fault) | Failure::Unstorable(fault) => fault.range(),
            Failure::Read {
                position, expected, ..
            } => Some((*position, position.saturating_add(*expected))),
            _ => None,
        }
    }

    /// Return advice for the caller, which is also the end of the text.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match &*self.failure {
            Failure::Write { step, source, .. } => faults::hint(self.path()?, step, source),
            // Only a destination that must be new is opened like this.
            Failure::Open(source) if source.kind() == io::ErrorKind::AlreadyExists => {
                Some("overwrite=True replaces it")
            }
            _ => None,
        }
    }

    /// Return the system's error, if it is the cause.
    #[must_use]
    pub fn system(&self) -> Option<&io::Error> {
        match &*self.failure {
            Failure::Open(source) | Failure::Write { source, .. } => Some(source),
            Failure::Read { source, .. } | Failure::OutOfMemory { source, .. } => source.as_ref(),
            _ => None,
        }
    }

    /// Return whether the call was interrupted, a request to a server included.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        self.code() == "interrupted"
    }

    /// Return whether the file was changed since it was opened.
    pub(crate) fn is_changed(&self) -> bool {
        matches!(*self.failure, Failure::Changed { .. })
    }

    /// Return the error for a request of `nbytes` bytes, if it is one about memory.
    pub(crate) fn of_nbytes(mut self, wanted: u64) -> Error {
        if let Failure::OutOfMemory { nbytes, .. } = &mut *self.failure {
            *nbytes = wanted;
        }
        self
    }

    /// Return the error about `tensor`.
    pub(crate) fn of(mut self, tensor: &str) -> Error {
        self.tensor = Some(tensor.to_owned());
        self
    }

    /// Return the error about the file at `path`, which takes `nbytes` bytes, for an error of a step of a save. An error of
    /// the source of a payload stays as it is.
    pub(crate) fn in_save(mut self, path: &Path, nbytes: u64) -> Error {
        if let Failure::Write { nbytes: needed, .. } = &mut *self.failure
            && self.path.is_none()
        {
            *needed = nbytes;
        }
        if let Failure::Write { .. } | Failure::Device(_) | Failure::Edit(_) = *self.failure {
            self.path.get_or_insert_with(|| path.to_owned());
        }
        self
    }
}

impl Failure {
    /// Return the error about `tensor` of the file at `path`. An error of a file that a computed file is read from stays as
    /// it is.
    #[must_use]
    pub fn about(self, path: Option<&Path>, tensor: Option<&str>) -> Error {
        match self.of_input() {
            Ok(error) => error,
            Err(failure) => Error {
                path: path
                    .filter(|_| !matches!(failure, Failure::Interrupted))
                    .map(Path::to_owned),
                tensor: tensor.map(ToOwned::to_owned),
                failure: Box::new(failure),
            },
        }
    }

    /// Return the error that a failed read of a computed file contains.
    fn of_input(self) -> Result<Error, Failure> {
        let Failure::Read {
            position,
            expected,
            found,
            source: Some(source),
        } = self
        else {
            return Err(self);
        };
        source.downcast().map_err(|source| Failure::Read {
            position,
            expected,
            found,
            source: Some(source),
        })
    }
}

impl From<Failure> for Error {
    /// Convert a failure that concerns no file.
    fn from(failure: Failure) -> Error {
        failure.about(None, None)
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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = self.path() {
            write!(f, "{}: ", Escaped(&path.to_string_lossy()))?;
        }
        // The text of a fault of a header, an index or an alias names the tensor itself.
        if let Some(tensor) = &self.tensor {
            write!(f, "tensor {}: ", Quoted(tensor))?;
        }
        f.write_str(&self.reason())?;
        self.hint().map_or(Ok(()), |hint| write!(f, " — {hint}"))
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &*self.failure {
            Failure::Header(fault) | Failure::Unstorable(fault) => Some(fault),
            Failure::Index(fault) => Some(fault),
            Failure::Slice(fault) => Some(fault),
            Failure::Device(fault) => Some(fault),
            Failure::Refused(fault) => Some(&**fault),
            Failure::Shared(fault) => Some(fault),
            _ => self.system().map(|fault| fault as _),
        }
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
    #[must_use]
    pub fn about(self, path: &Path) -> Error {
        Failure::Edit(self).about(Some(path), None)
    }
}

impl PatchFault {
    /// Return the error about the file at `path`.
    #[must_use]
    pub fn about(self, path: Option<&Path>) -> Error {
        Failure::Patch(self).about(path, None)
    }
}

impl CheckpointFault {
    /// Return the error about the checkpoint at `path`.
    pub(crate) fn about(self, path: &Path) -> Error {
        Failure::Checkpoint(self).about(Some(path), None)
    }
}

/// Return a function that makes an error of a failure to open the file at `path`.
pub(crate) fn unopened(path: &Path) -> impl Fn(io::Error) -> Error + Copy {
    move |source| Failure::Open(source).about(Some(path), None)
}

/// Return a function that makes an error of a failure to lay out the tensors of the file at `path`.
pub(crate) fn unstorable(path: &Path) -> impl Fn(FormatError) -> Error + Copy {
    move |fault| Failure::Unstorable(fault).about(Some(path), None)
}

/// Adds the step of a save to an error of the operating system. [`Error::in_save`] adds the path.
pub(crate) trait Step<T> {
    fn step(self, step: &'static str) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, step: &'static str) -> Result<T, Error> {
        self.map_err(|source| of_step(step, source.into()))
    }
}

/// Return the error for a failed step. Errors of payloads, also interruptions, are inside an error of the operating system.
pub(crate) fn of_step(step: &'static str, source: io::Error) -> Error {
    let source = match source.downcast::<DeviceFault>() {
        Ok(fault) => return fault.into(),
        Err(source) => source,
    };
    source.downcast().unwrap_or_else(|source| {
        Failure::Write {
            step,
            nbytes: 0,
            source,
        }
        .into()
    })
}
