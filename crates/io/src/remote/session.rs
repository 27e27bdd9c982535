//! Opening what is behind a URL: one file, or the shards of an index.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ingot_format::{Foreign, FormatError, Header, Limits, ShardIndex, StopFlag, to_u64};
use ingot_remote::{
    Client, Fault, INDEX_FILE, Location, MODEL_FILE, READS_AT_ONCE, Remote, RemoteFile, RemoteOptions,
    Resource, START_NBYTES, local_path, redacted, told_region,
};

use super::source;
use crate::checkpoint::folder::index_of;
use crate::checkpoint::{Backing, Checkpoint, Shards, Store, read_index};
use crate::error::{CheckpointFault, Error, Failure};
use crate::file::{Archive, LocalFile, ShardHeader, ShardHeaders};
use crate::options::{Backend, CheckpointOptions, OpenOptions, Reach};
use crate::watch::Watch;
use crate::workers::{Reading, share, watched};

/// Bytes that the first request for an index asks for. All of it is wanted, so that only the largest, of some 150,000
/// tensors, need a second one.
const INDEX_START_NBYTES: u64 = 16 << 20;

/// Headers that are asked for at once. Each is a round trip, or where a host redirects to another one to each: of so
/// many, half then wait for either host.
pub(super) const AT_ONCE: usize = 96;

/// Bytes of a header beside the names of its tensors: what the usual writers take for the rest of one, and more than
/// most take for the metadata.
const TENSOR_NBYTES: u64 = 112;
const METADATA_NBYTES: u64 = 4 << 10;

/// The least that is asked for, which takes no longer than less of it, and the most: what the index says of a shard is
/// not proven.
const LEAST_NBYTES: u64 = 8 << 10;
const MOST_NBYTES: u64 = 1 << 20;

/// The longest header that is fetched where nobody says otherwise. It is what the Hub's own clients take.
pub const REMOTE_HEADER_NBYTES: u64 = 25_000_000;

/// Those limits, where nobody says otherwise.
pub(crate) fn header_limits() -> Limits {
    Limits {
        header_nbytes: REMOTE_HEADER_NBYTES,
        ..Limits::default()
    }
}

/// Why a file that a URL names is read from the disk.
const CACHED: &str = "the Hub's local cache has this version";

/// Why a file is read as a remote one is.
const REMOTE: &str = "a URL";

impl Checkpoint {
    /// Opens what is behind a URL: a file of tensors, or the shards of an index, which lie beside it. No tensor is read.
    /// `http://`, `https://`, `hf://`, `s3://`, `gs://`, `az://` and `file://` are known, and pages of the Hub. A repository of the
    /// Hub stands for its `model.safetensors`, or for its `model.safetensors.index.json`; both are asked for at once.
    ///
    /// Opening a file takes one request, or two where its header is long; opening an index one, or two where that is,
    /// and none for its shards, each of which takes one when it is first needed. The shards of a repository of the Hub
    /// are those of the commit that the index was of.
    ///
    /// What the Hub's clients have in their cache is read from there.
    ///
    /// ```
    /// use ingot_format::Limits;
    /// use ingot_io::{Checkpoint, Dtype, RemoteOptions, TensorView, Unwatched, serialize_to_file};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("model.safetensors");
    /// serialize_to_file([("bias", &TensorView::new(Dtype::F32, vec![2], b"12345678")?)], None, &path)?;
    ///
    /// // Or `hf://owner/repo`, `s3://bucket/model.safetensors`, …
    /// let url = format!("file://{}", path.display());
    /// let model = Checkpoint::open_url(&url, &RemoteOptions::default(), &Limits::default(), &Unwatched)?;
    /// assert_eq!(model.find("bias")?.entry().shape, [2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Open`] with a [`Fault`] inside, whose kind is that of a file which is missing or not to be read where
    /// the server says so; [`Error::Header`]; [`Error::Index`]; [`Error::Interrupted`].
    pub fn open_url(
        url: &str,
        options: &RemoteOptions,
        limits: &Limits,
        watch: &dyn Watch,
    ) -> Result<Checkpoint, Error> {
        Checkpoint::open_url_with(url, options, limits, ShardHeaders::default(), watch)
    }

