//! Where the shards of an index are.

use std::fmt::Debug;
use std::path::PathBuf;

use ingot_format::Format;
use ingot_remote::StopFlag;

use super::shards::Shards;
use crate::archive::Archive;
use crate::error::Error;
use crate::workers::Reading;

/// Where the shards of an index are, and how they are opened: beside it in a directory, or behind URLs.
pub(crate) trait Store: Debug + Send + Sync {
    /// The path of a shard, or its URL without the secrets.
    fn path(&self, name: &str) -> PathBuf;

    /// Opens shard `number`. Whether it holds what the index says is not asked here.
    fn open(&self, shards: &Shards, number: usize, stop: StopFlag<'_>) -> Result<Archive, Error>;

    /// How many are opened at once.
    fn reading(&self) -> Reading;

    /// Called when many have been opened.
    fn rest(&self) {}

    /// What backs the shards, where that can be said without opening one of them.
    fn backing(&self, shards: &Shards) -> Option<Backing>;
}

/// What the files of a checkpoint are, and how they are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// The format of the first.
    pub format: Format,
    /// As [`Archive::backend`] has it.
    pub backend: &'static str,
    /// Why so, as a sentence.
    pub why: String,
}
