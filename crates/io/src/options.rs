//! What a caller may choose, and the variables of the environment that choose for a whole process.

use std::fmt;
use std::num::NonZeroUsize;

use ingot_format::Limits;

/// How to read a file: what the caller asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Backend {
    /// Choose by what is true of the file.
    #[default]
    Auto,
    /// Map it: tensors are views of the page cache, read when touched.
    Mmap,
    /// Read it into memory of our own, in parallel.
    Pread,
}

impl Backend {
    /// Every choice.
    pub const ALL: [Backend; 3] = [Backend::Auto, Backend::Mmap, Backend::Pread];

    /// The backend of this name: `auto`, `mmap` or `pread`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Backend> {
        Backend::ALL.into_iter().find(|backend| backend.name() == name)
    }

    /// The name that options use.
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

/// Overrides [`Backend::Auto`] for a whole process: `mmap` or `pread`.
pub(crate) const BACKEND_VARIABLE: &str = "INGOT_BACKEND";

/// How to open a file.
///
/// ```
/// use ingot_io::{Backend, OpenOptions};
/// let owned = OpenOptions::new().backend(Backend::Pread);
/// assert_eq!(owned.backend, Backend::Pread);
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// How its bytes are read.
    pub backend: Backend,
    /// What headers are taken.
    pub limits: Limits,
}

impl OpenOptions {
    /// Returns the defaults: [`Backend::Auto`] and the default [`Limits`].
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

/// How to open a checkpoint.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct CheckpointOptions {
    /// How each of its files is opened.
    pub open: OpenOptions,
    /// Whether files may lie elsewhere.
    pub reach: Reach,
}

impl CheckpointOptions {
    /// Returns the defaults: the default [`OpenOptions`] and [`Reach::FollowLinks`].
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

/// Where the files of a checkpoint may lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// Symbolic links are followed, because the cache of the Hub is made of them.
    #[default]
    FollowLinks,
    /// A symbolic link anywhere below the directory is refused, and so is a file that has another name somewhere.
    Confined,
}

/// How tensors are read.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ReadOptions {
    /// How many threads read at once; by default what the variable `INGOT_THREADS` says, else what suits the machine and the
    /// source.
    pub threads: Option<NonZeroUsize>,
}

impl ReadOptions {
    /// Returns the defaults.
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

/// How many threads read at once, for a whole process, where nothing else is asked for.
pub(crate) const THREADS_VARIABLE: &str = "INGOT_THREADS";

/// How many bytes of pinned memory a process may use to reach its devices.
pub(crate) const PINNED_VARIABLE: &str = "INGOT_PINNED";

/// How to save.
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
    /// Whether a file that this process may not write to is replaced, by one that is as read-only; else it is an error. This
    /// takes a writable directory, and excludes [`Replace::InPlace`].
    pub replace_read_only: bool,
}

/// How an existing file is replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replace {
    /// By renaming a whole new file over it. Needs the right to create files in the directory.
    #[default]
    Atomic,
    /// By writing into it, which keeps its owner, links and everything else. Needs only the right to write to it.
    ///
    /// All bytes go to a temporary file first (beside the target, or else among the system's temporary files), since
    /// the payloads may lie in a mapping of the target; so it takes twice the time. A process that dies, or a disk that
    /// fails, while they are then copied leaves a mixed file, and two saves at once do too. Whoever has the old file
    /// mapped sees it change.
    InPlace,
    /// Not at all: what has the name stays, and it is an error that it is there, also when it was made while the new
    /// file was written. Only where a file system has neither links nor renames that replace nothing, a file that was made
    /// in the last moment is replaced. Pipes and devices, which lose nothing by it, are written to.
    Nothing,
}

impl SaveOptions {
    /// Returns the defaults: durable, [`Replace::Atomic`], and read-only files are refused.
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

    /// Returns whether an existing file stays, which is an error then.
    pub(crate) fn keeps_existing(&self) -> bool {
        self.replace == Replace::Nothing
    }
}

impl Default for SaveOptions {
    fn default() -> SaveOptions {
        SaveOptions::new()
    }
}
