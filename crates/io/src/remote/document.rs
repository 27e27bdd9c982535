//! Short files that are read whole, such as the configuration beside a model.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use ingot_format::{to_u64, to_usize};

use super::fault::{Fault, FaultKind};
use super::fetch::{Answer, Resource};
use super::hub::{HubFile, MODEL_FILE};
use super::location::Location;
use super::options::RemoteOptions;
use super::pace::Deadline;
use super::retry::Tries;
use super::secrets::path_nbytes;
use super::session::{Session, header_limits, in_session, refused, variable};
use super::url::{Url, decode};
use crate::error::Error;
use crate::stop::StopFlag;
use crate::watch::Watch;

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
        if let Some(path) = remote.hub.as_ref().and_then(|file| file.cached(&variable)) {
            return read(path, most);
        }
        let bytes = all_of(&self.resource(&remote), most, self.stop);
        let bytes = bytes.map_err(|fault| refused(&remote.shown, fault))?;
        Ok((remote.shown.into(), bytes))
    }
}

/// What the file behind `url` is called. Empty where the URL names none.
#[must_use]
pub fn url_file_name(url: &str) -> String {
    match hub_file(url, &variable) {
        Some(Ok(file)) if file.is_folder() => return MODEL_FILE.to_owned(),
        Some(Ok(file)) => return file.name().to_owned(),
        _ => {}
    }
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let is_http = scheme.to_ascii_lowercase().starts_with("http");
    let path = &rest[..path_nbytes(scheme, rest)];
    let name = path.split_once('/').map_or("", |(_, path)| path);
    let name = name.rsplit('/').next().unwrap_or_default();
    match is_http {
        true => decode(name),
        false => name.to_owned(),
    }
}

/// The file of the Hub that a URL names, or `None` where it is one of something else.
pub(super) fn hub_file(
    url: &str,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Option<Result<HubFile, Fault>> {
    let (scheme, rest) = url.split_once("://")?;
    match scheme.to_ascii_lowercase().as_str() {
        "hf" => Some(HubFile::parse(rest)),
        "http" | "https" => match Url::parse(url) {
            Ok(url) => HubFile::of_url(&url, variable),
            Err(fault) => Some(Err(fault)),
        },
        _ => None,
    }
}

/// All that is there, if it has at most `most` bytes.
pub(super) fn all_of(resource: &Resource, most: u64, stop: StopFlag<'_>) -> Result<Vec<u8>, Fault> {
    let mut tries = Tries::new(&resource.client().options, stop);
    loop {
        match attempt(resource, most, tries.deadline) {
            Ok(bytes) => return Ok(bytes),
            Err(fault) => tries.after(fault)?,
        }
    }
}

fn attempt(resource: &Resource, most: u64, deadline: Deadline<'_>) -> Result<Vec<u8>, Fault> {
    let too_large = || Fault::new(FaultKind::TooLarge { limit: most });
    let (mut response, expected) = match resource.ask(&(0..most), None, deadline)? {
        Answer::Nothing => return Ok(Vec::new()),
        Answer::Part { pin, .. } if pin.nbytes > most => return Err(too_large()),
        Answer::Part { response, range, .. } => (response, Some(range.end)),
        Answer::Whole { response, nbytes, .. } => (response, nbytes),
    };
    if expected.is_some_and(|nbytes| nbytes > most) {
        return Err(too_large());
    }
    let wanted = to_usize(expected.unwrap_or(most + 1)).unwrap_or(usize::MAX);
    let bytes = response.read_some(wanted, &mut resource.pace(deadline))?;
    let found = to_u64(bytes.len());
    match expected {
        Some(expected) if found < expected => Err(FaultKind::Short { expected, found }.into()),
        None if found > most => Err(too_large()),
        _ => Ok(bytes),
    }
}

/// All of a file on this machine, with its path.
fn read(path: PathBuf, most: u64) -> Result<(PathBuf, Vec<u8>), Error> {
    let mut bytes = Vec::new();
    let outcome = File::open(&path).and_then(|file| file.take(most + 1).read_to_end(&mut bytes));
    let outcome = outcome.and_then(|_| match to_u64(bytes.len()) > most {
        true => Err(Fault::new(FaultKind::TooLarge { limit: most }).into()),
        false => Ok(()),
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
    fn a_file_behind_a_url_has_a_name() {
        for (url, name) in [
            ("https://h/a/model.safetensors?sig=/x", "model.safetensors"),
            ("https://huggingface.co/me/gpt", "model.safetensors"),
            ("hf://me/gpt@v1", "model.safetensors"),
            ("hf://me/gpt/a/x.bt", "x.bt"),
            ("s3://b/a/x?.bt", "x?.bt"),
            ("s3://b/a/x.bt?versionId=1", "x.bt"),
            ("az://c/x.bt?sv=1&sig=/x", "x.bt"),
        ] {
            assert_eq!(url_file_name(url), name, "{url}");
        }
    }

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
}
