//! Files behind URLs that are read whole.

use std::path::PathBuf;

use ingot_format::{Limits, StopFlag};
use ingot_remote::{Location, MODEL_FILE, RemoteFile, RemoteOptions, Resource, START_NBYTES, redacted};

use super::session::{header_limits, in_session};
use super::source;
use crate::error::Error;
use crate::file::{LocalFile, ReadAt, check_unchanged};
use crate::verify::in_order::read_in_order;
use crate::watch::Watch;

/// Open the file behind `url`, of any format, and return its name in errors and the limits of its header. The header is
/// requested at once if it `has_header`.
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
    in_session(url, options, &limits, watch, |session| {
        let local = |path: PathBuf| -> Result<(Box<dyn ReadAt>, PathBuf, Limits), Error> {
            Ok((Box::new(LocalFile::open(&path)?), path, Limits::default()))
        };
        let remote = match session.locate(url)? {
            Location::Cached(path, _) => return local(path),
            Location::Remote(remote) if remote.is_folder() => session.beside(&remote, MODEL_FILE)?,
            Location::Remote(remote) => *remote,
        };
        let (remote, source, _) = session.find(remote, false, &begin)?;
        match remote.cached_at(source.commit().as_deref()) {
            Some(path) => local(path),
            None => {
                let source = session.through_cache(source, true);
                Ok((source, PathBuf::from(redacted(url)), limits))
            }
        }
    })
}

/// Call `take` with all bytes of the file behind `url`, in their order. Several threads request them, and one of them at
/// a time calls `take`.
///
/// # Errors
/// As [`Checkpoint::open_url`](crate::Checkpoint::open_url); [`Failure::Read`](crate::Failure::Read);
/// [`Failure::Changed`](crate::Failure::Changed); [`Failure::Interrupted`](crate::Failure::Interrupted).
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
