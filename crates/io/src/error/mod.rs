//! Errors. [`Error`] is the type that callers receive. It contains a fault of a header, an index, a checkpoint, an edit and so
//! on. A [`Failure`] or a [`Stop`] becomes an error once path and tensor are known.

mod failure;
mod faults;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ingot_format::{Dtype, Escaped, FormatError, IndexError, Quoted, SelectionError, SharedError};

use self::faults::{about, hint};
use crate::device::{DeviceFault, Refusal};
use crate::digest::Unequal;
use crate::options::{BACKEND_VARIABLE, Backend, THREADS_VARIABLE};

pub(crate) use failure::{Failure, InFile, Step, Stop, size, unopened, unstorable};
pub(crate) use faults::step;
pub use faults::{CheckpointFault, EditError, Misfit};

/// A failure to open, read or save, with the facts that help to fix it.
///
/// `Display` writes one line: path, tensor, fault, expected and found. Names and paths are escaped in it; the fields hold
/// them unchanged.
///
/// ```
/// use std::path::Path;
///
/// use ingot_io::{Archive, Error, OpenOptions};
///
/// match Archive::open(Path::new("missing.safetensors"), &OpenOptions::new()) {
///     Err(Error::Open { path, source }) => println!("{}: {source}", path.display()),
///     Err(error) => println!("{} ({error})", error.code()),
///     Ok(archive) => println!("{} tensors", archive.tensors().count()),
/// }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be opened.
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The header breaks a rule of FORMAT.md.
    Header {
        /// The file; `None` for bytes in memory.
        path: Option<PathBuf>,
        /// The rule.
        fault: FormatError,
    },
    /// The index of a checkpoint breaks a rule of FORMAT.md.
    Index {
        /// The index.
        path: PathBuf,
        /// The rule.
        fault: IndexError,
    },
    /// The files of a checkpoint do not go together.
    Checkpoint {
        /// The index, or the directory.
        path: PathBuf,
        /// The reason.
        fault: CheckpointFault,
    },
    /// The file has no tensor of this name.
    UnknownTensor {
        /// The file.
        path: Option<PathBuf>,
        /// The requested name.
        tensor: String,
        /// The most similar name in the file.
        nearest: Option<String>,
    },
    /// The index does not fit the tensor.
    Slice {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The reason.
        fault: SelectionError,
    },
    /// Reading failed, or returned fewer bytes than expected.
    Read {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor whose bytes were read; `None` for the header, and for a file that is read as a whole.
        tensor: Option<String>,
        /// The position in the file, in bytes.
        position: u64,
        /// Bytes requested.
        expected: u64,
        /// Bytes found.
        found: u64,
        /// The system's error; `None` if the file ended.
        source: Option<io::Error>,
    },
    /// The file was written to, replaced, removed, lengthened or shortened since it was opened.
    Changed {
        /// The file.
        path: Option<PathBuf>,
        /// Its size when it was opened, in bytes.
        nbytes_at_open: u64,
        /// Its size now; `None` if it was removed, or has the same size.
        nbytes_now: Option<u64>,
    },
    /// The memory for the tensors cannot be allocated.
    OutOfMemory {
        /// The file.
        path: Option<PathBuf>,
        /// Bytes requested.
        nbytes: u64,
        /// The system's error.
        source: Option<io::Error>,
    },
    /// The tensors cannot be laid out in a file of this format.
    Unstorable {
        /// The file to be written; `None` for bytes in memory.
        path: Option<PathBuf>,
        /// The reason.
        fault: FormatError,
    },
    /// Saving failed. An existing file is unchanged, except after some values of `step`, which say so.
    Write {
        /// The file to be written, never a temporary one.
        path: PathBuf,
        /// The step that failed, as words after "could not".
        step: &'static str,
        /// The size of the new file in bytes.
        nbytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The environment variable for the backend has an unknown value.
    UnknownBackend {
        /// The value.
        found: String,
    },
    /// The environment variable for the number of threads has an invalid value.
    InvalidThreads {
        /// The value.
        found: String,
    },
    /// The tensor cannot be converted to the requested dtype.
    Conversion {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor.
        tensor: String,
        /// The dtype in the file.
        stored: Dtype,
        /// The requested dtype.
        wanted: Dtype,
    },
    /// The destination of a tensor does not fit the tensor.
    #[doc(hidden)]
    Destination {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor.
        tensor: String,
        /// The reason.
        misfit: Misfit,
    },
    /// The file was not edited, merged or filled.
    Edit {
        /// The file to be written.
        path: PathBuf,
        /// The reason.
        fault: EditError,
    },
    /// The record of digests in the file's metadata cannot be used. FORMAT.md, "Checksums".
    Checksums {
        /// The file.
        path: Option<PathBuf>,
        /// The reason.
        reason: String,
    },
    /// The record of shared tensors in the file's metadata cannot be used. FORMAT.md, "Shared tensors".
    Shared {
        /// The file.
        path: Option<PathBuf>,
        /// The reason.
        fault: SharedError,
    },
    /// The file has no recorded digest of a tensor that was to be verified.
    NoDigest {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor.
        tensor: String,
    },
    /// Bytes differ from a recorded digest.
    Digest {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor; `None` for the whole file.
        tensor: Option<String>,
        /// The two digests. Boxed, because they are larger than the other variants.
        unequal: Box<Unequal>,
    },
    /// The handle was closed.
    Closed {
        /// The file.
        path: Option<PathBuf>,
    },
    /// A device cannot be used.
    #[doc(hidden)]
    Device {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor, if it is known.
        tensor: Option<String>,
        /// The reason.
        fault: Box<DeviceFault>,
    },
    /// A framework cannot allocate memory of a device for the tensors.
    #[doc(hidden)]
    Refused {
        /// The file.
        path: Option<PathBuf>,
        /// The framework's error.
        source: Refusal,
    },
    /// The caller interrupted the call. No partial result is left behind.
    Interrupted,
}

