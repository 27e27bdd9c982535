//! Downloads of a model with shards. The shards are fetched together and renamed one by one, and the index is renamed
//! last, so that no index ever names a missing file.
//!
//! A call that ends between the renames leaves shards that were renamed. So that the next call can distinguish them from
//! other files, the temporary file of the index contains a [`Seal`] of each shard, after the bytes of the index, before the
//! first shard is renamed. The seals are cut off when the index is renamed.

use std::fs;
use std::path::{Path, PathBuf};

use ingot_format::to_u64;

use super::incoming::{Incoming, fetch, sum};
use super::part_table::{SEAL_NBYTES, Seal};
use super::wanted::{DownloadOptions, Downloaded, RemoteModel, VersionedSource, make_folder};
use crate::error::{Error, Step};
use crate::payload::FileRange;
use crate::save::check_destination;
use crate::save::{Temp, is_there};
use crate::watch::{After, Unwatched, Watch};

/// A model that can be downloaded to its destination.
pub(super) struct Ready {
    model: RemoteModel,
    /// The destination of the index.
    path: PathBuf,
    shards: Vec<Shard>,
}

struct Shard {
    versioned: VersionedSource,
    path: PathBuf,
    /// The seal, if an earlier call renamed the shard.
    seal: Option<Seal>,
}

impl Ready {
    /// Check everything that can be checked before anything is written. The index goes to `path`.
    pub(super) fn new(
        model: RemoteModel,
        path: PathBuf,
        how: &DownloadOptions,
        watch: &dyn Watch,
    ) -> Result<Ready, Error> {
        check_destination(&path, &how.save, watch)?;
        let refuses = how.save.keeps_existing();
        let seals = if refuses {
            seals_left(&path, &model.bytes, model.shards.len(), watch)
        } else {
            None
        };
        let paths: Vec<PathBuf> = model
            .shards
            .iter()
            .map(|shard| path.with_file_name(shard))
            .collect();
        for path in &paths {
            if !refuses {
                check_destination(path, &how.save, watch)?;
            } else if seals.is_none() && path.exists() {
                return Err(is_there(path));
            }
        }
        let sources = model.sources(how.threads, watch)?;
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

    /// Return each file with its size, the index last.
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
        // Its lock keeps other calls from downloading this model.
        let mut index = Temp::resume(&path, &how.save, watch)?;
        // More files than a process should keep open. Each takes two descriptors, with its directory.
        let stays_open = shards.len() <= 32;
        let mut files = Vec::with_capacity(shards.len());
        let outcome = (|| {
            for shard in shards {
                files.push(match shard.seal {
                    Some(seal) => Incoming::named(shard.versioned, shard.path, seal)?,
                    None => Incoming::open(shard.versioned, shard.path, stays_open, how, watch)?,
                });
            }
            let after = After {
                watch,
                before: index_nbytes,
                total: nbytes,
            };
            fetch(&files, how, &after)?;
            files.iter().try_for_each(|file| file.flush(watch))?;
            publish(&model, &path, &mut index, &files, how)
        })();
        if let Err(error) = outcome {
            files.iter().for_each(Incoming::abandon);
            if index.file().metadata().is_ok_and(|metadata| metadata.len() == 0) {
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

/// Rename all files, the index last. All bytes are on the disk, so that this takes too little time to be interrupted.
fn publish(
    model: &RemoteModel,
    path: &Path,
    index: &mut Temp,
    shards: &[Incoming],
    how: &DownloadOptions,
) -> Result<(), Error> {
    write_seals(index, &model.bytes, shards)?;
    index.flush(&Unwatched)?;
    if !how.save.keeps_existing() {
        // The old index would name files of two versions.
        remove(path, how.save.durable)?;
    }
    shards.iter().try_for_each(|shard| shard.publish(&Unwatched))?;
    index.publish_first(to_u64(model.bytes.len()), &Unwatched)
}

/// Remove an old index.
fn remove(path: &Path, durable: bool) -> Result<(), Error> {
    let removed = || {
        let path = fs::canonicalize(path)?;
        fs::remove_file(&path)?;
        match path.parent() {
            Some(folder) if durable => fs::File::open(folder)?.sync_all(),
            _ => Ok(()),
        }
    };
    match removed() {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            let removed = Err(source).step("remove the old index");
            removed.map_err(|fault| fault.in_save(path, 0))
        }
        _ => Ok(()),
    }
}

/// Return the seals of `count` shards that an earlier call left, if it downloaded the same index to `path`.
fn seals_left(path: &Path, index: &[u8], count: usize, watch: &dyn Watch) -> Option<Vec<Seal>> {
    let sealed = contents(&Temp::left(path, watch)?, index.len() + count * SEAL_NBYTES)?;
    Some(sealed.strip_prefix(index)?.as_chunks().0.to_vec())
}

/// Read a file if it has this size.
fn contents(file: &fs::File, nbytes: usize) -> Option<Vec<u8>> {
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() != to_u64(nbytes) {
        return None;
    }
    let mut bytes = vec![0; nbytes];
    FileRange::new(file, 0, metadata.len()).read(0, &mut bytes).ok()?;
    Some(bytes)
}

/// Write an index and the seals of all shards to the temporary file of the index.
fn write_seals(temp: &mut Temp, index: &[u8], shards: &[Incoming]) -> Result<(), Error> {
    let seals: Vec<Seal> = shards.iter().map(Incoming::seal).collect();
    let sealed = [index, seals.as_flattened()].concat();
    // Not written again: a kill would lose the seals of shards that were renamed.
    if contents(temp.file(), sealed.len()).as_ref() == Some(&sealed) {
        return Ok(());
    }
    temp.begin_anew(to_u64(sealed.len()), &Unwatched)?;
    temp.write(&sealed, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seals_belong_to_the_same_index_and_number_of_shards() {
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
