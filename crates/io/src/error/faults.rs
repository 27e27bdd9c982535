//! The faults inside an [`Error`](super::Error): of a checkpoint, of an edit, of a destination, and of a step of a save.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ingot_format::{Dtype, Escaped, Quoted};

/// A reason why the files of a checkpoint do not go together. Names of files are as the index spells them.
///
/// ```
/// use ingot_io::{Checkpoint, CheckpointFault, CheckpointOptions, Error};
///
/// let folder = tempfile::tempdir()?;
/// let opened = Checkpoint::open(folder.path(), &CheckpointOptions::new());
/// assert!(matches!(opened, Err(Error::Checkpoint { fault: CheckpointFault::NoCheckpoint, .. })));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckpointFault {
    /// The directory holds neither an index nor a file of tensors.
    NoCheckpoint,
    /// The directory holds several checkpoints.
    Ambiguous {
        /// Their names.
        found: Vec<String>,
    },
    /// The directory holds files with names of shards, and no index.
    MissingIndex {
        /// Their names.
        found: Vec<String>,
    },
    /// Shards of the index are missing.
    MissingShards {
        /// Their names.
        shards: Vec<String>,
        /// The number of shards in the index.
        of: usize,
    },
    /// A shard lacks a tensor that the index places in it.
    MissingTensor {
        /// The tensor.
        tensor: String,
        /// The shard in the index.
        shard: String,
        /// The shard that holds it.
        other: Option<String>,
    },
    /// A shard holds a tensor that the index does not place in it.
    ExtraTensor {
        /// The tensor.
        tensor: String,
        /// The shard that holds it.
        shard: String,
        /// The shard in the index.
        indexed: Option<String>,
    },
    /// Two shards hold a tensor of one name.
    TensorInTwoShards {
        /// The tensor.
        tensor: String,
        /// The two shards.
        shards: (String, String),
    },
    /// A file is, or may be, outside of the directory, which [`crate::Reach::Confined`] forbids.
    NotConfined {
        /// The file.
        shard: String,
        /// The reason.
        reason: &'static str,
    },
    /// One hash of several files was requested.
    ManyFiles {
        /// The number of files.
        files: usize,
    },
}

impl CheckpointFault {
    /// Returns a stable name for the fault, in kebab-case; programs may match it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.row().0
    }

    /// Returns the tensor that the fault concerns, if any.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            CheckpointFault::MissingTensor { tensor, .. }
            | CheckpointFault::ExtraTensor { tensor, .. }
            | CheckpointFault::TensorInTwoShards { tensor, .. } => Some(tensor),
            _ => None,
        }
    }

    /// Return the code, and the text after the tensor.
    fn row(&self) -> (&'static str, String) {
        match self {
            CheckpointFault::NoCheckpoint => (
                "no-checkpoint",
                "the directory holds no checkpoint: expected a *.safetensors.index.json, or one .safetensors or .bt file"
                    .to_owned(),
            ),
            CheckpointFault::Ambiguous { found } => (
                "ambiguous-checkpoint",
                format!(
                    "the directory holds more than one checkpoint, and any could be meant: {} — give the path of the one \
                     to open",
                    list(found)
                ),
            ),
            CheckpointFault::MissingIndex { found } => (
                "missing-index",
                format!(
                    "the directory holds shards of a checkpoint without their index: {} — fetch the index and all \
                     shards, or pass the path of one shard",
                    list(found)
                ),
            ),
            CheckpointFault::MissingShards { shards, of } => {
                let (count, names) = (shards.len(), list(shards));
                let text = format!("{count} of the {of} files that the index names are not there: {names}");
                ("missing-shards", text)
            }
            CheckpointFault::MissingTensor { shard, other, .. } => {
                let other = other.as_ref().map(|other| format!("; it is in {}", Quoted(other)));
                let (shard, other) = (Quoted(shard), other.unwrap_or_default());
                let text = format!("the index says that it is in {shard}, which lacks it{other}");
                ("missing-tensor", text)
            }
            CheckpointFault::ExtraTensor { shard, indexed, .. } => {
                let shard = Quoted(shard);
                let text = match indexed.as_deref().map(Quoted) {
                    Some(indexed) => {
                        format!("it is in {shard}, and the index says that it is in {indexed}, which lacks it")
                    }
                    None => format!("it is in {shard}, and the index does not name it"),
                };
                ("extra-tensor", text)
            }
            CheckpointFault::TensorInTwoShards { shards, .. } => {
                let text = format!("it is in {} and in {}", Quoted(&shards.0), Quoted(&shards.1));
                ("tensor-in-two-shards", text)
            }
            CheckpointFault::NotConfined { shard, reason } => {
                ("not-confined", format!("file {} refused: {reason}", Escaped(shard)))
            }
            CheckpointFault::ManyFiles { files } => (
                "many-files",
                format!("one hash cannot speak of {files} files: expected a file, found an index"),
            ),
        }
    }
}

