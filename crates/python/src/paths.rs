//! Paths of this machine, told apart from URLs.

use std::path::{Path, PathBuf};

use ingot_io::Failure;
use ingot_io::binding::{is_url as begins_as_url, redacted};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::errors::{class_of, exception, raise};

/// Convert an argument to a path of this machine: a `str`, `bytes` or `os.PathLike`, as `os.fsencode` converts it, also if it
/// is not UTF-8, or a `file:` URL. Every path is converted here, so that other URLs are refused in one place.
pub(crate) fn file_path(given: &Bound<'_, PyAny>) -> PyResult<PathBuf> {
    let py = given.py();
    if let Ok(text) = given.extract::<&str>()
        && may_be_url(text.as_bytes())
        && let Some(path) = ingot_io::binding::local_path(text)
    {
        let refuse = |fault: ingot_io::Fault| {
            Failure::Open(fault.into()).about(Some(Path::new(&redacted(text))), None)
        };
        return path.map_err(|fault| raise(py, &refuse(fault)));
    }
    let encoded = py.import("os")?.call_method1("fsencode", (given,));
    let encoded = encoded.map_err(|fault| no_path(given, fault))?;
    let encoded = encoded.cast::<PyBytes>()?;
    let bytes = encoded.as_bytes();
    // As `open()` does. The system would see a shorter path.
    if bytes.contains(&0) {
        return Err(PyValueError::new_err(if given.is_instance_of::<PyBytes>() {
            "embedded null byte in the path: bytes are the name of a file here — `load(data)` of ingot.numpy, \
                 ingot.torch and the others takes what is in one"
        } else {
            "embedded null byte in the path"
        }));
    }
    if may_be_url(bytes) {
        refuse_url(py, &String::from_utf8_lossy(bytes))?;
    }
    path_of(encoded)
}

/// Return whether a path needs a closer look: every URL has a colon, and hardly any path.
fn may_be_url(path: &[u8]) -> bool {
    path.contains(&b':')
}

#[cfg(unix)]
#[allow(clippy::unnecessary_wraps, reason = "Windows asks Python")]
fn path_of(encoded: &Bound<'_, PyBytes>) -> PyResult<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    Ok(PathBuf::from(std::ffi::OsStr::from_bytes(encoded.as_bytes())))
}

#[cfg(windows)]
fn path_of(encoded: &Bound<'_, PyBytes>) -> PyResult<PathBuf> {
    // The name may hold half a character, which is not UTF-8.
    let os = encoded.py().import("os")?;
    os.call_method1("fsdecode", (encoded,))?.extract()
}

/// Refuse a URL if a path is expected: for files to be written, and for arguments of a path type. A URL that pathlib has
/// shortened is refused too, unless its scheme is the name of a directory.
fn refuse_url(py: Python<'_>, text: &str) -> PyResult<()> {
    let was_url = || {
        ingot_io::binding::was_url(text)
            && !text
                .split('/')
                .next()
                .is_some_and(|first| Path::new(first).exists())
    };
    if !begins_as_url(text) && !was_url() {
        return Ok(());
    }
    let shown = redacted(text);
    let message = format!(
        "{}: is a URL: expected a path on this machine — URLs are read where they are given as a str, and `save_file` writes to \
         s3:// and az://",
        ingot_format::Escaped(&shown)
    );
    let facts = PyDict::new(py);
    facts.set_item("code", "url-for-path")?;
    facts.set_item("path", shown)?;
    Err(exception(py, "OptionError", &message, Some(&facts))?)
}

/// Return the error for an argument that is not a path, with the function that accepts it, for open files and bytes.
fn no_path(given: &Bound<'_, PyAny>, fault: PyErr) -> PyErr {
    let py = given.py();
    if !fault.is_instance_of::<PyTypeError>(py) {
        return fault;
    }
    let has = |name: &str| given.hasattr(name).unwrap_or(false);
    let hint = match () {
        () if has("read") || has("write") => {
            " — `load(file.read())` of ingot.numpy, ingot.torch and the others takes what is in an open file, \
             and their `save_file(tensors, file)` writes to one"
        }
        () if given.cast::<pyo3::types::PyByteArray>().is_ok() || has("tobytes") => {
            " — `load(data)` of ingot.numpy, ingot.torch and the others takes the bytes of a file"
        }
        () => "",
    };
    let class = class_of(given);
    PyTypeError::new_err(format!(
        "expected a path, as a str, bytes or os.PathLike object, found {class}{hint}"
    ))
}

/// Return whether a text is a URL that requests read. Names of files that are not Unicode are not.
#[pyfunction]
pub(crate) fn is_url(text: &Bound<'_, PyString>) -> bool {
    text.to_str().is_ok_and(is_remote)
}

/// Return whether a text is a URL other than a `file:` URL, which is a path.
pub(crate) fn is_remote(text: &str) -> bool {
    may_be_url(text.as_bytes()) && begins_as_url(text) && ingot_io::binding::local_path(text).is_none()
}

/// Return a URL without its secrets.
#[pyfunction]
pub(crate) fn shown_url(url: &Bound<'_, PyString>) -> PyResult<Py<PyString>> {
    // Names of files that are not Unicode have no secrets.
    Ok(match url.to_str() {
        Ok(text) => PyString::new(url.py(), &redacted(text)).unbind(),
        Err(_) => url.clone().unbind(),
    })
}

/// Return the URL of a store that files are written to, or otherwise a path as `local_path` does. See `_native.pyi`.
#[pyfunction]
pub(crate) fn destination<'py>(given: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    if is_store(given) {
        return Ok(given.clone());
    }
    local_path(given)
}

/// Return whether an argument is the URL of a store that files are written to.
pub(crate) fn is_store(given: &Bound<'_, PyAny>) -> bool {
    given.extract::<&str>().is_ok_and(ingot_io::binding::is_written)
}

/// Return a path of this machine as a str, or as bytes if it is given as bytes. See `_native.pyi`.
#[pyfunction]
pub(crate) fn local_path<'py>(given: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = given.py();
    let path = file_path(given)?;
    if given.is_instance_of::<PyString>() {
        Ok(path.as_os_str().into_pyobject(py)?.into_any())
    } else {
        py.import("os")?.call_method1("fspath", (given,))
    }
}