    /// As [`Checkpoint::open_url`], with the headers that another process read ([`Checkpoint::shard_headers`]). The first
    /// request is for a tensor, and fails if the file has another version.
    ///
    /// # Errors
    /// As [`Checkpoint::open_url`].
    #[doc(hidden)]
    pub fn open_url_with(
        url: &str,
        options: &RemoteOptions,
        limits: &Limits,
        headers: ShardHeaders,
        watch: &dyn Watch,
    ) -> Result<Checkpoint, Error> {
        let mut options = options.clone();
        if options.region.is_none() {
            let told = headers
                .files
                .first()
                .and_then(|header| told_region(&header.version));
            options.region = told.map(ToOwned::to_owned);
        }
        if let Some(path) = local_path(url) {
            let path = path.map_err(|fault| refused(&redacted(url), fault))?;
            let open = OpenOptions {
                backend: Backend::Auto,
                limits: *limits,
            };
            let reach = Reach::FollowLinks;
            return Checkpoint::open(&path, &CheckpointOptions { open, reach });
        }
        let headers = Arc::new(headers);
        in_session(url, &options, limits, watch, |session| {
            session.knowing(&headers).open(url)
        })
    }
}

/// A file of whatever kind that a URL leads to.
pub(super) enum UrlFile {
    Cached(PathBuf),
    /// With what it is asked with.
    Remote(Box<RemoteFile>, &'static str),
}

/// Asks for the start of the file behind `url`, as `begin` does that, or finds it on this machine.
pub(super) fn url_file(
    url: &str,
    options: &RemoteOptions,
    begin: &(dyn Fn(Resource, StopFlag<'_>) -> Result<RemoteFile, Fault> + Sync),
    watch: &dyn Watch,
) -> Result<UrlFile, Error> {
    in_session(url, options, &header_limits(), watch, |session| {
        session.url_file(url, begin)
    })
}

/// What `open` makes of a session. It is tried again where a server says that it has to be another.
pub(super) fn in_session<T: Send>(
    url: &str,
    options: &RemoteOptions,
    limits: &Limits,
    watch: &dyn Watch,
    open: impl Fn(&Session<'_>) -> Result<T, Error> + Send + Sync,
) -> Result<T, Error> {
    // A bucket of S3 lies in one region, and who asks in another is told in which.
    let open_in_region = |stop: StopFlag<'_>| match open(&Session::new(options, limits, stop)) {
        Err(error) if options.region.is_none() && region_of(&error).is_some() => {
            let mut options = options.clone();
            options.region = region_of(&error).map(ToOwned::to_owned);
            open(&Session::new(&options, limits, stop))
        }
        opened => opened,
    };
    let opened = watched(true, open_in_region, watch);
    opened.map_err(|failure| failure.about(Some(Path::new(&redacted(url))), None))?
}

fn region_of(error: &Error) -> Option<&str> {
    match error {
        Error::Open { source, .. } => Fault::of(source)?.region(),
        _ => None,
    }
}

/// Opens files behind URLs: one client, with its connections, for all that one URL leads to.
#[derive(Clone, Debug)]
pub(crate) struct Session<'f> {
    client: Arc<Client>,
    limits: Limits,
    /// Headers that another process read.
    headers: Arc<ShardHeaders>,
    pub(super) stop: StopFlag<'f>,
}

impl<'f> Session<'f> {
    fn new(options: &RemoteOptions, limits: &Limits, stop: StopFlag<'f>) -> Session<'f> {
        Session {
            client: Arc::new(Client::new(options.clone())),
            limits: *limits,
            headers: Arc::default(),
            stop,
        }
    }

    /// The same, of what another process has opened.
    fn knowing(&self, headers: &Arc<ShardHeaders>) -> Session<'f> {
        Session {
            headers: Arc::clone(headers),
            ..self.clone()
        }
    }

    /// The same for work that heeds another flag.
    pub(super) fn heeding<'g>(&self, stop: StopFlag<'g>) -> Session<'g> {
        Session {
            client: Arc::clone(&self.client),
            limits: self.limits,
            headers: Arc::clone(&self.headers),
            stop,
        }
    }

