//! A cache of remote files in a directory of this machine, which the processes of one user share.
//!
//! | file | contents |
//! |---|---|
//! | `blocks/ab/<file>.head` | the last version of a file that was opened, and its first bytes |
//! | `blocks/ab/<file and version>-<number>` | 8 MiB of that version ([`block`]) |
//! | `….part` | a block that is being fetched |
//! | `locks/<number>` | locked by the process that fetches a block |
//! | `nbytes` | the bytes of all blocks ([`room`]) |
//!
//! Files are identified by their URL without its signature, and versions by a strong ETag or a commit of the Hub. A file
//! without either is not cached. Each file is opened with a request, so that the store checks the identity of the caller,
//! and the version is the current one, before a block is used.
//!
//! A cache that cannot be used is left out, and [`why_uncached`] returns the reason: the bytes come from the store then.

mod block;
mod head;
mod reader;
mod room;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ingot_format::{StopFlag, locked};
use ingot_remote::{CacheOptions, Fault, RemoteFile};

use self::block::{BLOCK_NBYTES, Block, Place};
pub(super) use self::reader::CachedFile;
use self::room::{Room, UNFINISHED_ENDING};
use crate::disk::{self, Facts, Lock, Locked};

/// Locks for blocks. The blocks of one file that are fetched at once have different locks.
const LOCKS: u64 = 1024;

/// The time between two attempts to lock.
const PAUSE: Duration = Duration::from_millis(4);

/// The longest wait for the sum, which is locked while a process lists the cache.
const LOCKED: Duration = Duration::from_secs(10);

/// The file because of which programs for backups skip a directory (<https://bford.info/cachedir/>).
const TAG: (&str, &str) = (
    "CACHEDIR.TAG",
    "Signature: 8a477f597d28d172789f06886806bc55\n# Blocks of remote files. They can be removed at any time.\n",
);

/// The reason for the last time that a cache was not used.
static REASON: Mutex<Option<String>> = Mutex::new(None);

/// Return the reason why this process last read without its cache. `None` if it never did.
#[must_use]
pub fn why_uncached() -> Option<String> {
    locked(&REASON).clone()
}

/// The cache in a directory.
#[derive(Debug)]
pub(in crate::remote) struct Cache {
    directory: PathBuf,
    room: Room,
    /// Whether it was found that nothing can be written to it.
    is_full: AtomicBool,
}

/// The blocks of one version of a file.
#[derive(Debug)]
pub(in crate::remote) struct Version {
    key: blake3::Hash,
    nbytes: u64,
}

impl Version {
    /// Return the version of a file. `None` if its server does not identify versions.
    fn of(file: &RemoteFile) -> Option<Version> {
        let (name, version) = (file.cache_name(), file.cache_version()?);
        let nbytes = file.nbytes();
        let key = blake3::hash(format!("{name}\n{version}\n{nbytes}").as_bytes());
        Some(Version { key, nbytes })
    }

    /// Return the number that begins the digests and the locks of its blocks.
    fn seed(&self) -> u64 {
        seed_of(&self.key)
    }
}

