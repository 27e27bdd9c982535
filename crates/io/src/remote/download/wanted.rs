//! What a URL that is downloaded leads to: one file, or the index of a model and so its shards too.

use std::fs;
use std::io::Read;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use ingot_format::{IndexReader, StopFlag, to_u64, to_usize};
use ingot_remote::{INDEX_FILE, Location, MODEL_FILE, Remote, RemoteFile, RemoteOptions, redacted};

use super::part_table::PartTable;
use crate::checkpoint::folder::index_of;
use crate::digest::{Algorithm, Digest, Unequal};
use crate::error::Error;
use crate::file::{LocalFile, ReadAt};
use crate::options::{Durability, Existing, ReadOnly, SaveOptions};
use crate::payload::FileRange;
use crate::remote::session::{AT_ONCE, Session, UrlFile, for_urls, header_limits, in_session, refused};
use crate::watch::Watch;
use crate::workers::{Reading, in_parallel};

/// How to fetch a file.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct DownloadOptions {
    /// How many parts are fetched at once, of all files together; by default as for reading.
    pub threads: Option<NonZeroUsize>,
    /// What becomes of a file that is there.
    pub existing: Existing,
    /// Whether that holds of one that this process may not write to.
    pub read_only: ReadOnly,
    /// What a loss of power may undo.
    pub durable: Durability,
    /// The SHA-256 that the file has to have. One cannot speak of the many files of a model, for which it is refused.
    pub sha256: Option<Digest>,
}

impl DownloadOptions {
    /// Returns the defaults: existing files are refused, and the download is durable.
    #[must_use]
    pub fn new() -> DownloadOptions {
        DownloadOptions::default()
    }

    /// Sets how many parts are fetched at once; `None` for the default.
    #[must_use]
    pub fn threads(mut self, threads: impl Into<Option<NonZeroUsize>>) -> DownloadOptions {
        self.threads = threads.into();
        self
    }

    /// Sets what happens to a file that exists.
    #[must_use]
    pub const fn existing(mut self, existing: Existing) -> DownloadOptions {
        self.existing = existing;
        self
    }

    /// Sets what happens to a file that this process may not write to.
    #[must_use]
    pub const fn read_only(mut self, read_only: ReadOnly) -> DownloadOptions {
        self.read_only = read_only;
        self
    }

    /// Sets what a loss of power may undo.
    #[must_use]
    pub const fn durable(mut self, durable: Durability) -> DownloadOptions {
        self.durable = durable;
        self
    }

    /// Sets the SHA-256 that the file must have; `None` for any.
    #[must_use]
    pub fn sha256(mut self, sha256: impl Into<Option<Digest>>) -> DownloadOptions {
        self.sha256 = sha256.into();
        self
    }

    /// The options that a save has too.
    pub(super) fn save_options(&self) -> SaveOptions {
        SaveOptions {
            durable: self.durable,
            replace: self.existing.into(),
            read_only: self.read_only,
        }
    }
}

/// What was fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Downloaded {
    /// Where it is; of a model the index.
    pub path: PathBuf,
    /// Its size in bytes, of all files together.
    pub nbytes: u64,
    /// Bytes that came over the network for it. Fewer than all where an earlier call had some of them.
    pub fetched_nbytes: u64,
    /// Its SHA-256, where somebody said what that has to be: the caller, or the Hub.
    pub sha256: Option<Digest>,
    /// Of a model each of its files: the shards in the order of their names, then the index. Else none.
    pub files: Vec<Downloaded>,
}

/// What the names of indexes end in. Any file may be downloaded, so the content decides nothing.
const INDEX_ENDING: &str = ".index.json";

/// What a URL leads to.
pub(super) enum Downloadable {
    File(UrlFile),
    Model(Box<RemoteModel>),
}

/// An index, which was read, and its shards, which were not.
pub(super) struct RemoteModel {
    session: Session<'static>,
    /// All bytes of the index.
    pub(super) bytes: Vec<u8>,
    /// The SHA-256 that it was found to have, where the Hub says one.
    pub(super) sha256: Option<Digest>,
    /// The names of the shards, in their order.
    pub(super) shards: Vec<String>,
    /// Whether the index came over a network.
    pub(super) is_remote: bool,
    beside: ShardBase,
}

/// Where the files beside an index are.
enum ShardBase {
    /// Beside this one, which is of one commit where it is one of the Hub. What the cache has of it is there too.
    Url(Box<Remote>),
    /// In a folder of the Hub's cache, and the Hub may not be asked.
    Folder(PathBuf),
}

/// Asks for the start of the file behind `url`, or for all of an index, or finds them on this machine.
pub(super) fn wanted(url: &str, options: &RemoteOptions, watch: &dyn Watch) -> Result<Downloadable, Error> {
    in_session(url, options, &header_limits(), watch, |session| {
        session.wanted(url)
    })
}

/// Whether a file of this name is an index.
pub(super) fn is_index(name: &str) -> bool {
    name.ends_with(INDEX_ENDING)
}

