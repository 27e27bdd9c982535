//! Downloads of a file, or of a model with its shards.
//!
//! Several connections fetch parts into a file beside the destination, which is renamed once it is complete and verified.
//! A call that ends early leaves that file with a [`PartTable`](part_table::PartTable) of its parts, and the next call for
//! the same version resumes from it. The files of a model are downloaded in the same way, and the index is renamed last.

mod incoming;
mod model;
mod part_table;
mod wanted;

use std::path::{Path, PathBuf, is_separator};

use ingot_format::Escaped;
use ingot_remote::{Fault, INDEX_FILE, RemoteOptions, redacted, url_file_name};

use super::session::refused;
use crate::digest::Algorithm;
use crate::error::Error;
use crate::file::{LocalFile, ReadAt};
use crate::payload::{FileRange, Payload};
use crate::save::{Pieces, check_destination, save_pieces};
use crate::verify::hash;
use crate::watch::Watch;
use incoming::{Incoming, fetch};
use model::Ready;
pub use wanted::{DownloadOptions, Downloaded};
use wanted::{Downloadable, VersionedSource, compare, is_index, make_folder, wanted};

/// Download the file behind `url` to `path`, or into `path` if that is a directory. A directory is created if `path` ends
/// in a slash. `path` is unchanged until the file is complete.
///
/// A URL that ends in `.index.json`, and a repository of the Hub with an index and without `model.safetensors`, is a model
/// with shards: `path` must be a directory, and receives the index and all files that it names. Files of the Hub are of
/// the commit of the index. All files are complete before the first is renamed, and the index is renamed last. An index
/// that is replaced is removed before the first file is renamed. A call that ends between these renames leaves a seal of
/// each shard. By the seals, the next call recognises the shards that were renamed, and keeps them if index and shard are
/// the same at the server. Any other existing file is an error, or is replaced with
/// [`Replace::Atomic`](crate::Replace::Atomic).
///
/// ```no_run
/// use std::path::Path;
///
/// use ingot_io::{DownloadOptions, RemoteOptions, Unwatched, download};
///
/// let (remote, how) = (RemoteOptions::default(), DownloadOptions::new());
/// download("hf://openai-community/gpt2", Path::new("gpt2/"), &remote, &how, &Unwatched)?;
/// # Ok::<(), ingot_io::Error>(())
/// ```
///
/// # Errors
/// As [`Checkpoint::open_url`](crate::Checkpoint::open_url). [`Failure::Open`](crate::Failure::Open) if a file exists that
/// may not be replaced, or if the URL is a model with shards and `path` is not a directory.
/// [`Failure::Read`](crate::Failure::Read), [`Failure::Changed`](crate::Failure::Changed),
/// [`Failure::Write`](crate::Failure::Write) and [`Failure::Interrupted`](crate::Failure::Interrupted), after which the next
/// call resumes. [`Failure::Digest`](crate::Failure::Digest), after which it starts again.
/// [`Failure::Edit`](crate::Failure::Edit) with [`EditError::Busy`](crate::EditError::Busy) if another call downloads this
/// file.
pub fn download(
    url: &str,
    path: &Path,
    options: &RemoteOptions,
    how: &DownloadOptions,
    watch: &dyn Watch,
) -> Result<Downloaded, Error> {
    let (source, target) = reach(url, path, options, how, watch)?;
    if ends_in_slash(path) && !matches!(source, Downloadable::Model(_)) {
        make_folder(path)?;
    }
    match source {
        Downloadable::Cached(cached) => copy(&cached, target, how, watch),
        Downloadable::Remote(source) => download_file(source, target, how, watch),
        Downloadable::Model(model) => Ready::new(*model, target, how, &Silent(watch))?.fetch(how, watch),
    }
}

/// Return the files that [`download`] would write, each with its size in bytes, the index of a model last. Nothing is
/// written.
///
/// # Errors
/// As [`download`], except the errors of fetching and writing.
pub fn planned_download(
    url: &str,
    path: &Path,
    options: &RemoteOptions,
    how: &DownloadOptions,
    watch: &dyn Watch,
) -> Result<Vec<(PathBuf, u64)>, Error> {
    let (source, target) = reach(url, path, options, how, watch)?;
    match source {
        Downloadable::Cached(cached) => Ok(vec![(target, LocalFile::open(&cached)?.nbytes())]),
        Downloadable::Remote(source) => Ok(vec![(target, source.source.nbytes())]),
        Downloadable::Model(model) => Ok(Ready::new(*model, target, how, &Silent(watch))?.sizes()),
    }
}

/// A watch without progress, since the total size is not known yet.
struct Silent<'w>(&'w dyn Watch);

impl Watch for Silent<'_> {
    fn interrupted(&self) -> bool {
        self.0.interrupted()
    }
}