impl fmt::Display for CheckpointFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        about(f, self.tensor(), &self.row().1)
    }
}

impl std::error::Error for CheckpointFault {}

/// Names that a message lists. Further names are counted.
const SHOWN: usize = 8;

fn list(names: &[String]) -> String {
    let shown: Vec<_> = names
        .iter()
        .take(SHOWN)
        .map(|name| Quoted(name).to_string())
        .collect();
    let shown = shown.join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// A reason why an edit is refused. The file at the path is unchanged.
///
/// ```
/// use ingot_io::{Dtype, EditError, Error, Payload, SaveOptions, Unwatched, replace_tensor};
/// # use ingot_io::{TensorView, serialize_to_file};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bias = TensorView::new(Dtype::U8, vec![2], b"ab")?;
/// # serialize_to_file([("bias", &bias)], None, &path)?;
///
/// // The file has it as two bytes.
/// let four = Payload::from(&b"abcd"[..]);
/// let edited = replace_tensor(&path, "bias", Dtype::U8, &[4], &four, &SaveOptions::new(), &Unwatched);
/// assert!(matches!(edited, Err(Error::Edit { fault: EditError::Mismatch { .. }, .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EditError {
    /// Another process replaced the file, or wrote to it, while it was being edited.
    Overtaken,
    /// Two sources have a tensor of this name, or two tensors were renamed to it.
    Duplicate {
        /// The name.
        tensor: String,
        /// The file that has it first.
        first: PathBuf,
        /// The other file.
        second: PathBuf,
    },
    /// A tensor has another dtype or shape than its place in the file.
    Mismatch {
        /// Its name.
        tensor: String,
        /// Dtype and shape of the place.
        expected: (Dtype, Vec<u64>),
        /// Dtype and shape of the tensor.
        found: (Dtype, Vec<u64>),
    },
    /// Bytes of a tensor were written before, or are being written by another writer.
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
    /// No writer fills a file of this name, so there is nothing to join.
    NothingToJoin,
    /// The file was finished, so nothing can be added.
    Committed,
    /// The writer that began the file left without finishing it.
    Abandoned,
    /// The writer that began the file was killed, or crashed.
    Orphaned {
        /// Whether other writers that joined it still have it open.
        held: bool,
    },
    /// The process was forked: a writer belongs to the process that made it.
    Forked,
    /// The journal of the writers is broken.
    BrokenJournal,
    /// The file is a blob, whose name is the digest of its contents.
    Blob,
    /// The path leads to a pipe or a device, or to a file without a name.
    NoPlace,
}