impl Session<'_> {
    fn wanted(&self, url: &str) -> Result<Downloadable, Error> {
        match self.locate(url)? {
            Location::Cached(path, remote) if is_index(&path.to_string_lossy()) => {
                self.cached_model(&path, remote.map(|remote| *remote))
            }
            Location::Cached(path, _) => Ok(Downloadable::File(UrlFile::Cached(path))),
            Location::Remote(remote) if remote.is_folder() => self.wanted_of_folder(&remote),
            Location::Remote(remote) if is_index(remote.path()) => {
                let source = self.index_file(&remote, self.stop);
                let source = source.map_err(|fault| refused(&remote.shown, fault))?;
                self.model(*remote, &source, redacted(url))
            }
            Location::Remote(remote) => {
                let source = RemoteFile::of_whole(self.resource(&remote), self.stop);
                let source = source.map_err(|fault| refused(&remote.shown, fault))?;
                Ok(Downloadable::File(file(&remote, source)))
            }
        }
    }

    /// The model of a folder of the Hub. One question more is nothing beside a download.
    fn wanted_of_folder(&self, folder: &Remote) -> Result<Downloadable, Error> {
        let model = self.beside(folder, MODEL_FILE)?;
        let missing = match RemoteFile::of_whole(self.resource(&model), self.stop) {
            Ok(source) => return Ok(Downloadable::File(file(&model, source))),
            Err(fault) if fault.is_missing() => fault,
            Err(fault) => return Err(refused(&model.shown, fault)),
        };
        let index = self.beside(folder, INDEX_FILE)?;
        match self.index_file(&index, self.stop) {
            Ok(source) => {
                let shown = index.shown.clone();
                self.model(index, &source, shown)
            }
            Err(fault) if fault.is_missing() => Err(refused(&folder.shown, missing.and_not(INDEX_FILE))),
            Err(fault) => Err(refused(&index.shown, fault)),
        }
    }

    /// The model of the index that `source` is.
    fn model(&self, index: Remote, source: &RemoteFile, shown: String) -> Result<Downloadable, Error> {
        let commit = source.commit();
        let cached = index.cached_at(commit.as_deref());
        let sha256 = linked(source, index.backend);
        let index = index.at(commit);
        if let Some(path) = cached {
            return self.cached_model(&path, Some(index));
        }
        let mut bytes = vec![0; room(source.nbytes(), Path::new(&shown))?];
        source
            .all(self.stop)
            .read_exact(&mut bytes)
            .map_err(|source| Error::Open {
                path: PathBuf::from(&shown),
                source,
            })?;
        if let Some(expected) = sha256 {
            compare(Path::new(&shown), expected, Algorithm::Sha256.digest(&bytes))?;
        }
        let model = self.indexed(Path::new(&shown), bytes, ShardBase::Url(Box::new(index)))?;
        Ok(Downloadable::Model(Box::new(RemoteModel {
            sha256,
            is_remote: true,
            ..model
        })))
    }

    /// The model of an index in the Hub's cache, of which shards may be missing there.
    fn cached_model(&self, path: &Path, remote: Option<Remote>) -> Result<Downloadable, Error> {
        let source = LocalFile::open(path)?;
        let range = FileRange::of_local(&source, 0, source.nbytes());
        let mut bytes = vec![0; room(source.nbytes(), path)?];
        range.read(0, &mut bytes).map_err(|source| Error::Open {
            path: path.to_owned(),
            source,
        })?;
        let beside = match remote {
            Some(remote) => ShardBase::Url(Box::new(remote)),
            None => ShardBase::Folder(path.parent().map(Path::to_owned).unwrap_or_default()),
        };
        let model = self.indexed(path, bytes, beside)?;
        Ok(Downloadable::Model(Box::new(model)))
    }

    /// The model of an index on this machine, which was read at `path`. Names of shards that lead out of its folder are
    /// refused.
    fn indexed(&self, path: &Path, bytes: Vec<u8>, beside: ShardBase) -> Result<RemoteModel, Error> {
        let index = index_of(&bytes[..], to_u64(bytes.len()), path)?;
        let index = match &beside {
            ShardBase::Url(_) => for_urls(index, path)?,
            ShardBase::Folder(_) => index,
        };
        Ok(RemoteModel {
            session: self.heeding(StopFlag::never()),
            shards: index.shards().to_vec(),
            bytes,
            sha256: None,
            is_remote: false,
            beside,
        })
    }
}

fn file(remote: &Remote, source: RemoteFile) -> UrlFile {
    let cached = remote.cached_at(source.commit().as_deref());
    cached.map_or_else(
        || UrlFile::Remote(Box::new(source), remote.backend),
        UrlFile::Cached,
    )
}

/// Bytes that an index takes, if it is no larger than one may be.
fn room(nbytes: u64, path: &Path) -> Result<usize, Error> {
    match IndexReader::new(nbytes) {
        Ok(_) => Ok(to_usize(nbytes).unwrap_or(usize::MAX)),
        Err(fault) => Err(Error::Index {
            path: path.to_owned(),
            fault,
        }),
    }
}

