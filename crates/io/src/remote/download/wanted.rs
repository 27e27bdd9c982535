//! The source of a download: one file, or the index of a model and its shards.

use std::fs;
use std::io::Read;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use ingot_format::{IndexReader, StopFlag, to_u64, to_usize};
use ingot_remote::{Location, Remote, RemoteFile, RemoteOptions};

use super::part_table::PartTable;
use crate::checkpoint::folder::index_of;
use crate::digest::{Algorithm, Digest, Unequal};
use crate::error::{Error, Failure, unopened};
use crate::file::{LocalFile, ReadAt};
use crate::options::{Replace, SaveOptions};
use crate::payload::FileRange;
use crate::remote::session::{AT_ONCE, Session, for_urls, header_limits, in_session, refused};
use crate::watch::Watch;
use crate::workers::{Reading, in_parallel};

/// Options of a download.
///
/// ```
/// use std::num::NonZeroUsize;
///
/// use ingot_io::{DownloadOptions, Replace, SaveOptions};
///
/// let options = DownloadOptions::new()
///     .threads(NonZeroUsize::new(8))
///     .save(SaveOptions::new().replace(Replace::Atomic));
/// assert_eq!(options.save.replace, Replace::Atomic);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DownloadOptions {
    /// Number of parts of all files that are fetched at once; by default as for reading.
    pub threads: Option<NonZeroUsize>,
    /// How the files are written. Existing files are replaced atomically, or not at all.
    pub save: SaveOptions,
    /// The expected SHA-256 of a single file. It is rejected for a model with shards.
    pub sha256: Option<Digest>,
}

impl DownloadOptions {
    /// Return the defaults: existing files are refused, and the download is durable.
    #[must_use]
    pub const fn new() -> DownloadOptions {
        DownloadOptions {
            threads: None,
            save: SaveOptions::new().replace(Replace::Nothing),
            sha256: None,
        }
    }

    /// Set the number of parts that are fetched at once; `None` for the default.
    #[must_use]
    pub fn threads(mut self, threads: impl Into<Option<NonZeroUsize>>) -> DownloadOptions {
        self.threads = threads.into();
        self
    }

    /// Set how the files are written.
    #[must_use]
    pub const fn save(mut self, save: SaveOptions) -> DownloadOptions {
        self.save = save;
        self
    }

    /// Set the expected SHA-256; `None` for any.
    #[must_use]
    pub fn sha256(mut self, sha256: impl Into<Option<Digest>>) -> DownloadOptions {
        self.sha256 = sha256.into();
        self
    }
}

impl Default for DownloadOptions {
    fn default() -> DownloadOptions {
        DownloadOptions::new()
    }
}

/// A file that was downloaded, or a model with its files.
///
/// ```no_run
/// use std::path::Path;
///
/// use ingot_io::{DownloadOptions, RemoteOptions, Unwatched, download};
///
/// let (remote, how) = (RemoteOptions::default(), DownloadOptions::new());
/// let model = download("hf://openai-community/gpt2", Path::new("gpt2/"), &remote, &how, &Unwatched)?;
/// println!("{}: {} bytes, {} of them fetched", model.path.display(), model.nbytes, model.fetched_nbytes);
/// # Ok::<(), ingot_io::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Downloaded {
    /// The path of the file, or of the index of a model.
    pub path: PathBuf,
    /// The size in bytes, of all files together.
    pub nbytes: u64,
    /// Bytes that were fetched over the network. Fewer than all if an earlier call fetched some of them.
    pub fetched_nbytes: u64,
    /// The SHA-256, if the caller or the Hub named the expected one.
    pub sha256: Option<Digest>,
    /// The files of a model: the shards in the order of their names, then the index. Empty for a single file.
    pub files: Vec<Downloaded>,
}

/// The ending of the names of indexes. Any file may be downloaded, so the content does not decide.
const INDEX_ENDING: &str = ".index.json";

/// The source behind a URL.
pub(super) enum Downloadable {
    /// A file in a cache of this machine.
    Cached(PathBuf),
    Remote(VersionedSource),
    Model(Box<RemoteModel>),
}

/// An index that was read, and its shards, which were not opened yet.
pub(super) struct RemoteModel {
    session: Session<'static>,
    /// All bytes of the index.
    pub(super) bytes: Vec<u8>,
    /// The SHA-256 of the index, which was compared with the Hub's.
    pub(super) sha256: Option<Digest>,
    /// The names of the shards, in their order.
    pub(super) shards: Vec<String>,
    /// Whether the index was fetched over a network.
    pub(super) is_remote: bool,
    beside: ShardBase,
}

