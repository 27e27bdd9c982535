//! Files on their way: parts of all of them come at once, each into the file that gets its name in the end.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};

use ingot_format::{to_u64, to_usize};
use ingot_remote::StopFlag;

use super::part_table::{PART_HASH_NBYTES, PartHash, PartTable};
use super::wanted::{DownloadOptions, Downloaded, VersionedSource, compare};
use crate::archive::check_unchanged;
use crate::digest::{Algorithm, Digest, Hasher};
use crate::error::{Error, Failure};
use crate::options::ReadOptions;
use crate::payload::FileRange;
use crate::save::draft::{Draft, is_there};
use crate::source::{Source, Stream, read_exactly};
use crate::watch::Watch;
use crate::workers::{Reading, share};

/// Bytes that are written at once.
const WRITE_NBYTES: u64 = 1 << 20;

/// A file that is being fetched.
pub(super) struct Incoming {
    versioned: VersionedSource,
    path: PathBuf,
    table: PartTable,
    /// The hashes that its parts have, as far as they were there when this began.
    hashes: Vec<PartHash>,
    landing: Landing,
    fetched: AtomicU64,
}

enum Landing {
    /// It has no name yet.
    Partial(Box<Draft>),
    /// An earlier call has given it its name.
    Named(File),
}

/// Fetches what is missing of all these files.
pub(super) fn fetch(files: &[Incoming], how: &DownloadOptions, watch: &dyn Watch) -> Result<(), Error> {
    let parts = |(file, incoming): (usize, &Incoming)| {
        let numbers = 0..incoming.table.count();
        numbers.map(move |number| (file, number)).collect::<Vec<_>>()
    };
    let tasks = files.iter().enumerate().flat_map(parts).collect();
    let spans: Vec<(&dyn Source, Range<u64>)> = files
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
        let hashes = left.unwrap_or_else(|| vec![PartHash::default(); table.count()]);
        Ok(Incoming {
            versioned,
            path,
            table,
            hashes,
            landing: Landing::Partial(Box::new(partial)),
            fetched: AtomicU64::new(0),
        })
    }

    /// What has its name already, if its parts have these hashes, as is found out when it is fetched.
    pub(super) fn named(
        versioned: VersionedSource,
        path: PathBuf,
        hashes: Vec<PartHash>,
    ) -> Result<Incoming, Error> {
        let open = || -> io::Result<Option<File>> {
            let file = File::open(&path)?;
            Ok((file.metadata()?.len() == versioned.source.nbytes()).then_some(file))
        };
        let opened = open().map_err(|source| Error::Open {
            path: path.clone(),
            source,
        });
        let Some(file) = opened? else {
            return Err(is_there(&path));
        };
        Ok(Incoming {
            table: versioned.part_table(),
            versioned,
            path,
            hashes,
            landing: Landing::Named(file),
            fetched: AtomicU64::new(0),
        })
    }

    fn nbytes(&self) -> u64 {
        self.versioned.source.nbytes()
    }

    fn follow(&self) -> Option<Follow<'_>> {
        match &self.landing {
            Landing::Partial(partial) if self.versioned.sha256.is_some() => {
                Some(Follow::new(partial.file(), &self.table))
            }
            _ => None,
        }
    }

    /// Sees that a part is there.
    fn part(&self, number: usize, follow: Option<&Follow<'_>>, stop: StopFlag<'_>) -> Result<usize, Error> {
        let part = self.table.part(number);
        let noted = &self.hashes[number];
        match &self.landing {
            Landing::Named(file) if !has_hash(file, &part, noted) => return Err(is_there(&self.path)),
            Landing::Partial(partial) if !has_hash(partial.file(), &part, noted) => {
                let hash = self.fetch(partial, &part, stop)?;
                partial.write(&hash, self.table.position(number))?;
            }
            _ => {}
        }
        if let Some(follow) = follow {
            follow
                .came(number)
                .map_err(|fault| unread(&part, fault).about(Some(&self.versioned.shown), None))?;
        }
        Ok(size(&part))
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
            buffer.resize(size(&(at..part.end.min(at + WRITE_NBYTES))), 0);
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
                partial.discard();
            }
        })
    }

    /// Throws away what the next call could not go on with.
    pub(super) fn abandon(&self) {
        if let Landing::Partial(partial) = &self.landing
            && !self.can_go_on(partial)
        {
            partial.discard();
        }
    }

    /// Whether the next call would find a part of it.
    fn can_go_on(&self, partial: &Draft) -> bool {
        let is_any = |hashes: Vec<PartHash>| hashes.iter().any(|hash| *hash != PartHash::default());
        self.versioned.version.is_some() && self.table.hashes(partial.file()).is_some_and(is_any)
    }

    /// What tells the next call that it is this version of this file, once it is whole: nothing, where nothing does.
    pub(super) fn notes(&self) -> Vec<u8> {
        let hashes = match &self.landing {
            Landing::Named(_) => Some(self.hashes.clone()),
            Landing::Partial(partial) => self.table.hashes(partial.file()),
        };
        match (&self.versioned.version, hashes) {
            (Some(_), Some(hashes)) => self.table.notes(&hashes),
            _ => vec![0; self.table.notes_nbytes()],
        }
    }

    /// Has the disk hold it, which may take long, before it gets its name.
    pub(super) fn flush(&self, how: &DownloadOptions, watch: &dyn Watch) -> Result<(), Error> {
        match &self.landing {
            Landing::Partial(partial) => partial.flush(how.durable, watch),
            Landing::Named(_) => Ok(()),
        }
    }

    /// Gives it its name.
    pub(super) fn publish(&self, how: &DownloadOptions, watch: &dyn Watch) -> Result<(), Error> {
        match &self.landing {
            Landing::Partial(partial) => {
                partial.publish_first(self.nbytes(), how.existing, how.durable, watch)
            }
            Landing::Named(_) => Ok(()),
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
    let range = FileRange::new(file, part.start, part.end - part.start);
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
    part_hash(hasher) == *noted
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

/// Bytes that are hashed at once.
const PIECE_NBYTES: u64 = 1 << 20;

/// Follows the parts of a file, as far as all before are there. They are read again, while the system still has them in
/// memory: so nobody waits for the parts before his own, and nothing is kept.
struct Follow<'f> {
    file: &'f File,
    table: &'f PartTable,
    is_there: Vec<AtomicBool>,
    turn: Mutex<HashedParts>,
}

/// The parts that were hashed, in their order.
struct HashedParts {
    /// The part that is hashed next.
    next: usize,
    hasher: Hasher,
}

impl<'f> Follow<'f> {
    fn new(file: &'f File, table: &'f PartTable) -> Follow<'f> {
        Follow {
            file,
            table,
            is_there: (0..table.count()).map(|_| AtomicBool::new(false)).collect(),
            turn: Mutex::new(HashedParts {
                next: 0,
                hasher: Hasher::new(Algorithm::Sha256),
            }),
        }
    }

    /// Notes that a part is there. Whoever does so hashes what can be hashed, unless somebody is at it.
    fn came(&self, number: usize) -> io::Result<()> {
        self.is_there[number].store(true, Ordering::SeqCst);
        loop {
            let mut turn = match self.turn.try_lock() {
                Ok(turn) => turn,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Ok(()),
            };
            while self.can_go_on(turn.next) {
                self.hash(&mut turn)?;
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
        self.is_there
            .get(next)
            .is_some_and(|is_there| is_there.load(Ordering::SeqCst))
    }

    fn hash(&self, turn: &mut HashedParts) -> io::Result<()> {
        let part = self.table.part(turn.next);
        let range = FileRange::new(self.file, part.start, part.end - part.start);
        let mut buffer = Vec::new();
        let mut at = 0;
        while at < part.end - part.start {
            let count = PIECE_NBYTES.min(part.end - part.start - at);
            buffer.resize(to_usize(count).unwrap_or(0), 0);
            range.read(at, &mut buffer)?;
            turn.hasher.update(&buffer);
            at += count;
        }
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

    #[test]
    fn parts_that_come_in_any_order_are_hashed_in_theirs() {
        let bytes: Vec<u8> = (0_usize..(5 << 20) + 3).map(|at| at.to_le_bytes()[1]).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        let table = PartTable::new(5 * (1 << 20) + 3, "v");
        for order in [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]] {
            let follow = Follow::new(&file, &table);
            for number in order {
                follow.came(number).unwrap();
            }
            assert_eq!(follow.finish(), Algorithm::Sha256.digest(&bytes));
        }
    }
}
