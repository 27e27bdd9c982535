//! Documents that are read whole: what lies beside a model, and the headers of all its shards in one.

use std::io::Read;
use std::path::{Path, PathBuf};

use ingot_format::{Limits, ShardHeaders, StopFlag, to_u64};
use ingot_remote::{Fault, Location, RemoteOptions, redacted, shard_headers};

use super::session::{Session, header_limits, in_session, refused};
use crate::error::Error;
use crate::file::LocalFile;
use crate::watch::Watch;
use crate::workers::watched;

/// Fetches all of the file `name` that lies in the folder of the one behind `url`, if it has at most `most` bytes. Gives
/// its own URL too, without the secrets in it.
///
/// # Errors
/// [`Error::Open`] with a [`Fault`] inside, whose kind is that of a file which is missing or not to be read where the
/// server says so; [`Error::Interrupted`].
pub fn fetch_beside(
    url: &str,
    name: &str,
    most: u64,
    options: &RemoteOptions,
    watch: &dyn Watch,
) -> Result<(PathBuf, Vec<u8>), Error> {
    in_session(url, options, &header_limits(), watch, |session| {
        session.document_beside(url, name, most)
    })
}

impl Session<'_> {
    fn document_beside(&self, url: &str, name: &str, most: u64) -> Result<(PathBuf, Vec<u8>), Error> {
        let remote = match self.locate(url)? {
            Location::Cached(path, None) => return read(path.with_file_name(name), most),
            Location::Cached(_, Some(remote)) | Location::Remote(remote) => self.beside(&remote, name)?,
        };
        if let Some(path) = remote.cached() {
            return read(path, most);
        }
        let bytes = self.resource(&remote).document(most, self.stop);
        let bytes = bytes.map_err(|fault| refused(&remote.shown, fault))?;
        Ok((remote.shown.into(), bytes))
    }
}

/// Asks the Hub for the headers of all shards of a model in one document. `None` where it gives none that can be used,
/// for whatever reason: the files themselves will tell what is wrong, or do.
///
/// The Hub has such documents of indexes of models, as they are on the main branch. `url` names such an index, or a
/// repository, which stands for its index where it has no file that holds all of the model.
///
/// # Errors
/// [`Error::Interrupted`].
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

/// All of a file on this machine, with its path.
fn read(path: PathBuf, most: u64) -> Result<(PathBuf, Vec<u8>), Error> {
    let mut bytes = Vec::new();
    // It may be anything, such as a FIFO that no process writes to.
    let file = LocalFile::open(&path)?;
    let outcome = file.with(|file| file.take(most + 1).read_to_end(&mut bytes));
    let outcome = outcome.and_then(|_| {
        if to_u64(bytes.len()) > most {
            Err(Fault::too_large(most).into())
        } else {
            Ok(())
        }
    });
    match outcome {
        Ok(()) => Ok((path, bytes)),
        Err(source) => Err(Error::Open { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_too_large_is_not_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "12345").unwrap();
        let path = file.path().to_owned();
        assert_eq!(read(path.clone(), 5).unwrap(), (path.clone(), b"12345".to_vec()));
        let Err(Error::Open { source: fault, .. }) = read(path, 4) else {
            panic!("it has five bytes");
        };
        assert_eq!(Fault::of(&fault).unwrap().code(), "document-too-large");
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
