//! Opening a URL: one file, or the shards of an index.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use ingot_format::{Foreign, FormatError, Header, Limits, ShardIndex, StopFlag, to_u64};
use ingot_remote::{
    Client, Fault, INDEX_FILE, Location, MODEL_FILE, READS_AT_ONCE, Remote, RemoteFile, RemoteOptions,
    Resource, START_NBYTES, described_region, local_path, redacted,
};

use super::cache::{Cache, CachedFile, Version};
use super::source;
use crate::checkpoint::folder::{index_of, read_index};
use crate::checkpoint::{Checkpoint, Shards, Store};
use crate::error::{CheckpointFault, Error, Failure, unopened};
use crate::file::{Archive, LocalFile, Origin, ReadAt};
use crate::options::{CheckpointOptions, OpenOptions, ShardHeader, ShardHeaders};
use crate::watch::Watch;
use crate::workers::{Reading, share, watched};

/// Bytes of the first request for an index. All of the index is needed, and only the indexes of more than about 150,000
/// tensors need a second request.
const INDEX_START_NBYTES: u64 = 16 << 20;

/// Headers that are requested at once. Each takes a round trip, or a round trip to each of two hosts after a redirect, in
/// which case half of these requests wait for either host.
pub(super) const AT_ONCE: usize = 96;

/// Estimated bytes of a header for each tensor, besides its name, and for the metadata: as much as the usual writers need
/// for the first, and more than most need for the second.
const TENSOR_NBYTES: u64 = 112;
const METADATA_NBYTES: u64 = 4 << 10;

/// Bounds of the first request for a shard. A smaller request takes as long, and the estimate depends on the index, which
/// is not verified.
const LEAST_NBYTES: u64 = 8 << 10;
const MOST_NBYTES: u64 = 1 << 20;

/// Largest header of a remote file by default, in bytes. The Hub's own clients use the same limit.
pub const REMOTE_HEADER_NBYTES: u64 = 25_000_000;

/// Return the default limits of remote files.
pub(crate) fn header_limits() -> Limits {
    Limits {
        header_nbytes: REMOTE_HEADER_NBYTES,
        ..Limits::default()
    }
}

/// The reason why the file of a URL is read from the disk.
const CACHED: &str = "the Hub's local cache has this version";

/// The reason for the backend of a remote file.
const REMOTE: &str = "a URL";

impl Checkpoint {
    /// Open the file or the sharded checkpoint behind a URL. No tensor is read.
    ///
    /// The schemes are `http://`, `https://`, `hf://`, `s3://`, `gs://`, `az://` and `file://`. Pages of the Hub are
    /// accepted too. An index is opened with its shards beside it. A repository of the Hub, and a folder of a store, whose
    /// URL ends in a slash, mean their `model.safetensors` or `model.safetensors.index.json`; both are requested at once.
    ///
    /// A file takes one request, or two if its header is long. An index takes one, or two if it is long. Each shard takes
    /// one when it is first needed. The shards of a repository of the Hub are of the commit of the index. Files in the
    /// cache of the Hub's clients are read from there.
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
    /// [`Failure::Open`], which contains a [`Fault`]. The kind of its [`io::Error`](std::io::Error) is `NotFound` or
    /// `PermissionDenied` if the server says so. Also [`Failure::Header`], [`Failure::Index`] and [`Failure::Interrupted`].
    pub fn open_url(
        url: &str,
        options: &RemoteOptions,
        limits: &Limits,
        watch: &dyn Watch,
    ) -> Result<Checkpoint, Error> {
        Checkpoint::open_url_with(url, options, limits, ShardHeaders::default(), watch)
    }

    /// Open a URL as [`Checkpoint::open_url`] does, with the headers that another process read
    /// ([`Checkpoint::shard_headers`]). The first request is for a tensor, and fails if the file has another version.
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
            let first = headers.files.first();
            let region = first.and_then(|header| described_region(&header.version));
            options.region = region.map(ToOwned::to_owned);
        }
        if let Some(path) = local_path(url) {
            let path = path.map_err(|fault| refused(&redacted(url), fault))?;
            return Checkpoint::open(&path, &local(limits));
        }
        let headers = Arc::new(headers);
        in_session(url, &options, limits, watch, |session| {
            let mut session = session.clone();
            session.headers = Arc::clone(&headers);
            session.open(url)
        })
    }
}

