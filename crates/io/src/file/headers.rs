//! What is read to open a checkpoint, so that one process can read it for others.

use super::ReadAt;

/// What one process has read of the files of a checkpoint to open it. Another opens the same with it, and reads none of that:
/// [`Checkpoint::open_with`](crate::Checkpoint::open_with). By default it is nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heads {
    /// The index, as JSON, where there is one.
    pub index: Option<Vec<u8>>,
    /// Those of the files, in the order of their names.
    pub files: Vec<Head>,
}

/// The start of a file of one version, as far as its header goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The size of the file.
    pub nbytes: u64,
    /// What the file system or the server says of the version.
    pub version: String,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl Heads {
    /// That of the only file.
    pub(crate) fn of_file(&self) -> Option<&Head> {
        match (&self.index, &*self.files) {
            (None, [only]) => Some(only),
            _ => None,
        }
    }

    /// The index, and the version of the first of its files.
    #[cfg(feature = "remote")]
    pub(crate) fn of_index(&self) -> Option<(&[u8], &str)> {
        Some((self.index.as_deref()?, &self.files.first()?.version))
    }

    /// That of shard `number`.
    pub(crate) fn of_shard(&self, number: usize) -> Option<&Head> {
        self.index.as_ref().and(self.files.get(number))
    }
}

impl Head {
    /// Whether it is that of `source`, as it is here.
    pub(crate) fn is_of(&self, source: &dyn ReadAt) -> bool {
        self.nbytes == source.nbytes() && source.version().as_ref() == Some(&self.version)
    }
}
