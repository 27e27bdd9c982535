//! Conversion of errors to exceptions. `python/ingot/errors.py` defines the classes.

use std::path::Path;

use ingot_format::{Entry, Escaped, Quoted, SelectionError};
use ingot_io::{CheckpointFault, EditError, Error, Failure, Fault, PatchFault};
use pyo3::exceptions::{PyException, PyKeyboardInterrupt, PyMemoryError, PyNotImplementedError, PyOSError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::object_fault::{self, Raised};

/// Return the exception for `error`.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let path = error.path().unwrap_or(Path::new(""));
    let class = match error.failure() {
        Failure::Open(source) => match Fault::of(source) {
            Some(fault) => return remote_error(py, error, path, source, fault),
            None => return os_error(py, path, source, error.hint()),
        },
        Failure::Interrupted => return PyKeyboardInterrupt::new_err(()),
        // The framework's own exception.
        Failure::Refused(source) => match source.downcast_ref::<Raised>() {
            Some(Raised(raised)) => return raised.clone_ref(py),
            None => "DeviceError",
        },
        Failure::Device(_) => "DeviceError",
        Failure::OutOfMemory { .. } => return PyMemoryError::new_err(error.to_string()),
        Failure::Header(_) => "HeaderError",
        // As `open()` raises it.
        Failure::Checkpoint(CheckpointFault::NoCheckpoint) => {
            return numbered(py, "EISDIR", path, error.reason());
        }
        Failure::Checkpoint(CheckpointFault::MissingShards { .. }) => {
            return numbered(py, "ENOENT", path, error.reason());
        }
        Failure::Index(_) | Failure::Checkpoint(_) => "CheckpointError",
        Failure::UnknownTensor { .. } => "TensorNotFoundError",
        // Frameworks differ in the meaning, so the framework itself handles such an index.
        Failure::Slice(SelectionError::TwoLists | SelectionError::SeparatedList) => {
            return PyNotImplementedError::new_err(error.to_string());
        }
        Failure::Slice(_) => "SliceError",
        Failure::Read { .. } | Failure::Changed { .. } => "StorageError",
        Failure::Write { .. } => return write_error(py, error),
        Failure::Unstorable(_) => "SaveError",
        Failure::UnknownBackend(_) | Failure::InvalidThreads(_) => "OptionError",
        Failure::Conversion { .. } => "DtypeError",
        Failure::Dequantization(_) => "ConversionError",
        Failure::Pieces(_) => "RemapError",
        Failure::Destination(_) => "DestinationError",
        Failure::Edit(fault) => edit_class(fault),
        Failure::Checksums(_) | Failure::NoDigest | Failure::Digest(_) => "IntegrityError",
        Failure::Patch(PatchFault::Unfinished { .. } | PatchFault::Replaced { .. }) => "StorageError",
        Failure::Patch(PatchFault::NotInPlace(_)) => "SaveError",
        Failure::Patch(_) => "IntegrityError",
        Failure::Closed => "ClosedError",
        // Errors that a later version of ingot-io adds.
        _ => "SafetensorError",
    };
    of_object(py, ours(py, class, error), error)
}

/// Return `ours`, caused by the exception that an object raised, or that exception itself.
fn of_object(py: Python<'_>, ours: PyErr, error: &Error) -> PyErr {
    match object_fault::raised(error) {
        // Ctrl-C, the end of the program, and exceptions of ingot are returned unchanged.
        Some(raised) if !raised.is_instance_of::<PyException>(py) || is_ours(raised, py) => {
            raised.clone_ref(py)
        }
        raised => {
            ours.set_cause(py, raised.map(|raised| raised.clone_ref(py)));
            ours
        }
    }
}

fn is_ours(raised: &PyErr, py: Python<'_>) -> bool {
    let ours = || {
        raised
            .value(py)
            .is_instance(&py.import("ingot.errors")?.getattr("SafetensorError")?)
    };
    ours().unwrap_or(false)
}

/// Return the class for a fault of an edit: faults of tensors differ from changes by other processes.
fn edit_class(fault: &EditError) -> &'static str {
    match fault {
        EditError::Duplicate { .. }
        | EditError::Mismatch { .. }
        | EditError::FilledTwice
        | EditError::NotFilled { .. }
        | EditError::ReserveFull { .. } => "SaveError",
        EditError::Committed | EditError::Forked => "ClosedError",
        _ => "StorageError",
    }
}

/// Return an exception of ours, with the attributes of the error.
fn ours(py: Python<'_>, class: &str, error: &Error) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let facts = PyDict::new(py);
        facts.set_item("code", error.code())?;
        facts.set_item("path", error.path().map(Path::as_os_str))?;
        facts.set_item("tensor", error.tensor())?;
        let (expected, found) = object_fault::wrong_length(error)
            .or_else(|| error.expected_found())
            .unzip();
        facts.set_item("expected", expected)?;
        facts.set_item("found", found)?;
        if let Failure::Digest(unequal) = error.failure() {
            facts.set_item("expected", unequal.expected.to_string())?;
            facts.set_item("found", unequal.found.to_string())?;
        }
        if let Failure::Patch(
            PatchFault::WrongBase { expected, found } | PatchFault::Replaced { expected, found, .. },
        ) = error.failure()
        {
            facts.set_item("expected", expected)?;
            facts.set_item("found", found)?;
        }
        let (begin, end) = error.range().unzip();
        facts.set_item("begin", begin)?;
        facts.set_item("end", end)?;
        if let Some(errno) = error.system().and_then(std::io::Error::raw_os_error) {
            facts.set_item("errno", errno)?;
        }
        exception(py, class, &error.to_string(), Some(&facts))
    };
    make().unwrap_or_else(|failure| failure)
}