/// A function that opens a remote file.
pub(super) type Begin<'b> = dyn Fn(Resource, StopFlag<'_>) -> Result<RemoteFile, Fault> + Sync + 'b;

/// Call `open` with a session, and again with another region if an S3 bucket names one.
pub(super) fn in_session<T: Send>(
    url: &str,
    options: &RemoteOptions,
    limits: &Limits,
    watch: &dyn Watch,
    open: impl Fn(&Session<'_>) -> Result<T, Error> + Send + Sync,
) -> Result<T, Error> {
    let open_with = |options: &RemoteOptions, stop: StopFlag<'_>| {
        let session = Session::new(options, limits, stop);
        open(&session.map_err(|fault| refused(&redacted(url), fault))?)
    };
    let open_in_region = |stop: StopFlag<'_>| match open_with(options, stop) {
        Err(error) if options.region.is_none() && region_of(&error).is_some() => {
            let mut options = options.clone();
            options.region = region_of(&error).map(ToOwned::to_owned);
            open_with(&options, stop)
        }
        opened => opened,
    };
    let opened = watched(true, open_in_region, watch);
    opened.map_err(|failure| failure.about(Some(Path::new(&redacted(url))), None))?
}

/// Return the region of the bucket if a store refused a request because of its region.
pub(super) fn region_of(error: &Error) -> Option<&str> {
    fault_of(error)?.region()
}

/// Return the fault of a request that an error contains.
pub(super) fn fault_of(error: &Error) -> Option<&Fault> {
    match error.failure() {
        Failure::Open(source) | Failure::Write { source, .. } => Fault::of(source),
        _ => None,
    }
}

/// Opens the files behind one URL, with one client and its connections.
#[derive(Clone, Debug)]
pub(crate) struct Session<'f> {
    client: Arc<Client>,
    limits: Limits,
    /// Headers that another process read.
    headers: Arc<ShardHeaders>,
    /// The cache of this machine, if there is one and it can be used.
    cache: Option<Arc<Cache>>,
    pub(super) stop: StopFlag<'f>,
}

