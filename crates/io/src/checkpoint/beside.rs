//! Shards that lie beside their index in a directory.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::PathBuf;

use ingot_format::Limits;

use super::folder::{Folder, Stamp};
use super::index_file::index_in;
use super::shards::Shards;
use crate::error::{CheckpointFault, Error};
use crate::head::read_header;
use crate::source::FileSource;

/// A directory, and what the shards in it were when the index was read.
#[derive(Debug)]
pub(super) struct Beside {
    folder: Folder,
    stamps: Vec<Stamp>,
}

impl Beside {
    /// Reads the index `name`, and looks whether all its shards are there.
    pub(super) fn index(folder: Folder, name: &OsStr) -> Result<(Shards, Beside), Error> {
        let shards = Shards::new(folder.path(name), index_in(&folder, name)?);
        let names = shards.index().shards();
        let looked: Vec<_> = names.iter().map(|shard| folder.look(shard)).collect();
        refuse_missing(&shards, &looked)?;
        let stamps = looked.into_iter().collect::<Result<_, _>>()?;
        Ok((shards, Beside { folder, stamps }))
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path(name)
    }

    /// Shard `number` as a file, which is still the one that it was.
    pub(super) fn open(&self, shards: &Shards, number: usize) -> Result<(File, PathBuf), Error> {
        let name = shards.name(number);
        let (file, path) = (self.folder.open(name)?, self.folder.path(name));
        self.stamps[number].check(&file, &path)?;
        Ok((file, path))
    }

    /// Whether shard `number` can be opened and holds `tensor`. What is wrong with it is not the question.
    pub(super) fn holds(&self, shards: &Shards, number: usize, tensor: &str) -> bool {
        let header = || {
            let file = self.folder.open(shards.name(number)).ok()?;
            read_header(&FileSource::new(file).ok()?, None, &Limits::default()).ok()
        };
        header().is_some_and(|header| header.find(tensor).is_some())
    }
}

/// Fails when shards are not there, with all their names.
fn refuse_missing(shards: &Shards, looked: &[Result<Stamp, Error>]) -> Result<(), Error> {
    let is_missing = |shard: &Result<Stamp, Error>| matches!(shard, Err(Error::Open { source, .. }) if source.kind() == io::ErrorKind::NotFound);
    let missing: Vec<String> = looked
        .iter()
        .zip(shards.index().shards())
        .filter(|pair| is_missing(pair.0))
        .map(|pair| pair.1.clone())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Checkpoint {
        path: shards.path().to_owned(),
        fault: CheckpointFault::MissingShards {
            shards: missing,
            of: looked.len(),
        },
    })
}
