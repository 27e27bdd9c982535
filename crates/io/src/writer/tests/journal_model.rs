//! Journals compared with a model that knows the owner of each byte, for a test and for the fuzz target `journal`.
#![allow(unreachable_pub, reason = "what `fuzzing` passes on, where there is that")]

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use ingot_format::{to_u64, to_usize};

use super::journal::{
    ABANDON, CLAIM, COMMIT, Claim, DONE, End, FAILED, Journal, JournalFault, RANGE, RECORD, TAKE_OVER,
    Verdict, sealed, words,
};

/// Bytes of the file that is filled.
const TOTAL: usize = 48;

/// The number of parties, each with its own open journal, like separate processes.
const PARTIES: usize = 3;

/// A step of one party. The first number selects the party, and a second one selects one of all claims so far.
#[derive(Clone, Debug)]
pub enum Step {
    /// Claim ranges. Each has a first byte and a length, which is one more than the number here.
    Claim(u8, Vec<(u8, u8)>),
    /// Record that the bytes of a claim are written.
    Done(u8, u8),
    /// Record that the bytes of a claim cannot be written.
    Failed(u8, u8),
    /// Commit the file, if all its bytes are written.
    Commit(u8),
    /// Abandon the file.
    Abandon(u8),
    /// Take over the claims of parties that have died.
    TakeOver(u8),
    /// Read the records that other parties have written since.
    Look(u8),
    /// Write a forged record with a valid hash. The ranges belong to a claim.
    Forge(u64, u64, Vec<[u64; 3]>),
    /// Write at most as many bytes as a record has.
    Scribble(Vec<u8>),
}

/// The state that all records in the journal describe.
#[derive(Clone, Debug, Default)]
struct Expected {
    /// The claim that has each byte.
    owners: Vec<Option<u64>>,
    /// The claims that are not completed.
    open: BTreeSet<u64>,
    end: Option<End>,
    is_broken: bool,
}

impl Expected {
    /// Apply the record at `position`, which the ranges of a claim follow. `None` if it is invalid. All records after
    /// an invalid one are invalid too.
    fn add(&mut self, position: u64, kind: u64, number: u64, ranges: &[[u64; 3]]) -> Option<Verdict> {
        let verdict = if self.is_broken {
            None
        } else {
            self.judge(position, kind, number, ranges)
        };
        self.is_broken = verdict.is_none();
        verdict
    }

    fn judge(&mut self, position: u64, kind: u64, number: u64, ranges: &[[u64; 3]]) -> Option<Verdict> {
        match self.end {
            Some(End::Committed) if kind == TAKE_OVER => self.end = None,
            Some(end) => return Some(Verdict::Ended(end)),
            None => {}
        }
        match kind {
            CLAIM => return self.claim(position, ranges),
            DONE if self.open.remove(&number) => {}
            FAILED if self.open.contains(&number) => self.free(number),
            TAKE_OVER => self.open.clone().into_iter().for_each(|claim| self.free(claim)),
            COMMIT if !self.open.is_empty() || self.owners.contains(&None) => {
                return Some(Verdict::Incomplete);
            }
            COMMIT => self.end = Some(End::Committed),
            ABANDON => self.end = Some(End::Abandoned),
            _ => return None,
        }
        Some(Verdict::Accepted)
    }

    fn claim(&mut self, position: u64, ranges: &[[u64; 3]]) -> Option<Verdict> {
        let is_range = |&[kind, begin, end]: &[u64; 3]| kind == RANGE && begin < end && end <= to_u64(TOTAL);
        if !ranges.iter().all(is_range) {
            return None;
        }
        let before = self.owners.clone();
        for (number, &[_, begin, end]) in ranges.iter().enumerate() {
            for byte in begin..end {
                let owner = &mut self.owners[to_usize(byte)?];
                if owner.is_some() {
                    self.owners = before;
                    return Some(Verdict::Taken(number));
                }
                *owner = Some(position);
            }
        }
        self.open.insert(position);
        Some(Verdict::Accepted)
    }

    fn free(&mut self, claim: u64) {
        self.open.remove(&claim);
        for owner in self.owners.iter_mut().filter(|owner| **owner == Some(claim)) {
            *owner = None;
        }
    }

