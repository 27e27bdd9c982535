//! The last version of each file that was opened, with its first bytes. A file is opened from it without a request.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ingot_format::{StopFlag, to_u64, to_usize};
use ingot_remote::{Fault, RemoteFile, Resource};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::block::record_use;
use super::room::UNFINISHED_ENDING;
use super::{Cache, Version, seed_of};
use crate::disk;

/// The first bytes of the file: the format, and its version.
const MAGIC: &[u8; 8] = b"ingothd1";

/// The last version of a file.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    nbytes: u64,
    /// [`RemoteFile::description`].
    description: String,
    start: Vec<u8>,
}

impl Head {
    fn of(file: &RemoteFile) -> Option<Head> {
        Some(Head {
            nbytes: file.nbytes(),
            description: file.description()?,
            start: file.start().to_vec(),
        })
    }

    fn render(&self, seed: u64) -> Vec<u8> {
        let mut rest = self.nbytes.to_le_bytes().to_vec();
        rest.extend(to_u64(self.description.len()).to_le_bytes());
        rest.extend(self.description.as_bytes());
        rest.extend(&self.start);
        let digest = xxh3_64_with_seed(&rest, seed).to_le_bytes();
        [&MAGIC[..], &digest, &rest].concat()
    }

    fn parse(bytes: &[u8], seed: u64) -> Option<Head> {
        let (digest, rest) = bytes.strip_prefix(MAGIC)?.split_first_chunk()?;
        if u64::from_le_bytes(*digest) != xxh3_64_with_seed(rest, seed) {
            return None;
        }
        let (nbytes, rest) = rest.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (description, start) = rest.split_at_checked(to_usize(u64::from_le_bytes(*length))?)?;
        Some(Head {
            nbytes: u64::from_le_bytes(*nbytes),
            description: String::from_utf8(description.to_vec()).ok()?,
            start: start.to_vec(),
        })
    }

    /// Whether two heads of one version have the same first bytes.
    fn agrees(&self, other: &Head) -> bool {
        let both = self.start.len().min(other.start.len());
        self.start[..both] == other.start[..both]
    }

    fn is_of_version(&self, other: &Head) -> bool {
        (self.nbytes, &self.description) == (other.nbytes, &other.description)
    }
}

impl Cache {
    /// Record the version and the first bytes of a file that was opened, and return its version. `None` if it cannot be
    /// cached, also if its server uses one tag for two contents.
    pub(in crate::remote) fn remember(&self, file: &RemoteFile, stop: StopFlag<'_>) -> Option<Version> {
        let version = Version::of(file)?;
        let (path, seed) = self.head_of(&file.cache_name());
        let (old, new) = (self.head(&path, seed), Head::of(file)?);
        if let Some(old) = old.filter(|old| old.is_of_version(&new)) {
            if !old.agrees(&new) {
                let why = "the server uses one ETag for two contents of a file";
                self.note(&io::Error::other(why));
                return None;
            }
            if old.start.len() >= new.start.len() {
                return Some(version);
            }
        }
        let bytes = new.render(seed);
        if !file.options().is_offline() && !self.is_full() {
            let reserved = self.reserve(&path, to_u64(bytes.len()), stop);
            let written = reserved.and_then(|()| write(&path, &bytes));
            written.unwrap_or_else(|fault| self.give_up(&fault));
        }
        Some(version)
    }

    /// Return a file in its last version, without a request.
    ///
    /// # Errors
    /// [`Fault`], if the cache does not have it.
    pub(in crate::remote) fn recall(&self, resource: Resource) -> Result<RemoteFile, Fault> {
        let (path, seed) = self.head_of(&resource.cache_name());
        let head = self.head(&path, seed).ok_or_else(Fault::offline)?;
        RemoteFile::known(resource, head.nbytes, &head.description, head.start).ok_or_else(Fault::offline)
    }

    /// Read a head, and record its use.
    fn head(&self, path: &Path, seed: u64) -> Option<Head> {
        let mut file = disk::open_for_reading(path).ok()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        record_use(&file, self.room.since()).ok()?;
        Head::parse(&bytes, seed)
    }

    fn head_of(&self, name: &str) -> (PathBuf, u64) {
        let key = blake3::hash(name.as_bytes());
        (self.path(&key, ".head"), seed_of(&key))
    }
}

/// Write a whole file, or none.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let unfinished = path.with_extension(format!("{}-{number}.{UNFINISHED_ENDING}", std::process::id()));
    if let Some(folder) = path.parent() {
        disk::create_private_directory(folder)?;
    }
    let written = fs::write(&unfinished, bytes).and_then(|()| fs::rename(&unfinished, path));
    if written.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_head_is_not_read() {
        let head = Head {
            nbytes: 12,
            description: "tag \"1\"\n".to_owned(),
            start: b"start".to_vec(),
        };
        let bytes = head.render(7);
        assert_eq!(Head::parse(&bytes, 7).as_ref(), Some(&head));
        assert_eq!(Head::parse(&bytes, 8), None);
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert_eq!(Head::parse(&bad, 7), None, "{at}");
            assert_eq!(Head::parse(&bytes[..at], 7), None, "{at}");
        }
    }
}
