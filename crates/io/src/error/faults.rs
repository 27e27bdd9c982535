//! The faults inside a [`Failure`](super::Failure): of a checkpoint, of an edit, of a destination, and of a step of a save.

use std::io;
use std::path::{Path, PathBuf};

use ingot_format::{Dtype, Escaped, Quoted};

/// A reason why the files of a checkpoint do not go together. Names of files are as the index spells them.
///
/// ```
/// use ingot_io::{Checkpoint, CheckpointFault, CheckpointOptions, Failure};
///
/// let folder = tempfile::tempdir()?;
/// let error = Checkpoint::open(folder.path(), &CheckpointOptions::default()).unwrap_err();
/// assert!(matches!(error.failure(), Failure::Checkpoint(CheckpointFault::NoCheckpoint)));
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
        /// The shard in the index.
        shard: String,
        /// The shard that holds it.
        other: Option<String>,
    },
    /// A shard holds a tensor that the index does not place in it.
    ExtraTensor {
        /// The shard that holds it.
        shard: String,
        /// The shard in the index.
        indexed: Option<String>,
    },
    /// Two shards hold a tensor of one name.
    TensorInTwoShards {
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
    /// Return the code, and the text after the tensor.
    pub(super) fn row(&self) -> (&'static str, String) {
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
            CheckpointFault::MissingTensor { shard, other } => {
                let other = other.as_ref().map(|other| format!("; it is in {}", Quoted(other)));
                let (shard, other) = (Quoted(shard), other.unwrap_or_default());
                let text = format!("the index says that it is in {shard}, which lacks it{other}");
                ("missing-tensor", text)
            }
            CheckpointFault::ExtraTensor { shard, indexed } => {
                let shard = Quoted(shard);
                let text = match indexed.as_deref().map(Quoted) {
                    Some(indexed) => {
                        format!("it is in {shard}, and the index says that it is in {indexed}, which lacks it")
                    }
                    None => format!("it is in {shard}, and the index does not name it"),
                };
                ("extra-tensor", text)
            }
            CheckpointFault::TensorInTwoShards { shards } => {
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
/// use ingot_io::{Dtype, EditError, Failure, Payload, SaveOptions, Unwatched, replace_tensor};
/// # use ingot_io::{TensorView, serialize_to_file};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bias = TensorView::new(Dtype::U8, vec![2], b"ab")?;
/// # serialize_to_file([("bias", &bias)], None, &path)?;
///
/// // The file has it as two bytes.
/// let four = Payload::from(&b"abcd"[..]);
/// let edited = replace_tensor(&path, "bias", Dtype::U8, &[4], &four, &SaveOptions::default(), &Unwatched);
/// assert!(matches!(edited.unwrap_err().failure(), Failure::Edit(EditError::Mismatch { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EditError {
    /// Another process replaced the file, or wrote to it, while it was being edited.
    Overtaken,
    /// Two sources have a tensor of this name, or two tensors were renamed to it.
    Duplicate {
        /// The file that has it first.
        first: PathBuf,
        /// The other file.
        second: PathBuf,
    },
    /// A tensor has another dtype or shape than its place in the file.
    Mismatch {
        /// Dtype and shape of the place.
        expected: (Dtype, Vec<u64>),
        /// Dtype and shape of the tensor.
        found: (Dtype, Vec<u64>),
    },
    /// Bytes of a tensor were written before, or are being written by another writer.
    FilledTwice,
    /// Bytes of a tensor were not written when the file was to be finished.
    NotFilled {
        /// Its size in bytes.
        expected: u64,
        /// Bytes of it that were written.
        found: u64,
    },
    /// The header of the tensors that were appended is larger than the space that was reserved for it.
    ReserveFull {
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
        /// The seconds that the call waited.
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
    /// Return the code, and the text after the tensor.
    pub(super) fn row(&self) -> (&'static str, String) {
        match self {
            EditError::Overtaken => (
                "overtaken",
                "somebody else changed the file meanwhile — try again".to_owned(),
            ),
            EditError::Duplicate { first, second } => {
                let (first, second) = (first.to_string_lossy(), second.to_string_lossy());
                let text = format!("it is in {} and in {}", Escaped(&first), Escaped(&second));
                ("duplicate-tensor", text)
            }
            EditError::Mismatch { expected, found } => {
                let outline = |(dtype, shape): &(Dtype, Vec<u64>)| format!("{dtype} of shape {shape:?}");
                let text = format!("expected {}, found {}", outline(expected), outline(found));
                ("mismatch", text)
            }
            EditError::FilledTwice => ("filled-twice", "these elements were written already".to_owned()),
            EditError::NotFilled { expected, found: 0 } => {
                let text = format!("it was never written: expected {expected} bytes");
                ("never-filled", text)
            }
            EditError::NotFilled { expected, found } => {
                let text = format!("only a part was written: expected {expected} bytes, found {found}");
                ("partly-filled", text)
            }
            EditError::ReserveFull { expected, found } => {
                let text = format!(
                    "no space left for its entry: {expected} bytes were reserved for the header, it needs {found}"
                );
                ("reserve-full", text)
            }
            EditError::Busy { holder } => {
                let text = format!("another writer is filling this file{}", in_process(*holder));
                ("busy", text)
            }
            EditError::Locked { holder, seconds } => {
                let holder = in_process(*holder);
                let text = format!(
                    "the file is still locked by another edit after {seconds} s{holder} — try again when that has ended"
                );
                ("locked", text)
            }
            EditError::NothingToJoin => (
                "nothing-to-join",
                "no writer is filling this file — make one before others join it".to_owned(),
            ),
            EditError::Committed => ("committed", "the file was committed: nothing can be added".to_owned()),
            EditError::Abandoned => (
                "abandoned",
                "the writer that began the file left without a commit".to_owned(),
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
                ("orphaned", text)
            }
            EditError::Forked => (
                "forked",
                "this writer belongs to the process that was forked — join the file in this one".to_owned(),
            ),
            EditError::BrokenJournal => (
                "broken-journal",
                "what the writers noted beside the file is broken".to_owned(),
            ),
            EditError::Blob => (
                "blob",
                "the file is a blob of a cache, named after its contents: other contents would change every snapshot \
                 that links to it — save to the snapshot's path, which replaces the link, or elsewhere"
                    .to_owned(),
            ),
            EditError::NoPlace => (
                "no-place",
                "not a regular file: this needs one with a name".to_owned(),
            ),
        }
    }
}

/// Return the process that locked a file, if it is known, as the end of a message.
fn in_process(holder: Option<u32>) -> String {
    holder.map_or(String::new(), |process| format!(", in process {process}"))
}

/// A reason why a patch cannot be used. No file was changed. FORMAT.md, "Patches".
///
/// ```
/// use ingot_io::PatchFault;
///
/// let error = PatchFault::Later { found: 2 }.about(None);
/// assert_eq!(error.code(), "later-patch");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PatchFault {
    /// The file is not a patch, or its contents contradict each other.
    Invalid(String),
    /// It has a later version.
    Later {
        /// The version.
        found: u64,
    },
    /// The patch is for another version.
    WrongBase {
        /// The id of the version, or the digest of its data.
        expected: String,
        /// The same of the file.
        found: String,
    },
    /// Another patch of the file was begun in place and not finished.
    Unfinished {
        /// The first digits of the id of that patch.
        patch: String,
        /// Its path.
        path: String,
    },
    /// The patch was begun in place and not finished, and files were replaced or changed since.
    Replaced {
        /// The names of the files, at least one of which was replaced; empty if the error is about a single file.
        files: Vec<String>,
        /// What the base or the result has.
        expected: String,
        /// The same of the files.
        found: String,
    },
    /// The patch changes the file in a way that needs a new file.
    NotInPlace(&'static str),
}

impl PatchFault {
    /// Return the code, and the text after the path.
    pub(super) fn row(&self) -> (&'static str, String) {
        match self {
            PatchFault::Invalid(reason) => ("invalid-patch", reason.clone()),
            PatchFault::Later { found } => {
                let text = format!("expected version 1 of a patch, found {found} — update ingot");
                ("later-patch", text)
            }
            PatchFault::WrongBase { expected, found } => {
                let text = format!(
                    "the patch is for another version: expected {expected}, found {found} — apply the patches between \
                     the two first, in order"
                );
                ("wrong-base", text)
            }
            PatchFault::Unfinished { patch, path } => {
                let text = format!(
                    "another patch was begun and not finished: expected the patch {patch}… ({}) — apply that one again in \
                     place, or replace the file by a copy",
                    Escaped(path)
                );
                ("unfinished-patch", text)
            }
            PatchFault::Replaced {
                files,
                expected,
                found,
            } => {
                let names: Vec<String> = files.iter().map(|name| Escaped(name).to_string()).collect();
                let what = if names.is_empty() {
                    "this file was".to_owned()
                } else {
                    format!("one or more of these files were ({})", names.join(", "))
                };
                let text = format!(
                    "the patch was begun in place and not finished, and {what} replaced or changed since: expected \
                     {expected}, found {found} — restore what was replaced from a copy of the base, and apply the patch \
                     again"
                );
                ("replaced-file", text)
            }
            PatchFault::NotInPlace(reason) => {
                let text = format!("cannot be patched in place, since {reason} — write a new file");
                ("not-in-place", text)
            }
        }
    }
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

/// The steps of a save, as [`Failure::Write`](super::Failure::Write) has them after "could not".
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
    #[cfg(feature = "remote")]
    pub(crate) const UPLOAD: &str = "upload it";
    pub(crate) const PATCH: &str =
        "patch it in place, so it cannot be opened until the same patch is applied again";
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

/// Return whether the error is `ERROR_USER_MAPPED_FILE` of Windows. On other systems the number has another meaning.
fn is_mapped(fault: &io::Error) -> bool {
    cfg!(windows) && fault.raw_os_error() == Some(1224)
}

/// Return whether the error is `ERROR_SHARING_VIOLATION` or `ERROR_LOCK_VIOLATION` of Windows.
fn is_held(fault: &io::Error) -> bool {
    cfg!(windows) && matches!(fault.raw_os_error(), Some(32 | 33))
}
