//! What a URL that is downloaded leads to: one file, or the index of a model and so its shards too.

use std::io::Read;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use ingot_format::{IndexReader, ShardIndex, to_u64, to_usize};

use super::compare;
use super::origin::{Origin, linked};
use crate::archive::open_source;
use crate::checkpoint::{in_parallel, index_of};
use crate::digest::{Algorithm, Digest};
use crate::error::Error;
use crate::payload::FileRange;
use crate::remote::checkpoint::{
    Door, Found, INDEX_START_NBYTES, cached_at, for_urls, refused, through_door,
};
use crate::remote::hub::{INDEX_FILE, MODEL_FILE};
use crate::remote::options::RemoteOptions;
use crate::remote::place::{Place, Remote};
use crate::remote::secrets::redacted;
use crate::remote::shards::AT_ONCE;
use crate::remote::source::RemoteSource;
use crate::remote::{header_limits, variable};
use crate::source::Source;
use crate::watch::Watch;
use crate::workers::Reading;

/// What the names of indexes end in. Any file may be downloaded, so the content decides nothing.
const INDEX_ENDING: &str = ".index.json";

/// What a URL leads to.
pub(super) enum Wanted {
    File(Found),
    Model(Box<Model>),
}

/// An index, which was read, and its shards, which were not.
pub(super) struct Model {
    door: Door,
    /// All bytes of the index.
    pub(super) bytes: Vec<u8>,
    /// The SHA-256 that it was found to have, where the Hub says one.
    pub(super) sha256: Option<Digest>,
    /// The names of the shards, in their order.
    pub(super) shards: Vec<String>,
    /// Whether the index came over a network.
    pub(super) is_remote: bool,
    beside: Beside,
}

/// Where the files beside an index are.
enum Beside {
    /// Beside this one, which is of one commit where it is one of the Hub. What the cache has of it is there too.
    Url(Box<Remote>),
    /// In a folder of the Hub's cache, and the Hub may not be asked.
    Folder(PathBuf),
}

/// Asks for the start of the file behind `url`, or for all of an index, or finds them on this machine.
pub(super) fn wanted(url: &str, options: &RemoteOptions, watch: &dyn Watch) -> Result<Wanted, Error> {
    through_door(url, options, &header_limits(), watch, |door| door.wanted(url))
}

/// Whether a file of this name is an index.
pub(super) fn is_index(name: &str) -> bool {
    name.ends_with(INDEX_ENDING)
}

impl Door {
    fn wanted(&self, url: &str) -> Result<Wanted, Error> {
        match self.place(url)? {
            Place::Cached(path, remote) if is_index(&path.to_string_lossy()) => {
                self.cached_model(&path, remote.map(|remote| *remote))
            }
            Place::Cached(path, _) => Ok(Wanted::File(Found::Cached(path))),
            Place::Remote(remote) if remote.hub.as_ref().is_some_and(|file| file.is_folder()) => {
                self.wanted_of_folder(&remote)
            }
            Place::Remote(remote) if is_index(&remote.home.path) => {
                let source = RemoteSource::begin(self.target(&remote), INDEX_START_NBYTES);
                let source = source.map_err(|fault| refused(&remote.shown, fault))?;
                self.model(*remote, &source, redacted(url))
            }
            Place::Remote(remote) => {
                let source = RemoteSource::of_whole(self.target(&remote));
                let source = source.map_err(|fault| refused(&remote.shown, fault))?;
                Ok(Wanted::File(file(&remote, source)))
            }
        }
    }

    /// The model of a folder of the Hub. One question more is nothing beside a download.
    fn wanted_of_folder(&self, folder: &Remote) -> Result<Wanted, Error> {
        let model = self.beside(folder, MODEL_FILE)?;
        let missing = match RemoteSource::of_whole(self.target(&model)) {
            Ok(source) => return Ok(Wanted::File(file(&model, source))),
            Err(fault) if fault.is_missing() => fault,
            Err(fault) => return Err(refused(&model.shown, fault)),
        };
        let index = self.beside(folder, INDEX_FILE)?;
        match RemoteSource::begin(self.target(&index), INDEX_START_NBYTES) {
            Ok(source) => {
                let shown = index.shown.clone();
                self.model(index, &source, shown)
            }
            Err(fault) if fault.is_missing() => Err(refused(&folder.shown, missing.and_not(INDEX_FILE))),
            Err(fault) => Err(refused(&index.shown, fault)),
        }
    }