    /// Bytes of a range that were written.
    fn written(&self, range: Range<usize>) -> u64 {
        let is_good = |owner: &&Option<u64>| owner.is_some_and(|claim| !self.open.contains(&claim));
        to_u64(self.owners[range].iter().filter(is_good).count())
    }
}

struct World {
    journals: Vec<Journal>,
    /// The state that each party has read.
    read: Vec<Expected>,
    now: Expected,
    /// Return the model of a new file.
    other: File,
    claims: Vec<Claim>,
}

/// Run `steps` in a new journal at `path`.
///
/// # Errors
/// Return the difference from the model.
pub fn run(path: &Path, steps: &[Step]) -> Result<(), String> {
    let mut world = World::new(path).map_err(|fault| fault.to_string())?;
    for (number, step) in steps.iter().enumerate() {
        let differs = |difference: String| format!("step {number}, {step:?}: {difference}");
        world.step(step).map_err(differs)?;
    }
    Ok(())
}

impl World {
    fn new(path: &Path) -> io::Result<World> {
        let open = || OpenOptions::new().read(true).append(true).create(true).open(path);
        let journal = |_| Ok(Journal::new(open()?, 0, to_u64(TOTAL)));
        let empty = Expected {
            owners: vec![None; TOTAL],
            ..Expected::default()
        };
        Ok(World {
            journals: (0..PARTIES).map(journal).collect::<io::Result<_>>()?,
            read: vec![empty.clone(); PARTIES],
            now: empty,
            other: open()?,
            claims: Vec::new(),
        })
    }

    fn step(&mut self, step: &Step) -> Result<(), String> {
        match *step {
            Step::Claim(who, ref ranges) => self.claim(party(who), ranges),
            Step::Done(who, claim) => self.settle(party(who), claim, DONE, Journal::done),
            Step::Failed(who, claim) => self.settle(party(who), claim, FAILED, Journal::failed),
            Step::Commit(who) => self.tell(party(who), COMMIT, 0, Journal::commit),
            Step::Abandon(who) => self.tell(party(who), ABANDON, 0, Journal::abandon),
            Step::TakeOver(who) => self.tell(party(who), TAKE_OVER, 0, Journal::take_over),
            Step::Look(who) => self.check_end(party(who)),
            Step::Forge(kind, number, ref ranges) => self.forge(kind, number, ranges),
            Step::Scribble(ref bytes) => self.scribble(bytes),
        }
    }

    fn claim(&mut self, who: usize, ranges: &[(u8, u8)]) -> Result<(), String> {
        let range = |&(begin, more): &(u8, u8)| u64::from(begin)..u64::from(begin) + u64::from(more) + 1;
        let ranges: Vec<Range<u64>> = ranges.iter().map(range).collect();
        let records: Vec<[u64; 3]> = ranges
            .iter()
            .map(|range| [RANGE, range.start, range.end])
            .collect();
        let expected = self
            .now
            .add(self.position()?, CLAIM, to_u64(records.len()), &records);
        let found = self.journals[who].claim(&ranges);
        let found = found.map(|(claim, verdict)| {
            self.claims.push(claim);
            verdict
        });
        self.has_read(who, found, expected)
    }

    fn settle(
        &mut self,
        who: usize,
        claim: u8,
        kind: u64,
        act: impl Fn(&Journal, Claim) -> Result<Verdict, JournalFault>,
    ) -> Result<(), String> {
        match self.claims.len() {
            0 => Ok(()),
            count => {
                let claim = self.claims[usize::from(claim) % count];
                self.tell(who, kind, claim.0, |journal| act(journal, claim))
            }
        }
    }

    fn tell(
        &mut self,
        who: usize,
        kind: u64,
        number: u64,
        act: impl Fn(&Journal) -> Result<Verdict, JournalFault>,
    ) -> Result<(), String> {
        let expected = self.now.add(self.position()?, kind, number, &[]);
        let found = act(&self.journals[who]);
        self.has_read(who, found, expected)
    }