impl EditError {
    /// Returns a stable name for the fault, in kebab-case; programs may match it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.row().0
    }

    /// Returns the tensor that the fault concerns, if any.
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

    /// Returns the expected and the found size in bytes, for a fault of sizes.
    #[must_use]
    pub fn expected_found(&self) -> Option<(u64, u64)> {
        match *self {
            EditError::NotFilled { expected, found, .. } | EditError::ReserveFull { expected, found, .. } => {
                Some((expected, found))
            }
            _ => None,
        }
    }

    /// Return the code, and the text after the tensor.
    fn row(&self) -> (&'static str, Cow<'static, str>) {
        match self {
            EditError::Overtaken => (
                "overtaken",
                "somebody else changed the file meanwhile — try again".into(),
            ),
            EditError::Duplicate { first, second, .. } => {
                let (first, second) = (first.to_string_lossy(), second.to_string_lossy());
                let text = format!("it is in {} and in {}", Escaped(&first), Escaped(&second));
                ("duplicate-tensor", text.into())
            }
            EditError::Mismatch { expected, found, .. } => {
                let outline = |(dtype, shape): &(Dtype, Vec<u64>)| format!("{dtype} of shape {shape:?}");
                let text = format!("expected {}, found {}", outline(expected), outline(found));
                ("mismatch", text.into())
            }
            EditError::FilledTwice { .. } => ("filled-twice", "these elements were written already".into()),
            EditError::NotFilled {
                expected, found: 0, ..
            } => {
                let text = format!("it was never written: expected {expected} bytes");
                ("never-filled", text.into())
            }
            EditError::NotFilled { expected, found, .. } => {
                let text = format!("only a part was written: expected {expected} bytes, found {found}");
                ("partly-filled", text.into())
            }
            EditError::ReserveFull { expected, found, .. } => {
                let text = format!(
                    "no space left for its entry: {expected} bytes were reserved for the header, it needs {found}"
                );
                ("reserve-full", text.into())
            }
            EditError::Busy { holder } => {
                let text = format!("another writer is filling this file{}", in_process(*holder));
                ("busy", text.into())
            }
            EditError::Locked { holder, seconds } => {
                let holder = in_process(*holder);
                let text = format!(
                    "the file is still locked by another edit after {seconds} s{holder} — try again when that has ended"
                );
                ("locked", text.into())
            }
            EditError::NothingToJoin => (
                "nothing-to-join",
                "no writer is filling this file — make one before others join it".into(),
            ),
            EditError::Committed => ("committed", "the file was committed: nothing can be added".into()),
            EditError::Abandoned => (
                "abandoned",
                "the writer that began the file left without a commit".into(),
            ),
            EditError::Orphaned { held } => {
                let hint = if *held {
                    "others still have it open: when they have left, one may finish it"
                } else {
                    "begin it anew by Writer(...), or finish it by Writer.join(..., orphaned=\"finish\")"
                };
                let text = format!(
                    "the writer that began the file was killed before a commit, so what is there may be of an earlier \
                     run — {hint}"
                );
                ("orphaned", text.into())
            }
            EditError::Forked => (
                "forked",
                "this writer belongs to the process that was forked — join the file in this one".into(),
            ),
            EditError::BrokenJournal => (
                "broken-journal",
                "what the writers noted beside the file is broken".into(),
            ),
            EditError::Blob => (
                "blob",
                "the file is a blob of a cache, named after its contents: other contents would change every snapshot \
                 that links to it — save to the snapshot's path, which replaces the link, or elsewhere"
                    .into(),
            ),
            EditError::NoPlace => (
                "no-place",
                "not a regular file: this needs one with a name".into(),
            ),
        }
    }
}

impl fmt::Display for EditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        about(f, self.tensor(), &self.row().1)
    }
}

impl std::error::Error for EditError {}

/// Return the process that locked a file, if it is known, as the end of a message.
fn in_process(holder: Option<u32>) -> String {
    holder.map_or(String::new(), |process| format!(", in process {process}"))
}

