//! Where the shards of an index are.

use std::path::PathBuf;

use ingot_format::Format;

use super::folder::Beside;
use super::parallel::of_directory;
use super::shards::Shards;
use crate::archive::Archive;
use crate::error::Error;
use crate::options::OpenOptions;
#[cfg(feature = "remote")]
use crate::remote::RemoteShards;
use crate::workers::Reading;

/// What the files of a checkpoint are, and how they are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manner {
    /// The format of the first.
    pub format: Format,
    /// As [`Archive::backend`] has it.
    pub backend: &'static str,
    /// Why so, as a sentence.
    pub why: String,
}

/// Where the shards of an index are, and how they are opened.
#[derive(Debug)]
pub(super) enum Store {
    /// Beside it.
    Directory { beside: Beside, options: OpenOptions },
    /// Behind URLs.
    #[cfg(feature = "remote")]
    Url(Box<RemoteShards>),
}

impl Store {
    /// The path, or the URL without its secrets.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        match self {
            Store::Directory { beside, .. } => beside.path(name),
            #[cfg(feature = "remote")]
            Store::Url(remote) => remote.path(name),
        }
    }

    pub(super) fn open(&self, shards: &Shards, number: usize) -> Result<Archive, Error> {
        match self {
            Store::Directory { beside, options } => {
                let (file, path) = beside.open(shards, number)?;
                Archive::of_file(file, path, options)
            }
            #[cfg(feature = "remote")]
            Store::Url(remote) => remote.open(shards, number),
        }
    }

    /// Whether a shard, whatever is wrong with it, holds `tensor`.
    pub(super) fn holds(&self, shards: &Shards, number: usize, tensor: &str) -> bool {
        match self {
            Store::Directory { beside, .. } => beside.holds(shards, number, tensor),
            #[cfg(feature = "remote")]
            Store::Url(remote) => {
                let opened = remote.open(shards, number);
                opened.is_ok_and(|archive| archive.header().find(tensor).is_some())
            }
        }
    }

    /// How many are opened at once.
    pub(super) fn reading(&self) -> Reading {
        match self {
            Store::Directory { .. } => of_directory(),
            #[cfg(feature = "remote")]
            Store::Url(_) => RemoteShards::reading(),
        }
    }

    /// Called when many have been opened.
    pub(super) fn rest(&self) {
        match self {
            Store::Directory { .. } => {}
            #[cfg(feature = "remote")]
            Store::Url(remote) => remote.rest(),
        }
    }

    /// What can be said of the shards without opening one of them.
    pub(super) fn manner(&self, shards: &Shards) -> Option<Manner> {
        match self {
            Store::Directory { .. } if shards.len() > 0 => None,
            Store::Directory { .. } => Some(Manner {
                format: shards.format(),
                backend: "pread",
                why: "no file to read".to_owned(),
            }),
            #[cfg(feature = "remote")]
            Store::Url(remote) => Some(remote.manner(shards)),
        }
    }
}
