//! What keeps a file from being edited, merged or filled.

use std::fmt;
use std::path::PathBuf;

use ingot_format::{Dtype, Escaped, Quoted};

/// Why an edit is refused. What was at the path is still there, unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EditError {
    /// Somebody replaced the file, or wrote to it, while it was being edited.
    Overtaken,
    /// Two sources have a tensor of this name, or two tensors were renamed to it.
    Duplicate {
        /// The name.
        tensor: String,
        /// The file that has it first.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
    },
    /// A tensor is not of the dtype or the shape that its place has.
    Mismatch {
        /// Its name.
        tensor: String,
        /// Dtype and shape of the place.
        expected: (Dtype, Vec<u64>),
        /// Those of the tensor.
        found: (Dtype, Vec<u64>),
    },
    /// Bytes of a tensor were written before, or are being written by somebody else.
    FilledTwice {
        /// Its name.
        tensor: String,
    },
    /// Bytes of a tensor were not written when the file was to be finished.
    NotFilled {
        /// Its name.
        tensor: String,
        /// Its size in bytes.
        expected: u64,
        /// Bytes of it that were written.
        found: u64,
    },
    /// The header of the tensors that were appended is larger than the space that was reserved for it.
    ReserveFull {
        /// The tensor for which there is no space.
        tensor: String,
        /// Bytes that were reserved.
        expected: u64,
        /// Bytes that the header would take.
        found: u64,
    },
    /// Another writer fills a file of this name.
    Busy {
        /// The process that locked the file, if the system reports it.
        holder: Option<u32>,
    },
    /// Another process did not finish its edit of this file in time.
    Locked {
        /// The process that locked the file, if the system reports it.
        holder: Option<u32>,
        /// Seconds that were waited.
        seconds: u64,
    },
    /// Nobody fills a file of this name, so there is nothing to join.
    NothingToJoin,
    /// The file was finished, so nothing can be added.
    Committed,
    /// Whoever began the file left without finishing it.
    Abandoned,
    /// Whoever began the file is gone, and did not say so: it was killed, or crashed.
    Orphaned {
        /// Whether others still have it open, who joined it before.
        held: bool,
    },
    /// The process was forked: a writer belongs to the process that made it.
    Forked,
    /// What writers note beside the file is broken.
    BrokenJournal,
    /// The path is that of a blob, whose name is the digest of its contents.
    Blob,
    /// What is at the path takes bytes in order only, or has no name that could pass to another file.
    NoPlace,
}

impl EditError {
    /// A stable name for the fault, in kebab-case; programs may match it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            EditError::Overtaken => "overtaken",
            EditError::Duplicate { .. } => "duplicate-tensor",
            EditError::Mismatch { .. } => "mismatch",
            EditError::FilledTwice { .. } => "filled-twice",
            EditError::NotFilled { found: 0, .. } => "never-filled",
            EditError::NotFilled { .. } => "partly-filled",
            EditError::ReserveFull { .. } => "reserve-full",
            EditError::Busy { .. } => "busy",
            EditError::Locked { .. } => "locked",
            EditError::NothingToJoin => "nothing-to-join",
            EditError::Committed => "committed",
            EditError::Abandoned => "abandoned",
            EditError::Orphaned { .. } => "orphaned",
            EditError::Forked => "forked",
            EditError::BrokenJournal => "broken-journal",
            EditError::Blob => "blob",
            EditError::NoPlace => "no-place",
        }
    }

    /// The tensor that it concerns, if it is one.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            EditError::Duplicate { tensor, .. }
            | EditError::Mismatch { tensor, .. }
            | EditError::FilledTwice { tensor }
            | EditError::NotFilled { tensor, .. }
            | EditError::ReserveFull { tensor, .. } => Some(tensor),
            _ => None,
        }
    }

    /// The sizes that had to agree and did not, in bytes.
    #[must_use]
    pub fn expected_found(&self) -> Option<(u64, u64)> {
        match *self {
            EditError::NotFilled { expected, found, .. } | EditError::ReserveFull { expected, found, .. } => {
                Some((expected, found))
            }
            _ => None,
        }
    }
}

impl fmt::Display for EditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(tensor) = self.tensor() {
            write!(f, "tensor {}: ", Quoted(tensor))?;
        }
        match self {
            EditError::Overtaken => f.write_str("somebody else changed the file meanwhile — try again"),
            EditError::Duplicate { first, second, .. } => write!(
                f,
                "it is in {} and in {}",
                Escaped(&first.to_string_lossy()),
                Escaped(&second.to_string_lossy())
            ),
            EditError::Mismatch { expected, found, .. } => write!(
                f,
                "expected {} of shape {:?}, found {} of shape {:?}",
                expected.0, expected.1, found.0, found.1
            ),
            EditError::FilledTwice { .. } => f.write_str("these elements were written already"),
            EditError::NotFilled {
                expected, found: 0, ..
            } => write!(f, "it was never written: expected {expected} bytes"),
            EditError::NotFilled { expected, found, .. } => {
                write!(
                    f,
                    "only a part was written: expected {expected} bytes, found {found}"
                )
            }
            EditError::ReserveFull { expected, found, .. } => write!(
                f,
                "no space left for its entry: {expected} bytes were reserved for the header, it needs {found}"
            ),
            EditError::Busy { holder } => {
                f.write_str("another writer is filling this file")?;
                in_process(f, *holder)
            }
            EditError::Locked { holder, seconds } => {
                write!(f, "the file is still locked by another edit after {seconds} s")?;
                in_process(f, *holder)?;
                f.write_str(" — try again when that has ended")
            }
            EditError::NothingToJoin => {
                f.write_str("no writer is filling this file — make one before others join it")
            }
            EditError::Committed => f.write_str("the file was committed: nothing can be added"),
            EditError::Abandoned => f.write_str("the writer that began the file left without a commit"),
            EditError::Orphaned { held } => {
                f.write_str(
                    "the writer that began the file was killed before a commit, so what is there may be of an \
                     earlier run — ",
                )?;
                f.write_str(if *held {
                    "others still have it open: when they have left, one may finish it"
                } else {
                    "begin it anew by Writer(...), or finish it by Writer.join(..., orphaned=\"finish\")"
                })
            }
            EditError::Forked => {
                f.write_str("this writer belongs to the process that was forked — join the file in this one")
            }
            EditError::BrokenJournal => f.write_str("what the writers noted beside the file is broken"),
            EditError::Blob => f.write_str(
                "the file is a blob of a cache, named after its contents: other contents would change every \
                 snapshot that links to it — save to the snapshot's path, which replaces the link, or elsewhere",
            ),
            EditError::NoPlace => f.write_str("not a regular file: this needs one with a name"),
        }
    }
}

/// Names the process that locked a file, if it is known.
fn in_process(f: &mut fmt::Formatter<'_>, holder: Option<u32>) -> fmt::Result {
    holder.map_or(Ok(()), |process| write!(f, ", in process {process}"))
}

impl std::error::Error for EditError {}
