//! Documents that are read whole: files beside a model, the document with the headers of all its shards, and lists of
//! objects. And the start of a file of any content.

use std::io::Read;
use std::path::{Path, PathBuf};

use ingot_format::{Limits, ShardHeaders, StopFlag, saturating_usize, to_u64};
use ingot_remote::{
    Fault, Listed, Location, Remote, RemoteFile, RemoteOptions, list, redacted, shard_headers,
};

use super::session::{Session, header_limits, in_session, refused};
use crate::error::{Error, unopened};
use crate::file::LocalFile;
use crate::watch::Watch;
use crate::workers::watched;

/// Return the file `name` in the folder of the file behind `url`, if it has at most `most` bytes, with its URL without
/// secrets.
///
/// # Errors
/// [`Failure::Open`](crate::Failure::Open), which contains a [`Fault`]. The kind of its [`io::Error`](std::io::Error) is
/// `NotFound` or `PermissionDenied` if the server says so. Also [`Failure::Interrupted`](crate::Failure::Interrupted).
pub fn fetch_beside(
    url: &str,
    name: &str,
    most: u64,
    options: &RemoteOptions,
    watch: &dyn Watch,
) -> Result<(PathBuf, Vec<u8>), Error> {
    in_session(url, options, &header_limits(), watch, |session| {
        let remote = match session.locate(url)? {
            Location::Cached(path, None) => return read(path.with_file_name(name), most),
            Location::Cached(_, Some(remote)) | Location::Remote(remote) => session.beside(&remote, name)?,
        };
        if let Some(path) = remote.cached() {
            return read(path, most);
        }
        let bytes = session.resource(&remote).document(most, session.stop);
        let bytes = bytes.map_err(|fault| refused(&remote.shown, fault))?;
        Ok((remote.shown.into(), bytes))
    })
}

/// Return the headers of all shards of a model from one document of the Hub. `None` if the Hub has none, for any reason:
/// the shards themselves have the headers, or the error.
///
/// The Hub has such documents for the indexes of models on the main branch. `url` names such an index, or a repository
/// without a file for the whole model.
///
/// # Errors
/// [`Failure::Interrupted`](crate::Failure::Interrupted).
pub fn hub_headers(
    url: &str,
    options: &RemoteOptions,
    limits: &Limits,
    watch: &dyn Watch,
) -> Result<Option<ShardHeaders>, Error> {
    let fetching = |stop: StopFlag<'_>| shard_headers(url, options, ShardHeaders::NBYTES, stop);
    let fetched = watched(true, fetching, watch);
    let fetched = fetched.map_err(|failure| failure.about(Some(Path::new(&redacted(url))), None))?;
    Ok(fetched.and_then(|document| ShardHeaders::parse(&document, limits)))
}

/// Return the first `most` bytes of the file behind `url`, and its size.
///
/// # Errors
/// As [`fetch_beside`].
pub fn fetch_start(
    url: &str,
    most: u64,
    options: &RemoteOptions,
    watch: &dyn Watch,
) -> Result<(Vec<u8>, u64), Error> {
    in_session(url, options, &header_limits(), watch, |session| {
        let remote = requested(session, url)?;
        let file = RemoteFile::begin(session.resource(&remote), most.max(1), session.stop);
        let file = file.map_err(|fault| refused(&remote.shown, fault))?;
        let start = file.start();
        let len = start.len().min(saturating_usize(most));
        Ok((start[..len].to_vec(), file.nbytes()))
    })
}

/// Return the objects of a store whose keys begin with the key of `url`.
///
/// # Errors
/// As [`fetch_beside`].
pub fn list_objects(url: &str, options: &RemoteOptions, watch: &dyn Watch) -> Result<Vec<Listed>, Error> {
    in_session(url, options, &header_limits(), watch, |session| {
        let remote = requested(session, url)?;
        let found = list(session.client(), &remote, session.stop);
        found.map_err(|fault| refused(&remote.shown, fault))
    })
}

/// Return the location of a file that is not on this machine.
fn requested(session: &Session<'_>, url: &str) -> Result<Remote, Error> {
    match session.locate(url)? {
        Location::Remote(remote) => Ok(*remote),
        Location::Cached(..) => Err(refused(
            &redacted(url),
            Fault::address("expected a URL of a store"),
        )),
    }
}

/// Read a whole file of this machine, and return it with its path.
fn read(path: PathBuf, most: u64) -> Result<(PathBuf, Vec<u8>), Error> {
    let mut bytes = Vec::new();
    // It may be anything, such as a FIFO that no process writes to.
    let file = LocalFile::open(&path)?;
    let outcome = file.with(|file| file.take(most + 1).read_to_end(&mut bytes));
    match outcome {
        Ok(_) if to_u64(bytes.len()) > most => {
            let source = Fault::too_large(most).into();
            Err(unopened(&path)(source))
        }
        Ok(_) => Ok((path, bytes)),
        Err(source) => Err(unopened(&path)(source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_beyond_the_limit_is_rejected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "12345").unwrap();
        let path = file.path().to_owned();
        assert_eq!(read(path.clone(), 5).unwrap(), (path.clone(), b"12345".to_vec()));
        assert_eq!(read(path, 4).unwrap_err().code(), "document-too-large");
    }

    #[cfg(unix)]
    #[test]
    fn rejects_a_fifo_without_waiting_for_a_writer() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("config.json");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
        let fault = read(fifo, 5).unwrap_err();
        assert!(fault.to_string().contains("not a regular file"), "{fault}");
    }
}
