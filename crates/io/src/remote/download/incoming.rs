//! Files on their way: parts of all of them come at once, each into the file that gets its name in the end.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use ingot_format::{StopFlag, locked, to_u64, to_usize};

use super::part_table::{PART_HASH_NBYTES, PartHash, PartTable};
use super::wanted::{DownloadOptions, Downloaded, VersionedSource, compare};
use crate::archive::check_unchanged;
use crate::digest::{Algorithm, Digest, Hasher};
use crate::disk;
use crate::error::{Error, Failure};
use crate::options::{Existing, ReadOptions};
use crate::payload::FileRange;
use crate::save::draft::Draft;
use crate::save::target::is_there;
use crate::source::{ReadAt, Stamp, Stream, read_exactly};
use crate::watch::{Unwatched, Watch};
use crate::workers::{Reading, share};

/// Bytes that are written, or read again and hashed, at once.
const PIECE_NBYTES: u64 = 1 << 20;

/// A file that is being fetched.
pub(super) struct Incoming {
    versioned: VersionedSource,
    path: PathBuf,
    table: PartTable,
    /// The hashes of its parts that were there when this began; empty where none was.
    hashes: Vec<PartHash>,
    landing: Landing,
    fetched: AtomicU64,
}

enum Landing {
    /// It has no name yet.
    Partial(Partial),
    /// An earlier call has given it its name.
    Named,
}

/// How long the files stay open that parts are written to. Each takes two descriptors, with its directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// As long as the call takes, so that nobody else fills them.
    Open,
    /// While a thread is at one of their parts: there are more than a process should have open.
    InUse,
}

impl Keep {
    /// Of so many files.
    pub(super) fn of(files: usize) -> Keep {
        const FEW: usize = 32;
        if files <= FEW { Keep::Open } else { Keep::InUse }
    }
}

/// The file that is filled before it gets its name. Where it does not stay open, it is locked only while it is open, so
/// it is held against what it was when it is opened again.
struct Partial {
    path: PathBuf,
    nbytes: u64,
    existing: Existing,
    keep: Keep,
    place: Mutex<PartialPlace>,
}

/// The file while it is open, and what it was when it was closed.
#[derive(Default)]
struct PartialPlace {
    draft: Option<Arc<Draft>>,
    closed: Option<Stamp>,
}

impl Partial {
    fn new(draft: Draft, nbytes: u64, existing: Existing, keep: Keep) -> Result<Partial, Error> {
        let partial = Partial {
            path: draft.path().to_owned(),
            nbytes,
            existing,
            keep,
            place: Mutex::default(),
        };
        locked(&partial.place).draft = Some(Arc::new(draft));
        partial.with(|_| Ok(()))?;
        Ok(partial)
    }

    /// Does `work` with the open file, which any number of threads may do at once.
    fn with<R>(&self, work: impl FnOnce(&Draft) -> Result<R, Error>) -> Result<R, Error> {
        let draft = self.opened()?;
        let outcome = work(&draft);
        drop(draft);
        self.close_unused()?;
        outcome
    }

    fn opened(&self) -> Result<Arc<Draft>, Error> {
        let mut place = locked(&self.place);
        if let Some(draft) = &place.draft {
            return Ok(Arc::clone(draft));
        }
        let mut draft = Draft::resume(&self.path, self.existing, &Unwatched)?;
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
        let is_unused = |draft: &Arc<Draft>| Arc::strong_count(draft) == 1;
        if self.keep == Keep::InUse
            && let Some(draft) = place.draft.take_if(|draft| is_unused(draft))
        {
            place.closed = Some(self.stamp(&draft)?);
        }
        Ok(())
    }

    fn stamp(&self, draft: &Draft) -> Result<Stamp, Error> {
        let facts = disk::facts(draft.file()).map_err(|source| Error::Open {
            path: self.path.clone(),
            source,
        })?;
        Ok(Stamp::of(&facts))
    }
}

/// Unlock the file. After an interrupt the flush continues with a copy of the descriptor, which shares the lock.
impl Drop for Partial {
    fn drop(&mut self) {
        let place = self.place.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(draft) = &place.draft {
            // A file system without locks has nothing to unlock.
            let _ = disk::unlock(draft.file());
        }
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
    let follows: Vec<Option<Follow<'_>>> = files.iter().map(Incoming::follow).collect();
    let work = |(file, number): (usize, usize), stop: StopFlag<'_>| {
        files[file].part(number, follows[file].as_ref(), stop)
    };
    share(reading, tasks, total, work, watch)?;
    // Of all: what one of them has to be is asked whatever the others are.
    let compared = files
        .iter()
        .zip(follows)
        .map(|(file, follow)| file.compare(follow));
    compared.collect::<Vec<_>>().into_iter().collect()
}

