//! Files that are being downloaded. Parts of all of them are fetched at once, each into the file that is renamed at the
//! end.

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
use crate::disk::{self, Facts};
use crate::error::{Error, Failure, unopened};
use crate::file::check_unchanged;
use crate::file::{ReadAt, Stream, is_in_its_place, read_exactly};
use crate::options::{ReadOptions, SaveOptions};
use crate::payload::FileRange;
use crate::save::{Temp, is_there};
use crate::watch::{Unwatched, Watch};
use crate::workers::{Reading, share};

/// Bytes that are written, or read again and hashed, at once.
const PIECE_NBYTES: u64 = 1 << 20;

/// A file that is being downloaded.
pub(super) struct Incoming {
    versioned: VersionedSource,
    path: PathBuf,
    table: PartTable,
    hashes: Mutex<PartHashes>,
    landing: Landing,
    /// For a file whose SHA-256 is known.
    sha256: Option<Mutex<InOrder>>,
    fetched: AtomicU64,
}

enum Landing {
    /// The file that will be renamed.
    Partial(Partial),
    /// An earlier call renamed the file, and left this seal.
    Named(Seal),
}

/// The file that is filled before it is renamed. It is locked while it is open. Opening it again checks that no other
/// process wrote to it.
struct Partial {
    path: PathBuf,
    nbytes: u64,
    save: SaveOptions,
    /// Whether it stays open until the call ends, and not only while a thread works on one of its parts.
    stays_open: bool,
    handle: Mutex<Handle>,
}

enum Handle {
    Open(Arc<Temp>),
    Closed(Facts),
}

impl Partial {
    fn new(temp: Temp, nbytes: u64, save: SaveOptions, stays_open: bool) -> Result<Partial, Error> {
        let partial = Partial {
            path: temp.path().to_owned(),
            nbytes,
            save,
            stays_open,
            handle: Mutex::new(Handle::Open(Arc::new(temp))),
        };
        partial.close_unused()?;
        Ok(partial)
    }

    /// Call `work` with the open file. Any number of threads may do so at once.
    fn with<R>(&self, work: impl FnOnce(&Temp) -> Result<R, Error>) -> Result<R, Error> {
        let temp = self.opened()?;
        let outcome = work(&temp);
        drop(temp);
        self.close_unused()?;
        outcome
    }

    fn opened(&self) -> Result<Arc<Temp>, Error> {
        let mut handle = locked(&self.handle);
        let closed = match &*handle {
            Handle::Open(temp) => return Ok(Arc::clone(temp)),
            Handle::Closed(facts) => facts,
        };
        let mut temp = Temp::resume(&self.path, &self.save, &Unwatched)?;
        let now = self.facts(&temp)?;
        if !is_in_its_place(closed, &now, false) {
            if now.nbytes == 0 {
                // The other file was removed, and this one was just created.
                temp.discard();
            }
            let failure = Failure::Changed {
                nbytes_at_open: self.nbytes,
                nbytes_now: (now.nbytes != self.nbytes).then_some(now.nbytes),
            };
            return Err(failure.about(Some(&self.path), None));
        }
        temp.grow_to(self.nbytes);
        let temp = Arc::new(temp);
        *handle = Handle::Open(Arc::clone(&temp));
        Ok(temp)
    }

    fn close_unused(&self) -> Result<(), Error> {
        let mut handle = locked(&self.handle);
        if let Handle::Open(temp) = &*handle
            && !self.stays_open
            && Arc::strong_count(temp) == 1
        {
            *handle = Handle::Closed(self.facts(temp)?);
        }
        Ok(())
    }

    fn facts(&self, temp: &Temp) -> Result<Facts, Error> {
        disk::facts(temp.file()).map_err(unopened(&self.path))
    }
}

