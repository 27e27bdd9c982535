//! Fetching a model of many files: the shards come together, get their names one by one, and the index gets its name
//! last, so that there is never one which names what is not there.
//!
//! A call that ends between the renames leaves shards that have their names. So that the next call can tell them from
//! other files, the partial file of the index holds a [`Seal`] of each shard, after the bytes of the index, before the
//! first shard gets its name. The seals are cut off when the index gets its name.

use std::fs;
use std::path::{Path, PathBuf};

use ingot_format::to_u64;
use ingot_remote::RemoteOptions;

use super::incoming::{Incoming, fetch, sum};
use super::part_table::{SEAL_NBYTES, Seal};
use super::wanted::{DownloadOptions, Downloaded, RemoteModel, VersionedSource, make_folder};
use crate::error::Error;
use crate::options::{Durability, Existing};
use crate::payload::FileRange;
use crate::save::check_destination;
use crate::save::{Temp, is_there};
use crate::watch::{After, Unwatched, Watch};

/// A model of which it is known that it can be fetched to where it is wanted.
pub(super) struct Ready {
    model: RemoteModel,
    /// Where the index goes.
    path: PathBuf,
    shards: Vec<Shard>,
}

struct Shard {
    versioned: VersionedSource,
    path: PathBuf,
    /// Its seal, where an earlier call gave it its name.
    seal: Option<Seal>,
}

impl Ready {
    /// Looks at everything that can be refused, and writes nothing.
    pub(super) fn new(
        model: RemoteModel,
        folder: &Path,
        name: &str,
        options: &RemoteOptions,
        how: &DownloadOptions,
        watch: &dyn Watch,
    ) -> Result<Ready, Error> {
        let path = folder.join(name);
        let saving = how.save_options();
        check_destination(&path, &saving, watch)?;
        let refuses = how.existing == Existing::Refuse;
        let seals = if refuses {
            seals_left(&path, &model.bytes, model.shards.len(), watch)
        } else {
            None
        };
        let paths: Vec<PathBuf> = model.shards.iter().map(|shard| folder.join(shard)).collect();
        for path in &paths {
            if !refuses {
                check_destination(path, &saving, watch)?;
            } else if seals.is_none() && path.exists() {
                return Err(is_there(path));
            }
        }
        let sources = model.sources(how.threads, options, watch)?;
        let mut shards = Vec::with_capacity(paths.len());
        for (number, (versioned, path)) in sources.into_iter().zip(paths).enumerate() {
            let mut seal = None;
            if refuses && path.exists() {
                let left = seals.as_ref().map(|seals| seals[number]);
                seal = left.filter(|left| versioned.part_table().is_sealed_by(left));
                seal.ok_or_else(|| is_there(&path))?;
            }
            shards.push(Shard {
                versioned,
                path,
                seal,
            });
        }
        Ok(Ready { model, path, shards })
    }

    /// Each file with its size, the index last.
    pub(super) fn sizes(&self) -> Vec<(PathBuf, u64)> {
        let shards = self.shards.iter();
        let shards = shards.map(|shard| (shard.path.clone(), shard.versioned.source.nbytes()));
        shards.chain([(self.path.clone(), self.index_nbytes())]).collect()
    }

    fn index_nbytes(&self) -> u64 {
        to_u64(self.model.bytes.len())
    }

    pub(super) fn fetch(self, how: &DownloadOptions, watch: &dyn Watch) -> Result<Downloaded, Error> {
        let nbytes = sum(self.sizes().into_iter().map(|(_, nbytes)| nbytes));
        let index_nbytes = self.index_nbytes();
        self.make_folders()?;
        let Ready { model, path, shards } = self;
        // Whoever has it fetches the model: nobody else does at the same time.
        let mut index = Temp::resume(&path, how.existing, watch)?;
        // More files than a process should keep open. Each takes two descriptors, with its directory.
        let stays_open = shards.len() <= 32;
        let mut files = Vec::with_capacity(shards.len());
        let outcome = (|| {
            for shard in shards {
                files.push(shard.open(stays_open, how, watch)?);
            }
            let after = After {
                watch,
                before: index_nbytes,
                total: nbytes,
            };
            fetch(&files, how, &after)?;
            files.iter().try_for_each(|file| file.flush(how, watch))?;
            publish(&model, &path, &mut index, &files, how)
        })();
        if let Err(error) = outcome {
            files.iter().for_each(Incoming::abandon);
            let is_empty = index.file().metadata().is_ok_and(|metadata| metadata.len() == 0);
            if is_empty {
                index.discard();
            }
            return Err(error);
        }
        let mut files: Vec<Downloaded> = files.into_iter().map(Incoming::into_downloaded).collect();
        files.push(Downloaded {
            path: path.clone(),
            nbytes: index_nbytes,
            fetched_nbytes: if model.is_remote { index_nbytes } else { 0 },
            sha256: model.sha256,
            files: Vec::new(),
        });
        Ok(Downloaded {
            path,
            nbytes,
            fetched_nbytes: sum(files.iter().map(|file| file.fetched_nbytes)),
            sha256: None,
            files,
        })
    }

