//! What can fail. One table has the code and the text of each failure.

use std::io;

use ingot_format::{Dtype, FormatError, IndexError, Quoted, SelectionError, SharedError};

use super::faults::{CheckpointFault, EditError, Misfit, PatchFault};
use crate::device::{DeviceFault, Refusal};
use crate::digest::Unequal;
use crate::options::{BACKEND_VARIABLE, Backend, THREADS_VARIABLE};

/// A failure, without the file and the tensor that it concerns: [`Error`](super::Error) has them.
///
/// ```
/// use std::path::Path;
///
/// use ingot_io::Failure;
///
/// let error = Failure::UnknownTensor { nearest: Some("weight".to_owned()) };
/// let error = error.about(Some(Path::new("model.safetensors")), Some("weights"));
/// assert_eq!(
///     error.to_string(),
///     "model.safetensors: tensor `weights`: the file has no such tensor — did you mean `weight`?"
/// );
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Failure {
    /// The file cannot be opened.
    Open(io::Error),
    /// The header breaks a rule of FORMAT.md.
    Header(FormatError),
    /// The index of a checkpoint breaks a rule of FORMAT.md.
    Index(IndexError),
    /// The files of a checkpoint do not go together. The path is the index, or the directory.
    Checkpoint(CheckpointFault),
    /// The file has no tensor of this name.
    UnknownTensor {
        /// The most similar name in the file.
        nearest: Option<String>,
    },
    /// The index does not fit the tensor.
    Slice(SelectionError),
    /// Reading failed, or returned fewer bytes than expected. There is no tensor for the header, and for a file that is read
    /// as a whole.
    Read {
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
        /// Its size when it was opened, in bytes.
        nbytes_at_open: u64,
        /// Its size now; `None` if it was removed, or has the same size.
        nbytes_now: Option<u64>,
    },
    /// The memory for the tensors cannot be allocated.
    OutOfMemory {
        /// Bytes requested.
        nbytes: u64,
        /// The system's error.
        source: Option<io::Error>,
    },
    /// The tensors cannot be laid out in a file of this format.
    Unstorable(FormatError),
    /// Saving failed. An existing file is unchanged, except after some values of `step`, which say so.
    Write {
        /// The step that failed, as words after "could not".
        step: &'static str,
        /// The size of the new file in bytes.
        nbytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The environment variable for the backend has this unknown value.
    UnknownBackend(String),
    /// The environment variable for the number of threads has this invalid value.
    InvalidThreads(String),
    /// The tensor cannot be converted to the requested dtype.
    Conversion {
        /// The dtype in the file.
        stored: Dtype,
        /// The requested dtype.
        wanted: Dtype,
    },
    /// The weight that this tensor is a part of cannot be dequantised, for this reason.
    Dequantization(String),
    /// The pieces that a tensor is put together from do not fit it, for this reason.
    #[doc(hidden)]
    Pieces(String),
    /// The destination of a tensor does not fit the tensor.
    #[doc(hidden)]
    Destination(Misfit),
    /// The file was not edited, merged or filled.
    Edit(EditError),
    /// The record of digests in the file's metadata cannot be used, for this reason. FORMAT.md, "Checksums".
    Checksums(String),
    /// The record of shared tensors in the file's metadata cannot be used. FORMAT.md, "Shared tensors".
    Shared(SharedError),
    /// A patch cannot be used. FORMAT.md, "Patches".
    Patch(PatchFault),
    /// The file has no recorded digest of a tensor that was to be verified.
    NoDigest,
    /// Bytes of the tensor, or of the whole file, differ from a recorded digest.
    Digest(Unequal),
    /// The handle was closed.
    Closed,
    /// A device cannot be used.
    #[doc(hidden)]
    Device(DeviceFault),
    /// A framework cannot allocate memory of a device for the tensors: its own error.
    #[doc(hidden)]
    Refused(Refusal),
    /// The caller interrupted the call. No partial result is left behind.
    Interrupted,
}

impl Failure {
    /// Return the tensor that the text names.
    pub(super) fn tensor(&self) -> Option<&str> {
        match self {
            Failure::Header(fault) | Failure::Unstorable(fault) => fault.tensor(),
            Failure::Index(fault) => fault.tensor(),
            Failure::Shared(fault) => fault.tensor(),
            _ => None,
        }
    }

    /// Return the code, and the text after path and tensor.
    pub(super) fn row(&self) -> (&'static str, String) {
        match self {
            Failure::Open(source) => (code_of(source).unwrap_or("open"), source.to_string()),
            Failure::Header(fault) | Failure::Unstorable(fault) => (fault.code(), fault.to_string()),
            Failure::Index(fault) => (fault.code(), fault.to_string()),
            Failure::Checkpoint(fault) => fault.row(),
            Failure::UnknownTensor { nearest } => {
                let nearest = nearest
                    .as_ref()
                    .map(|name| format!(" — did you mean {}?", Quoted(name)));
                let text = format!("the file has no such tensor{}", nearest.unwrap_or_default());
                ("unknown-tensor", text)
            }
            Failure::Slice(fault) => (fault.code(), fault.to_string()),
            Failure::Read {
                position,
                expected,
                found,
                source,
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
            Failure::Changed {
                nbytes_at_open: before,
                nbytes_now,
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
            Failure::OutOfMemory { nbytes, source } => {
                let why = source.as_ref().map(|source| format!(": {source}"));
                let text = format!("no memory for {nbytes} bytes{}", why.unwrap_or_default());
                ("out-of-memory", text)
            }
            Failure::Write { step, nbytes, source } => {
                // A journal, and a file whose size is not known yet, have none.
                let needs = (*nbytes > 0).then(|| format!(": the file needs {nbytes} bytes"));
                let text = format!("could not {step}: {source}{}", needs.unwrap_or_default());
                (code_of(source).unwrap_or("write"), text)
            }
            Failure::UnknownBackend(found) => {
                let (found, names) = (Quoted(found), Backend::ALL.map(Backend::name).join(", "));
                let text = format!("{BACKEND_VARIABLE} {found} is unknown: expected one of {names}");
                ("unknown-backend", text)
            }
            Failure::InvalidThreads(found) => {
                let found = Quoted(found);
                let text = format!("{THREADS_VARIABLE} {found} is no number of threads: expected 1 or more");
                ("invalid-threads", text)
            }
            Failure::Conversion { stored, wanted } => {
                ("no-conversion", format!("{stored} is not converted to {wanted}"))
            }
            Failure::Dequantization(reason) => ("no-dequantization", reason.clone()),
            Failure::Pieces(reason) => ("invalid-pieces", format!("the pieces do not fit: {reason}")),
            Failure::Destination(misfit) => misfit.row(),
            Failure::Edit(fault) => fault.row(),
            Failure::Checksums(reason) => ("invalid-checksums", reason.clone()),
            Failure::Shared(fault) => ("invalid-alias", fault.to_string()),
            Failure::Patch(fault) => fault.row(),
            Failure::NoDigest => ("no-digest", "the file keeps no digest to verify it by".to_owned()),
            Failure::Digest(unequal) => (
                "digest-mismatch",
                format!("the bytes have another digest: {unequal}"),
            ),
            Failure::Closed => ("closed", "file is closed".to_owned()),
            Failure::Device(fault) => (fault.code(), fault.to_string()),
            Failure::Refused(source) => {
                let text = format!("the framework gives no memory: {source}");
                ("device-out-of-memory", text)
            }
            Failure::Interrupted => ("interrupted", "interrupted".to_owned()),
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