/// Fetch the missing parts of all these files.
pub(super) fn fetch(files: &[Incoming], how: &DownloadOptions, watch: &dyn Watch) -> Result<(), Error> {
    let parts = |file| (0..Incoming::count(file)).map(move |number| (file, number));
    let span = |file: &'_ Incoming| 0..file.nbytes();
    let spans: Vec<(&dyn ReadAt, Range<u64>)> = files
        .iter()
        .map(|file| (&*file.versioned.source, span(file)))
        .collect();
    let total = sum(files.iter().map(Incoming::nbytes));
    let reading = Reading::of(total, &spans, &ReadOptions { threads: how.threads });
    let work = |(file, number): (&Incoming, usize), stop: StopFlag<'_>| file.part(number, stop);
    share(reading, files.iter().flat_map(parts), total, work, watch)?;
    // Compare all: each file that is wrong is removed.
    let compared: Vec<_> = files.iter().map(Incoming::compare).collect();
    compared.into_iter().collect()
}

impl Incoming {
    /// Resume the download to `path`, or start it.
    pub(super) fn open(
        versioned: VersionedSource,
        path: PathBuf,
        stays_open: bool,
        how: &DownloadOptions,
        watch: &dyn Watch,
    ) -> Result<Incoming, Error> {
        let mut temp = Temp::resume(&path, &how.save, watch)?;
        let table = versioned.part_table();
        let left = versioned.version.as_ref().and_then(|_| table.hashes(temp.file()));
        if left.is_none() {
            // Fails if the disk has no room for the size that the server claims, before any memory is allocated for it.
            let begun = temp.begin_anew(table.nbytes(), watch);
            let begun = begun.and_then(|()| temp.write(&table.head(), versioned.source.nbytes()));
            if let Err(error) = begun {
                temp.discard();
                return Err(error);
            }
        }
        let partial = Partial::new(temp, table.nbytes(), how.save, stays_open)?;
        let sha256 = versioned.sha256.map(|_| Mutex::new(InOrder::new()));
        Ok(Incoming {
            hashes: Mutex::new(left.unwrap_or_default()),
            sha256,
            ..Incoming::new(versioned, path, Landing::Partial(partial))
        })
    }

