//! Fetching a file, or a model of many files, whole, to keep it.
//!
//! Parts come by several connections at once into a file beside the target, which gets the target's name when all of
//! them are there and are what they should be. A call that ends early, however that happens, leaves that file with a
//! [`PartTable`](part_table::PartTable) of what it holds; the next call for the same version resumes from it. Each file of
//! a model is fetched in this way, and the index gets its name after all others.

mod incoming;
mod model;
mod part_table;
mod wanted;

use std::path::{Path, PathBuf, is_separator};

use ingot_format::Escaped;
use ingot_remote::{Fault, INDEX_FILE, RemoteOptions, is_repository, redacted, url_file_name};

use super::session::{UrlFile, refused};
use crate::digest::Algorithm;
use crate::error::Error;
use crate::file::{LocalFile, ReadAt};
use crate::payload::{FileRange, Payload};
use crate::save::{check_destination, replace_file};
use crate::verify::hash;
use crate::watch::Watch;
use incoming::{Incoming, fetch};
use model::Ready;
pub use wanted::{DownloadOptions, Downloaded};
use wanted::{Downloadable, VersionedSource, compare, is_index, make_folder, wanted};

/// Fetches what is behind `url` to `path`; into it, where that is a directory, which is made where the path ends in a
/// slash. Nothing has the name `path`, or it is what it was before, until all of the file is there.
///
/// What is named `*.index.json`, and a repository of the Hub that has an index and no `model.safetensors`, is a model of
/// many files: `path` has to be a directory then, and gets the index and all files that it names. Those of the Hub are of
/// the commit that the index was of. All are whole before the first gets its name, and the index gets its name last.
/// Where an index is replaced, there is none from just before the first file is replaced until the last one is. A call
/// that ends between these renames leaves a seal of each shard, by which the next call recognises and keeps the shards
/// that have their names, if index and shard are the same at the server. Any other file that exists is refused, or with
/// [`Existing::Replace`](crate::Existing::Replace) replaced.
///
/// # Errors
/// As [`Checkpoint::open_url`](crate::Checkpoint::open_url); [`Error::Open`] where something is at `path` that is not to be
/// replaced, or `path` is no directory and the URL leads to a model of many files; [`Error::Read`], [`Error::Changed`],
/// [`Error::Write`] and [`Error::Interrupted`], after which the next call goes on with what came by then;
/// [`Error::Digest`], after which it does not; [`Error::Edit`] with [`EditError::Busy`](crate::EditError::Busy) when
/// somebody else fetches this file.
pub fn download(
    url: &str,
    path: &Path,
    options: &RemoteOptions,
    how: &DownloadOptions,
    watch: &dyn Watch,
) -> Result<Downloaded, Error> {
    let reached = reach(url, path, options, how, &Asking(watch))?;
    if ends_in_slash(path) {
        make_folder(path)?;
    }
    match reached {
        Reached::Cached(cached, path) => copy(&cached, path, how, watch),
        Reached::File(versioned, path) => one(versioned, path, how, watch),
        Reached::Model(ready) => ready.fetch(how, watch),
    }
}

/// The files that [`download`] would make, each with its size in bytes, the index of a model last. Nothing is written.
///
/// # Errors
/// As [`download`], as far as it can be told before the bytes come.
pub fn planned_download(
    url: &str,
    path: &Path,
    options: &RemoteOptions,
    how: &DownloadOptions,
    watch: &dyn Watch,
) -> Result<Vec<(PathBuf, u64)>, Error> {
    match reach(url, path, options, how, &Asking(watch))? {
        Reached::Cached(cached, path) => Ok(vec![(path, LocalFile::open(&cached)?.nbytes())]),
        Reached::File(versioned, path) => Ok(vec![(path, versioned.source.nbytes())]),
        Reached::Model(ready) => Ok(ready.sizes()),
    }
}

/// What is going to be fetched, and where to.
enum Reached {
    Cached(PathBuf, PathBuf),
    File(VersionedSource, PathBuf),
    Model(Ready),
}

/// Asks whether to stop, and tells nothing: how much there is to do is not known yet.
struct Asking<'w>(&'w dyn Watch);

impl Watch for Asking<'_> {
    fn interrupted(&self) -> bool {
        self.0.interrupted()
    }
}

