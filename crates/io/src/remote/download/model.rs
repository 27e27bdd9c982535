//! Fetching a model of many files: the shards come together, get their names one by one, and the index gets its name
//! last, so that there is never one which names what is not there.
//!
//! Whoever is broken off in between has left shards which the next call could not tell from somebody else's. So before
//! the first of them gets its name, the notes of all are written down behind the bytes of the index, in the file that
//! becomes the index and loses them then.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use ingot_format::{to_u64, to_usize};
use ingot_remote::RemoteOptions;

use super::incoming::{Incoming, Keep, fetch, sum};
use super::part_table::{PartHash, PartTable};
use super::wanted::{DownloadOptions, Downloaded, RemoteModel, VersionedSource, make_folder};
use crate::error::Error;
use crate::options::{Durability, Existing};
use crate::payload::FileRange;
use crate::save::check_destination;
use crate::save::draft::Draft;
use crate::save::target::is_there;
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
    /// The hashes of its parts, where an earlier call has given it its name.
    hashes: Option<Vec<PartHash>>,
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
        let ledger = match refuses {
            true => Ledger::left(&path, &model.bytes, watch),
            false => None,
        };
        let paths: Vec<PathBuf> = model.shards.iter().map(|shard| folder.join(shard)).collect();
        if !refuses {
            paths
                .iter()
                .try_for_each(|path| check_destination(path, &saving, watch))?;
        }
        let is_named: Vec<bool> = paths.iter().map(|path| refuses && path.exists()).collect();
        if let (Some(number), None) = (is_named.iter().position(|&is_named| is_named), &ledger) {
            return Err(is_there(&paths[number]));
        }
        let sources = model.sources(how.threads, options, watch)?;
        let tables: Vec<_> = sources.iter().map(VersionedSource::part_table).collect();
        let known = match &ledger {
            Some(ledger) => ledger.hashes(&tables),
            None => tables.iter().map(|_| None).collect(),
        };
        let mut shards = Vec::with_capacity(paths.len());
        for (((versioned, path), is_named), known) in sources.into_iter().zip(paths).zip(is_named).zip(known)
        {
            let hashes = match (is_named, known) {
                (true, Some(hashes)) if versioned.version.is_some() => Some(hashes),
                (true, _) => return Err(is_there(&path)),
                (false, _) => None,
            };
            shards.push(Shard {
                versioned,
                path,
                hashes,
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
        let mut index = Draft::resume(&path, how.existing, watch)?;
        let keep = Keep::of(shards.len());
        let mut files = Vec::with_capacity(shards.len());
        let outcome = (|| {
            for shard in shards {
                files.push(shard.open(keep, how, watch)?);
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
    fn open(self, keep: Keep, how: &DownloadOptions, watch: &dyn Watch) -> Result<Incoming, Error> {
        match self.hashes {
            Some(hashes) => Incoming::named(self.versioned, self.path, hashes),
            None => Incoming::open(self.versioned, self.path, keep, how, watch),
        }
    }
}

/// Gives all files their names, the index last. All bytes are on the disk, so this takes no time that would have to be
/// watched.
fn publish(
    model: &RemoteModel,
    path: &Path,
    index: &mut Draft,
    shards: &[Incoming],
    how: &DownloadOptions,
) -> Result<(), Error> {
    Ledger::write(index, &model.bytes, shards, &Unwatched)?;
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

/// Bytes of notes that are read at most. A TiB takes 2 MiB of them.
const NBYTES: u64 = 256 << 20;

/// The notes of all shards of an index, in the order of their names.
struct Ledger {
    notes: Vec<u8>,
}

impl Ledger {
    /// The one that a call was broken off behind, which fetched the same index.
    fn left(path: &Path, index: &[u8], watch: &dyn Watch) -> Option<Ledger> {
        let file = Draft::left(path, watch)?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        let mut left = Vec::new();
        let most = to_u64(index.len()).saturating_add(NBYTES);
        file.take(most).read_to_end(&mut left).ok()?;
        let notes = left.strip_prefix(index)?;
        (!notes.is_empty()).then(|| Ledger {
            notes: notes.to_vec(),
        })
    }

    /// The hashes that the parts of each file had. What is of another version has none, nor has what follows a file that
    /// had another size.
    fn hashes(&self, tables: &[PartTable]) -> Vec<Option<Vec<PartHash>>> {
        let mut rest = &*self.notes;
        let mut take = |table: &PartTable| {
            let (notes, after) = rest.split_at_checked(table.notes_nbytes())?;
            rest = after;
            table.hashes_in(notes)
        };
        tables.iter().map(&mut take).collect()
    }

    /// Writes the bytes of an index into the file that becomes it, and behind them what is known of its shards.
    fn write(partial: &mut Draft, index: &[u8], shards: &[Incoming], watch: &dyn Watch) -> Result<(), Error> {
        let mut bytes = index.to_vec();
        for shard in shards {
            bytes.extend(shard.notes()?);
        }
        // What stands there already may be all that vouches for shards which have their names.
        if holds(partial, &bytes) {
            return Ok(());
        }
        partial.begin_anew(to_u64(bytes.len()), watch)?;
        partial.write(&bytes, 0)
    }
}

fn holds(partial: &Draft, bytes: &[u8]) -> bool {
    let is_as_long = |len| to_usize(len) == Some(bytes.len());
    if !partial
        .file()
        .metadata()
        .is_ok_and(|metadata| is_as_long(metadata.len()))
    {
        return false;
    }
    let mut held = vec![0; bytes.len()];
    let range = FileRange::new(partial.file(), 0, to_u64(bytes.len()));
    range.read(0, &mut held).is_ok() && held == bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Unwatched;

    #[test]
    fn a_shard_is_known_by_its_version_and_its_place() {
        let tables =
            |versions: [&str; 2], first| [PartTable::new(first, versions[0]), PartTable::new(5, versions[1])];
        let written = tables(["one", "two"], 3);
        let notes = [written[0].notes(&[[1; 16]]), written[1].notes(&[[2; 16]])].concat();
        let ledger = Ledger { notes };
        let known = |tables: &[PartTable]| ledger.hashes(tables);
        assert_eq!(known(&written), [Some(vec![[1; 16]]), Some(vec![[2; 16]])]);
        assert_eq!(known(&tables(["other", "two"], 3)), [None, Some(vec![[2; 16]])]);
        assert_eq!(known(&tables(["one", "two"], 2 << 20)), [None, None]);
    }

    #[test]
    fn what_was_left_of_another_index_is_no_ledger() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("index.json");
        assert!(Ledger::left(&path, b"{}", &Unwatched).is_none());
        std::fs::write(folder.path().join(".index.json.ingot-part"), "{}notes").unwrap();
        assert_eq!(Ledger::left(&path, b"{}", &Unwatched).unwrap().notes, b"notes");
        for other in [&b"{ "[..], b"{}notes", b"{}notes and more"] {
            assert!(Ledger::left(&path, other, &Unwatched).is_none());
        }
    }
}