impl Error {
    /// Returns a stable name for the failure, in kebab-case; programs may match it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.row().0
    }

    /// Return the code, and the text after path and tensor.
    fn row(&self) -> (&'static str, String) {
        match self {
            Error::Open { source, .. } => (code_of(source).unwrap_or("open"), source.to_string()),
            Error::Header { fault, .. } | Error::Unstorable { fault, .. } => {
                (fault.code(), fault.to_string())
            }
            Error::Index { fault, .. } => (fault.code(), fault.to_string()),
            Error::Checkpoint { fault, .. } => (fault.code(), fault.to_string()),
            Error::UnknownTensor { nearest, .. } => {
                let nearest = nearest
                    .as_ref()
                    .map(|name| format!(" — did you mean {}?", Quoted(name)));
                let text = format!("the file has no such tensor{}", nearest.unwrap_or_default());
                ("unknown-tensor", text)
            }
            Error::Slice { fault, .. } => (fault.code(), fault.to_string()),
            Error::Read {
                position,
                expected,
                found,
                source,
                ..
            } => {
                let at = format!(
                    "bytes {position}..{} of the file",
                    position.saturating_add(*expected)
                );
                match source {
                    Some(source) => (
                        code_of(source).unwrap_or("read"),
                        format!("reading {at}: {source}"),
                    ),
                    None => (
                        "short-read",
                        format!("expected {expected} bytes, found {found} at {at}"),
                    ),
                }
            }
            Error::Changed {
                nbytes_at_open: before,
                nbytes_now,
                ..
            } => {
                let what = match nbytes_now {
                    Some(now) if now < before => format!("shrank from {before} to {now} bytes"),
                    Some(now) => format!("grew from {before} to {now} bytes"),
                    None => "was written to, replaced or removed".to_owned(),
                };
                (
                    "changed",
                    format!("the file {what} since it was opened — open it again"),
                )
            }
            Error::OutOfMemory { nbytes, source, .. } => {
                let why = source.as_ref().map(|source| format!(": {source}"));
                let text = format!("no memory for {nbytes} bytes{}", why.unwrap_or_default());
                ("out-of-memory", text)
            }
            Error::Write {
                step, nbytes, source, ..
            } => {
                // A journal, and a file whose size is not known yet, have none.
                let needs = (*nbytes > 0).then(|| format!(": the file needs {nbytes} bytes"));
                let text = format!("could not {step}: {source}{}", needs.unwrap_or_default());
                ("write", text)
            }
            Error::UnknownBackend { found } => {
                let (found, names) = (Quoted(found), Backend::ALL.map(Backend::name).join(", "));
                let text = format!("{BACKEND_VARIABLE} {found} is unknown: expected one of {names}");
                ("unknown-backend", text)
            }
            Error::InvalidThreads { found } => {
                let found = Quoted(found);
                let text = format!("{THREADS_VARIABLE} {found} is no number of threads: expected 1 or more");
                ("invalid-threads", text)
            }
            Error::Conversion { stored, wanted, .. } => {
                ("no-conversion", format!("{stored} is not converted to {wanted}"))
            }
            Error::Destination { misfit, .. } => misfit.row(),
            Error::Edit { fault, .. } => (fault.code(), fault.to_string()),
            Error::Checksums { reason, .. } => ("invalid-checksums", reason.clone()),
            Error::Shared { fault, .. } => ("invalid-alias", fault.to_string()),
            Error::NoDigest { .. } => ("no-digest", "the file keeps no digest to verify it by".to_owned()),
            Error::Digest { tensor, unequal, .. } => {
                let text = format!("bytes are not those that were promised: {unequal}");
                let text = match tensor {
                    Some(_) => format!("its {text}"),
                    None => format!("the file's {text}"),
                };
                ("digest-mismatch", text)
            }
            Error::Closed { .. } => ("closed", "file is closed".to_owned()),
            Error::Device { fault, .. } => (fault.code(), fault.to_string()),
            Error::Refused { source, .. } => {
                let text = format!("the framework gives no memory: {source}");
                ("device-out-of-memory", text)
            }
            Error::Interrupted => ("interrupted", "interrupted".to_owned()),
        }
    }

    /// Returns the file that the failure concerns.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Error::Open { path, .. }
            | Error::Write { path, .. }
            | Error::Edit { path, .. }
            | Error::Index { path, .. }
            | Error::Checkpoint { path, .. } => Some(path),
            Error::Header { path, .. }
            | Error::UnknownTensor { path, .. }
            | Error::Slice { path, .. }
            | Error::Read { path, .. }
            | Error::Changed { path, .. }
            | Error::OutOfMemory { path, .. }
            | Error::Unstorable { path, .. }
            | Error::Conversion { path, .. }
            | Error::Destination { path, .. }
            | Error::Checksums { path, .. }
            | Error::Shared { path, .. }
            | Error::NoDigest { path, .. }
            | Error::Digest { path, .. }
            | Error::Device { path, .. }
            | Error::Refused { path, .. }
            | Error::Closed { path } => path.as_deref(),
            Error::UnknownBackend { .. } | Error::InvalidThreads { .. } | Error::Interrupted => None,
        }
    }

    /// Returns the tensor that the failure concerns.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Error::Header { fault, .. } | Error::Unstorable { fault, .. } => fault.tensor(),
            Error::Index { fault, .. } => fault.tensor(),
            Error::Checkpoint { fault, .. } => fault.tensor(),
            Error::Edit { fault, .. } => fault.tensor(),
            Error::Shared { fault, .. } => fault.tensor(),
            Error::Device { tensor, .. } => tensor.as_deref(),
            _ => self.subject(),
        }
    }

    /// Return the tensor at the beginning of the text; the text of a fault names its tensor itself.
    fn subject(&self) -> Option<&str> {
        match self {
            Error::UnknownTensor { tensor, .. }
            | Error::Slice { tensor, .. }
            | Error::Conversion { tensor, .. }
            | Error::Destination { tensor, .. }
            | Error::NoDigest { tensor, .. } => Some(tensor),
            Error::Read { tensor, .. } | Error::Digest { tensor, .. } => tensor.as_deref(),
            _ => None,
        }
    }

    /// Returns the expected and the found size in bytes, for a failure of sizes.
    #[must_use]
    pub fn expected_found(&self) -> Option<(u64, u64)> {
        match *self {
            Error::Header { ref fault, .. } | Error::Unstorable { ref fault, .. } => fault.expected_found(),
            Error::Index { ref fault, .. } => fault.expected_found(),
            Error::Read { expected, found, .. } => Some((expected, found)),
            Error::Edit { ref fault, .. } => fault.expected_found(),
            Error::Changed {
                nbytes_at_open,
                nbytes_now: Some(now),
                ..
            } => Some((nbytes_at_open, now)),
            _ => None,
        }
    }

    /// Returns the range of bytes that the failure concerns: of the data section for a fault of the header, of the file for a
    /// failed read.
    #[must_use]
    pub fn range(&self) -> Option<(u64, u64)> {
        match *self {
            Error::Header { ref fault, .. } | Error::Unstorable { ref fault, .. } => fault.range(),
            Error::Read {
                position, expected, ..
            } => Some((position, position.saturating_add(expected))),
            _ => None,
        }
    }

    /// Returns advice for the caller, which is also the end of the text.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Error::Write {
                path, step, source, ..
            } => hint(path, step, source),
            // Only a destination that must be new is opened like this.
            Error::Open { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => {
                Some("overwrite=True replaces it")
            }
            _ => None,
        }
    }

    /// Returns the system's error, if it is the cause.
    #[must_use]
    pub fn system(&self) -> Option<&io::Error> {
        match self {
            Error::Open { source, .. } | Error::Write { source, .. } => Some(source),
            Error::Read { source, .. } | Error::OutOfMemory { source, .. } => source.as_ref(),
            _ => None,
        }
    }
}

/// Return the code of a network fault.
fn code_of(source: &io::Error) -> Option<&'static str> {
    #[cfg(feature = "remote")]
    if let Some(fault) = ingot_remote::Fault::of(source) {
        return Some(fault.code());
    }
    let _ = source;
    None
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = self.path() {
            write!(f, "{}: ", Escaped(&path.to_string_lossy()))?;
        }
        about(f, self.subject(), &self.row().1)?;
        self.hint().map_or(Ok(()), |hint| write!(f, " — {hint}"))
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Header { fault, .. } | Error::Unstorable { fault, .. } => Some(fault),
            Error::Index { fault, .. } => Some(fault),
            Error::Checkpoint { fault, .. } => Some(fault),
            Error::Slice { fault, .. } => Some(fault),
            Error::Device { fault, .. } => Some(&**fault),
            Error::Refused { source, .. } => Some(&**source),
            Error::Edit { fault, .. } => Some(fault),
            Error::Shared { fault, .. } => Some(fault),
            _ => self
                .system()
                .map(|fault| fault as &(dyn std::error::Error + 'static)),
        }
    }
}