/// A reason why a destination does not fit its tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Misfit {
    /// It has another dtype.
    Dtype {
        /// The dtype that would be read.
        expected: Dtype,
        /// The dtype of the destination.
        found: Dtype,
    },
    /// It has another shape.
    Shape {
        /// The shape that would be read.
        expected: Vec<u64>,
        /// The shape of the destination.
        found: Vec<u64>,
    },
    /// It overlaps the destination of another tensor.
    Overlap {
        /// The other tensor.
        other: String,
    },
}

impl Misfit {
    /// Return the code and the text.
    pub(super) fn row(&self) -> (&'static str, String) {
        match self {
            Misfit::Dtype { expected, found } => (
                "destination-dtype",
                format!("the destination has another dtype: expected {expected}, found {found}"),
            ),
            Misfit::Shape { expected, found } => (
                "destination-shape",
                format!("the destination has another shape: expected {expected:?}, found {found:?}"),
            ),
            Misfit::Overlap { other } => (
                "destination-overlap",
                format!("the destination shares memory with that of {}", Quoted(other)),
            ),
        }
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.row().1)
    }
}

/// Write a message about a tensor, or about none.
pub(super) fn about(f: &mut fmt::Formatter<'_>, tensor: Option<&str>, text: &str) -> fmt::Result {
    if let Some(tensor) = tensor {
        write!(f, "tensor {}: ", Quoted(tensor))?;
    }
    f.write_str(text)
}

/// The steps of a save, as [`Error::Write`](super::Error::Write) has them after "could not".
pub(crate) mod step {
    pub(crate) const OPEN: &str = "open it for writing";
    pub(crate) const READ_ONLY: &str = "replace it, since it is read-only";
    pub(crate) const CREATE: &str = "create a temporary file";
    pub(crate) const RESERVE: &str = "reserve space";
    pub(crate) const READ: &str = "get the bytes of a tensor";
    pub(crate) const SEAL: &str = "put digests at its beginning";
    pub(crate) const WRITE: &str = "write";
    pub(crate) const JOURNAL: &str = "use what its writers noted beside it";
    pub(crate) const OWNER: &str = "tell by a lock whether the writer that began it is still there";
    pub(crate) const ATTRIBUTES: &str = "copy mode and owner";
    pub(crate) const FLUSH: &str = "flush";
    pub(crate) const RENAME: &str = "rename the temporary file over it";
    pub(crate) const FLUSH_DIRECTORY: &str = "flush its directory, though it is written";
    pub(crate) const COPY: &str = "overwrite it in place, so it holds a mix of old and new bytes";
}

/// Return advice for a fault in writing to `path`.
pub(super) fn hint(path: &Path, step: &str, fault: &io::Error) -> Option<&'static str> {
    use io::ErrorKind::{NotSeekable, PermissionDenied, ResourceBusy};
    match (step, fault.kind()) {
        _ if is_mapped(fault) => Some(
            "a program has it mapped into memory, perhaps this one: close that, or load files without backend=\"mmap\"",
        ),
        _ if is_held(fault) => Some(
            "another program has it open, perhaps mapped into memory, and lets nobody replace it: close that, or save to another name",
        ),
        (step::CREATE | step::RENAME, PermissionDenied | ResourceBusy) if path.exists() => Some(
            "save_file(..., atomic=False) writes an existing file in place instead, though not atomically",
        ),
        (step::SEAL, NotSeekable) => Some("what is streamed keeps no checksums"),
        (step::READ_ONLY, PermissionDenied) => {
            Some("write_options={\"replace_read_only\": True} replaces it")
        }
        _ => None,
    }
}

/// `ERROR_USER_MAPPED_FILE` of Windows, which has no such number elsewhere.
fn is_mapped(fault: &io::Error) -> bool {
    cfg!(windows) && fault.raw_os_error() == Some(1224)
}

/// `ERROR_SHARING_VIOLATION` and `ERROR_LOCK_VIOLATION` of Windows.
fn is_held(fault: &io::Error) -> bool {
    cfg!(windows) && matches!(fault.raw_os_error(), Some(32 | 33))
}