    fn open(&self, url: &str) -> Result<Checkpoint, Error> {
        match self.locate(url)? {
            Location::Cached(path, remote) => self.cached(&path, remote.map(|remote| *remote)),
            Location::Remote(remote) => match self.told(&remote)? {
                Some(told) => Ok(told),
                None => self.asked(*remote),
            },
        }
    }

    fn asked(&self, remote: Remote) -> Result<Checkpoint, Error> {
        if remote.is_folder() {
            return self.model_of(&remote);
        }
        let refused = |fault| refused(&remote.shown, fault);
        if remote.is_index() {
            let source = self.index_file(&remote, self.stop).map_err(refused)?;
            return self.index(remote, source);
        }
        let source = self.source(&remote, START_NBYTES).map_err(refused)?;
        self.content(remote, source)
    }

    /// What another process has opened, where it has: nothing is asked for. Its files may have been of another kind, such as
    /// those of a cache.
    fn told(&self, remote: &Remote) -> Result<Option<Checkpoint>, Error> {
        let file = |name| {
            if remote.is_folder() {
                self.beside(remote, name)
            } else {
                Ok(remote.clone())
            }
        };
        if let Some((index, version)) = self.headers.of_index() {
            let file = file(INDEX_FILE)?;
            let (resource, nbytes) = (self.resource(&file), to_u64(index.len()));
            let source = RemoteFile::known(resource, nbytes, version, index.to_owned());
            return source.map(|source| self.index(file, source)).transpose();
        }
        let Some(only) = self.headers.of_file() else {
            return Ok(None);
        };
        let mut model = file(MODEL_FILE)?;
        model.shown.clone_from(&remote.shown);
        let source = self.known(&model, only);
        source.map(|source| self.content(model, source)).transpose()
    }

    /// A file of tensors that another process has opened.
    fn known(&self, remote: &Remote, header: &ShardHeader) -> Option<RemoteFile> {
        let start = header.bytes.clone();
        RemoteFile::known(self.resource(remote), header.nbytes, &header.version, start)
    }

    pub(super) fn locate(&self, url: &str) -> Result<Location, Error> {
        let location = Location::find(url, self.client.options(), self.stop);
        location.map_err(|fault| refused(&redacted(url), fault))
    }

