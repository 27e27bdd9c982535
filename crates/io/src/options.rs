//! The options of opening, reading and saving, and the environment variables that set defaults for a process.

use std::fmt;
use std::num::NonZeroUsize;

use ingot_format::Limits;

/// How the bytes of a file are read.
///
/// ```
/// use ingot_io::{Backend, OpenOptions};
///
/// assert_eq!(Backend::from_name("pread"), Some(Backend::Pread));
/// let options = OpenOptions::new().backend(Backend::Pread);
/// assert_eq!(options.backend.to_string(), "pread");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Backend {
    /// Chosen by the file system of the file.
    #[default]
    Auto,
    /// The file is mapped: tensors are views of the page cache, read when touched.
    Mmap,
    /// The bytes are read in parallel into private memory.
    Pread,
}

impl Backend {
    /// All backends.
    pub const ALL: [Backend; 3] = [Backend::Auto, Backend::Mmap, Backend::Pread];

    /// Returns the backend of this name: `auto`, `mmap` or `pread`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Backend> {
        Backend::ALL.into_iter().find(|backend| backend.name() == name)
    }

    /// Returns the name used in options and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Mmap => "mmap",
            Backend::Pread => "pread",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The variable that overrides [`Backend::Auto`] for a process: `mmap` or `pread`.
pub(crate) const BACKEND_VARIABLE: &str = "INGOT_BACKEND";

/// The options of opening a file.
///
/// ```
/// use ingot_io::{Backend, OpenOptions};
/// let owned = OpenOptions::new().backend(Backend::Pread);
/// assert_eq!(owned.backend, Backend::Pread);
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// How the bytes are read.
    pub backend: Backend,
    /// Which headers are accepted.
    pub limits: Limits,
}

impl OpenOptions {
    /// Return the defaults: [`Backend::Auto`] and the default [`Limits`].
    #[must_use]
    pub fn new() -> OpenOptions {
        OpenOptions::default()
    }

    /// Sets how the bytes are read.
    #[must_use]
    pub const fn backend(mut self, backend: Backend) -> OpenOptions {
        self.backend = backend;
        self
    }

    /// Sets which headers are accepted.
    #[must_use]
    pub const fn limits(mut self, limits: Limits) -> OpenOptions {
        self.limits = limits;
        self
    }
}

/// The options of opening a checkpoint.
///
/// ```
/// use ingot_io::{Backend, CheckpointOptions, OpenOptions, Reach};
///
/// let open = OpenOptions::new().backend(Backend::Pread);
/// let options = CheckpointOptions::new().open(open).reach(Reach::Confined);
/// assert_eq!(options.reach, Reach::Confined);
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CheckpointOptions {
    /// How each of its files is opened.
    pub open: OpenOptions,
    /// Where the files may be.
    pub reach: Reach,
    /// Headers that another process read to open the same files
    /// ([`Checkpoint::shard_headers`](crate::Checkpoint::shard_headers)). The headers of files with the same size and time of
    /// modification are not read again.
    #[doc(hidden)]
    pub headers: ShardHeaders,
    /// Whether even a single file may be closed between reads and opened again, like a shard: for callers that open
    /// many.
    #[doc(hidden)]
    pub is_one_of_many: bool,
}

impl CheckpointOptions {
    /// Return the defaults: the default [`OpenOptions`] and [`Reach::FollowLinks`].
    #[must_use]
    pub fn new() -> CheckpointOptions {
        CheckpointOptions::default()
    }

    /// Sets how each file is opened.
    #[must_use]
    pub const fn open(mut self, open: OpenOptions) -> CheckpointOptions {
        self.open = open;
        self
    }

    /// Sets where the files may be.
    #[must_use]
    pub const fn reach(mut self, reach: Reach) -> CheckpointOptions {
        self.reach = reach;
        self
    }
}

/// Where the files of a checkpoint may be.
///
/// ```
/// use ingot_io::{Checkpoint, CheckpointOptions, Reach};
/// # use ingot_io::{Dtype, TensorView, serialize_to_file};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bias = TensorView::new(Dtype::U8, vec![2], b"ab")?;
/// # serialize_to_file([("bias", &bias)], None, &path)?;
///
/// let options = CheckpointOptions::new().reach(Reach::Confined);
/// let model = Checkpoint::open(folder.path(), &options)?;
/// assert_eq!(model.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// Symbolic links are followed, because the cache of the Hub is made of them.
    #[default]
    FollowLinks,
    /// A symbolic link anywhere below the directory is refused, and so is a file with a second name (a hard link).
    Confined,
}

/// The headers of a checkpoint's files that one process read, so that others open the checkpoint without reading them. Empty
/// by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardHeaders {
    /// The index as JSON, if there is one.
    pub index: Option<Vec<u8>>,
    /// The headers, in the order of the file names.
    pub files: Vec<ShardHeader>,
}

/// The header of one version of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardHeader {
    /// The size of the file.
    pub nbytes: u64,
    /// The version, as the file system or the server reports it.
    pub version: String,
    /// The bytes before the data section.
    pub bytes: Vec<u8>,
}