/// Open the source behind `url`, and return it with the destination of its file or its index. Nothing is written.
fn reach(
    url: &str,
    path: &Path,
    options: &RemoteOptions,
    how: &DownloadOptions,
    watch: &dyn Watch,
) -> Result<(Downloadable, PathBuf), Error> {
    let watch = &Silent(watch);
    let shown = redacted(url);
    let refuse = |fault| refused(&shown, fault);
    let name = url_file_name(url);
    let mut target = named(path, &name).map_err(refuse)?;
    let is_model = ingot_remote::is_folder(url);
    // Before any request.
    if is_index(&name) {
        check_many(path, how).map_err(refuse)?;
    }
    // The content of a remote folder decides the name of the file.
    if !(is_model && is_folder(path)) {
        check_destination(&target, &how.save, watch)?;
    }
    let mut source = wanted(url, options, watch)?;
    match &mut source {
        Downloadable::Model(_) => {
            check_many(path, how).map_err(refuse)?;
            target = path.join(if is_model { INDEX_FILE } else { &name });
        }
        Downloadable::Cached(_) => check_destination(&target, &how.save, watch)?,
        Downloadable::Remote(source) => {
            check_destination(&target, &how.save, watch)?;
            source.expect(how.sha256)?;
        }
    }
    Ok((source, target))
}

/// Reject options that do not fit a model with shards.
fn check_many(path: &Path, how: &DownloadOptions) -> Result<(), Fault> {
    if how.sha256.is_some() {
        let why =
            "it is the index of a model of many files, for which one SHA-256 is not enough: expected none";
        return Err(Fault::option(why));
    }
    if is_folder(path) {
        return Ok(());
    }
    let why = "it is the index of a model of many files: expected a directory that exists, or a path that ends in a \
               slash, found";
    Err(Fault::option(format!(
        "{why} {}",
        Escaped(&path.to_string_lossy())
    )))
}

/// Whether `path` is a directory, or will be one.
fn is_folder(path: &Path) -> bool {
    path.is_dir() || ends_in_slash(path)
}

fn ends_in_slash(path: &Path) -> bool {
    let last = path.as_os_str().as_encoded_bytes().last();
    last.is_some_and(|&last| is_separator(last.into()))
}

/// Return `path`, or the file `name` in it if it is a directory.
fn named(path: &Path, name: &str) -> Result<PathBuf, Fault> {
    if !is_folder(path) {
        return Ok(path.to_owned());
    }
    // On Windows, a colon separates a drive or a stream of a file.
    let is_elsewhere = name.contains(['/', '\\', '\0']) || cfg!(windows) && name.contains(':');
    if matches!(name, "" | "." | "..") || is_elsewhere {
        let why = "the URL gives no name for a file, and the destination is a directory";
        return Err(Fault::address(why));
    }
    Ok(path.join(name))
}

/// Download a single file.
fn download_file(
    source: VersionedSource,
    path: PathBuf,
    how: &DownloadOptions,
    watch: &dyn Watch,
) -> Result<Downloaded, Error> {
    let file = [Incoming::open(source, path, true, how, watch)?];
    let outcome = fetch(&file, how, watch).and_then(|()| file[0].publish(watch));
    let [file] = file;
    match outcome {
        Ok(()) => Ok(file.into_downloaded()),
        Err(error) => {
            file.abandon();
            Err(error)
        }
    }
}

/// Copy a file of the Hub's cache.
fn copy(cached: &Path, path: PathBuf, how: &DownloadOptions, watch: &dyn Watch) -> Result<Downloaded, Error> {
    if let Some(expected) = how.sha256 {
        let found = hash(cached, Algorithm::Sha256, watch)?;
        compare(cached, expected, found)?;
    }
    let source = LocalFile::open(cached)?;
    let all = [Payload::File(FileRange::of_local(&source, 0, source.nbytes()))];
    save_pieces(&path, Ok(Pieces::of_bytes(&all)), &how.save, watch)?;
    Ok(Downloaded {
        path,
        nbytes: source.nbytes(),
        fetched_nbytes: 0,
        sha256: how.sha256,
        files: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_receives_the_file_name_of_the_url() {
        let folder = tempfile::tempdir().unwrap();
        for (url, name) in [
            ("https://h/a/m%20x.bt?sig=1#y", "m x.bt"),
            ("s3://b/a/m%20x.bt?versionId=7", "m%20x.bt"),
            ("hf://me/gpt", "model.safetensors"),
            ("hf://me/gpt@v1/a/b.bt", "b.bt"),
        ] {
            assert_eq!(
                named(folder.path(), &url_file_name(url)).unwrap(),
                folder.path().join(name),
                "{url}"
            );
        }
        for url in [
            "https://h",
            "https://h/a/",
            "https://h/%2E%2E",
            "https://h/a%2Fb",
            "https://h/a%5Cb",
        ] {
            assert!(named(folder.path(), &url_file_name(url)).is_err(), "{url}");
        }
        for url in ["https://h/C%3Aa", "https://h/a%3Ab"] {
            let found = named(folder.path(), &url_file_name(url));
            assert_eq!(found.is_err(), cfg!(windows), "{url}");
        }
        assert_eq!(
            named(&folder.path().join("x"), &url_file_name("https://h")).unwrap(),
            folder.path().join("x")
        );
    }
}