/// The folder of the shards.
enum ShardBase {
    /// The folder of this file. On the Hub, the URL names one commit. Shards in the Hub's cache are read from there.
    Url(Box<Remote>),
    /// A folder of the Hub's cache, without requests to the Hub.
    Folder(PathBuf),
}

/// Open the file behind `url`, or read the index, or find them on this machine.
pub(super) fn wanted(url: &str, options: &RemoteOptions, watch: &dyn Watch) -> Result<Downloadable, Error> {
    in_session(url, options, &header_limits(), watch, |session| {
        session.wanted(url)
    })
}

/// Whether a file with this name is an index.
pub(super) fn is_index(name: &str) -> bool {
    name.ends_with(INDEX_ENDING)
}

impl Session<'_> {
    fn wanted(&self, url: &str) -> Result<Downloadable, Error> {
        let remote = match self.locate(url)? {
            Location::Cached(path, remote) if is_index(&path.to_string_lossy()) => {
                return self.cached_model(&path, remote.map(|remote| *remote));
            }
            Location::Cached(path, _) => return Ok(Downloadable::Cached(path)),
            Location::Remote(remote) => *remote,
        };
        let is_index = is_index(remote.path());
        let (remote, source, is_index) = self.find(remote, is_index, &RemoteFile::of_whole)?;
        let cached = remote.cached_at(source.commit().as_deref());
        match cached {
            Some(path) if is_index => self.cached_model(&path, Some(remote.at(source.commit()))),
            Some(path) => Ok(Downloadable::Cached(path)),
            None if is_index => self.model(remote, &source),
            None => Ok(Downloadable::Remote(self.versioned(source, remote))),
        }
    }

    fn versioned(&self, source: RemoteFile, remote: Remote) -> VersionedSource {
        let retries = self.options().retries;
        let sha256 = linked(&source, &remote);
        // The Hub has the same bytes at many URLs, one for each commit.
        let version = sha256.map(|digest| format!("sha256 {digest}"));
        VersionedSource {
            version: version.or_else(|| source.version()),
            sha256,
            is_remote: true,
            whole: source.is_whole().then_some(retries),
            source: Box::new(source),
            shown: remote.shown.into(),
        }
    }

    /// Return the model of the index `source`.
    fn model(&self, index: Remote, source: &RemoteFile) -> Result<Downloadable, Error> {
        let path = PathBuf::from(&index.shown);
        let sha256 = linked(source, &index);
        let mut bytes = vec![0; index_nbytes(source.nbytes(), &path)?];
        let read = source.all(self.stop).read_exact(&mut bytes);
        read.map_err(unopened(&path))?;
        if let Some(expected) = sha256 {
            compare(&path, expected, Algorithm::Sha256.digest(&bytes))?;
        }
        let beside = ShardBase::Url(Box::new(index.at(source.commit())));
        let mut model = self.indexed(&path, bytes, beside)?;
        (model.sha256, model.is_remote) = (sha256, true);
        Ok(Downloadable::Model(Box::new(model)))
    }

    /// Return the model of an index in the Hub's cache, which may lack shards.
    fn cached_model(&self, path: &Path, remote: Option<Remote>) -> Result<Downloadable, Error> {
        let source = LocalFile::open(path)?;
        let range = FileRange::of_local(&source, 0, source.nbytes());
        let mut bytes = vec![0; index_nbytes(source.nbytes(), path)?];
        range.read(0, &mut bytes).map_err(unopened(path))?;
        let beside = match remote {
            Some(remote) => ShardBase::Url(Box::new(remote)),
            None => ShardBase::Folder(path.parent().map(Path::to_owned).unwrap_or_default()),
        };
        let model = self.indexed(path, bytes, beside)?;
        Ok(Downloadable::Model(Box::new(model)))
    }

    /// Return the model of an index that was read from `path`. Names of shards outside its folder are rejected.
    fn indexed(&self, path: &Path, bytes: Vec<u8>, beside: ShardBase) -> Result<RemoteModel, Error> {
        let mut index = index_of(&bytes[..], to_u64(bytes.len()), path)?;
        if let ShardBase::Url(_) = &beside {
            index = for_urls(index, path)?;
        }
        Ok(RemoteModel {
            session: self.with_stop(StopFlag::never()),
            shards: index.shards().to_vec(),
            bytes,
            sha256: None,
            is_remote: false,
            beside,
        })
    }
}