impl ShardHeaders {
    /// Return the header of the only file.
    pub(crate) fn of_file(&self) -> Option<&ShardHeader> {
        match (&self.index, &*self.files) {
            (None, [only]) => Some(only),
            _ => None,
        }
    }

    /// Return the index and the version of the first shard.
    #[cfg(feature = "remote")]
    pub(crate) fn of_index(&self) -> Option<(&[u8], &str)> {
        Some((self.index.as_deref()?, &self.files.first()?.version))
    }

    /// Return the header of shard `number`.
    pub(crate) fn of_shard(&self, number: usize) -> Option<&ShardHeader> {
        self.index.as_ref().and(self.files.get(number))
    }
}

/// The options of reading tensors.
///
/// ```
/// use std::num::NonZeroUsize;
///
/// use ingot_io::ReadOptions;
///
/// let options = ReadOptions::new().threads(NonZeroUsize::new(4));
/// assert_eq!(options.threads.map(NonZeroUsize::get), Some(4));
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ReadOptions {
    /// How many threads read at once; by default the number in the variable `INGOT_THREADS`, or else a number that suits the
    /// machine and the source.
    pub threads: Option<NonZeroUsize>,
}

impl ReadOptions {
    /// Return the defaults.
    #[must_use]
    pub fn new() -> ReadOptions {
        ReadOptions::default()
    }

    /// Sets how many threads read at once; `None` for the default.
    #[must_use]
    pub fn threads(mut self, threads: impl Into<Option<NonZeroUsize>>) -> ReadOptions {
        self.threads = threads.into();
        self
    }
}

/// The variable that sets the default of [`ReadOptions::threads`] for a process.
pub(crate) const THREADS_VARIABLE: &str = "INGOT_THREADS";

/// The variable that limits the pinned memory of a process for copies to and from its devices, in bytes.
pub(crate) const PINNED_VARIABLE: &str = "INGOT_PINNED";

/// The options of saving.
///
/// ```
/// use ingot_io::{Replace, SaveOptions};
/// let new_and_fast = SaveOptions::new().replace(Replace::Nothing).durable(false);
/// assert_eq!(new_and_fast.replace, Replace::Nothing);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveOptions {
    /// Whether the file is on the disk when [`save`](crate::save) returns. If false, a loss of power may undo a save of the last
    /// half minute or so, or leave a part of its bytes. Ending the process loses nothing.
    pub durable: bool,
    /// How an existing file is replaced.
    pub replace: Replace,
    /// Whether to replace a file that this process may not write to, by one that is read-only too. If false, that is an error.
    /// Needs a writable directory, and excludes [`Replace::InPlace`].
    pub replace_read_only: bool,
}

/// How an existing file is replaced.
///
/// ```
/// use ingot_io::{Dtype, Format, Payload, Replace, SaveOptions, Spec, Unwatched, layout, save};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
///
/// let specs = [Spec { name: "bias", dtype: Dtype::U8, shape: &[2] }];
/// let new = layout(&specs, None, Format::Safetensors)?;
/// let options = SaveOptions::new().replace(Replace::Nothing);
/// save(&path, &new, &[Payload::from(&b"ab"[..])], &options, &Unwatched)?;
/// assert!(save(&path, &new, &[Payload::from(&b"cd"[..])], &options, &Unwatched).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replace {
    /// By renaming a whole new file over it. Needs the right to create files in the directory.
    #[default]
    Atomic,
    /// By writing into it, which keeps its owner, links and attributes. Needs only the right to write to it.
    ///
    /// All bytes are written to a temporary file first (beside the target, or else among the system's temporary files), since
    /// the payloads may be in a mapping of the target; so it takes twice the time. If the process dies or the disk fails
    /// during the copy that follows, the file holds a mix of old and new bytes; two saves at once have the same effect.
    /// Processes that have the old file mapped see it change.
    InPlace,
    /// Not at all: an existing file is an error, also if it was created while the new file was written. If the file
    /// system has neither links nor renames that keep an existing file, a file created just before the rename is
    /// replaced. Pipes and devices are written to.
    Nothing,
}

impl SaveOptions {
    /// Return the defaults: durable, [`Replace::Atomic`], and read-only files are refused.
    #[must_use]
    pub const fn new() -> SaveOptions {
        SaveOptions {
            durable: true,
            replace: Replace::Atomic,
            replace_read_only: false,
        }
    }

    /// Sets whether the file is on the disk when the save returns.
    #[must_use]
    pub const fn durable(mut self, durable: bool) -> SaveOptions {
        self.durable = durable;
        self
    }

    /// Sets how an existing file is replaced.
    #[must_use]
    pub const fn replace(mut self, replace: Replace) -> SaveOptions {
        self.replace = replace;
        self
    }

    /// Sets whether a file that this process may not write to is replaced.
    #[must_use]
    pub const fn replace_read_only(mut self, replace_read_only: bool) -> SaveOptions {
        self.replace_read_only = replace_read_only;
        self
    }

    /// Returns whether an existing file is an error.
    pub(crate) fn keeps_existing(&self) -> bool {
        self.replace == Replace::Nothing
    }
}

impl Default for SaveOptions {
    fn default() -> SaveOptions {
        SaveOptions::new()
    }
}
