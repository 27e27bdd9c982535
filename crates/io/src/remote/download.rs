//! Fetching a file whole, to keep it.
//!
//! Parts come by several connections at once into a file beside the target, which gets the target's name when all of
//! them are there and are what they should be. A call that is broken off, however that happens, leaves that file with
//! notes of what it holds ([`Journal`]); the next call for the same version goes on from there.

use std::io::{self, Read};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ingot_format::{to_u64, to_usize};

use super::checkpoint::{Found, found};
use super::document::url_file_name;
use super::fault::{Fault, FaultKind};
use super::follow::Follow;
use super::journal::{Journal, RECORD, Record};
use super::options::RemoteOptions;
use super::place::redacted;
use super::source::RemoteSource;
use crate::archive::{check_unchanged, open_source};
use crate::error::Error;
use crate::execute::{ReadOptions, Reading};
use crate::failure::Failure;
use crate::hash::{Algorithm, Definition, Digest, Hasher, Unequal, hash};
use crate::payload::{FileRange, Payload};
use crate::save::partial::{Existing, Partial};
use crate::save::{Durability, ReadOnly, SaveOptions, save};
use crate::source::Source;
use crate::watch::Watch;
use crate::workers::share;

/// Bytes that are written at once.
const WRITE_NBYTES: u64 = 1 << 20;

/// How to fetch a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct DownloadOptions {
    /// How many parts are fetched at once; by default as for reading.
    pub threads: Option<NonZeroUsize>,
    /// What becomes of a file that is there.
    pub existing: Existing,
    /// What a loss of power may undo.
    pub durable: Durability,
    /// The SHA-256 that the file has to have.
    pub sha256: Option<Digest>,
}

/// What was fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Downloaded {
    /// Where it is.
    pub path: PathBuf,
    /// Its size in bytes.
    pub nbytes: u64,
    /// Bytes that came over the network for it. Fewer than all where an earlier call had some of them.
    pub fetched_nbytes: u64,
    /// Its SHA-256, where somebody said what that has to be: the caller, or the Hub.
    pub sha256: Option<Digest>,
}

/// Fetches what is behind `url` to `path`; into it, where that is a directory. Nothing has the name `path`, or it is what
/// it was before, until all of the file is there.
///
/// # Errors
/// As [`Checkpoint::open_url`](crate::Checkpoint::open_url); [`Error::Open`] where something is at `path` that is not to be
/// replaced; [`Error::Read`], [`Error::Changed`], [`Error::Write`] and [`Error::Interrupted`], after which the next call
/// goes on with what came by then; [`Error::Digest`], after which it does not; [`Error::Edit`] with
/// [`EditError::Busy`](crate::EditError::Busy) when somebody else fetches this file.
pub fn download(
    url: &str,
    path: &Path,
    options: &RemoteOptions,
    how: &DownloadOptions,
    watch: &dyn Watch,
) -> Result<Downloaded, Error> {
    let shown = PathBuf::from(redacted(url));
    let path = named(path, url).map_err(|fault| Error::Open {
        path: shown.clone(),
        source: fault.into(),
    })?;
    // Before anybody is asked for anything.
    if how.existing == Existing::Refuse && path.exists() {
        return Err(Error::Open {
            path,
            source: rustix::io::Errno::EXIST.into(),
        });
    }
    match found(url, options, &RemoteSource::of_whole, watch)? {
        Found::Cached(cached) => copy(&cached, path, how, watch),
        Found::Remote(source, backend) => {
            let fetch = Fetch {
                // Only the Hub means that by the header.
                linked: (backend == "hf").then(|| source.sha256()).flatten(),
                version: source.version(),
                source: &source,
                shown,
                retries: options.retries,
                fetched: AtomicU64::new(0),
            };
            fetch.to(path, how, watch)
        }
    }
}

/// `path`, or the name that the URL gives in it where it is a directory.
fn named(path: &Path, url: &str) -> Result<PathBuf, Fault> {
    let is_folder = path.is_dir() || path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if !is_folder {
        return Ok(path.to_owned());
    }
    let name = url_file_name(url);
    let is_name = !matches!(&*name, "" | "." | "..") && !name.contains(['/', '\\', '\0']);
    match is_name {
        true => Ok(path.join(name)),
        false => {
            let why = "the URL gives no name for a file, and the destination is a directory";
            Err(FaultKind::Address(why.to_owned()).into())
        }
    }
}