    /// Use a shard that an earlier call renamed. [`fetch`] checks its seal.
    pub(super) fn named(versioned: VersionedSource, path: PathBuf, seal: Seal) -> Result<Incoming, Error> {
        match std::fs::metadata(&path) {
            Ok(metadata) if metadata.len() != versioned.source.nbytes() => Err(is_there(&path)),
            Ok(_) => Ok(Incoming::new(versioned, path, Landing::Named(seal))),
            Err(source) => Err(unopened(&path)(source)),
        }
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

    fn count(&self) -> usize {
        self.table.count()
    }

    /// Call `work` with the file unless it was renamed by an earlier call.
    fn with(&self, work: impl FnOnce(&Temp) -> Result<(), Error>) -> Result<(), Error> {
        match &self.landing {
            Landing::Partial(partial) => partial.with(work),
            Landing::Named(_) => Ok(()),
        }
    }

    /// Fetch a part unless it is complete, and return its size. For a shard that an earlier call renamed, parts are
    /// only hashed: after the last one, the call fails if the shard has another seal.
    fn part(&self, number: usize, stop: StopFlag<'_>) -> Result<usize, Error> {
        let part = self.table.part(number);
        match &self.landing {
            Landing::Named(seal) => {
                let hash = File::open(&self.path).and_then(|file| part_hash(&file, &part));
                let hash = hash.map_err(|_| is_there(&self.path))?;
                let mut hashes = locked(&self.hashes);
                hashes.insert(number, hash);
                if hashes.len() == self.count() && self.table.seal(&hashes) != *seal {
                    return Err(is_there(&self.path));
                }
            }
            Landing::Partial(partial) => partial.with(|temp| self.complete(temp, number, stop))?,
        }
        Ok(size(&part))
    }

    /// Fetch a part unless `temp` contains it.
    fn complete(&self, temp: &Temp, number: usize, stop: StopFlag<'_>) -> Result<(), Error> {
        let part = self.table.part(number);
        let known = locked(&self.hashes).get(&number).copied();
        if known.is_none() || known != part_hash(temp.file(), &part).ok() {
            let hash = self.fetch(temp, &part, stop)?;
            temp.write(&hash, self.table.position(number))?;
            locked(&self.hashes).insert(number, hash);
        }
        let Some(in_order) = &self.sha256 else {
            return Ok(());
        };
        hash_in_order(in_order, number, &self.table, temp.file()).map_err(|fault| {
            let failure = Failure::Read {
                position: part.start,
                expected: part.end - part.start,
                found: 0,
                source: Some(fault),
            };
            failure.about(Some(&self.versioned.shown), None)
        })
    }

    /// Fetch a part and return its hash. A file that can only be fetched whole is started again after a failure.
    fn fetch(&self, temp: &Temp, part: &Range<u64>, stop: StopFlag<'_>) -> Result<PartHash, Error> {
        let mut left = self.versioned.whole.unwrap_or(0);
        loop {
            match self.try_fetch(temp, part, stop) {
                Err(error) if left > 0 && error.code() == "range-ignored" => left -= 1,
                outcome => return outcome,
            }
        }
    }

    fn try_fetch(&self, temp: &Temp, part: &Range<u64>, stop: StopFlag<'_>) -> Result<PartHash, Error> {
        let source = &*self.versioned.source;
        let mut stream = Stream::new(source, part.clone(), stop);
        let mut hasher = Hasher::new(Algorithm::Xxh3Wide);
        let mut buffer = Vec::new();
        for piece in pieces(part) {
            buffer.resize(size(&piece), 0);
            let filled = match &mut stream {
                Some(stream) => stream.fill(piece.start, &mut buffer),
                None => read_exactly(source, piece.start, &mut buffer, stop),
            };
            filled.map_err(|failure| self.explain(failure))?;
            hasher.update(&buffer);
            temp.write(&buffer, piece.start)?;
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

    /// Check the SHA-256. A file with the wrong SHA-256 is removed: the next call would find the same bytes.
    fn compare(&self) -> Result<(), Error> {
        let hasher = self
            .sha256
            .as_ref()
            .and_then(|in_order| locked(in_order).hasher.take());
        let (Some(expected), Some(hasher)) = (self.versioned.sha256, hasher) else {
            return Ok(());
        };
        let compared = compare(&self.versioned.shown, expected, hasher.finish());
        compared.inspect_err(|_| self.discard())
    }

    /// Remove the file if the next call could not use any of it.
    pub(super) fn abandon(&self) {
        if self.versioned.version.is_none() || locked(&self.hashes).is_empty() {
            self.discard();
        }
    }

    fn discard(&self) {
        // Fails if another program replaced the file, which is then kept.
        let _ = self.with(|temp| {
            temp.discard();
            Ok(())
        });
    }

    /// Return the seal of the complete file; zeros if the server does not distinguish versions.
    pub(super) fn seal(&self) -> Seal {
        match self.versioned.version {
            Some(_) => self.table.seal(&locked(&self.hashes)),
            None => [0; SEAL_NBYTES],
        }
    }

    /// Flush the file before it is renamed, which may take long.
    pub(super) fn flush(&self, watch: &dyn Watch) -> Result<(), Error> {
        self.with(|temp| temp.flush(watch))
    }

    /// Rename the file.
    pub(super) fn publish(&self, watch: &dyn Watch) -> Result<(), Error> {
        self.with(|temp| temp.publish_first(self.nbytes(), watch))
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

/// Return the sum of sizes that servers claim.
pub(super) fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

fn part_hash(file: &File, part: &Range<u64>) -> io::Result<PartHash> {
    let mut hasher = Hasher::new(Algorithm::Xxh3Wide);
    feed(&mut hasher, file, part)?;
    Ok(finished(hasher))
}

/// Update `hasher` with the bytes of a part.
fn feed(hasher: &mut Hasher, file: &File, part: &Range<u64>) -> io::Result<()> {
    let mut buffer = Vec::new();
    for piece in pieces(part) {
        buffer.resize(size(&piece), 0);
        let range = FileRange::new(file, piece.start, piece.end - piece.start);
        range.read(0, &mut buffer)?;
        hasher.update(&buffer);
    }
    Ok(())
}

/// Split a part into the ranges that are read at once.
fn pieces(part: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = part.end;
    let next =
        move |piece: &Range<u64>| (piece.end < end).then(|| piece.end..end.min(piece.end + PIECE_NBYTES));
    let first = part.start..end.min(part.start + PIECE_NBYTES);
    std::iter::successors(Some(first).filter(|first| !first.is_empty()), next)
}

fn finished(hasher: Hasher) -> PartHash {
    let hash = hasher.finish();
    hash.as_bytes().first_chunk().copied().unwrap_or_default()
}

fn size(range: &Range<u64>) -> usize {
    to_usize(range.end - range.start).unwrap_or(usize::MAX)
}

/// The SHA-256 of a file whose parts are fetched in any order. A part is hashed once all parts before it are complete. It
/// is read again then, while the system still has it in memory. So no thread waits for another, and no part is kept.
struct InOrder {
    /// The parts that are complete and not hashed yet.
    waiting: BTreeSet<usize>,
    /// The part to hash next.
    next: usize,
    /// `None` while a thread hashes a part.
    hasher: Option<Hasher>,
}

impl InOrder {
    fn new() -> InOrder {
        InOrder {
            waiting: BTreeSet::new(),
            next: 0,
            hasher: Some(Hasher::new(Algorithm::Sha256)),
        }
    }
}

/// Note that a part is complete in `file`, and hash all parts that can be hashed now, unless another thread does so.
fn hash_in_order(in_order: &Mutex<InOrder>, number: usize, table: &PartTable, file: &File) -> io::Result<()> {
    let mut state = locked(in_order);
    state.waiting.insert(number);
    while state.waiting.contains(&state.next)
        && let Some(mut hasher) = state.hasher.take()
    {
        let next = state.next;
        drop(state);
        feed(&mut hasher, file, &table.part(next))?;
        state = locked(in_order);
        state.waiting.remove(&next);
        state.next += 1;
        state.hasher = Some(hasher);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Replace;
    use std::io::Write;

    const NEW: SaveOptions = SaveOptions::new().replace(Replace::Nothing);

    /// Without the comparison, the second and the third file would be overwritten.
    #[test]
    fn a_closed_file_is_opened_again_only_if_it_is_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let (path, part) = (folder.path().join("a"), folder.path().join(".a.ingot-part"));
        let partial = || {
            let mut temp = Temp::resume(&path, &NEW, &Unwatched).unwrap();
            temp.begin_anew(3, &Unwatched).unwrap();
            Partial::new(temp, 3, NEW, false).unwrap()
        };
        let same = partial();
        assert!(matches!(*locked(&same.handle), Handle::Closed(_)));
        same.with(|temp| temp.write(b"abc", 0)).unwrap();
        same.with(|temp| temp.write(b"d", 0)).unwrap();
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
            let outcome = altered.with(|temp| temp.write(b"x", 0));
            assert_eq!(outcome.unwrap_err().code(), "changed");
        }
        assert!(!part.exists(), "a file that was removed is not created");
        drop(Temp::resume(&path, &NEW, &Unwatched).unwrap());
        let held = Temp::resume(&path, &NEW, &Unwatched).unwrap();
        let kept = Partial::new(held, 0, NEW, true).unwrap();
        assert!(Temp::resume(&path, &NEW, &Unwatched).is_err());
        drop(kept);
    }

    #[test]
    fn a_flush_holds_no_lock_after_the_file_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let resumed = || Temp::resume(&path, &NEW, &Unwatched);
        let mut temp = resumed().unwrap();
        temp.begin_anew(3, &Unwatched).unwrap();
        let partial = Partial::new(temp, 3, NEW, true).unwrap();
        let flushing = partial.with(|temp| Ok(temp.file().try_clone().unwrap())).unwrap();
        assert!(resumed().is_err());
        drop(partial);
        assert!(resumed().is_ok());
        drop(flushing);
    }

    #[test]
    fn parts_are_hashed_in_order_whatever_order_they_complete_in() {
        let bytes: Vec<u8> = (0_usize..(5 << 20) + 3).map(|at| at.to_le_bytes()[1]).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        let table = PartTable::new(5 * (1 << 20) + 3, "v");
        for order in [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]] {
            let in_order = Mutex::new(InOrder::new());
            for number in order {
                hash_in_order(&in_order, number, &table, &file).unwrap();
            }
            let hasher = in_order.into_inner().unwrap().hasher.unwrap();
            assert_eq!(hasher.finish(), Algorithm::Sha256.digest(&bytes));
        }
    }
}
