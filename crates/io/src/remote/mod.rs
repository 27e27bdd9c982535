//! Files behind URLs: HTTP, the Hugging Face Hub, S3 and what speaks like it, Google Cloud Storage, Azure.
//!
//! A remote file is one more [`Source`](crate::Source). Its requests are made by the threads that read, each of which
//! waits for its own: bytes go from the socket to where they are wanted, nothing runs in between, and nothing is left
//! running when a call is over, so that a process may fork at any time. No more is sent than `GET` with `Range`, over
//! HTTP/1.1; one connection for each thread brings more than streams that share one.

mod access;
mod azure;
mod bucket;
mod client;
mod connection;
mod dial;
mod digest;
mod fault;
mod fetch;
mod gcs;
mod hub;
mod message;
mod options;
mod pace;
mod pin;
mod place;
mod proxy;
mod retry;
mod s3;
mod source;
mod trust;
mod url;

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use ingot_format::Limits;

use self::client::Client;
use self::fetch::Target;
use self::hub::HubFile;
use self::place::{Place, redacted};
use self::source::RemoteSource;
use crate::archive::{Archive, OpenOptions};
use crate::backend::Backend;
use crate::error::Error;
use crate::watch::Watch;
use crate::workers::watched;

pub use self::digest::{hash_url, read_url};
pub use self::fault::Fault;
pub use self::options::{RemoteOptions, Secret, Token};
pub use self::place::is_url;

/// The longest header that is fetched where nobody says otherwise. It is what the Hub's own clients take.
pub const REMOTE_HEADER_NBYTES: u64 = 25_000_000;

/// Those limits, where nobody says otherwise.
pub(crate) fn header_limits() -> Limits {
    Limits {
        header_nbytes: REMOTE_HEADER_NBYTES,
        ..Limits::default()
    }
}

const CACHED: &str = "the Hub's local cache has this version";

impl Archive {
    /// Opens a file behind a URL and proves its header: one request, or two where the header is long. No tensor is
    /// read. `http://`, `https://`, `hf://`, `s3://`, `gs://` and `az://` are known, and
    /// pages of files of the Hub.
    ///
    /// A file of the Hub that its clients have in their cache is opened there.
    ///
    /// # Errors
    /// [`Error::Open`] with a [`Fault`] inside, whose kind is that of a file which is missing or not to be read where
    /// the server says so; [`Error::Header`]; [`Error::Interrupted`].
    pub fn open_url(
        url: &str,
        options: &RemoteOptions,
        limits: &Limits,
        watch: &dyn Watch,
    ) -> Result<Archive, Error> {
        let shown = PathBuf::from(redacted(url));
        let begin = |target| RemoteSource::open(target, limits);
        match found(url, options, &begin, watch)? {
            Found::Cached(path) => open_cached(path, limits),
            Found::Remote(source, backend) => {
                Archive::named(shown, source, limits, backend, Cow::Borrowed("a URL"))
            }
        }
    }
}

/// What a URL led to.
enum Found {
    Cached(PathBuf),
    Remote(Box<RemoteSource>, &'static str),
}

/// Asks for the start of what is behind `url`, as `begin` does that, or finds it on this machine.
fn found(
    url: &str,
    options: &RemoteOptions,
    begin: &(dyn Fn(Target) -> Result<RemoteSource, Fault> + Sync),
    watch: &dyn Watch,
) -> Result<Found, Error> {
    let shown = PathBuf::from(redacted(url));
    let variable = |name: &str| std::env::var(name).ok();
    let open = |options: &RemoteOptions| -> Result<Found, Fault> {
        let remote = match Place::find(url, options, &variable)? {
            Place::Cached(path) => return Ok(Found::Cached(path)),
            Place::Remote(remote) => remote,
        };
        let client = Arc::new(Client::new(options.clone(), &variable));
        let source = begin(Target::new(client, remote.home, remote.access, remote.is_shown))?;
        let cached = |file: HubFile| file.cached_at(&source.commit()?, &variable);
        Ok(match remote.hub.and_then(cached) {
            Some(path) => Found::Cached(path),
            None => Found::Remote(Box::new(source), remote.backend),
        })
    };
    // A bucket of S3 lies in one region, and who asks in another is told in which.
    let open_in_region = || match open(options) {
        Err(fault) if options.region.is_none() && fault.region().is_some() => open(&RemoteOptions {
            region: fault.region().map(ToOwned::to_owned),
            ..options.clone()
        }),
        opened => opened,
    };
    let opened = watched(open_in_region, watch).map_err(|failure| failure.about(Some(&shown), None))?;
    opened.map_err(|fault| Error::Open {
        path: shown,
        source: fault.into(),
    })
}

fn open_cached(path: PathBuf, limits: &Limits) -> Result<Archive, Error> {
    let options = OpenOptions {
        backend: Backend::Auto,
        limits: *limits,
    };
    let archive = Archive::open(&path, &options)?;
    let why = format!("{CACHED}: {}", archive.why());
    Ok(archive.because(why))
}
