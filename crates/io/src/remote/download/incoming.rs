//! Files on their way: parts of all of them come at once, each into the file that gets its name in the end.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ingot_format::{StopFlag, locked, to_u64, to_usize};

use super::part_table::{PartHash, PartHashes, PartTable, SEAL_NBYTES, Seal};
use super::wanted::{DownloadOptions, Downloaded, VersionedSource, compare};
use crate::digest::{Algorithm, Hasher};
use crate::disk;
use crate::error::{Error, Failure};
use crate::file::check_unchanged;
use crate::file::{ReadAt, Stamp, Stream, read_exactly};
use crate::options::{Existing, ReadOptions};
use crate::payload::FileRange;
use crate::save::{Temp, is_there};
use crate::watch::{Unwatched, Watch};
use crate::workers::{Reading, share};

/// Bytes that are written, or read again and hashed, at once.
const PIECE_NBYTES: u64 = 1 << 20;

/// A file that is being fetched.
pub(super) struct Incoming {
    versioned: VersionedSource,
    path: PathBuf,
    table: PartTable,
    hashes: Mutex<PartHashes>,
    landing: Landing,
    /// Of a file whose SHA-256 is known.
    sha256: Option<Mutex<InOrder>>,
    fetched: AtomicU64,
}

enum Landing {
    /// It has no name yet.
    Partial(Partial),
    /// An earlier call gave it its name, and left this seal.
    Named(Seal),
}

/// The file that is filled before it gets its name. It is locked while it is open. Where it was closed, `opened` checks
/// that nobody wrote to it since.
struct Partial {
    path: PathBuf,
    nbytes: u64,
    existing: Existing,
    /// Whether it stays open until the call ends. Else it is open while a thread works on one of its parts.
    stays_open: bool,
    place: Mutex<PartialPlace>,
}

/// The file while it is open, and its stamp after it was closed.
#[derive(Default)]
struct PartialPlace {
    draft: Option<Arc<Temp>>,
    closed: Option<Stamp>,
}

impl Partial {
    fn new(draft: Temp, nbytes: u64, existing: Existing, stays_open: bool) -> Result<Partial, Error> {
        let partial = Partial {
            path: draft.path().to_owned(),
            nbytes,
            existing,
            stays_open,
            place: Mutex::default(),
        };
        locked(&partial.place).draft = Some(Arc::new(draft));
        partial.with(|_| Ok(()))?;
        Ok(partial)
    }

    /// Does `work` with the open file, which any number of threads may do at once.
    fn with<R>(&self, work: impl FnOnce(&Temp) -> Result<R, Error>) -> Result<R, Error> {
        let draft = self.opened()?;
        let outcome = work(&draft);
        drop(draft);
        self.close_unused()?;
        outcome
    }

    fn opened(&self) -> Result<Arc<Temp>, Error> {
        let mut place = locked(&self.place);
        if let Some(draft) = &place.draft {
            return Ok(Arc::clone(draft));
        }
        let mut draft = Temp::resume(&self.path, self.existing, &Unwatched)?;
        let (now, closed) = (self.stamp(&draft)?, place.closed.as_ref());
        if !closed.is_some_and(|closed| closed.is_same_file(&now) && closed.is_unwritten(&now)) {
            if now.nbytes() == 0 {
                // Somebody took the other away, and this one was made just now.
                draft.discard();
            }
            return Err(Error::Changed {
                path: Some(self.path.clone()),
                nbytes_at_open: self.nbytes,
                nbytes_now: (now.nbytes() != self.nbytes).then_some(now.nbytes()),
            });
        }
        draft.grow_to(self.nbytes);
        Ok(Arc::clone(place.draft.insert(Arc::new(draft))))
    }

    fn close_unused(&self) -> Result<(), Error> {
        let mut place = locked(&self.place);
        let is_unused = |draft: &Arc<Temp>| Arc::strong_count(draft) == 1;
        if !self.stays_open
            && let Some(draft) = place.draft.take_if(|draft| is_unused(draft))
        {
            place.closed = Some(self.stamp(&draft)?);
        }
        Ok(())
    }

    fn stamp(&self, draft: &Temp) -> Result<Stamp, Error> {
        let facts = disk::facts(draft.file()).map_err(|source| Error::Open {
            path: self.path.clone(),
            source,
        })?;
        Ok(Stamp::of(&facts))
    }
}