    /// The model of the index that `source` is.
    fn model(&self, index: Remote, source: &RemoteSource, shown: String) -> Result<Wanted, Error> {
        let commit = source.commit();
        let cached = cached_at(&index, commit.as_deref());
        let sha256 = linked(source, index.backend);
        let index = index.at(commit);
        if let Some(path) = cached {
            return self.cached_model(&path, Some(index));
        }
        let mut bytes = vec![0; room(source.nbytes(), Path::new(&shown))?];
        source
            .all()
            .read_exact(&mut bytes)
            .map_err(|source| Error::Open {
                path: PathBuf::from(&shown),
                source,
            })?;
        if let Some(expected) = sha256 {
            compare(Path::new(&shown), expected, Algorithm::Sha256.digest(&bytes))?;
        }
        let model = Model {
            door: self.clone(),
            shards: for_urls(read(&bytes, Path::new(&shown))?, Path::new(&shown))?
                .shards()
                .to_vec(),
            bytes,
            sha256,
            is_remote: true,
            beside: Beside::Url(Box::new(index)),
        };
        Ok(Wanted::Model(Box::new(model)))
    }

    /// The model of an index in the Hub's cache, of which shards may be missing there.
    fn cached_model(&self, path: &Path, remote: Option<Remote>) -> Result<Wanted, Error> {
        let source = open_source(path)?;
        let range = FileRange::new(source.file(), 0, source.nbytes());
        let mut bytes = vec![0; room(source.nbytes(), path)?];
        range.read(0, &mut bytes).map_err(|source| Error::Open {
            path: path.to_owned(),
            source,
        })?;
        let folder = path.parent().map(Path::to_owned).unwrap_or_default();
        let index = match &remote {
            Some(_) => for_urls(read(&bytes, path)?, path)?,
            None => read(&bytes, path)?,
        };
        let model = Model {
            door: self.clone(),
            shards: index.shards().to_vec(),
            bytes,
            sha256: None,
            is_remote: false,
            beside: match remote {
                Some(remote) => Beside::Url(Box::new(remote)),
                None => Beside::Folder(folder),
            },
        };
        Ok(Wanted::Model(Box::new(model)))
    }
}

fn file(remote: &Remote, source: RemoteSource) -> Found {
    let cached = cached_at(remote, source.commit().as_deref());
    cached.map_or_else(|| Found::Remote(Box::new(source), remote.backend), Found::Cached)
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

/// An index. Names of shards that lead out of its folder are refused.
fn read(index: &[u8], path: &Path) -> Result<ShardIndex, Error> {
    index_of(index, to_u64(index.len()), path)
}

impl Model {
    /// Where each shard comes from. Of each the start is asked for, of many at once.
    pub(super) fn origins(
        &self,
        threads: Option<NonZeroUsize>,
        options: &RemoteOptions,
        watch: &dyn Watch,
    ) -> Result<Vec<Origin>, Error> {
        let at_once = threads.map_or(AT_ONCE, |threads| threads.get().min(AT_ONCE));
        let numbers: Vec<usize> = (0..self.shards.len()).collect();
        let origin = |number: usize| self.origin(&self.shards[number], options);
        let origins = in_parallel(Reading::waiting(at_once), &numbers, origin, watch);
        self.door.rest();
        origins
    }

    fn origin(&self, shard: &str, options: &RemoteOptions) -> Result<Origin, Error> {
        let index = match &self.beside {
            Beside::Url(index) => index,
            Beside::Folder(folder) => return Origin::cached(&folder.join(shard)),
        };
        let remote = self.door.beside(index, shard)?;
        if let Some(path) = remote.hub.as_ref().and_then(|file| file.cached(&variable)) {
            return Origin::cached(&path);
        }
        let source = RemoteSource::of_many(self.door.target(&remote));
        let source = source.map_err(|fault| refused(&remote.shown, fault))?;
        Ok(Origin::remote(
            source,
            remote.backend,
            remote.shown.into(),
            options,
        ))
    }
}