/// Return the size of an index, if it is within the limit.
fn index_nbytes(nbytes: u64, path: &Path) -> Result<usize, Error> {
    match IndexReader::new(nbytes) {
        Ok(_) => Ok(to_usize(nbytes).unwrap_or(usize::MAX)),
        Err(fault) => Err(Failure::Index(fault).about(Some(path), None)),
    }
}

impl RemoteModel {
    /// Open all shards, many at once, with a request for the start of each.
    pub(super) fn sources(
        &self,
        threads: Option<NonZeroUsize>,
        watch: &dyn Watch,
    ) -> Result<Vec<VersionedSource>, Error> {
        let at_once = threads.map_or(AT_ONCE, |threads| threads.get().min(AT_ONCE));
        let numbers: Vec<usize> = (0..self.shards.len()).collect();
        let source = |number: usize, stop: StopFlag<'_>| self.source(&self.shards[number], stop);
        let sources = in_parallel(Reading::on(at_once).waiting(true), &numbers, source, watch);
        self.session.rest();
        sources
    }

    fn source(&self, shard: &str, stop: StopFlag<'_>) -> Result<VersionedSource, Error> {
        let index = match &self.beside {
            ShardBase::Url(index) => index,
            ShardBase::Folder(folder) => return VersionedSource::cached(&folder.join(shard)),
        };
        let remote = self.session.beside(index, shard)?;
        if let Some(path) = remote.cached() {
            return VersionedSource::cached(&path);
        }
        match RemoteFile::of_many(self.session.resource(&remote), stop) {
            Ok(source) => Ok(self.session.versioned(source, remote)),
            Err(fault) => Err(refused(&remote.shown, fault)),
        }
    }
}

/// A source of one version.
pub(super) struct VersionedSource {
    pub(super) source: Box<dyn ReadAt>,
    /// The name in errors.
    pub(super) shown: PathBuf,
    /// A text that no other version has; `None` if versions cannot be distinguished.
    pub(super) version: Option<String>,
    /// The expected SHA-256.
    pub(super) sha256: Option<Digest>,
    /// Whether it is fetched over a network.
    pub(super) is_remote: bool,
    /// For a file that can only be fetched whole, how often it is started again after a failure.
    pub(super) whole: Option<u32>,
}

impl VersionedSource {
    /// Return a file of the Hub's cache.
    fn cached(path: &Path) -> Result<VersionedSource, Error> {
        Ok(VersionedSource {
            source: Box::new(LocalFile::open_one_of_many(path)?),
            shown: path.to_owned(),
            version: version(path),
            sha256: None,
            is_remote: false,
            whole: None,
        })
    }

    /// Set the SHA-256 that the caller expects. It must equal the Hub's.
    pub(super) fn expect(&mut self, sha256: Option<Digest>) -> Result<(), Error> {
        if let (Some(expected), Some(found)) = (sha256, self.sha256) {
            compare(&self.shown, expected, found)?;
        }
        self.sha256 = sha256.or(self.sha256);
        Ok(())
    }

    pub(super) fn part_table(&self) -> PartTable {
        let version = self.version.as_deref().unwrap_or_default();
        match self.whole {
            Some(_) => PartTable::of_one_part(self.source.nbytes(), version),
            None => PartTable::new(self.source.nbytes(), version),
        }
    }
}

/// Return the SHA-256 of a file that the Hub names in a header. Other servers use that header for other values.
fn linked(source: &RemoteFile, remote: &Remote) -> Option<Digest> {
    let etag = source.linked_etag().filter(|_| remote.backend == "hf")?;
    Digest::from_hex(Algorithm::Sha256, etag.trim_matches('"'))
}

/// Return the version of a file in the cache: its path there, and when it was written.
fn version(path: &Path) -> Option<String> {
    let path = fs::canonicalize(path).ok()?;
    let modified = fs::metadata(&path).ok()?.modified().ok()?;
    let modified = modified.duration_since(UNIX_EPOCH).ok()?.as_nanos();
    Some(format!("cache {}\n{modified}", path.display()))
}

pub(super) fn make_folder(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).map_err(unopened(path))
}

pub(super) fn compare(path: &Path, expected: Digest, found: Digest) -> Result<(), Error> {
    if expected == found {
        return Ok(());
    }
    let unequal = Unequal {
        algorithm: Algorithm::Sha256,
        expected,
        found,
    };
    Err(Failure::Digest(unequal).about(Some(path), None))
}