/// Fetches what is missing of all these files.
pub(super) fn fetch(files: &[Incoming], how: &DownloadOptions, watch: &dyn Watch) -> Result<(), Error> {
    let parts = |(file, incoming): (usize, &Incoming)| {
        let numbers = 0..incoming.table.count();
        numbers.map(move |number| (file, number))
    };
    let tasks = files.iter().enumerate().flat_map(parts);
    let spans: Vec<(&dyn ReadAt, Range<u64>)> = files
        .iter()
        .map(|file| (&*file.versioned.source, 0..file.nbytes()))
        .collect();
    let total = sum(files.iter().map(Incoming::nbytes));
    let reading = Reading::of(total, &spans, &ReadOptions { threads: how.threads });
    let work = |(file, number): (usize, usize), stop: StopFlag<'_>| files[file].part(number, stop);
    share(reading, tasks, total, work, watch)?;
    // Compare all: each file that is wrong has to be thrown away.
    let compared: Vec<_> = files.iter().map(Incoming::compare).collect();
    compared.into_iter().collect()
}

impl Incoming {
    /// Goes on with what was left at `path`, or begins anew.
    pub(super) fn open(
        versioned: VersionedSource,
        path: PathBuf,
        stays_open: bool,
        how: &DownloadOptions,
        watch: &dyn Watch,
    ) -> Result<Incoming, Error> {
        let mut partial = Temp::resume(&path, how.existing, watch)?;
        let table = versioned.part_table();
        let left = match versioned.version {
            Some(_) => table.hashes(partial.file()),
            None => None,
        };
        let begun = match &left {
            Some(_) => Ok(()),
            // Fails where the server claims more than there is room for, before anything is made of that.
            None => partial
                .begin_anew(table.nbytes(), watch)
                .and_then(|()| partial.write(&table.head(), versioned.source.nbytes())),
        };
        if let Err(error) = begun {
            partial.discard();
            return Err(error);
        }
        let partial = Partial::new(partial, table.nbytes(), how.existing, stays_open)?;
        let sha256 = versioned.sha256.map(|_| Mutex::default());
        Ok(Incoming {
            hashes: Mutex::new(left.unwrap_or_default()),
            sha256,
            ..Incoming::new(versioned, path, Landing::Partial(partial))
        })
    }

    /// Takes a shard that has its name already. `fetch` checks that it has this seal.
    pub(super) fn named(versioned: VersionedSource, path: PathBuf, seal: Seal) -> Result<Incoming, Error> {
        let metadata = std::fs::metadata(&path).map_err(|source| Error::Open {
            path: path.clone(),
            source,
        })?;
        if metadata.len() != versioned.source.nbytes() {
            return Err(is_there(&path));
        }
        Ok(Incoming::new(versioned, path, Landing::Named(seal)))
    }

    fn new(versioned: VersionedSource, path: PathBuf, landing: Landing) -> Incoming {
        Incoming {
            table: versioned.part_table(),
            versioned,
            path,
            hashes: Mutex::default(),
            landing,
            sha256: None,
            fetched: AtomicU64::new(0),
        }
    }

    fn nbytes(&self) -> u64 {
        self.versioned.source.nbytes()
    }

    /// Does `work` with the file if it has no name yet.
    fn with(&self, work: impl FnOnce(&Temp) -> Result<(), Error>) -> Result<(), Error> {
        match &self.landing {
            Landing::Partial(partial) => partial.with(work),
            Landing::Named(_) => Ok(()),
        }
    }

    /// Fetches a part unless it is there, and returns its size. The last part of a shard that has its name is the one that
    /// fails where the shard has another seal.
    fn part(&self, number: usize, stop: StopFlag<'_>) -> Result<usize, Error> {
        let part = self.table.part(number);
        match &self.landing {
            Landing::Named(seal) => {
                let hash = File::open(&self.path).and_then(|file| part_hash(&file, &part));
                let hash = hash.map_err(|_| is_there(&self.path))?;
                let mut hashes = locked(&self.hashes);
                hashes.insert(number, hash);
                if hashes.len() == self.table.count() && self.table.seal(&hashes) != *seal {
                    return Err(is_there(&self.path));
                }
            }
            Landing::Partial(partial) => partial.with(|draft| self.complete(draft, number, stop))?,
        }
        Ok(size(&part))
    }

    /// Fetches a part if `draft` lacks it.
    fn complete(&self, draft: &Temp, number: usize, stop: StopFlag<'_>) -> Result<(), Error> {
        let part = self.table.part(number);
        let noted = locked(&self.hashes).get(&number).copied();
        if noted.is_none() || noted != part_hash(draft.file(), &part).ok() {
            let hash = self.fetch(draft, &part, stop)?;
            draft.write(&hash, self.table.position(number))?;
            locked(&self.hashes).insert(number, hash);
        }
        match &self.sha256 {
            Some(in_order) => came(in_order, number, &self.table, draft.file())
                .map_err(|fault| unread(&part, fault).about(Some(&self.versioned.shown), None)),
            None => Ok(()),
        }
    }