    fn check_end(&mut self, who: usize) -> Result<(), String> {
        let found = self.journals[who].end_now();
        let expected = (!self.now.is_broken).then_some(self.now.end);
        self.has_read(who, found, expected)
    }

    fn forge(&mut self, kind: u64, number: u64, ranges: &[[u64; 3]]) -> Result<(), String> {
        let (number, ranges) = match kind {
            CLAIM => (to_u64(ranges.len()), ranges),
            _ => (number, &[][..]),
        };
        let words = [kind, number, 0]
            .into_iter()
            .chain(ranges.iter().flatten().copied());
        let batch = sealed(words.flat_map(u64::to_le_bytes).collect());
        self.now.add(self.position()?, kind, number, ranges);
        self.write(&batch)
    }

    fn scribble(&mut self, bytes: &[u8]) -> Result<(), String> {
        if let Some(bytes) = bytes.first_chunk::<RECORD>() {
            let words = words(bytes);
            if sealed(bytes.to_vec()) == bytes && !(words[0] == CLAIM && words[1] > 0) {
                return self.forge(words[0], words[1], &[]);
            }
        }
        self.now.is_broken |= !bytes.is_empty();
        self.write(&bytes[..bytes.len().min(RECORD)])
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.other.write_all(bytes).map_err(|fault| fault.to_string())
    }

    /// The position of the next record.
    fn position(&self) -> Result<u64, String> {
        let facts = self.other.metadata().map_err(|fault| fault.to_string())?;
        Ok(facts.len())
    }

    /// Compare the finding of one party, which has read all records by now, with the model.
    fn has_read<T: PartialEq + std::fmt::Debug>(
        &mut self,
        who: usize,
        found: Result<T, JournalFault>,
        expected: Option<T>,
    ) -> Result<(), String> {
        self.read[who] = self.now.clone();
        match (found, expected) {
            (Ok(found), Some(expected)) if found == expected => {}
            (Err(JournalFault::Broken), None) => {}
            (found, expected) => return Err(format!("expected {expected:?}, found {found:?}")),
        }
        for (journal, read) in self.journals.iter().zip(&self.read) {
            let expected = (
                read.end,
                [0..TOTAL, 0..7, 11..30].map(|range| read.written(range)),
            );
            let written = [0..48, 0..7, 11..30].map(|range| journal.written(&range));
            if (journal.end(), written) != expected {
                return Err(format!("expected {expected:?} to be known, found {written:?}"));
            }
        }
        Ok(())
    }
}

/// A party that has the journal open.
fn party(who: u8) -> usize {
    usize::from(who) % PARTIES
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let number = any::<u8>;
        let ranges = prop::collection::vec((0..48_u8, 0..16_u8), 0..4);
        let whole = |at: u8| (0..3_u8).prop_map(move |who| Step::Claim(who, vec![(at, 23)]));
        let forged = prop::collection::vec((1..4_u64, 0..50_u64, 0..50_u64), 0..3);
        let step = prop_oneof![
            6 => (number(), ranges).prop_map(|(who, ranges)| Step::Claim(who, ranges)),
            2 => prop_oneof![whole(0), whole(24)],
            8 => (number(), number()).prop_map(|(who, claim)| Step::Done(who, claim)),
            2 => (number(), number()).prop_map(|(who, claim)| Step::Failed(who, claim)),
            3 => number().prop_map(Step::Commit),
            1 => number().prop_map(Step::Abandon),
            1 => number().prop_map(Step::TakeOver),
            2 => number().prop_map(Step::Look),
            1 => (0..9_u64, 0..200_u64, forged).prop_map(|(kind, number, ranges)| {
                Step::Forge(kind, number, ranges.into_iter().map(|(kind, begin, end)| [kind, begin, end]).collect())
            }),
            1 => prop::collection::vec(number(), 0..26).prop_map(Step::Scribble),
        ];
        prop::collection::vec(step, 1..30)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn a_journal_says_who_has_each_byte_whoever_reads_it_and_when(steps in steps()) {
            let folder = tempfile::tempdir().unwrap();
            let ran = run(&folder.path().join("journal"), &steps);
            prop_assert_eq!(ran, Ok(()));
        }
    }
}