impl RemoteModel {
    /// Where each shard comes from. Of each the start is asked for, of many at once.
    pub(super) fn sources(
        &self,
        threads: Option<NonZeroUsize>,
        options: &RemoteOptions,
        watch: &dyn Watch,
    ) -> Result<Vec<VersionedSource>, Error> {
        let at_once = threads.map_or(AT_ONCE, |threads| threads.get().min(AT_ONCE));
        let numbers: Vec<usize> = (0..self.shards.len()).collect();
        let source = |number: usize, stop: StopFlag<'_>| self.versioned(&self.shards[number], options, stop);
        let sources = in_parallel(Reading::waiting(at_once), &numbers, source, watch);
        self.session.rest();
        sources
    }

    fn versioned(
        &self,
        shard: &str,
        options: &RemoteOptions,
        stop: StopFlag<'_>,
    ) -> Result<VersionedSource, Error> {
        let index = match &self.beside {
            ShardBase::Url(index) => index,
            ShardBase::Folder(folder) => return VersionedSource::cached(&folder.join(shard)),
        };
        let remote = self.session.beside(index, shard)?;
        if let Some(path) = remote.cached() {
            return VersionedSource::cached(&path);
        }
        let source = RemoteFile::of_many(self.session.resource(&remote), stop);
        let source = source.map_err(|fault| refused(&remote.shown, fault))?;
        Ok(VersionedSource::remote(
            source,
            remote.backend,
            remote.shown.into(),
            options,
        ))
    }
}

/// A source, of one version.
pub(super) struct VersionedSource {
    pub(super) source: Box<dyn ReadAt>,
    /// What the caller knows it by.
    pub(super) shown: PathBuf,
    /// What no other version of it is called; `None` where nothing tells versions apart.
    pub(super) version: Option<String>,
    /// The SHA-256 that it has to have.
    pub(super) sha256: Option<Digest>,
    /// Whether it comes over a network.
    pub(super) is_remote: bool,
    /// How often it is begun anew where it breaks off: where it is given whole or not at all.
    pub(super) retries: u32,
    is_whole: bool,
}

impl VersionedSource {
    pub(super) fn remote(
        source: RemoteFile,
        backend: &str,
        shown: PathBuf,
        options: &RemoteOptions,
    ) -> VersionedSource {
        let sha256 = linked(&source, backend);
        let is_whole = source.is_whole();
        VersionedSource {
            shown,
            // The Hub gives the same bytes under many addresses: one for each commit.
            version: sha256
                .map(|digest| format!("sha256 {digest}"))
                .or_else(|| source.version()),
            sha256,
            is_remote: true,
            retries: if is_whole { options.retries } else { 0 },
            is_whole,
            source: Box::new(source),
        }
    }

    /// A file of the Hub's cache.
    pub(super) fn cached(path: &Path) -> Result<VersionedSource, Error> {
        Ok(VersionedSource {
            source: Box::new(LocalFile::open_one_of_many(path)?),
            shown: path.to_owned(),
            version: version(path),
            sha256: None,
            is_remote: false,
            retries: 0,
            is_whole: false,
        })
    }

    /// The same, which the caller expects to have this SHA-256. All who know it must say the same.
    pub(super) fn expecting(self, sha256: Option<Digest>) -> Result<VersionedSource, Error> {
        if let (Some(expected), Some(found)) = (sha256, self.sha256) {
            compare(&self.shown, expected, found)?;
        }
        Ok(VersionedSource {
            sha256: sha256.or(self.sha256),
            ..self
        })
    }

    pub(super) fn part_table(&self) -> PartTable {
        let version = self.version.as_deref().unwrap_or_default();
        if self.is_whole {
            PartTable::of_one_part(self.source.nbytes(), version)
        } else {
            PartTable::new(self.source.nbytes(), version)
        }
    }
}

/// The SHA-256 that the Hub says a file has. Only the Hub means that by the header.
fn linked(source: &RemoteFile, backend: &str) -> Option<Digest> {
    let etag = (backend == "hf").then(|| source.linked_etag()).flatten()?;
    Digest::from_hex(Algorithm::Sha256, etag.trim_matches('"'))
}

/// The name of the file's bytes in the cache, and when they were written.
fn version(path: &Path) -> Option<String> {
    let path = fs::canonicalize(path).ok()?;
    let modified = fs::metadata(&path).ok()?.modified().ok()?;
    let modified = modified.duration_since(UNIX_EPOCH).ok()?.as_nanos();
    Some(format!("cache {}\n{modified}", path.display()))
}

pub(super) fn make_folder(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).map_err(|source| Error::Open {
        path: path.to_owned(),
        source,
    })
}

pub(super) fn compare(path: &Path, expected: Digest, found: Digest) -> Result<(), Error> {
    if expected == found {
        return Ok(());
    }
    Err(Error::Digest {
        path: Some(path.to_owned()),
        tensor: None,
        unequal: Box::new(Unequal {
            algorithm: Algorithm::Sha256,
            expected,
            found,
        }),
    })
}