/// Copies a file of the Hub's cache.
fn copy(cached: &Path, path: PathBuf, how: &DownloadOptions, watch: &dyn Watch) -> Result<Downloaded, Error> {
    if let Some(expected) = how.sha256 {
        let found = hash(cached, Definition::File(Algorithm::Sha256), watch)?;
        let found =
            Digest::from_hex(Algorithm::Sha256, &found).unwrap_or_else(|| Digest::zero(Algorithm::Sha256));
        compare(cached, expected, found)?;
    }
    let source = open_source(cached)?;
    let all = FileRange::new(source.file(), 0, source.nbytes());
    let options = SaveOptions {
        durable: how.durable,
        read_only: ReadOnly::Replace,
        ..SaveOptions::default()
    };
    save(&path, b"", &[Payload::File(all)], &options, watch)?;
    Ok(Downloaded {
        path,
        nbytes: source.nbytes(),
        fetched_nbytes: 0,
        sha256: how.sha256,
    })
}

fn compare(path: &Path, expected: Digest, found: Digest) -> Result<(), Error> {
    if expected == found {
        return Ok(());
    }
    Err(Error::Digest {
        path: Some(path.to_owned()),
        tensor: None,
        unequal: Box::new(Unequal {
            algorithm: Algorithm::Sha256,
            expected,
            found,
        }),
    })
}

/// A file that is being fetched.
struct Fetch<'s> {
    source: &'s RemoteSource,
    /// The SHA-256 that the Hub says the file has.
    linked: Option<Digest>,
    shown: PathBuf,
    retries: u32,
    /// What no other version of it is called; `None` where nothing tells versions apart.
    version: Option<String>,
    fetched: AtomicU64,
}

