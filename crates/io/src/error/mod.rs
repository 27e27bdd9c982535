//! What can go wrong with a file, in words: nothing here can fail, and nothing is done. [`Error`] is what callers get, the
//! faults inside it are those of one thing each, a [`Failure`] or a [`Stop`] is what becomes an error once path and tensor are known.

mod checkpoint;
mod edit;
mod failure;
mod write;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ingot_format::{Dtype, Escaped, FormatError, IndexError, Quoted, SelectionError, SharedError};

use self::write::hint;
use crate::device::{DeviceFault, Refusal};
use crate::digest::Unequal;
use crate::options::{BACKEND_VARIABLE, Backend, THREADS_VARIABLE};

pub use checkpoint::CheckpointFault;
pub use edit::EditError;
pub(crate) use failure::{Failure, InFile, Step, Stop, size, unopened};
pub(crate) use write::step;

/// A failure to open, read or save, with what a reader needs to put it right.
///
/// `Display` gives one line: path, tensor, what is wrong, expected and found. Names and paths are escaped in it;
/// the fields hold them as they are.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be opened. The system's own error says why.
    Open {
        /// The file.
        path: PathBuf,
        /// What the system says.
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
        /// What is wrong.
        fault: CheckpointFault,
    },
    /// The file has no tensor of this name.
    UnknownTensor {
        /// The file.
        path: Option<PathBuf>,
        /// The name that was asked for.
        tensor: String,
        /// The name in the file that is most like it.
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
        /// What does not fit.
        fault: SelectionError,
    },
    /// Reading failed, or gave fewer bytes than there should be.
    Read {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor whose bytes were read; `None` for the header, and for a file that is read whatever it holds.
        tensor: Option<String>,
        /// Where in the file, in bytes.
        position: u64,
        /// Bytes asked for.
        expected: u64,
        /// Bytes found.
        found: u64,
        /// What the system says; `None` when the file just ended.
        source: Option<io::Error>,
    },
    /// The file was written to, replaced, removed, lengthened or shortened since it was opened.
    Changed {
        /// The file.
        path: Option<PathBuf>,
        /// Its size when it was opened, in bytes.
        nbytes_at_open: u64,
        /// Its size now; `None` when it is gone, or has the same size.
        nbytes_now: Option<u64>,
    },
    /// There is no memory for the tensors.
    OutOfMemory {
        /// The file.
        path: Option<PathBuf>,
        /// Bytes that were asked for.
        nbytes: u64,
        /// What the system says.
        source: Option<io::Error>,
    },
    /// The tensors cannot be laid out in a file of this format.
    Unstorable {
        /// The file to be written; `None` for bytes in memory.
        path: Option<PathBuf>,
        /// Why not.
        fault: FormatError,
    },
    /// Saving failed. What the path held before is still there, unless `step` says otherwise.
    Write {
        /// The file to be written, never a temporary one.
        path: PathBuf,
        /// What could not be done, to stand after "could not".
        step: &'static str,
        /// Bytes that the new file takes.
        nbytes: u64,
        /// What the system says.
        source: io::Error,
    },
    /// The environment asks for a way to read that there is not.
    UnknownBackend {
        /// What it asks for.
        found: String,
    },
    /// The environment asks for a number of threads that is none.
    InvalidThreads {
        /// What it asks for.
        found: String,
    },
    /// The tensor is not converted to the dtype that was asked for.
    Conversion {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor.
        tensor: String,
        /// The dtype that it has in the file.
        stored: Dtype,
        /// The dtype that was asked for.
        wanted: Dtype,
    },
    /// The memory that a tensor was to be read into does not fit it.
    #[doc(hidden)]
    Destination {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor.
        tensor: String,
        /// What does not fit.
        misfit: Misfit,
    },
    /// The file was not edited, merged or filled.
    Edit {
        /// The file to be written.
        path: PathBuf,
        /// Why not.
        fault: EditError,
    },
    /// The record of digests in the file's metadata cannot be used. FORMAT.md, "Checksums".
    Checksums {
        /// The file.
        path: Option<PathBuf>,
        /// Why not.
        reason: String,
    },
    /// The record of shared tensors in the file's metadata cannot be used. FORMAT.md, "Shared tensors".
    Shared {
        /// The file.
        path: Option<PathBuf>,
        /// Why not.
        fault: SharedError,
    },
    /// The file keeps no digest of a tensor that was to be compared with one.
    NoDigest {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor.
        tensor: String,
    },
    /// Bytes are not those that a digest was taken of.
    Digest {
        /// The file.
        path: Option<PathBuf>,
        /// The tensor; `None` for the whole file.
        tensor: Option<String>,
        /// The two digests. Boxed, because they are larger than all the rest.
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
        /// The tensor; `None` where it is not known which.
        tensor: Option<String>,
        /// What is wrong with it.
        fault: Box<DeviceFault>,
    },
    /// A framework gives no memory of a device for the tensors.
    #[doc(hidden)]
    Refused {
        /// The file.
        path: Option<PathBuf>,
        /// What the framework says.
        source: Refusal,
    },
    /// The caller stopped it. Nothing half-done stays behind.
    Interrupted,
}

