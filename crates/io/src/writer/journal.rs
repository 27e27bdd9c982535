//! The record of a write that processes share.
//!
//! A file beside the temporary file, to which processes only append records, one batch after another. The order of the
//! records decides: the earliest record wins, and a later claim that overlaps it fails. All readers of the journal see the
//! same order. So no lock is held while bytes are written, and a process that dies leaves open claims.
//!
//! A batch is one record, or a claim and its ranges. It contains its own hash, so that foreign bytes are never taken
//! for a record; otherwise a failed claim could pass for a completed one.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ingot_format::{to_u64, to_usize};
use xxhash_rust::xxh3::Xxh3;

use super::coverage::Coverage;
use crate::disk;
use crate::payload::FileRange;

/// The size of a record in bytes: three words, which are its kind and two numbers.
pub(super) const RECORD: usize = 24;
/// The position of the hash in a batch: the second number of its first record.
const CHECK: Range<usize> = 16..24;
/// The number of bytes that are read at a time if no batch is longer. A file that others can write to may have any
/// length.
const PIECE: u64 = 1 << 20;

pub(super) const CLAIM: u64 = 1;
pub(super) const RANGE: u64 = 2;
pub(super) const DONE: u64 = 3;
pub(super) const FAILED: u64 = 4;
pub(super) const COMMIT: u64 = 5;
pub(super) const ABANDON: u64 = 6;
pub(super) const TAKE_OVER: u64 = 7;

pub(super) struct Journal {
    inner: Mutex<Inner>,
}

struct Inner {
    file: File,
    /// The position of the records that were not read yet.
    position: u64,
    state: JournalState,
}

/// Why a journal can be used no longer.
#[derive(Debug)]
pub(super) enum JournalFault {
    /// The journal lacks records that were written to it.
    Broken,
    /// The system does not read or write it.
    System(io::Error),
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Committed,
    Abandoned,
}

/// The outcome of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Accepted,
    /// Another writer has a byte of it. The number of the range in its batch.
    Taken(usize),
    /// Bytes are missing, or a claim is open.
    Incomplete,
    Ended(End),
}

/// A claim, which its owner completes or takes back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim(pub(super) u64);

/// The state that the records describe, in their order.
#[derive(Debug)]
struct JournalState {
    /// Bytes that the file will have.
    total: u64,
    taken: Coverage,
    /// Claims that are not completed, by the position of their record.
    open: HashMap<u64, Vec<Range<u64>>>,
    end: Option<End>,
}

impl From<io::Error> for JournalFault {
    fn from(fault: io::Error) -> JournalFault {
        match fault.kind() {
            // Another process truncated it during the read.
            io::ErrorKind::UnexpectedEof => JournalFault::Broken,
            _ => JournalFault::System(fault),
        }
    }
}

impl Journal {
    /// The journal in `file`, whose records begin at `position`, of a file with `total` bytes of data.
    pub(super) fn new(file: File, position: u64, total: u64) -> Journal {
        let state = JournalState {
            total,
            taken: Coverage::default(),
            open: HashMap::new(),
            end: None,
        };
        Journal {
            inner: Mutex::new(Inner {
                file,
                position,
                state,
            }),
        }
    }

    /// Claim all of `ranges`, or none. No range is empty.
    pub(super) fn claim(&self, ranges: &[Range<u64>]) -> Result<(Claim, Verdict), JournalFault> {
        let (position, verdict) = self.append(&batch(CLAIM, to_u64(ranges.len()), ranges))?;
        Ok((Claim(position), verdict))
    }

    /// The bytes of the claim are written.
    pub(super) fn done(&self, claim: Claim) -> Result<Verdict, JournalFault> {
        self.append(&batch(DONE, claim.0, &[])).map(|found| found.1)
    }

    /// Release ranges that could not be written. They can be claimed again.
    pub(super) fn failed(&self, claim: Claim) -> Result<Verdict, JournalFault> {
        self.append(&batch(FAILED, claim.0, &[])).map(|found| found.1)
    }

    /// Nothing is written from here on, if all is there.
    pub(super) fn commit(&self) -> Result<Verdict, JournalFault> {
        self.append(&batch(COMMIT, 0, &[])).map(|found| found.1)
    }

