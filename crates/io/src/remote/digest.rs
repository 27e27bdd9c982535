//! Files behind URLs that are read whole, whatever they contain.

use std::path::PathBuf;

use ingot_format::{Limits, StopFlag};
use ingot_remote::{RemoteFile, RemoteOptions, Resource, START_NBYTES, redacted};

use super::session::{UrlFile, header_limits, url_file};
use super::source;
use crate::error::Error;
use crate::file::{LocalFile, ReadAt, check_unchanged};
use crate::verify::in_order::read_in_order;
use crate::watch::Watch;

/// Open the file behind `url`, whatever it contains, and return its name in errors and the limits of its header. The header
/// is fetched at once if it `has_header`.
///
/// # Errors
/// As [`Checkpoint::open_url`](crate::Checkpoint::open_url).
pub fn url_source(
    url: &str,
    options: &RemoteOptions,
    has_header: bool,
    watch: &dyn Watch,
) -> Result<(Box<dyn ReadAt>, PathBuf, Limits), Error> {
    let limits = header_limits();
    let begin = |resource: Resource, stop: StopFlag<'_>| {
        if has_header {
            source::open(resource, START_NBYTES, &limits, stop)
        } else {
            RemoteFile::begin(resource, START_NBYTES, stop)
        }
    };
    Ok(match url_file(url, options, &begin, watch)? {
        UrlFile::Cached(path) => (Box::new(LocalFile::open(&path)?), path, Limits::default()),
        UrlFile::Remote(source, _) => (source, PathBuf::from(redacted(url)), limits),
    })
}

/// Gives `take` all bytes of the file behind `url`, whatever it holds, in their order. They are fetched by several
/// threads, one of which at a time calls `take`.
///
/// # Errors
/// As [`Checkpoint::open_url`](crate::Checkpoint::open_url); [`Error::Read`]; [`Error::Changed`]; [`Error::Interrupted`].
pub fn read_url(
    url: &str,
    options: &RemoteOptions,
    take: &mut (dyn FnMut(&[u8]) + Send),
    watch: &dyn Watch,
) -> Result<(), Error> {
    let (source, path, _) = url_source(url, options, false, watch)?;
    let outcome = read_in_order(&*source, take, watch);
    check_unchanged(&*source, Some(&path))?;
    outcome.map_err(|failure| failure.about(Some(&path), None))
}
