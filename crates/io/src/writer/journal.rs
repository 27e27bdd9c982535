//! What all who fill one file tell each other.
//!
//! A file beside the one that is filled, to which records are only ever appended (`O_APPEND`, one call for each batch,
//! which local file systems do one after another). The order of the records decides: whoever claims bytes and finds
//! in an earlier record that somebody else has them, has lost, and all who read the journal see it the same way. So no
//! lock is held while anything is written, and a process that dies leaves claims that nobody has made good.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use ingot_format::{to_u64, to_usize};

use super::coverage::Coverage;
use crate::payload::FileRange;

/// Words of a record: what it is, and two numbers.
const WORDS: usize = 3;
const RECORD: u64 = 24;

const CLAIM: u64 = 1;
const RANGE: u64 = 2;
const DONE: u64 = 3;
const FAILED: u64 = 4;
const COMMIT: u64 = 5;
const ABANDON: u64 = 6;

pub(super) struct Journal {
    inner: Mutex<Inner>,
}

struct Inner {
    file: File,
    /// Where the records begin that were not read yet.
    position: u64,
    state: State,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Committed,
    Abandoned,
}

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Accepted,
    /// Somebody has a byte of it. The number of the range in its batch.
    Taken(usize),
    /// Bytes are missing, or were claimed and not made good.
    Incomplete,
    Ended(End),
}

/// A claim, which its owner makes good or takes back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim(u64);

/// What the records say, in their order.
#[derive(Debug)]
struct State {
    /// Bytes that the file will have.
    total: u64,
    taken: Coverage,
    taken_nbytes: u64,
    /// Claims that were not made good yet, by the position of the record.
    open: HashMap<u64, Vec<Range<u64>>>,
    end: Option<End>,
}