impl Incoming {
    /// Goes on with what was left at `path`, or begins anew.
    pub(super) fn open(
        versioned: VersionedSource,
        path: PathBuf,
        keep: Keep,
        how: &DownloadOptions,
        watch: &dyn Watch,
    ) -> Result<Incoming, Error> {
        let mut partial = Draft::resume(&path, how.existing, watch)?;
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
        let partial = Partial::new(partial, table.nbytes(), how.existing, keep)?;
        Ok(Incoming {
            versioned,
            path,
            table,
            hashes: left.unwrap_or_default(),
            landing: Landing::Partial(partial),
            fetched: AtomicU64::new(0),
        })
    }

    /// What has its name already, if its parts have these hashes, as is found out when it is fetched.
    pub(super) fn named(
        versioned: VersionedSource,
        path: PathBuf,
        hashes: Vec<PartHash>,
    ) -> Result<Incoming, Error> {
        let metadata = std::fs::metadata(&path).map_err(|source| Error::Open {
            path: path.clone(),
            source,
        })?;
        if metadata.len() != versioned.source.nbytes() {
            return Err(is_there(&path));
        }
        Ok(Incoming {
            table: versioned.part_table(),
            versioned,
            path,
            hashes,
            landing: Landing::Named,
            fetched: AtomicU64::new(0),
        })
    }

    fn nbytes(&self) -> u64 {
        self.versioned.source.nbytes()
    }

    /// The hash of a part that was there when this began; zero where it was not.
    fn hash(&self, number: usize) -> PartHash {
        self.hashes.get(number).copied().unwrap_or_default()
    }