    /// The file that `url` names; of a repository of the Hub that with its model.
    fn url_file(
        &self,
        url: &str,
        begin: &(dyn Fn(Resource, StopFlag<'_>) -> Result<RemoteFile, Fault> + Sync),
    ) -> Result<UrlFile, Error> {
        let remote = match self.locate(url)? {
            Location::Cached(path, _) => return Ok(UrlFile::Cached(path)),
            Location::Remote(remote) if remote.is_folder() => self.beside(&remote, MODEL_FILE)?,
            Location::Remote(remote) => *remote,
        };
        let source =
            begin(self.resource(&remote), self.stop).map_err(|fault| refused(&remote.shown, fault))?;
        let cached = remote.cached_at(source.commit().as_deref());
        Ok(cached.map_or_else(
            || UrlFile::Remote(Box::new(source), remote.backend),
            UrlFile::Cached,
        ))
    }

    /// The file `name` beside this one.
    pub(super) fn beside(&self, remote: &Remote, name: &str) -> Result<Remote, Error> {
        let beside = remote.beside(name, self.client.options());
        beside.map_err(|fault| refused(&remote.shown, fault))
    }

    /// A file of tensors.
    fn source(&self, remote: &Remote, start_nbytes: u64) -> Result<RemoteFile, Fault> {
        source::open(self.resource(remote), start_nbytes, &self.limits, self.stop)
    }

    /// An index, or the start of a long one.
    pub(super) fn index_file(&self, remote: &Remote, stop: StopFlag<'_>) -> Result<RemoteFile, Fault> {
        RemoteFile::begin(self.resource(remote), INDEX_START_NBYTES, stop)
    }

    pub(super) fn resource(&self, remote: &Remote) -> Resource {
        Resource::new(&self.client, remote)
    }

    /// The model of a folder of the Hub. Both files that it can be are asked for at once: nobody knows which it is, and
    /// one after the other would take twice as long.
    fn model_of(&self, folder: &Remote) -> Result<Checkpoint, Error> {
        let mut model = self.beside(folder, MODEL_FILE)?;
        model.shown.clone_from(&folder.shown);
        let index = self.beside(folder, INDEX_FILE)?;
        let found = [Mutex::new(None), Mutex::new(None)];
        let ask = |number: usize, stop: StopFlag<'_>| {
            let opened = match number {
                0 => self.heeding(stop).source(&model, START_NBYTES),
                _ => self.index_file(&index, stop),
            };
            let is_model = number == 0 && opened.is_ok();
            *found[number].lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
            match is_model {
                // Nobody wants the index any more.
                true => Err(Failure::Interrupted),
                false => Ok(0),
            }
        };
        // What becomes of each is in its slot.
        let _ = share(Reading::waiting(2), vec![0, 1], 0, ask, &self.stop);
        let found = found.map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner));
        let fault = match found {
            [Some(Ok(source)), _] => return self.content(model, source),
            [Some(Err(fault)), Some(Ok(source))] if fault.is_missing() => {
                return self.index(index, source);
            }
            [Some(Err(fault)), Some(Err(other))] if fault.is_missing() => {
                if other.is_missing() {
                    fault.and_not(INDEX_FILE)
                } else {
                    other
                }
            }
            [Some(Err(fault)), _] => fault,
            [None, _] => return Err(Error::Interrupted),
        };
        Err(refused(&folder.shown, fault))
    }

    /// Whatever `source` turns out to be.
    fn content(&self, remote: Remote, source: RemoteFile) -> Result<Checkpoint, Error> {
        let commit = source.commit();
        if let Some(path) = remote.cached_at(commit.as_deref()) {
            return self.cached(&path, Some(remote.at(commit)));
        }
        match self.header(&remote, &source) {
            Err(error) if is_index(&error) => self.index(remote, source),
            header => Ok(archive(remote, header?, source).into()),
        }
    }

    /// A shard. What came with its header is not kept: there may be many.
    fn shard(&self, remote: Remote, number: usize, start_nbytes: u64) -> Result<Archive, Error> {
        if let Some(path) = remote.cached() {
            return self.cached_file(&path);
        }
        let known = self.headers.of_shard(number);
        let mut source = match known.and_then(|header| self.known(&remote, header)) {
            Some(source) => source,
            None => {
                let source = self.source(&remote, start_nbytes);
                source.map_err(|fault| refused(&remote.shown, fault))?
            }
        };
        let header = self.header(&remote, &source)?;
        source.let_go();
        Ok(archive(remote, header, source))
    }

    /// Keeps no more connections than reading tensors takes: opening shards takes more, which would stay open as long as
    /// the handle.
    pub(super) fn rest(&self) {
        self.client.close_idle(READS_AT_ONCE);
    }

    fn header(&self, remote: &Remote, source: &RemoteFile) -> Result<Header, Error> {
        source::header(source, &self.limits).map_err(|fault| Error::Header {
            path: Some(remote.shown.clone().into()),
            fault,
        })
    }

    /// The shards of the index that `source` is.
    fn index(&self, remote: Remote, source: RemoteFile) -> Result<Checkpoint, Error> {
        let commit = source.commit();
        let cached = remote.cached_at(commit.as_deref());
        let remote = remote.at(commit);
        if let Some(path) = cached {
            return self.cached(&path, Some(remote));
        }
        let path = PathBuf::from(&remote.shown);
        let nbytes = source.nbytes();
        let index = index_of(source.all(self.stop), nbytes, &path)?;
        self.shards(path, index, remote)
    }

    /// The shards of `index`, which was read at `path` and lies at `remote`.
    fn shards(&self, path: PathBuf, index: ShardIndex, remote: Remote) -> Result<Checkpoint, Error> {
        let index = for_urls(index, &path)?;
        let store = RemoteShards {
            session: self.heeding(StopFlag::never()),
            index: remote,
        };
        Ok(Checkpoint::of_shards(Shards::new(path, index), Box::new(store)))
    }

    /// What is in the Hub's cache at `path`: a file, or an index, whose shards are had from the Hub where one is missing.
    fn cached(&self, path: &Path, remote: Option<Remote>) -> Result<Checkpoint, Error> {
        let options = CheckpointOptions {
            open: self.local(),
            reach: Reach::FollowLinks,
        };
        match (Checkpoint::open(path, &options), remote) {
            (
                Err(Error::Checkpoint {
                    fault: CheckpointFault::MissingShards { .. },
                    ..
                }),
                Some(remote),
            ) => self.shards(path.to_owned(), read_index(path)?, remote),
            (opened, _) => Ok(opened?.because(CACHED)),
        }
    }

    fn cached_file(&self, path: &Path) -> Result<Archive, Error> {
        Archive::of_file(LocalFile::open_one_of_many(path)?, path, &self.local(), None)
    }

    fn local(&self) -> OpenOptions {
        OpenOptions {
            backend: Backend::Auto,
            limits: self.limits,
        }
    }
}