/// Why memory does not fit the tensor that was to be read into it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Misfit {
    /// It is for elements of another kind.
    Dtype {
        /// What would be read.
        expected: Dtype,
        /// What the memory is for.
        found: Dtype,
    },
    /// It has another shape.
    Shape {
        /// The shape that would be read.
        expected: Vec<u64>,
        /// The shape of the memory.
        found: Vec<u64>,
    },
    /// Some of it is to take another tensor too.
    Overlap {
        /// The other tensor.
        other: String,
    },
}

impl Misfit {
    fn code(&self) -> &'static str {
        match self {
            Misfit::Dtype { .. } => "destination-dtype",
            Misfit::Shape { .. } => "destination-shape",
            Misfit::Overlap { .. } => "destination-overlap",
        }
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Misfit::Dtype { expected, found } => {
                write!(
                    f,
                    "the destination has another dtype: expected {expected}, found {found}"
                )
            }
            Misfit::Shape { expected, found } => {
                write!(
                    f,
                    "the destination has another shape: expected {expected:?}, found {found:?}"
                )
            }
            Misfit::Overlap { other } => {
                write!(f, "the destination shares memory with that of {}", Quoted(other))
            }
        }
    }
}

impl Error {
    /// A stable name for the failure, in kebab-case; programs may match it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Error::Open { source, .. } => code_of(source).unwrap_or("open"),
            Error::Header { fault, .. } | Error::Unstorable { fault, .. } => fault.code(),
            Error::Index { fault, .. } => fault.code(),
            Error::Checkpoint { fault, .. } => fault.code(),
            Error::UnknownTensor { .. } => "unknown-tensor",
            Error::Slice { fault, .. } => fault.code(),
            Error::Read { source: None, .. } => "short-read",
            Error::Read {
                source: Some(source), ..
            } => code_of(source).unwrap_or("read"),
            Error::Changed { .. } => "changed",
            Error::OutOfMemory { .. } => "out-of-memory",
            Error::Write { .. } => "write",
            Error::UnknownBackend { .. } => "unknown-backend",
            Error::InvalidThreads { .. } => "invalid-threads",
            Error::Conversion { .. } => "no-conversion",
            Error::Destination { misfit, .. } => misfit.code(),
            Error::Edit { fault, .. } => fault.code(),
            Error::Checksums { .. } => "invalid-checksums",
            Error::Shared { .. } => "invalid-alias",
            Error::NoDigest { .. } => "no-digest",
            Error::Digest { .. } => "digest-mismatch",
            Error::Closed { .. } => "closed",
            Error::Device { fault, .. } => fault.code(),
            Error::Refused { .. } => "device-out-of-memory",
            Error::Interrupted => "interrupted",
        }
    }

    /// The file that the failure concerns.
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

    /// The tensor that the failure concerns.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Error::Header { fault, .. } | Error::Unstorable { fault, .. } => fault.tensor(),
            Error::Index { fault, .. } => fault.tensor(),
            Error::Checkpoint { fault, .. } => fault.tensor(),
            Error::UnknownTensor { tensor, .. }
            | Error::Slice { tensor, .. }
            | Error::Conversion { tensor, .. }
            | Error::Destination { tensor, .. }
            | Error::NoDigest { tensor, .. } => Some(tensor),
            Error::Read { tensor, .. } | Error::Digest { tensor, .. } | Error::Device { tensor, .. } => {
                tensor.as_deref()
            }
            Error::Edit { fault, .. } => fault.tensor(),
            Error::Shared { fault, .. } => fault.tensor(),
            _ => None,
        }
    }

    /// The sizes that had to agree and did not, in bytes: what was expected, what was found.
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

    /// The bytes that the failure concerns: of the data section for a fault of the header, of the file for a
    /// failure to read.
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

    /// What the caller can do about it, as its text says it too. `None` where there is nothing to be said.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Error::Write {
                path, step, source, ..
            } => hint(path, step, source),
            // What is opened so is a destination that has to be new.
            Error::Open { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => {
                Some("overwrite=True replaces it")
            }
            _ => None,
        }
    }

    /// What the system said, where the failure came from it.
    #[must_use]
    pub fn system(&self) -> Option<&io::Error> {
        match self {
            Error::Open { source, .. } | Error::Write { source, .. } => Some(source),
            Error::Read { source, .. } | Error::OutOfMemory { source, .. } => source.as_ref(),
            _ => None,
        }
    }
}