impl Journal {
    /// The journal in `file`, whose records begin at `position`, of a file with `total` bytes of data.
    pub(super) fn new(file: File, position: u64, total: u64) -> Journal {
        let state = State {
            total,
            taken: Coverage::default(),
            taken_nbytes: 0,
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

    /// Claims `ranges`, none of which is empty, all or none.
    pub(super) fn claim(&self, ranges: &[Range<u64>]) -> io::Result<(Claim, Verdict)> {
        let mut records = vec![CLAIM, to_u64(ranges.len()), 0];
        records.extend(ranges.iter().flat_map(|range| [RANGE, range.start, range.end]));
        let (position, verdict) = self.append(&records)?;
        Ok((Claim(position), verdict))
    }

    /// The bytes of the claim are written.
    pub(super) fn done(&self, claim: Claim) -> io::Result<Verdict> {
        self.append(&[DONE, claim.0, 0]).map(|found| found.1)
    }

    /// They could not be. Somebody may claim them again.
    pub(super) fn failed(&self, claim: Claim) -> io::Result<Verdict> {
        self.append(&[FAILED, claim.0, 0]).map(|found| found.1)
    }

    /// Nothing is written from here on, if all is there.
    pub(super) fn commit(&self) -> io::Result<Verdict> {
        self.append(&[COMMIT, 0, 0]).map(|found| found.1)
    }

    /// Nothing is written from here on, because nobody will finish the file.
    pub(super) fn abandon(&self) -> io::Result<Verdict> {
        self.append(&[ABANDON, 0, 0]).map(|found| found.1)
    }

    /// How it ended, as far as was read.
    pub(super) fn end(&self) -> Option<End> {
        self.inner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .state
            .end
    }

    /// Bytes of `range` that were written.
    pub(super) fn written(&self, range: &Range<u64>) -> u64 {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let open = inner.state.open.values().flatten();
        let claimed: u64 = open
            .map(|claim| {
                claim
                    .end
                    .min(range.end)
                    .saturating_sub(claim.start.max(range.start))
            })
            .sum();
        inner.state.taken.within(range) - claimed
    }

    /// Appends a batch, and reads what others appended before it. Says where it stands, and what became of it.
    fn append(&self, words: &[u64]) -> io::Result<(u64, Verdict)> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let batch: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let written = loop {
            match inner.file.write(&batch) {
                Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
                written => break written?,
            }
        };
        if written != batch.len() {
            // The disk is full in the middle of a batch: nobody can read on from here, and all find that out.
            return Err(io::ErrorKind::WriteZero.into());
        }
        let end = inner.file.stream_position()?;
        let begin = end - to_u64(batch.len());
        let verdict = inner.read_to(end)?;
        Ok((begin, verdict))
    }
}

impl Inner {
    /// Reads the records up to `end`. Gives what became of the last batch.
    fn read_to(&mut self, end: u64) -> io::Result<Verdict> {
        let mut bytes = vec![0; to_usize(end - self.position).ok_or(io::ErrorKind::OutOfMemory)?];
        FileRange::new(&self.file, self.position, end - self.position).read(0, &mut bytes)?;
        let words: Vec<u64> = bytes
            .as_chunks::<8>()
            .0
            .iter()
            .map(|word| u64::from_le_bytes(*word))
            .collect();
        let mut records = words.as_chunks::<WORDS>().0;
        let mut verdict = None;
        while let [record, rest @ ..] = records {
            let count = if record[0] == CLAIM {
                to_usize(record[1]).unwrap_or(usize::MAX)
            } else {
                0
            };
            let (ranges, rest) = rest.split_at_checked(count).ok_or(io::ErrorKind::InvalidData)?;
            verdict = Some(
                self.state
                    .apply(self.position, record, ranges)
                    .ok_or(io::ErrorKind::InvalidData)?,
            );
            self.position += RECORD * to_u64(1 + count);
            records = rest;
        }
        verdict.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

impl State {
    /// What becomes of the record at `position`. `None` when it is none.
    fn apply(
        &mut self,
        position: u64,
        &[kind, number, _]: &[u64; WORDS],
        ranges: &[[u64; WORDS]],
    ) -> Option<Verdict> {
        if let Some(end) = self.end {
            return Some(Verdict::Ended(end));
        }
        match kind {
            CLAIM => return self.claim(position, ranges),
            DONE => drop(self.open.remove(&number)?),
            FAILED => {
                for range in self.open.remove(&number)? {
                    self.taken.remove(&range);
                    self.taken_nbytes -= range.end - range.start;
                }
            }
            COMMIT if self.taken_nbytes < self.total || !self.open.is_empty() => {
                return Some(Verdict::Incomplete);
            }
            COMMIT => self.end = Some(End::Committed),
            ABANDON => self.end = Some(End::Abandoned),
            _ => return None,
        }
        Some(Verdict::Accepted)
    }

    fn claim(&mut self, position: u64, records: &[[u64; WORDS]]) -> Option<Verdict> {
        let mut ranges: Vec<Range<u64>> = Vec::with_capacity(records.len());
        for &[kind, begin, end] in records {
            if kind != RANGE || begin >= end || end > self.total {
                return None;
            }
            let range = begin..end;
            if !self.taken.add(&range) {
                for range in &ranges {
                    self.taken.remove(range);
                }
                return Some(Verdict::Taken(ranges.len()));
            }
            ranges.push(range);
        }
        self.taken_nbytes += ranges.iter().map(|range| range.end - range.start).sum::<u64>();
        self.open.insert(position, ranges);
        Some(Verdict::Accepted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs::OpenOptions;

    /// Several who have the same journal open, each by itself, as processes do.
    fn several(count: usize, total: u64) -> (tempfile::TempDir, Vec<Journal>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let open = || {
            OpenOptions::new()
                .read(true)
                .append(true)
                .create(true)
                .open(&path)
                .unwrap()
        };
        let journals = (0..count).map(|_| Journal::new(open(), 0, total)).collect();
        (folder, journals)
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
    fn a_broken_journal_is_an_error() {
        let (folder, journals) = several(1, 10);
        let mut file = OpenOptions::new()
            .append(true)
            .open(folder.path().join("journal"))
            .unwrap();
        file.write_all(&[9; 24]).unwrap();
        assert!(journals[0].claim(&[0..1, 2..3]).is_err());
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