impl<'f> Session<'f> {
    fn new(options: &RemoteOptions, limits: &Limits, stop: StopFlag<'f>) -> Result<Session<'f>, Fault> {
        let cache = options.cache()?.and_then(|cache| Cache::open(&cache));
        let mut options = options.clone();
        options.offline = Some(options.is_offline());
        Ok(Session {
            client: Arc::new(Client::new(options)),
            limits: *limits,
            headers: Arc::default(),
            cache: cache.map(Arc::new),
            stop,
        })
    }

    /// Return the session with another stop flag.
    pub(super) fn with_stop<'g>(&self, stop: StopFlag<'g>) -> Session<'g> {
        Session {
            client: Arc::clone(&self.client),
            limits: self.limits,
            headers: Arc::clone(&self.headers),
            cache: self.cache.clone(),
            stop,
        }
    }

    pub(super) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    pub(super) fn options(&self) -> &RemoteOptions {
        self.client.options()
    }

    fn open(&self, url: &str) -> Result<Checkpoint, Error> {
        let remote = match self.locate(url)? {
            Location::Cached(path, remote) => return self.cached(&path, remote.map(|remote| *remote)),
            Location::Remote(remote) => *remote,
        };
        if let Some(known) = self.of_headers(&remote)? {
            return Ok(known);
        }
        let is_index = remote.is_index();
        let begin =
            |resource: Resource, stop: StopFlag<'_>| source::open(resource, START_NBYTES, &self.limits, stop);
        let (remote, source, is_index) = self.find(remote, is_index, &begin)?;
        self.opened(remote, source, is_index, true)
    }

    /// Open a file, or the model of a folder. Returns whether it is an index by its name.
    pub(super) fn find(
        &self,
        remote: Remote,
        is_index: bool,
        begin: &Begin<'_>,
    ) -> Result<(Remote, RemoteFile, bool), Error> {
        if remote.is_folder() {
            return self.find_model(&remote, begin);
        }
        let begin: &Begin<'_> = if is_index { &begin_index } else { begin };
        match self.begin(&remote, begin, self.stop) {
            Ok(source) => Ok((remote, source, is_index)),
            Err(fault) => Err(refused(&remote.shown, fault)),
        }
    }

    /// Open a file with a request, or as the cache has it if requests are forbidden.
    fn begin(&self, remote: &Remote, begin: &Begin<'_>, stop: StopFlag<'_>) -> Result<RemoteFile, Fault> {
        let resource = self.resource(remote);
        match &self.cache {
            Some(cache) if self.options().is_offline() => cache.recall(resource),
            _ => begin(resource, stop),
        }
    }

    /// Record the version of a file in the cache. `None` if its blocks are not cached.
    fn remember(&self, source: &RemoteFile) -> Option<(Arc<Cache>, Version)> {
        let cache = self.cache.as_ref()?;
        Some((Arc::clone(cache), cache.remember(source, self.stop)?))
    }

    /// Return a file that is read through the cache, if there is one. `is_answered`: whether the store has answered a
    /// request for it.
    pub(super) fn through_cache(&self, source: RemoteFile, is_answered: bool) -> Box<dyn ReadAt> {
        let remembered = self.remember(&source);
        cached(source, remembered, is_answered)
    }

    /// Open the model of a folder, a file or an index. Both are requested at once, since one after the other would take twice
    /// as long. The file comes first on the Hub, as for its own clients, and the index in a store, as in a directory.
    fn find_model(&self, folder: &Remote, begin: &Begin<'_>) -> Result<(Remote, RemoteFile, bool), Error> {
        let model = (self.model_of(folder)?, false);
        let index = (self.beside(folder, INDEX_FILE)?, true);
        let (first, second) = if folder.is_of_hub() {
            (model, index)
        } else {
            (index, model)
        };
        let both = [&first, &second];
        let found = [const { OnceLock::new() }; 2];
        let ask = |number: usize, stop: StopFlag<'_>| {
            let (remote, is_index) = both[number];
            let begin: &Begin<'_> = if *is_index { &begin_index } else { begin };
            let opened = self.begin(remote, begin, stop);
            // The second is not needed any more.
            let is_done = number == 0 && opened.is_ok();
            let _ = found[number].set(opened);
            if is_done { Err(Failure::Interrupted) } else { Ok(0) }
        };
        // The outcome of each request is in `found`.
        let _ = share(Reading::on(2).waiting(true), vec![0, 1], 0, ask, &self.stop);
        // S3 answers 403 for a missing object if the identity may not list the bucket.
        let may_be_missing = |fault: &Fault| {
            let is_missing = fault.is_missing() || fault.is_offline();
            is_missing || !folder.is_of_hub() && fault.status() == Some(403)
        };
        let missing = match found.map(OnceLock::into_inner) {
            [Some(Ok(source)), _] => return Ok((first.0, source, first.1)),
            [Some(Err(fault)), other] if may_be_missing(&fault) => match other {
                Some(Ok(source)) => return Ok((second.0, source, second.1)),
                Some(Err(other)) if !other.is_missing() && !other.is_offline() => other,
                Some(Err(_)) if fault.is_missing() => {
                    fault.and_not(if second.1 { INDEX_FILE } else { MODEL_FILE })
                }
                _ => fault,
            },
            [Some(Err(fault)), _] => fault,
            [None, _] => return Err(Failure::Interrupted.into()),
        };
        Err(refused(&folder.shown, missing))
    }

    /// Return the file with the whole model of a folder. The Hub's has the name of the repository.
    fn model_of(&self, folder: &Remote) -> Result<Remote, Error> {
        let mut model = self.beside(folder, MODEL_FILE)?;
        if folder.is_of_hub() {
            model.shown.clone_from(&folder.shown);
        }
        Ok(model)
    }

    /// Open the checkpoint from the headers of another process, without a request. `None` if they are of another kind of
    /// file, such as one in a cache.
    fn of_headers(&self, remote: &Remote) -> Result<Option<Checkpoint>, Error> {
        if let Some((index, version)) = self.headers.of_index() {
            let file = if remote.is_folder() {
                self.beside(remote, INDEX_FILE)?
            } else {
                remote.clone()
            };
            let (resource, nbytes) = (self.resource(&file), to_u64(index.len()));
            let source = RemoteFile::known(resource, nbytes, version, index.to_owned());
            return source
                .map(|source| self.opened(file, source, true, false))
                .transpose();
        }
        let Some(only) = self.headers.of_file() else {
            return Ok(None);
        };
        let model = if remote.is_folder() {
            self.model_of(remote)?
        } else {
            remote.clone()
        };
        let source = self.known(&model, only);
        source
            .map(|source| self.opened(model, source, false, false))
            .transpose()
    }

    /// Return a file of tensors whose header another process read.
    fn known(&self, remote: &Remote, header: &ShardHeader) -> Option<RemoteFile> {
        let start = header.bytes.clone();
        RemoteFile::known(self.resource(remote), header.nbytes, &header.version, start)
    }

    pub(super) fn locate(&self, url: &str) -> Result<Location, Error> {
        let location = Location::find(url, self.options(), self.stop);
        location.map_err(|fault| refused(&redacted(url), fault))
    }

    /// Return the file `name` beside this one.
    pub(super) fn beside(&self, remote: &Remote, name: &str) -> Result<Remote, Error> {
        let beside = remote.beside(name, self.options());
        beside.map_err(|fault| refused(&remote.shown, fault))
    }

    pub(super) fn resource(&self, remote: &Remote) -> Resource {
        Resource::new(&self.client, remote)
    }

    /// Open the file `source`, or the shards if it is an index by its name or its content.
    fn opened(
        &self,
        remote: Remote,
        source: RemoteFile,
        is_index: bool,
        is_answered: bool,
    ) -> Result<Checkpoint, Error> {
        let commit = source.commit();
        if let Some(path) = remote.cached_at(commit.as_deref()) {
            return self.cached(&path, Some(remote.at(commit)));
        }
        if !is_index {
            match self.header(&remote, &source) {
                Err(error) if names_index(&error) => {}
                header => {
                    let header = header?;
                    let source = self.through_cache(source, is_answered);
                    return Ok(archive(remote, header, source).into());
                }
            }
        }
        self.remember(&source);
        let path = PathBuf::from(&remote.shown);
        let index = index_of(source.all(self.stop), source.nbytes(), &path)?;
        self.shards(path, index, remote.at(commit))
    }

    /// Open a shard, and free the bytes of its header, since there may be many shards.
    fn shard(&self, remote: Remote, number: usize, start_nbytes: u64) -> Result<Archive, Error> {
        if let Some(path) = remote.cached() {
            let file = LocalFile::open_one_of_many(&path)?;
            let file = Origin::Local(Arc::new(file));
            return Archive::of(file, Some(&path), &local(&self.limits).open, None);
        }
        let known = self.headers.of_shard(number);
        let known = known.and_then(|header| self.known(&remote, header));
        let is_answered = known.is_none();
        let begin =
            |resource: Resource, stop: StopFlag<'_>| source::open(resource, start_nbytes, &self.limits, stop);
        let mut source = match known {
            Some(source) => source,
            None => {
                let source = self.begin(&remote, &begin, self.stop);
                source.map_err(|fault| refused(&remote.shown, fault))?
            }
        };
        let header = self.header(&remote, &source)?;
        let remembered = self.remember(&source);
        source.free_start();
        Ok(archive(remote, header, cached(source, remembered, is_answered)))
    }

    /// Close the connections that reading tensors does not need. Opening shards needs more, which would stay open as long
    /// as the handle.
    pub(super) fn rest(&self) {
        self.client.close_idle(READS_AT_ONCE);
    }

    fn header(&self, remote: &Remote, source: &RemoteFile) -> Result<Header, Error> {
        let header = Header::parse(source.start(), source.nbytes(), &self.limits);
        header.map_err(|fault| Failure::Header(fault).about(Some(Path::new(&remote.shown)), None))
    }

    /// Open the shards of `index`, which was read from `path` and belongs to `remote`.
    fn shards(&self, path: PathBuf, index: ShardIndex, remote: Remote) -> Result<Checkpoint, Error> {
        let index = for_urls(index, &path)?;
        let store = RemoteShards {
            session: self.with_stop(StopFlag::never()),
            index: remote,
        };
        Ok(Checkpoint::of_shards(Shards::new(path, index, Box::new(store))))
    }

    /// Open a file or an index in the Hub's cache. Shards that the cache lacks are requested from the Hub.
    fn cached(&self, path: &Path, remote: Option<Remote>) -> Result<Checkpoint, Error> {
        match (Checkpoint::open(path, &local(&self.limits)), remote) {
            (Err(error), Some(remote)) if lacks_shards(&error) => {
                self.shards(path.to_owned(), read_index(path)?, remote)
            }
            (opened, _) => Ok(opened?.with_reason(CACHED)),
        }
    }
}