    /// Fetches a part; gives the hash of its bytes. Where a server gives no parts, what breaks off begins anew.
    fn fetch(&self, partial: &Temp, part: &Range<u64>, stop: StopFlag<'_>) -> Result<PartHash, Error> {
        let mut left = self.versioned.retries;
        loop {
            match self.try_fetch(partial, part, stop) {
                Err(error) if left > 0 && error.code() == "range-ignored" => left -= 1,
                outcome => return outcome,
            }
        }
    }

    fn try_fetch(&self, partial: &Temp, part: &Range<u64>, stop: StopFlag<'_>) -> Result<PartHash, Error> {
        let source = &*self.versioned.source;
        let mut stream = Stream::new(source, part.clone(), stop);
        let mut hasher = Hasher::new(Algorithm::Xxh3Wide);
        let mut buffer = Vec::new();
        let mut at = part.start;
        while at < part.end {
            buffer.resize(size(&(at..part.end.min(at + PIECE_NBYTES))), 0);
            let came = match &mut stream {
                Some(stream) => stream.fill(at, &mut buffer),
                None => read_exactly(source, at, &mut buffer, stop),
            };
            came.map_err(|failure| self.explain(failure))?;
            hasher.update(&buffer);
            partial.write(&buffer, at)?;
            at += to_u64(buffer.len());
            if self.versioned.is_remote {
                self.fetched.fetch_add(to_u64(buffer.len()), Ordering::Relaxed);
            }
        }
        Ok(finished(hasher))
    }

    fn explain(&self, failure: Failure) -> Error {
        match check_unchanged(&*self.versioned.source, Some(&self.versioned.shown)) {
            Err(changed) => changed,
            Ok(()) => failure.about(Some(&self.versioned.shown), None),
        }
    }

    /// Checks the SHA-256. A file with the wrong SHA-256 is not kept: the next call would find the same bytes.
    fn compare(&self) -> Result<(), Error> {
        let hasher = self
            .sha256
            .as_ref()
            .and_then(|in_order| locked(in_order).hasher.take());
        match (self.versioned.sha256, hasher) {
            (Some(expected), Some(hasher)) => {
                compare(&self.versioned.shown, expected, hasher.finish()).inspect_err(|_| self.discard())
            }
            _ => Ok(()),
        }
    }

    /// Throws away a file of which the next call could use nothing.
    pub(super) fn abandon(&self) {
        if self.versioned.version.is_none() || locked(&self.hashes).is_empty() {
            self.discard();
        }
    }

    fn discard(&self) {
        // Fails where the file is another program's by now, which keeps it.
        let _ = self.with(|draft| {
            draft.discard();
            Ok(())
        });
    }

    /// Returns the seal of the whole file; zeros where the server tells no versions apart.
    pub(super) fn seal(&self) -> Seal {
        match self.versioned.version {
            Some(_) => self.table.seal(&locked(&self.hashes)),
            None => [0; SEAL_NBYTES],
        }
    }

    /// Flushes the file, which may take long, before it gets its name.
    pub(super) fn flush(&self, how: &DownloadOptions, watch: &dyn Watch) -> Result<(), Error> {
        self.with(|draft| draft.flush(how.durable, watch))
    }

    /// Gives the file its name.
    pub(super) fn publish(&self, how: &DownloadOptions, watch: &dyn Watch) -> Result<(), Error> {
        self.with(|draft| draft.publish_first(self.nbytes(), how.existing, how.durable, watch))
    }

    pub(super) fn into_downloaded(self) -> Downloaded {
        Downloaded {
            nbytes: self.nbytes(),
            fetched_nbytes: self.fetched.into_inner(),
            sha256: self.versioned.sha256,
            path: self.path,
            files: Vec::new(),
        }
    }
}

/// All of them together. Servers may claim anything.
pub(super) fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

fn part_hash(file: &File, part: &Range<u64>) -> io::Result<PartHash> {
    let mut hasher = Hasher::new(Algorithm::Xxh3Wide);
    feed(&mut hasher, file, part)?;
    Ok(finished(hasher))
}

/// Feeds `hasher` the bytes of a part.
fn feed(hasher: &mut Hasher, file: &File, part: &Range<u64>) -> io::Result<()> {
    let range = FileRange::new(file, part.start, part.end - part.start);
    let mut buffer = Vec::new();
    let mut at = 0;
    while at < part.end - part.start {
        buffer.resize(size(&(at..(part.end - part.start).min(at + PIECE_NBYTES))), 0);
        range.read(at, &mut buffer)?;
        hasher.update(&buffer);
        at += to_u64(buffer.len());
    }
    Ok(())
}