    /// End the journal: no process will finish the file.
    pub(super) fn abandon(&self) -> Result<Verdict, JournalFault> {
        self.append(&batch(ABANDON, 0, &[])).map(|found| found.1)
    }

    /// Take over a file that all of its writers have left: open claims are released, and a commit whose outcome was lost
    /// may be repeated.
    pub(super) fn take_over(&self) -> Result<Verdict, JournalFault> {
        self.append(&batch(TAKE_OVER, 0, &[])).map(|found| found.1)
    }

    /// Return how the file ended, as far as it was read.
    pub(super) fn end(&self) -> Option<End> {
        self.inner().state.end
    }

    /// Return how it ended, after reading all records.
    pub(super) fn end_now(&self) -> Result<Option<End>, JournalFault> {
        let mut inner = self.inner();
        let end = disk::facts(&inner.file)?.nbytes;
        inner.read_to(end)?;
        Ok(inner.state.end)
    }

    /// Bytes of `range` that were written.
    pub(super) fn written(&self, range: &Range<u64>) -> u64 {
        let inner = self.inner();
        let open = inner.state.open.values().flatten();
        let claimed = open.map(|claim| {
            let end = claim.end.min(range.end);
            end.saturating_sub(claim.start.max(range.start))
        });
        inner.state.taken.within(range).saturating_sub(claimed.sum())
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Append a batch, and read the records that others appended before it. Return its position and the verdict on it.
    fn append(&self, batch: &[u8]) -> Result<(u64, Verdict), JournalFault> {
        let mut inner = self.inner();
        let begin = inner.write(batch)?;
        let end = begin
            .checked_add(to_u64(batch.len()))
            .ok_or(JournalFault::Broken)?;
        let verdict = inner.read_to(end)?.ok_or(JournalFault::Broken)?;
        Ok((begin, verdict))
    }
}

impl Inner {
    /// Write a batch at the end, and return its position.
    fn write(&mut self, batch: &[u8]) -> Result<u64, JournalFault> {
        let end = disk::append(&self.file, batch)?;
        end.checked_sub(to_u64(batch.len())).ok_or(JournalFault::Broken)
    }

    /// Read the records up to `end`, and return the verdict on the last batch; `None` if all were read before.
    fn read_to(&mut self, end: u64) -> Result<Option<Verdict>, JournalFault> {
        if end < self.position {
            return Err(JournalFault::Broken);
        }
        let (mut verdict, mut longest) = (None, 0);
        while self.position < end {
            let left = end - self.position;
            if longest > left {
                return Err(JournalFault::Broken);
            }
            let bytes = self.read(left.min(PIECE.max(longest)))?;
            let mut unread = &*bytes;
            while let Some(batch) = first_batch(unread, &mut longest) {
                verdict = Some(
                    self.state
                        .apply(self.position, batch)
                        .ok_or(JournalFault::Broken)?,
                );
                self.position += to_u64(batch.len());
                unread = unread.get(batch.len()..).unwrap_or_default();
            }
        }
        Ok(verdict)
    }

    /// `nbytes` bytes from the first record on that was not read yet.
    fn read(&self, nbytes: u64) -> Result<Vec<u8>, JournalFault> {
        let len = to_usize(nbytes).ok_or(JournalFault::Broken)?;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(len)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        bytes.resize(len, 0);
        FileRange::new(&self.file, self.position, nbytes).read(0, &mut bytes)?;
        Ok(bytes)
    }
}

/// A batch, in the form of the file.
fn batch(kind: u64, number: u64, ranges: &[Range<u64>]) -> Vec<u8> {
    let ranges = ranges.iter().flat_map(|range| [RANGE, range.start, range.end]);
    let words = [kind, number, 0].into_iter().chain(ranges);
    sealed(words.flat_map(u64::to_le_bytes).collect())
}

/// Return the same bytes with the hash that they require.
pub(super) fn sealed(mut batch: Vec<u8>) -> Vec<u8> {
    let check = check(&batch);
    batch[CHECK].copy_from_slice(&check);
    batch
}

/// The hash of all bytes of a batch except the hash.
fn check(batch: &[u8]) -> [u8; 8] {
    let mut hash = Xxh3::new();
    hash.update(&batch[..CHECK.start]);
    hash.update(&batch[CHECK.end..]);
    hash.digest().to_le_bytes()
}

/// Return the first batch in `bytes`. `nbytes` becomes its size, as far as that is known if `bytes` end before the batch.
fn first_batch<'a>(bytes: &'a [u8], nbytes: &mut u64) -> Option<&'a [u8]> {
    let records = match bytes.as_chunks::<8>().0 {
        [kind, number, ..] if u64::from_le_bytes(*kind) == CLAIM => {
            u64::from_le_bytes(*number).saturating_add(1)
        }
        _ => 1,
    };
    *nbytes = records.saturating_mul(to_u64(RECORD));
    bytes.get(..to_usize(*nbytes)?)
}