/// Return an exception of the class `class` of `ingot.errors`.
pub(crate) fn exception(
    py: Python<'_>,
    class: &str,
    message: &str,
    facts: Option<&Bound<'_, PyDict>>,
) -> PyResult<PyErr> {
    let class = py.import("ingot.errors")?.getattr(class)?;
    Ok(PyErr::from_value(class.call((message,), facts)?))
}

/// Return an exception of the class `class` about one tensor.
pub(crate) fn about_tensor(py: Python<'_>, class: &str, code: &str, tensor: &str, message: &str) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let facts = PyDict::new(py);
        facts.set_item("code", code)?;
        facts.set_item("tensor", tensor)?;
        exception(py, class, message, Some(&facts))
    };
    make().unwrap_or_else(|failure| failure)
}

/// Return the exception for the tensor `entry` of the file at `path`, which a framework cannot hold. `found` is the attribute
/// that it rejects.
pub(crate) fn refused(
    path: Option<&Path>,
    entry: &Entry<'_>,
    code: &str,
    found: &Bound<'_, PyAny>,
    reason: &str,
) -> PyErr {
    let py = found.py();
    let make = || -> PyResult<PyErr> {
        let mut message = String::new();
        if let Some(path) = path {
            message = format!("{}: ", Escaped(&path.to_string_lossy()));
        }
        message += &format!("tensor {}: {reason}", Quoted(entry.name));
        let facts = PyDict::new(py);
        facts.set_item("code", code)?;
        facts.set_item("path", path.map(Path::as_os_str))?;
        facts.set_item("tensor", entry.name)?;
        facts.set_item("found", found)?;
        exception(py, "DtypeError", &message, Some(&facts))
    };
    make().unwrap_or_else(|failure| failure)
}

/// Return the builtin exception for this error number, with file name and number, so that `except FileNotFoundError` and
/// `except PermissionError` work.
fn os_error(py: Python<'_>, path: &Path, source: &std::io::Error, hint: Option<&str>) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let os = py.import("os")?;
        let (errno, text) = match source.raw_os_error() {
            // On Windows, Python derives its own number and the class from the system's number.
            Some(_) if cfg!(windows) => (0, source.to_string().into_pyobject(py)?.into_any()),
            Some(errno) => (errno, os.call_method1("strerror", (errno,))?),
            None => (
                number_of(py, source.kind())?,
                source.to_string().into_pyobject(py)?.into_any(),
            ),
        };
        let text = match hint {
            Some(hint) => format!("{text} — {hint}").into_pyobject(py)?.into_any(),
            None => text,
        };
        let system = source.raw_os_error().filter(|_| cfg!(windows));
        Ok(PyErr::from_value(py.get_type::<PyOSError>().call1((
            errno,
            text,
            path.as_os_str(),
            system,
        ))?))
    };
    make().unwrap_or_else(|failure| failure)
}

/// Return the number for a failure without a number of the system.
fn number_of(py: Python<'_>, kind: std::io::ErrorKind) -> PyResult<i32> {
    let name = match kind {
        std::io::ErrorKind::IsADirectory => "EISDIR",
        std::io::ErrorKind::NotADirectory => "ENOTDIR",
        std::io::ErrorKind::NotFound => "ENOENT",
        _ => "EINVAL",
    };
    py.import("errno")?.getattr(name)?.extract()
}

/// Return the exception for a network fault. If a server answers that the file does not exist, or denies access, that is the
/// builtin exception for the same failure of a local file. The message contains the answer.
fn remote_error(py: Python<'_>, error: &Error, path: &Path, source: &std::io::Error, fault: &Fault) -> PyErr {
    let errno = match source.kind() {
        _ if fault.is_misuse() => return ours(py, "OptionError", error),
        std::io::ErrorKind::NotFound if fault.is_answer() => "ENOENT",
        std::io::ErrorKind::PermissionDenied if fault.is_answer() => "EACCES",
        std::io::ErrorKind::AlreadyExists => {
            let hint = error.hint().unwrap_or_default();
            return numbered(py, "EEXIST", path, format!("{fault} — {hint}"));
        }
        _ => return of_object(py, ours(py, "StorageError", error), error),
    };
    numbered(py, errno, path, fault.to_string())
}

/// Return the builtin exception for this error number, with a message of ours.
fn numbered(py: Python<'_>, errno: &str, path: &Path, words: String) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let errno: i32 = py.import("errno")?.getattr(errno)?.extract()?;
        let arguments = (errno, words, path.as_os_str());
        Ok(PyErr::from_value(py.get_type::<PyOSError>().call1(arguments)?))
    };
    make().unwrap_or_else(|failure| failure)
}

/// Return the exception for a failed save: a `StorageError`, or the builtin that `open(path, "wb")` raises if permission is
/// missing or the target is a directory.
fn write_error(py: Python<'_>, error: &Error) -> PyErr {
    if let (Some(path), Some(source)) = (error.path(), error.system())
        && let Some(fault) = Fault::of(source)
    {
        return remote_error(py, error, path, source, fault);
    }
    match (error.path(), error.system()) {
        (Some(path), Some(source))
            if matches!(
                source.kind(),
                std::io::ErrorKind::PermissionDenied
                    | std::io::ErrorKind::IsADirectory
                    | std::io::ErrorKind::NotFound
            ) =>
        {
            os_error(py, path, source, error.hint())
        }
        _ => ours(py, "StorageError", error),
    }
}

/// Return the name of an argument's class.
pub(crate) fn class_of(given: &Bound<'_, PyAny>) -> String {
    given
        .get_type()
        .name()
        .map(|class| class.to_string())
        .unwrap_or_default()
}
