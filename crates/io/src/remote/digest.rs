//! Hashes of files behind URLs.

use std::path::PathBuf;

use ingot_format::StopFlag;
use ingot_remote::{RemoteFile, RemoteOptions, Resource, START_NBYTES, redacted};

use super::session::{UrlFile, header_limits, url_file};
use super::source;
use crate::error::Error;
use crate::file::{LocalFile, ReadAt, check_unchanged};
use crate::verify::definition::of_source;
use crate::verify::in_order::read_in_order;
use crate::verify::{Definition, hash};
use crate::watch::Watch;

/// The hash of the file behind `url`, as [`hash`] gives it. Parts of it are fetched at once and kept no longer than until
/// they are hashed.
///
/// # Errors
/// As [`Checkpoint::open_url`](crate::Checkpoint::open_url) and [`hash`].
pub fn hash_url(
    url: &str,
    definition: Definition,
    options: &RemoteOptions,
    watch: &dyn Watch,
) -> Result<String, Error> {
    let limits = header_limits();
    let asks_for_tensors = !matches!(
        definition,
        Definition::File(_) | Definition::AutoV1 | Definition::AutoV2
    );
    let begin = |resource: Resource, stop: StopFlag<'_>| match asks_for_tensors {
        true => source::open(resource, START_NBYTES, &limits, stop),
        false => RemoteFile::begin(resource, START_NBYTES, stop),
    };
    let file = match url_file(url, options, &begin, watch)? {
        UrlFile::Cached(path) => return hash(&path, definition, watch),
        UrlFile::Remote(file, _) => file,
    };
    let shown = PathBuf::from(redacted(url));
    of_source(&*file, &shown, definition, &limits, watch)
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
    let begin = |resource: Resource, stop: StopFlag<'_>| RemoteFile::begin(resource, START_NBYTES, stop);
    let (source, path): (Box<dyn ReadAt>, PathBuf) = match url_file(url, options, &begin, watch)? {
        UrlFile::Cached(path) => (Box::new(LocalFile::open(&path)?), path),
        UrlFile::Remote(source, _) => (source, PathBuf::from(redacted(url))),
    };
    let outcome = read_in_order(&*source, take, watch);
    check_unchanged(&*source, Some(&path))?;
    outcome.map_err(|failure| failure.about(Some(&path), None))
}