/// Shards behind URLs: beside their index, and of the same commit where it is one of the Hub.
#[derive(Debug)]
struct RemoteShards {
    session: Session<'static>,
    index: Remote,
}

impl Store for RemoteShards {
    fn path(&self, name: &str) -> PathBuf {
        let beside = self.session.beside(&self.index, name);
        beside.map_or_else(|_| name.into(), |remote| remote.shown.into())
    }

    /// With one request where the header is about as long as the index lets expect.
    fn open(&self, shards: &Shards, number: usize, stop: StopFlag<'_>) -> Result<Archive, Error> {
        let remote = self.session.beside(&self.index, shards.name(number))?;
        let entries = shards
            .tensors(number)
            .map(|name| to_u64(name.len()) + TENSOR_NBYTES);
        let expected = METADATA_NBYTES + entries.sum::<u64>();
        let session = self.session.heeding(stop);
        session.shard(remote, number, expected.clamp(LEAST_NBYTES, MOST_NBYTES))
    }

    fn reading(&self) -> Reading {
        Reading::waiting(AT_ONCE)
    }

    fn rest(&self) {
        self.session.rest();
    }

    fn backing(&self, shards: &Shards) -> Option<Backing> {
        Some(Backing {
            format: shards.format(),
            backend: self.index.backend,
            why: REMOTE.to_owned(),
        })
    }
}

/// An index whose names of shards may become parts of URLs.
pub(super) fn for_urls(index: ShardIndex, path: &Path) -> Result<ShardIndex, Error> {
    let path = path.to_owned();
    match index.check_in_urls() {
        Ok(()) => Ok(index),
        Err(fault) => Err(Error::Index { path, fault }),
    }
}

fn archive(remote: Remote, header: Header, source: RemoteFile) -> Archive {
    Archive {
        path: Some(remote.shown.into()),
        header,
        source: Arc::new(source),
        local: None,
        backend: remote.backend,
        why: REMOTE.into(),
    }
}

pub(super) fn refused(shown: &str, fault: Fault) -> Error {
    Error::Open {
        path: shown.into(),
        source: fault.into(),
    }
}

fn is_index(error: &Error) -> bool {
    matches!(
        error,
        Error::Header {
            fault: FormatError::Foreign {
                kind: Foreign::IndexJson,
                ..
            },
            ..
        }
    )
}