/// Open an index, with its first bytes.
pub(super) fn begin_index(resource: Resource, stop: StopFlag<'_>) -> Result<RemoteFile, Fault> {
    RemoteFile::begin(resource, INDEX_START_NBYTES, stop)
}

/// Return the options of files on this machine.
fn local(limits: &Limits) -> CheckpointOptions {
    CheckpointOptions::new().open(OpenOptions::new().limits(*limits))
}

/// Shards behind URLs: beside their index, and on the Hub of its commit.
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

    /// Open a shard with one request, whose length is estimated from the index.
    fn open(&self, shards: &Shards, number: usize, stop: StopFlag<'_>) -> Result<Archive, Error> {
        let remote = self.session.beside(&self.index, shards.name(number))?;
        let entry = |name: &str| to_u64(name.len()) + TENSOR_NBYTES;
        let expected = METADATA_NBYTES + shards.tensors(number).map(entry).sum::<u64>();
        let session = self.session.with_stop(stop);
        session.shard(remote, number, expected.clamp(LEAST_NBYTES, MOST_NBYTES))
    }

    fn reading(&self) -> Reading {
        Reading::on(AT_ONCE).waiting(true)
    }

    fn rest(&self) {
        self.session.rest();
    }

    fn backend(&self) -> Option<(&'static str, &'static str)> {
        Some((self.index.backend, REMOTE))
    }
}