impl JournalState {
    /// Apply the batch at `position`. `None` if it is not valid.
    fn apply(&mut self, position: u64, batch: &[u8]) -> Option<Verdict> {
        let (head, ranges) = batch.split_first_chunk::<RECORD>()?;
        if head[CHECK] != check(batch) {
            return None;
        }
        let [kind, number, _] = words(head);
        match (self.end, kind) {
            (None, _) => {}
            (Some(End::Committed), TAKE_OVER) => self.end = None,
            (Some(end), _) => return Some(Verdict::Ended(end)),
        }
        match kind {
            CLAIM => return self.claim(position, ranges),
            DONE => drop(self.open.remove(&number)?),
            FAILED => {
                let claim = self.open.remove(&number)?;
                self.release(&claim);
            }
            TAKE_OVER => {
                for claim in std::mem::take(&mut self.open).values() {
                    self.release(claim);
                }
            }
            COMMIT if !self.is_complete() => return Some(Verdict::Incomplete),
            COMMIT => self.end = Some(End::Committed),
            ABANDON => self.end = Some(End::Abandoned),
            _ => return None,
        }
        Some(Verdict::Accepted)
    }

    fn claim(&mut self, position: u64, records: &[u8]) -> Option<Verdict> {
        let range = |record| match words(record) {
            [RANGE, begin, end] if begin < end && end <= self.total => Some(begin..end),
            _ => None,
        };
        // An invalid claim takes no range, so that reading it again has the same result.
        let ranges = records.as_chunks::<RECORD>().0.iter().map(range);
        let ranges: Vec<Range<u64>> = ranges.collect::<Option<_>>()?;
        for (number, range) in ranges.iter().enumerate() {
            if !self.taken.add(range) {
                self.release(&ranges[..number]);
                return Some(Verdict::Taken(number));
            }
        }
        self.open.insert(position, ranges);
        Some(Verdict::Accepted)
    }

    fn release(&mut self, ranges: &[Range<u64>]) {
        for range in ranges {
            self.taken.remove(range);
        }
    }

    /// Return whether every byte was claimed, and every claim completed.
    fn is_complete(&self) -> bool {
        self.open.is_empty() && self.taken.within(&(0..self.total)) == self.total
    }
}

