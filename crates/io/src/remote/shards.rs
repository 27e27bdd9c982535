//! Shards that lie beside an index behind a URL.

use std::path::PathBuf;

use ingot_format::to_u64;

use super::REMOTE;
use super::checkpoint::Door;
use super::place::Remote;
use crate::archive::Archive;
use crate::checkpoint::{Manner, Shards};
use crate::error::Error;
use crate::workers::Reading;

/// Headers that are asked for at once. Each is a round trip, or where a host redirects to another one to each: of so
/// many, half then wait for either host.
pub(super) const AT_ONCE: usize = 64;

/// Bytes of a header beside the names of its tensors: what the usual writers take for the rest of one, and more than
/// most take for the metadata.
const TENSOR_NBYTES: u64 = 112;
const METADATA_NBYTES: u64 = 4 << 10;

/// The least that is asked for, which takes no longer than less of it, and the most: what the index says of a shard is
/// not proven.
const LEAST_NBYTES: u64 = 8 << 10;
const MOST_NBYTES: u64 = 1 << 20;

/// Where the shards of an index behind a URL are: beside it, of the same commit where it is one of the Hub.
#[derive(Debug)]
pub(crate) struct RemoteShards {
    door: Door,
    index: Remote,
}

impl RemoteShards {
    pub(super) fn new(door: Door, index: Remote) -> RemoteShards {
        RemoteShards { door, index }
    }

    /// The URL of a shard, without secrets.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        let beside = self.door.beside(&self.index, name);
        beside.map_or_else(|_| name.into(), |remote| remote.shown.into())
    }

    /// Opens a shard, with one request where its header is about as long as the index lets expect.
    pub(crate) fn open(&self, shards: &Shards, number: usize) -> Result<Archive, Error> {
        let remote = self.door.beside(&self.index, shards.name(number))?;
        let entries = shards
            .tensors(number)
            .map(|name| to_u64(name.len()) + TENSOR_NBYTES);
        let expected = METADATA_NBYTES + entries.sum::<u64>();
        self.door.shard(remote, expected.clamp(LEAST_NBYTES, MOST_NBYTES))
    }

    /// Called when many have been opened.
    pub(crate) fn rest(&self) {
        self.door.rest();
    }

    pub(crate) fn reading() -> Reading {
        Reading::waiting(AT_ONCE)
    }

    pub(crate) fn manner(&self, shards: &Shards) -> Manner {
        Manner {
            format: shards.format(),
            backend: self.index.backend,
            why: REMOTE.to_owned(),
        }
    }
}