/// Check that the names of the shards may become parts of URLs.
pub(super) fn for_urls(index: ShardIndex, path: &Path) -> Result<ShardIndex, Error> {
    match index.check_in_urls() {
        Ok(()) => Ok(index),
        Err(fault) => Err(Failure::Index(fault).about(Some(path), None)),
    }
}

/// Return a file whose blocks are cached, if the cache knows its version.
fn cached(
    source: RemoteFile,
    remembered: Option<(Arc<Cache>, Version)>,
    is_answered: bool,
) -> Box<dyn ReadAt> {
    match remembered {
        Some((cache, version)) => Box::new(CachedFile::new(source, cache, version, is_answered)),
        None => Box::new(source),
    }
}

fn archive(remote: Remote, header: Header, source: Box<dyn ReadAt>) -> Archive {
    Archive {
        path: Some(remote.shown.into()),
        header,
        origin: Origin::Other(source),
        backend: remote.backend,
        why: REMOTE.into(),
    }
}

pub(super) fn refused(shown: &str, fault: Fault) -> Error {
    unopened(Path::new(shown))(fault.into())
}

/// Whether a header was rejected because the file is an index.
fn names_index(error: &Error) -> bool {
    let foreign = |kind: &Foreign| *kind == Foreign::IndexJson;
    matches!(error.failure(), Failure::Header(FormatError::Foreign { kind, .. }) if foreign(kind))
}

fn lacks_shards(error: &Error) -> bool {
    matches!(
        error.failure(),
        Failure::Checkpoint(CheckpointFault::MissingShards { .. })
    )
}