/// The three words of a record.
pub(super) fn words(record: &[u8; RECORD]) -> [u64; 3] {
    let mut words = [0; 3];
    for (word, bytes) in words.iter_mut().zip(record.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs::OpenOptions;
    use std::path::Path;

    /// Several journals on the same file, as in several processes.
    fn several(count: usize, total: u64) -> (tempfile::TempDir, Vec<Journal>) {
        let folder = tempfile::tempdir().unwrap();
        let journals = (0..count).map(|_| open(folder.path(), total)).collect();
        (folder, journals)
    }

    fn open(folder: &Path, total: u64) -> Journal {
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(folder.join("journal"));
        Journal::new(file.unwrap(), 0, total)
    }

    #[test]
    fn all_is_committed_once_and_only_when_it_is_whole() {
        let (_folder, journals) = several(2, 10);
        let (first, verdict) = journals[0].claim(&[0..4, 6..8]).unwrap();
        assert_eq!(verdict, Verdict::Accepted);
        assert_eq!(journals[1].claim(&[4..5, 7..9]).unwrap().1, Verdict::Taken(1));
        let (second, verdict) = journals[1].claim(&[4..6, 8..10]).unwrap();
        assert_eq!(verdict, Verdict::Accepted);
        assert_eq!(journals[1].done(second).unwrap(), Verdict::Accepted);
        assert_eq!(journals[1].commit().unwrap(), Verdict::Incomplete);
        assert_eq!(
            (journals[1].written(&(0..6)), journals[1].written(&(8..10))),
            (2, 2)
        );
        assert_eq!(journals[0].failed(first).unwrap(), Verdict::Accepted);
        let (third, verdict) = journals[1].claim(&[6..8, 0..4]).unwrap();
        assert_eq!(verdict, Verdict::Accepted);
        assert_eq!(journals[1].done(third).unwrap(), Verdict::Accepted);
        assert_eq!(journals[0].commit().unwrap(), Verdict::Accepted);
        assert_eq!(journals[1].commit().unwrap(), Verdict::Ended(End::Committed));
        assert_eq!(journals[1].end(), Some(End::Committed));
    }

    #[test]
    fn what_was_abandoned_stays_so() {
        let (_folder, journals) = several(2, 0);
        assert_eq!(journals[0].abandon().unwrap(), Verdict::Accepted);
        assert_eq!(journals[1].commit().unwrap(), Verdict::Ended(End::Abandoned));
    }

    #[test]
    fn who_takes_over_frees_what_was_not_made_good_and_may_commit_again() {
        let (_folder, journals) = several(3, 10);
        let (whole, _) = journals[0].claim(&[0..4, 6..8]).unwrap();
        journals[0].done(whole).unwrap();
        let half = [4..6, 8..10];
        journals[0].claim(&half).unwrap();
        assert_eq!(journals[1].take_over().unwrap(), Verdict::Accepted);
        assert_eq!(journals[1].commit().unwrap(), Verdict::Incomplete);
        let (again, verdict) = journals[1].claim(&half).unwrap();
        assert_eq!(verdict, Verdict::Accepted);
        journals[1].done(again).unwrap();
        assert_eq!(journals[1].commit().unwrap(), Verdict::Accepted);
        assert_eq!(journals[2].take_over().unwrap(), Verdict::Accepted);
        assert_eq!(journals[2].commit().unwrap(), Verdict::Accepted);
        journals[2].take_over().unwrap();
        journals[2].abandon().unwrap();
        assert_eq!(journals[2].take_over().unwrap(), Verdict::Ended(End::Abandoned));
    }

    /// A journal with every kind of record, and its bytes.
    fn some_journal() -> (tempfile::TempDir, Vec<Journal>, Vec<u8>) {
        let (folder, journals) = several(3, 30);
        let (first, _) = journals[0].claim(&[0..4, 6..8, 10..20]).unwrap();
        let (second, _) = journals[1].claim(std::slice::from_ref(&(4..6))).unwrap();
        journals[1].claim(&[20..21, 19..20]).unwrap();
        journals[0].done(first).unwrap();
        journals[1].failed(second).unwrap();
        journals[0].commit().unwrap();
        journals[1].take_over().unwrap();
        let (third, _) = journals[1].claim(&[4..6, 8..10, 20..30]).unwrap();
        journals[1].done(third).unwrap();
        let bytes = std::fs::read(folder.path().join("journal")).unwrap();
        (folder, journals, bytes)
    }

    /// The verdict on a commit through a journal that is opened late, if the file has these bytes.
    fn late(folder: &Path, bytes: &[u8]) -> Result<Verdict, JournalFault> {
        std::fs::write(folder.join("journal"), bytes).unwrap();
        open(folder, 30).commit()
    }

    #[test]
    fn no_byte_of_a_journal_can_change_without_an_error() {
        let (folder, _, bytes) = some_journal();
        assert_eq!(late(folder.path(), &bytes).unwrap(), Verdict::Accepted);
        for at in 0..bytes.len() {
            for change in [1, 2, 4, 6, 0x80, 0xFF] {
                let mut changed = bytes.clone();
                changed[at] ^= change;
                let found = late(folder.path(), &changed);
                assert!(
                    matches!(found, Err(JournalFault::Broken)),
                    "{at}, {change}: {found:?}"
                );
            }
        }
    }

    #[test]
    fn a_truncated_journal_is_an_error_or_the_start_of_one() {
        let (folder, _, bytes) = some_journal();
        let (mut ends, mut rest) = (vec![0], &*bytes);
        while let Some(batch) = first_batch(rest, &mut 0) {
            ends.push(ends[ends.len() - 1] + batch.len());
            rest = &rest[batch.len()..];
        }
        for len in 0..bytes.len() {
            match late(folder.path(), &bytes[..len]) {
                Ok(verdict) => {
                    assert_eq!(verdict, Verdict::Incomplete, "{len}");
                    assert!(ends.contains(&len), "{len}");
                }
                Err(fault) => {
                    assert!(matches!(fault, JournalFault::Broken), "{len}: {fault:?}");
                    assert!(!ends.contains(&len), "{len}");
                }
            }
        }
    }

    #[test]
    fn what_is_cut_off_under_those_who_read_it_is_an_error() {
        let (folder, journals, bytes) = some_journal();
        for journal in &journals {
            assert_eq!(journal.end_now().unwrap(), None);
        }
        for len in 0..bytes.len() {
            for journal in &journals {
                std::fs::write(folder.path().join("journal"), &bytes[..len]).unwrap();
                let found = journal.claim(std::slice::from_ref(&(0..1))).map(|found| found.1);
                assert!(matches!(found, Err(JournalFault::Broken)), "{len}: {found:?}");
            }
        }
    }

    #[test]
    fn bytes_that_nobody_wrote_are_an_error_however_many_there_are() {
        for nbytes in [1, 24, 1 << 20, 1 << 42] {
            let (folder, journals) = several(1, 10);
            let file = OpenOptions::new()
                .append(true)
                .open(folder.path().join("journal"))
                .unwrap();
            file.set_len(nbytes).unwrap();
            let found = journals[0].commit();
            assert!(matches!(found, Err(JournalFault::Broken)), "{nbytes}: {found:?}");
        }
    }

    #[test]
    fn a_claim_that_is_none_takes_nothing_however_often_it_is_read() {
        for none in [8..11, 8..8] {
            let (folder, journals) = several(1, 10);
            let forged = batch(CLAIM, 2, &[0..4, none]);
            std::fs::write(folder.path().join("journal"), forged).unwrap();
            for _ in 0..2 {
                let found = journals[0].end_now();
                assert!(matches!(found, Err(JournalFault::Broken)), "{found:?}");
                assert_eq!(journals[0].written(&(0..10)), 0);
            }
        }
    }

    #[test]
    fn a_claim_may_be_longer_than_what_is_read_at_a_time() {
        let count = 3 * PIECE / to_u64(RECORD) + 7;
        let (_folder, journals) = several(2, 2 * count);
        let ranges: Vec<Range<u64>> = (0..count).map(|at| 2 * at..2 * at + 1).collect();
        journals[0].claim(&[1..2, 3..4]).unwrap();
        assert_eq!(journals[0].claim(&ranges).unwrap().1, Verdict::Accepted);
        assert_eq!(journals[1].claim(&ranges).unwrap().1, Verdict::Taken(0));
        assert_eq!(journals[1].written(&(0..2 * count)), 0);
    }

    #[test]
    fn what_the_system_says_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let unreadable = OpenOptions::new().append(true).create(true).open(path).unwrap();
        let expected = disk::read_at(&unreadable, &mut [0], 0)
            .unwrap_err()
            .raw_os_error();
        let found = Journal::new(unreadable, 0, 10).commit();
        assert!(
            matches!(&found, Err(JournalFault::System(fault)) if fault.raw_os_error() == expected),
            "{found:?}"
        );
    }

    #[test]
    fn a_journal_that_is_shortened_while_it_is_read_is_broken() {
        let (_folder, journals) = several(1, 10);
        let found = journals[0].inner().read(1);
        assert!(matches!(found, Err(JournalFault::Broken)), "{found:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn of_all_who_claim_a_byte_at_once_one_gets_it(threads in 2..5_usize, claims in 1..30_u64) {
            let (_folder, journals) = several(threads, claims);
            let won: u64 = std::thread::scope(|scope| {
                let running: Vec<_> = journals
                    .iter()
                    .map(|journal| {
                        scope.spawn(move || {
                            (0..claims)
                                .map(|at| {
                                    let (claim, verdict) = journal.claim(std::slice::from_ref(&(at..at + 1))).unwrap();
                                    if verdict == Verdict::Accepted {
                                        journal.done(claim).unwrap();
                                    }
                                    u64::from(verdict == Verdict::Accepted)
                                })
                                .sum::<u64>()
                        })
                    })
                    .collect();
                running.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            prop_assert_eq!(won, claims);
            prop_assert_eq!(journals[0].commit().unwrap(), Verdict::Accepted);
        }
    }
}