/// Finds out what is behind `url`, and refuses what can be refused by then.
fn reach(
    url: &str,
    path: &Path,
    options: &RemoteOptions,
    how: &DownloadOptions,
    watch: &dyn Watch,
) -> Result<Reached, Error> {
    let shown = redacted(url);
    let name = url_file_name(url);
    let target = named(path, &name).map_err(|fault| refused(&shown, fault))?;
    let is_repository = is_repository(url);
    // Before anybody is asked for anything.
    if is_index(&name) {
        check_many(path, how).map_err(|fault| refused(&shown, fault))?;
    }
    // What is in a repository decides what it is going to be called.
    if !(is_repository && is_folder(path)) {
        check_destination(&target, &how.save_options(), watch)?;
    }
    match wanted(url, options, watch)? {
        Downloadable::File(found) => {
            check_destination(&target, &how.save_options(), watch)?;
            match found {
                UrlFile::Cached(cached) => Ok(Reached::Cached(cached, target)),
                UrlFile::Remote(source, backend) => {
                    let versioned = VersionedSource::remote(*source, backend, shown.into(), options);
                    Ok(Reached::File(versioned.expecting(how.sha256)?, target))
                }
            }
        }
        Downloadable::Model(model) => {
            check_many(path, how).map_err(|fault| refused(&shown, fault))?;
            let name = if is_repository { INDEX_FILE } else { &name };
            Ok(Reached::Model(Ready::new(
                *model, path, name, options, how, watch,
            )?))
        }
    }
}

/// Refuses what does not fit a model of many files.
fn check_many(path: &Path, how: &DownloadOptions) -> Result<(), Fault> {
    let why = match is_folder(path) {
        _ if how.sha256.is_some() => {
            "it is the index of a model of many files, of which one SHA-256 cannot speak: expected none"
                .to_owned()
        }
        true => return Ok(()),
        false => format!(
            "it is the index of a model of many files: expected a directory that exists, or a path that ends in a \
             slash, found {}",
            Escaped(&path.to_string_lossy())
        ),
    };
    Err(Fault::option(why))
}

/// Whether `path` stands for a directory.
fn is_folder(path: &Path) -> bool {
    path.is_dir() || ends_in_slash(path)
}

fn ends_in_slash(path: &Path) -> bool {
    let last = path.as_os_str().as_encoded_bytes().last();
    last.is_some_and(|&last| is_separator(last.into()))
}

/// `path`, or the name that the URL gives in it where it is a directory.
fn named(path: &Path, name: &str) -> Result<PathBuf, Fault> {
    if !is_folder(path) {
        return Ok(path.to_owned());
    }
    // A colon stands after a drive, or before a stream of a file, where there are such.
    let is_elsewhere = name.contains(['/', '\\', '\0']) || cfg!(windows) && name.contains(':');
    let is_name = !matches!(name, "" | "." | "..") && !is_elsewhere;
    if is_name {
        Ok(path.join(name))
    } else {
        let why = "the URL gives no name for a file, and the destination is a directory";
        Err(Fault::address(why))
    }
}

/// Fetches a single file.
fn one(
    versioned: VersionedSource,
    path: PathBuf,
    how: &DownloadOptions,
    watch: &dyn Watch,
) -> Result<Downloaded, Error> {
    let file = [Incoming::open(versioned, path, true, how, watch)?];
    let outcome = fetch(&file, how, watch).and_then(|()| file[0].publish(how, watch));
    let [file] = file;
    match outcome {
        Ok(()) => Ok(file.into_downloaded()),
        Err(error) => {
            file.abandon();
            Err(error)
        }
    }
}

/// Copies a file of the Hub's cache.
fn copy(cached: &Path, path: PathBuf, how: &DownloadOptions, watch: &dyn Watch) -> Result<Downloaded, Error> {
    if let Some(expected) = how.sha256 {
        let found = hash(cached, Algorithm::Sha256, watch)?;
        compare(cached, expected, found)?;
    }
    let source = LocalFile::open(cached)?;
    let all = FileRange::of_local(&source, 0, source.nbytes());
    replace_file(&path, &[Payload::File(all)], &how.save_options(), watch)?;
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
    fn a_directory_gets_the_name_that_the_url_gives() {
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