/// Return the number that begins the digests of the cache's files with this key.
fn seed_of(key: &blake3::Hash) -> u64 {
    let bytes = key.as_bytes().first_chunk();
    bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// The turn of a thread that lacks a block.
enum Turn {
    /// It fetches the block, and no other process does.
    Mine(Locked),
    /// Another has fetched the block.
    Done,
}

impl Cache {
    /// Open the cache, and create its directory if it is missing. `None` if it cannot be used.
    pub(super) fn open(options: &CacheOptions) -> Option<Cache> {
        let directory = options.directory.clone();
        let made = prepare(&directory);
        if let Err(fault) = made {
            note(&directory, &fault);
            return None;
        }
        Some(Cache {
            room: Room::new(directory.join("blocks"), options.most_nbytes),
            directory,
            is_full: AtomicBool::new(false),
        })
    }

    /// Write nothing more to the cache, because of this fault.
    fn give_up(&self, fault: &io::Error) {
        self.is_full.store(true, Ordering::Relaxed);
        self.note(fault);
    }

    fn note(&self, fault: &io::Error) {
        note(&self.directory, fault);
    }

    fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    /// Return the path of a file of the cache, in one of 256 directories.
    fn path(&self, key: &blake3::Hash, ending: &str) -> PathBuf {
        let hex = key.to_hex();
        let folder = self.directory.join("blocks").join(&hex[..2]);
        folder.join(format!("{}{ending}", &hex[..32]))
    }

    fn place(&self, version: &Version, number: u64) -> Place {
        let begin = number * BLOCK_NBYTES;
        Place {
            path: self.path(&version.key, &format!("-{number:06}")),
            seed: version.seed(),
            span: begin..version.nbytes.min(begin + BLOCK_NBYTES),
        }
    }

    /// Open a block. `None` if it is missing, or has another size.
    fn block(&self, place: &Place) -> Option<Block> {
        Block::open(place.clone(), self.room.since())
    }

    /// Wait for the lock of a block, or until another process has fetched the block. The process with the lock must make
    /// progress during each `patience`.
    fn turn(
        &self,
        version: &Version,
        number: u64,
        patience: Duration,
        stop: StopFlag<'_>,
    ) -> io::Result<Turn> {
        let slot = version.seed().wrapping_add(number) % LOCKS;
        let lock = Locked::new(lock_file(&self.directory.join("locks").join(slot.to_string()))?);
        let place = self.place(version, number);
        let part = unfinished(&place.path);
        let progress = || fs::metadata(&part).map_or(0, |facts| facts.len());
        let (mut seen, mut since) = (progress(), Instant::now());
        while !disk::try_lock(&lock, Lock::Exclusive)? {
            if stop.is_set() {
                return Err(Fault::stopped().into());
            }
            let now = progress();
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
            if since.elapsed() > patience {
                let why = format!("another process has stopped while it fetches {}", part.display());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            thread::sleep(PAUSE);
        }
        if self.block(&place).is_some() {
            return Ok(Turn::Done);
        }
        // It may be one of another size.
        self.remove(&place);
        Ok(Turn::Mine(lock))
    }

    /// Reserve room for a new file of this many bytes.
    fn reserve(&self, path: &Path, nbytes: u64, stop: StopFlag<'_>) -> io::Result<()> {
        let full = || {
            io::Error::new(
                io::ErrorKind::StorageFull,
                "cache_size is smaller than the files in use",
            )
        };
        let has_room = self.with_sum(stop, |sum| self.room.reserve(sum, path, nbytes))?;
        if has_room == Some(false) {
            Err(full())
        } else {
            Ok(())
        }
    }

    fn release(&self, nbytes: u64) {
        // The sum is then too large, and the next removal corrects it.
        let _ = self.with_sum(StopFlag::never(), |sum| self.room.release(sum, nbytes));
    }

    /// Call `work` with the locked file that has the sum, unless the size of the cache has no limit.
    fn with_sum<T>(
        &self,
        stop: StopFlag<'_>,
        work: impl FnOnce(&File) -> io::Result<T>,
    ) -> io::Result<Option<T>> {
        if !self.room.is_limited() {
            return Ok(None);
        }
        let sum = Locked::new(lock_file(&self.directory.join("nbytes"))?);
        let begun = Instant::now();
        while !disk::try_lock(&sum, Lock::Exclusive)? {
            if stop.is_set() {
                return Err(Fault::stopped().into());
            }
            if begun.elapsed() > LOCKED {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "another process keeps its size locked",
                ));
            }
            thread::sleep(PAUSE);
        }
        work(&sum).map(Some)
    }

    /// Remove a block with wrong bytes, unless another process has replaced it.
    fn discard(&self, block: &Block) {
        let identity = |facts: io::Result<Facts>| facts.ok().map(|facts| facts.identity);
        let place = block.place();
        if identity(disk::facts(block.file())) == identity(disk::facts_at(&place.path)) {
            self.remove(place);
        }
    }

    fn remove(&self, place: &Place) {
        if fs::remove_file(&place.path).is_ok() {
            self.release(place.file_nbytes());
        }
    }
}

/// Create the directory for this user only, or check that no other user can write to it.
fn prepare(directory: &Path) -> io::Result<()> {
    disk::create_private_directory(directory)?;
    if !disk::is_private_directory(&disk::facts_at(directory)?) {
        let why = "it belongs to another user, or others can write to it";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    // A cache that is only readable may lack them.
    let made = ["blocks", "locks"].map(|name| disk::create_private_directory(&directory.join(name)));
    let (name, text) = TAG;
    if made.iter().all(Result::is_ok) && !directory.join(name).exists() {
        let _ = fs::write(directory.join(name), text);
    }
    Ok(())
}

/// Open a file for locking, and create it if necessary.
fn lock_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.open(path)
}

fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(UNFINISHED_ENDING);
    name.into()
}

fn note(directory: &Path, fault: &io::Error) {
    *locked(&REASON) = Some(format!("{}: {fault}", directory.display()));
}