    fn follow(&self) -> Option<Follow<'_>> {
        let follows = self.versioned.sha256.is_some() && matches!(self.landing, Landing::Partial(_));
        follows.then(|| Follow::new(&self.table))
    }

    /// Sees that a part is there.
    fn part(&self, number: usize, follow: Option<&Follow<'_>>, stop: StopFlag<'_>) -> Result<usize, Error> {
        let part = self.table.part(number);
        match &self.landing {
            Landing::Named => {
                let has_hash = |file: File| has_hash(&file, &part, &self.hash(number));
                if !File::open(&self.path).is_ok_and(has_hash) {
                    return Err(is_there(&self.path));
                }
            }
            Landing::Partial(partial) => {
                partial.with(|draft| self.complete(draft, number, follow, stop))?;
            }
        }
        Ok(size(&part))
    }

    /// Fetches a part if `draft` lacks it.
    fn complete(
        &self,
        draft: &Draft,
        number: usize,
        follow: Option<&Follow<'_>>,
        stop: StopFlag<'_>,
    ) -> Result<(), Error> {
        let part = self.table.part(number);
        if !has_hash(draft.file(), &part, &self.hash(number)) {
            let hash = self.fetch(draft, &part, stop)?;
            draft.write(&hash, self.table.position(number))?;
        }
        match follow {
            Some(follow) => follow
                .came(number, draft.file())
                .map_err(|fault| unread(&part, fault).about(Some(&self.versioned.shown), None)),
            None => Ok(()),
        }
    }

    /// Fetches a part; gives the hash of its bytes. Where a server gives no parts, what breaks off begins anew.
    fn fetch(&self, partial: &Draft, part: &Range<u64>, stop: StopFlag<'_>) -> Result<PartHash, Error> {
        let mut left = self.versioned.retries;
        loop {
            match self.try_fetch(partial, part, stop) {
                Err(error) if left > 0 && error.code() == "range-ignored" => left -= 1,
                outcome => return outcome,
            }
        }
    }

    fn try_fetch(&self, partial: &Draft, part: &Range<u64>, stop: StopFlag<'_>) -> Result<PartHash, Error> {
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
        Ok(part_hash(hasher))
    }

    fn explain(&self, failure: Failure) -> Error {
        match check_unchanged(&*self.versioned.source, Some(&self.versioned.shown)) {
            Err(changed) => changed,
            Ok(()) => failure.about(Some(&self.versioned.shown), None),
        }
    }

    /// Holds it against the SHA-256 that it has to have. Wrong bytes are not kept: they would be found to be there again
    /// and again.
    fn compare(&self, follow: Option<Follow<'_>>) -> Result<(), Error> {
        let (Some(expected), Some(follow)) = (self.versioned.sha256, follow) else {
            return Ok(());
        };
        compare(&self.versioned.shown, expected, follow.finish()).inspect_err(|_| {
            if let Landing::Partial(partial) = &self.landing {
                let _ = partial.with(|draft| {
                    draft.discard();
                    Ok(())
                });
            }
        })
    }

    /// Throws away what the next call could not go on with.
    pub(super) fn abandon(&self) {
        if let Landing::Partial(partial) = &self.landing {
            // What somebody else has by now is not this call's to throw away.
            let _ = partial.with(|draft| {
                if !self.can_go_on(draft) {
                    draft.discard();
                }
                Ok(())
            });
        }
    }

    /// Whether the next call would find a part of it.
    fn can_go_on(&self, partial: &Draft) -> bool {
        let is_any = |hashes: Vec<PartHash>| hashes.iter().any(|hash| *hash != PartHash::default());
        self.versioned.version.is_some() && self.table.hashes(partial.file()).is_some_and(is_any)
    }

    /// What tells the next call that it is this version of this file, once it is whole: nothing, where nothing does.
    pub(super) fn notes(&self) -> Result<Vec<u8>, Error> {
        let hashes = match &self.landing {
            Landing::Named => Some(self.hashes.clone()),
            Landing::Partial(partial) => partial.with(|draft| Ok(self.table.hashes(draft.file())))?,
        };
        Ok(match (&self.versioned.version, hashes) {
            (Some(_), Some(hashes)) => self.table.notes(&hashes),
            _ => vec![0; self.table.notes_nbytes()],
        })
    }

    /// Has the disk hold it, which may take long, before it gets its name.
    pub(super) fn flush(&self, how: &DownloadOptions, watch: &dyn Watch) -> Result<(), Error> {
        match &self.landing {
            Landing::Partial(partial) => partial.with(|draft| draft.flush(how.durable, watch)),
            Landing::Named => Ok(()),
        }
    }

    /// Gives it its name.
    pub(super) fn publish(&self, how: &DownloadOptions, watch: &dyn Watch) -> Result<(), Error> {
        match &self.landing {
            Landing::Partial(partial) => {
                partial.with(|draft| draft.publish_first(self.nbytes(), how.existing, how.durable, watch))
            }
            Landing::Named => Ok(()),
        }
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

/// Whether the bytes of a part have the hash that was noted of them.
fn has_hash(file: &File, part: &Range<u64>, noted: &PartHash) -> bool {
    if *noted == PartHash::default() {
        return false;
    }
    let mut hasher = Hasher::new(Algorithm::Xxh3Wide);
    if feed(&mut hasher, file, part).is_err() {
        return false;
    }
    part_hash(hasher) == *noted
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

fn part_hash(hasher: Hasher) -> PartHash {
    let mut hash = [0; PART_HASH_NBYTES];
    hash.copy_from_slice(&hasher.finish().as_bytes()[..PART_HASH_NBYTES]);
    hash
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

/// Follows the parts of a file, as far as all before are there. They are read again, while the system still has them in
/// memory: so nobody waits for the parts before his own, and nothing is kept.
struct Follow<'f> {
    table: &'f PartTable,
    /// The parts that are there and were not hashed.
    waiting: Mutex<BTreeSet<usize>>,
    turn: Mutex<HashedParts>,
}

/// The parts that were hashed, in their order.
struct HashedParts {
    /// The part that is hashed next.
    next: usize,
    hasher: Hasher,
}

impl<'f> Follow<'f> {
    fn new(table: &'f PartTable) -> Follow<'f> {
        Follow {
            table,
            waiting: Mutex::default(),
            turn: Mutex::new(HashedParts {
                next: 0,
                hasher: Hasher::new(Algorithm::Sha256),
            }),
        }
    }

    /// Notes that a part is there, in `file`. Whoever does so hashes what can be hashed, unless somebody is at it.
    fn came(&self, number: usize, file: &File) -> io::Result<()> {
        locked(&self.waiting).insert(number);
        loop {
            let mut turn = match self.turn.try_lock() {
                Ok(turn) => turn,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Ok(()),
            };
            while self.can_go_on(turn.next) {
                self.hash(&mut turn, file)?;
            }
            let next = turn.next;
            drop(turn);
            // A part may have come after it was looked for and before the lock was given back.
            if !self.can_go_on(next) {
                return Ok(());
            }
        }
    }

    fn can_go_on(&self, next: usize) -> bool {
        locked(&self.waiting).contains(&next)
    }

    fn hash(&self, turn: &mut HashedParts, file: &File) -> io::Result<()> {
        let part = self.table.part(turn.next);
        feed(&mut turn.hasher, file, &part)?;
        locked(&self.waiting).remove(&turn.next);
        turn.next += 1;
        Ok(())
    }

    /// The digest, once all parts came.
    fn finish(self) -> Digest {
        let turn = self.turn.into_inner().unwrap_or_else(PoisonError::into_inner);
        turn.hasher.finish()
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
            let mut draft = Draft::resume(&path, Existing::Refuse, &Unwatched).unwrap();
            draft.begin_anew(3, &Unwatched).unwrap();
            Partial::new(draft, 3, Existing::Refuse, Keep::InUse).unwrap()
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
        drop(Draft::resume(&path, Existing::Refuse, &Unwatched).unwrap());
        let held = Draft::resume(&path, Existing::Refuse, &Unwatched).unwrap();
        let kept = Partial::new(held, 0, Existing::Refuse, Keep::Open).unwrap();
        assert!(Draft::resume(&path, Existing::Refuse, &Unwatched).is_err());
        drop(kept);
    }

    #[test]
    fn a_flush_that_goes_on_holds_no_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let resumed = || Draft::resume(&path, Existing::Refuse, &Unwatched);
        let mut draft = resumed().unwrap();
        draft.begin_anew(3, &Unwatched).unwrap();
        let partial = Partial::new(draft, 3, Existing::Refuse, Keep::Open).unwrap();
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
            let follow = Follow::new(&table);
            for number in order {
                follow.came(number, &file).unwrap();
            }
            assert_eq!(follow.finish(), Algorithm::Sha256.digest(&bytes));
        }
    }
}