fn finished(hasher: Hasher) -> PartHash {
    hasher
        .finish()
        .as_bytes()
        .first_chunk()
        .copied()
        .unwrap_or_default()
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

/// The SHA-256 of a file whose parts come in any order. A part is hashed when all parts before it are there; it is read
/// again then, while the system still has it in memory. So no thread waits for another, and no part is kept.
struct InOrder {
    /// The parts that are there and not hashed yet.
    waiting: BTreeSet<usize>,
    /// The part to hash next.
    next: usize,
    /// `None` while a thread hashes a part.
    hasher: Option<Hasher>,
}

impl Default for InOrder {
    fn default() -> InOrder {
        InOrder {
            waiting: BTreeSet::new(),
            next: 0,
            hasher: Some(Hasher::new(Algorithm::Sha256)),
        }
    }
}

/// Notes that a part is there, in `file`, and hashes all parts whose turn it is, unless another thread does so.
fn came(in_order: &Mutex<InOrder>, number: usize, table: &PartTable, file: &File) -> io::Result<()> {
    let mut state = locked(in_order);
    state.waiting.insert(number);
    loop {
        let next = state.next;
        if !state.waiting.contains(&next) {
            return Ok(());
        }
        let Some(mut hasher) = state.hasher.take() else {
            return Ok(());
        };
        drop(state);
        feed(&mut hasher, file, &table.part(next))?;
        state = locked(in_order);
        state.waiting.remove(&next);
        state.next += 1;
        state.hasher = Some(hasher);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Without the stamp, the second and the third would be written into.
    #[test]
    fn a_partial_that_was_closed_is_taken_again_only_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let (path, part) = (folder.path().join("a"), folder.path().join(".a.ingot-part"));
        let partial = || {
            let mut draft = Temp::resume(&path, Existing::Refuse, &Unwatched).unwrap();
            draft.begin_anew(3, &Unwatched).unwrap();
            Partial::new(draft, 3, Existing::Refuse, false).unwrap()
        };
        let same = partial();
        assert!(locked(&same.place).draft.is_none());
        same.with(|draft| draft.write(b"abc", 0)).unwrap();
        same.with(|draft| draft.write(b"d", 0)).unwrap();
        assert_eq!(std::fs::read(&part).unwrap(), b"dbc");
        let alter: [fn(&std::path::Path); 3] = [
            |part| std::fs::write(part, "longer").unwrap(),
            |part| {
                std::fs::rename(part, part.with_extension("aside")).unwrap();
                std::fs::write(part, "abc").unwrap();
            },
            |part| std::fs::remove_file(part).unwrap(),
        ];
        for alter in alter {
            let altered = partial();
            alter(&part);
            let outcome = altered.with(|draft| draft.write(b"x", 0));
            assert_eq!(outcome.unwrap_err().code(), "changed");
        }
        assert!(!part.exists(), "nothing is left where there was nothing");
        drop(Temp::resume(&path, Existing::Refuse, &Unwatched).unwrap());
        let held = Temp::resume(&path, Existing::Refuse, &Unwatched).unwrap();
        let kept = Partial::new(held, 0, Existing::Refuse, true).unwrap();
        assert!(Temp::resume(&path, Existing::Refuse, &Unwatched).is_err());
        drop(kept);
    }

    #[test]
    fn a_flush_that_goes_on_holds_no_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let resumed = || Temp::resume(&path, Existing::Refuse, &Unwatched);
        let mut draft = resumed().unwrap();
        draft.begin_anew(3, &Unwatched).unwrap();
        let partial = Partial::new(draft, 3, Existing::Refuse, true).unwrap();
        let flushing = partial
            .with(|draft| Ok(draft.file().try_clone().unwrap()))
            .unwrap();
        assert!(resumed().is_err());
        drop(partial);
        assert!(resumed().is_ok());
        drop(flushing);
    }

    #[test]
    fn parts_that_come_in_any_order_are_hashed_in_theirs() {
        let bytes: Vec<u8> = (0_usize..(5 << 20) + 3).map(|at| at.to_le_bytes()[1]).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        let table = PartTable::new(5 * (1 << 20) + 3, "v");
        for order in [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]] {
            let in_order = Mutex::default();
            for number in order {
                came(&in_order, number, &table, &file).unwrap();
            }
            let hasher = in_order.into_inner().unwrap().hasher.unwrap();
            assert_eq!(hasher.finish(), Algorithm::Sha256.digest(&bytes));
        }
    }
}