/// The name of a failure that came over a network.
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
        match self {
            Error::Open { source, .. } => {
                write!(f, "{source}")?;
                self.hint().map_or(Ok(()), |hint| write!(f, " — {hint}"))
            }
            Error::Header { fault, .. } | Error::Unstorable { fault, .. } => write!(f, "{fault}"),
            Error::Index { fault, .. } => write!(f, "{fault}"),
            Error::Checkpoint { fault, .. } => write!(f, "{fault}"),
            Error::UnknownTensor { tensor, nearest, .. } => {
                write!(f, "tensor {}: the file has none of this name", Quoted(tensor))?;
                match nearest {
                    Some(nearest) => write!(f, " — did you mean {}?", Quoted(nearest)),
                    None => Ok(()),
                }
            }
            Error::Slice { tensor, fault, .. } => write!(f, "tensor {}: {fault}", Quoted(tensor)),
            Error::Read {
                tensor,
                position,
                expected,
                found,
                source,
                ..
            } => {
                if let Some(tensor) = tensor {
                    write!(f, "tensor {}: ", Quoted(tensor))?;
                }
                let end = position.saturating_add(*expected);
                match source {
                    Some(source) => write!(f, "reading bytes {position}..{end} of the file: {source}"),
                    None => write!(
                        f,
                        "expected {expected} bytes, found {found} at bytes {position}..{end} of the file"
                    ),
                }
            }
            Error::Changed {
                nbytes_at_open,
                nbytes_now,
                ..
            } => {
                match nbytes_now {
                    Some(now) if now < nbytes_at_open => {
                        write!(f, "the file shrank from {nbytes_at_open} to {now} bytes")?;
                    }
                    Some(now) => write!(f, "the file grew from {nbytes_at_open} to {now} bytes")?,
                    None => f.write_str("the file was written to, replaced or removed")?,
                }
                f.write_str(" since it was opened — open it again")
            }
            Error::OutOfMemory { nbytes, source, .. } => {
                write!(f, "no memory for {nbytes} bytes")?;
                source.as_ref().map_or(Ok(()), |source| write!(f, ": {source}"))
            }
            Error::Write {
                step, nbytes, source, ..
            } => {
                write!(f, "could not {step}: {source}")?;
                // Nothing is said of the notes beside a file, nor of one whose size is not known yet.
                if *nbytes > 0 {
                    write!(f, ": the file needs {nbytes} bytes")?;
                }
                self.hint().map_or(Ok(()), |hint| write!(f, " — {hint}"))
            }
            Error::UnknownBackend { found } => write!(
                f,
                "{BACKEND_VARIABLE} {} is unknown: expected one of {}",
                Quoted(found),
                Backend::ALL.map(Backend::name).join(", ")
            ),
            Error::InvalidThreads { found } => write!(
                f,
                "{THREADS_VARIABLE} {} is no number of threads: expected 1 or more",
                Quoted(found)
            ),
            Error::Conversion {
                tensor,
                stored,
                wanted,
                ..
            } => write!(
                f,
                "tensor {}: {stored} is not converted to {wanted}",
                Quoted(tensor)
            ),
            Error::Destination { tensor, misfit, .. } => write!(f, "tensor {}: {misfit}", Quoted(tensor)),
            Error::Edit { fault, .. } => write!(f, "{fault}"),
            Error::Checksums { reason, .. } => f.write_str(reason),
            Error::Shared { fault, .. } => write!(f, "{fault}"),
            Error::NoDigest { tensor, .. } => {
                write!(
                    f,
                    "tensor {}: the file keeps no digest to verify it by",
                    Quoted(tensor)
                )
            }
            Error::Digest { tensor, unequal, .. } => {
                match tensor {
                    Some(tensor) => write!(f, "tensor {}: its bytes", Quoted(tensor))?,
                    None => f.write_str("the file's bytes")?,
                }
                write!(f, " are not those that were promised: {unequal}")
            }
            Error::Closed { .. } => f.write_str("file is closed"),
            Error::Device { fault, .. } => write!(f, "{fault}"),
            Error::Refused { source, .. } => write!(f, "the framework gives no memory: {source}"),
            Error::Interrupted => f.write_str("interrupted"),
        }
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