    fn make_folders(&self) -> Result<(), Error> {
        let paths = self.shards.iter().map(|shard| &shard.path).chain([&self.path]);
        let mut folders: Vec<&Path> = paths.filter_map(|path| path.parent()).collect();
        folders.dedup();
        folders.into_iter().try_for_each(make_folder)
    }
}

impl Shard {
    fn open(self, stays_open: bool, how: &DownloadOptions, watch: &dyn Watch) -> Result<Incoming, Error> {
        match self.seal {
            Some(seal) => Incoming::named(self.versioned, self.path, seal),
            None => Incoming::open(self.versioned, self.path, stays_open, how, watch),
        }
    }
}

/// Gives all files their names, the index last. All bytes are on the disk, so this takes no time that would have to be
/// watched.
fn publish(
    model: &RemoteModel,
    path: &Path,
    index: &mut Temp,
    shards: &[Incoming],
    how: &DownloadOptions,
) -> Result<(), Error> {
    write_seals(index, &model.bytes, shards)?;
    index.flush(how.durable, &Unwatched)?;
    if how.existing == Existing::Replace {
        // The old one would name files of two versions.
        remove(path, how.durable)?;
    }
    shards
        .iter()
        .try_for_each(|shard| shard.publish(how, &Unwatched))?;
    index.publish_first(to_u64(model.bytes.len()), how.existing, how.durable, &Unwatched)
}

/// Takes an old index away.
fn remove(path: &Path, durable: Durability) -> Result<(), Error> {
    let removed = || {
        let path = fs::canonicalize(path)?;
        fs::remove_file(&path)?;
        match (durable, path.parent()) {
            (Durability::Durable, Some(folder)) => fs::File::open(folder)?.sync_all(),
            _ => Ok(()),
        }
    };
    match removed() {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(Error::Write {
            path: path.to_owned(),
            step: "remove the old index",
            nbytes: 0,
            source,
        }),
        _ => Ok(()),
    }
}

/// Reads the seals of `count` shards that an earlier call left, which fetched the same index to `path`.
fn seals_left(path: &Path, index: &[u8], count: usize, watch: &dyn Watch) -> Option<Vec<Seal>> {
    let sealed = contents(&Temp::left(path, watch)?, index.len() + count * SEAL_NBYTES)?;
    Some(sealed.strip_prefix(index)?.as_chunks().0.to_vec())
}

/// Reads a file that has so many bytes.
fn contents(file: &fs::File, nbytes: usize) -> Option<Vec<u8>> {
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() != to_u64(nbytes) {
        return None;
    }
    let mut bytes = vec![0; nbytes];
    FileRange::new(file, 0, metadata.len()).read(0, &mut bytes).ok()?;
    Some(bytes)
}

/// Writes the bytes of an index to its partial file, and the seals of all shards.
fn write_seals(partial: &mut Temp, index: &[u8], shards: &[Incoming]) -> Result<(), Error> {
    let seals: Vec<Seal> = shards.iter().map(Incoming::seal).collect();
    let sealed = [index, seals.as_flattened()].concat();
    // Not written again: a kill would lose the seals of shards that have their names.
    if contents(partial.file(), sealed.len()).as_ref() == Some(&sealed) {
        return Ok(());
    }
    partial.begin_anew(to_u64(sealed.len()), &Unwatched)?;
    partial.write(&sealed, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seals_are_read_only_after_the_same_index_and_of_as_many_shards() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("index.json");
        let left = |index: &[u8], count| seals_left(&path, index, count, &Unwatched);
        assert_eq!(left(b"{}", 2), None);
        let seals = [[1; SEAL_NBYTES], [2; SEAL_NBYTES]];
        let sealed = [b"{}", seals.as_flattened()].concat();
        fs::write(folder.path().join(".index.json.ingot-part"), sealed).unwrap();
        assert_eq!(left(b"{}", 2), Some(seals.to_vec()));
        for (index, count) in [(&b"{ "[..], 2), (b"{}", 1), (b"{}", 3), (b"{}\n", 2)] {
            assert_eq!(left(index, count), None);
        }
    }
}