impl Fetch<'_> {
    fn to(&self, path: PathBuf, how: &DownloadOptions, watch: &dyn Watch) -> Result<Downloaded, Error> {
        let nbytes = self.source.nbytes();
        let sha256 = self.expected(how)?;
        let mut partial = Partial::open(&path, how.existing, watch)?;
        let outcome = self
            .fill(&mut partial, sha256, how, watch)
            .and_then(|()| partial.publish(nbytes, how.existing, how.durable, watch));
        if let Err(error) = outcome {
            // Wrong bytes would be found to be there again and again.
            if matches!(error, Error::Digest { .. }) || !self.can_go_on(&partial) {
                partial.discard();
            }
            return Err(error);
        }
        Ok(Downloaded {
            path,
            nbytes,
            fetched_nbytes: self.fetched.load(Ordering::Relaxed),
            sha256,
        })
    }

    /// Whether the next call would find a part of it.
    fn can_go_on(&self, partial: &Partial) -> bool {
        let records = || self.journal().records(partial.file());
        let is_any = |records: Vec<Record>| records.iter().any(|record| *record != Record::default());
        self.version.is_some() && records().is_some_and(is_any)
    }

    fn journal(&self) -> Journal {
        let version = self.version.as_deref().unwrap_or_default();
        match self.source.is_whole() {
            true => Journal::of_one_part(self.source.nbytes(), version),
            false => Journal::new(self.source.nbytes(), version),
        }
    }

    /// The SHA-256 that it has to have, of which all who know it must say the same.
    fn expected(&self, how: &DownloadOptions) -> Result<Option<Digest>, Error> {
        if let (Some(expected), Some(found)) = (how.sha256, self.linked) {
            compare(&self.shown, expected, found)?;
        }
        Ok(how.sha256.or(self.linked))
    }

    fn fill(
        &self,
        partial: &mut Partial,
        sha256: Option<Digest>,
        how: &DownloadOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        let nbytes = self.source.nbytes();
        let journal = self.journal();
        let left = self
            .version
            .as_ref()
            .and_then(|_| journal.records(partial.file()));
        let records = match left {
            Some(records) => records,
            None => {
                partial.begin_anew(journal.nbytes(), watch)?;
                partial.write(&journal.head(), nbytes)?;
                vec![Record::default(); journal.count()]
            }
        };
        let follow = sha256.map(|_| Follow::new(partial.file(), &journal));
        let work = |number: usize| -> Result<usize, Error> {
            let part = journal.part(number);
            if !is_there(partial, &part, &records[number]) {
                let record = self.fetch(partial, &part)?;
                partial.write(&record, journal.position(number))?;
            }
            if let Some(follow) = &follow {
                follow
                    .came(number)
                    .map_err(|fault| unread(&part, fault).about(Some(&self.shown), None))?;
            }
            Ok(size(&part))
        };
        let options = ReadOptions { threads: how.threads };
        let reading = Reading::of(nbytes, &[(self.source, 0..nbytes)], &options);
        share(reading, (0..journal.count()).collect(), nbytes, work, watch)?;
        match (sha256, follow) {
            (Some(expected), Some(follow)) => compare(&self.shown, expected, follow.finish()),
            _ => Ok(()),
        }
    }

    /// Fetches a part; gives the hash of its bytes. Where a server gives no parts, what breaks off begins anew.
    fn fetch(&self, partial: &Partial, part: &Range<u64>) -> Result<Record, Error> {
        let mut left = if self.source.is_whole() { self.retries } else { 0 };
        loop {
            match self.try_fetch(partial, part) {
                Err(error) if left > 0 && error.code() == "range-ignored" => left -= 1,
                outcome => return outcome,
            }
        }
    }

    fn try_fetch(&self, partial: &Partial, part: &Range<u64>) -> Result<Record, Error> {
        let mut bytes = self.source.part(part.clone());
        let mut hasher = Hasher::new(Algorithm::Xxh3Wide);
        let mut buffer = Vec::new();
        let mut at = part.start;
        while at < part.end {
            buffer.resize(size(&(at..part.end.min(at + WRITE_NBYTES))), 0);
            bytes
                .read_exact(&mut buffer)
                .map_err(|fault| self.explain(unread(part, fault)))?;
            hasher.update(&buffer);
            partial.write(&buffer, at)?;
            at += to_u64(buffer.len());
            self.fetched.fetch_add(to_u64(buffer.len()), Ordering::Relaxed);
        }
        Ok(record(hasher))
    }

    fn explain(&self, failure: Failure) -> Error {
        match check_unchanged(self.source, Some(&self.shown)) {
            Err(changed) => changed,
            Ok(()) => failure.about(Some(&self.shown), None),
        }
    }
}

/// Whether the bytes of a part have the hash that was noted of them.
fn is_there(partial: &Partial, part: &Range<u64>, noted: &Record) -> bool {
    if *noted == Record::default() {
        return false;
    }
    let range = FileRange::new(partial.file(), part.start, part.end - part.start);
    let mut hasher = Hasher::new(Algorithm::Xxh3Wide);
    let mut buffer = Vec::new();
    let mut at = 0;
    while at < part.end - part.start {
        buffer.resize(size(&(at..(part.end - part.start).min(at + WRITE_NBYTES))), 0);
        if range.read(at, &mut buffer).is_err() {
            return false;
        }
        hasher.update(&buffer);
        at += to_u64(buffer.len());
    }
    record(hasher) == *noted
}

fn record(hasher: Hasher) -> Record {
    let mut record = [0; RECORD];
    record.copy_from_slice(&hasher.finish().as_bytes()[..RECORD]);
    record
}

fn unread(part: &Range<u64>, fault: io::Error) -> Failure {
    Failure::Read {
        position: part.start,
        expected: size(part),
        found: 0,
        source: Some(fault),
    }
}

fn size(range: &Range<u64>) -> usize {
    to_usize(range.end - range.start).unwrap_or(usize::MAX)
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
                named(folder.path(), url).unwrap(),
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
            assert!(named(folder.path(), url).is_err(), "{url}");
        }
        assert_eq!(
            named(&folder.path().join("x"), "https://h").unwrap(),
            folder.path().join("x")
        );
    }
}
