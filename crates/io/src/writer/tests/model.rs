//! Writers that begin, join, leave and die in random order, compared with a model of the allowed results.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use ingot_format::{Dtype, Format, Index, LayoutOptions, Spec};
use proptest::prelude::*;

use super::Writer;
use crate::error::Error;
use crate::options::SaveOptions;
use crate::payload::Payload;
use crate::watch::Unwatched;

const CELLS: u64 = 3;
const OPTIONS: SaveOptions = SaveOptions {
    durable: false,
    replace: crate::options::Replace::Atomic,
    replace_read_only: false,
};

/// A step of one of the writers. A number is the writer, and a byte its content.
#[derive(Clone, Debug)]
enum Action {
    Create,
    /// Whether to finish the file if its writer was killed.
    Join(bool),
    Write(usize, u64, u8),
    /// Claim a cell, and stop before it is written.
    Claim(usize, u64),
    Commit(usize),
    Leave(usize),
    Die(usize),
}

fn steps() -> impl Strategy<Value = Vec<Action>> {
    let (who, cell) = (0..4_usize, 0..CELLS);
    let step = prop_oneof![
        2 => Just(Action::Create),
        3 => any::<bool>().prop_map(Action::Join),
        8 => (who.clone(), cell.clone(), 1..255_u8).prop_map(|(who, cell, value)| Action::Write(who, cell, value)),
        1 => (who.clone(), cell).prop_map(|(who, cell)| Action::Claim(who, cell)),
        3 => who.clone().prop_map(Action::Commit),
        1 => who.clone().prop_map(Action::Leave),
        2 => who.prop_map(Action::Die),
    ];
    proptest::collection::vec(step, 1..40)
}

/// The expected state.
#[derive(Default)]
struct Expected {
    /// The contents of the file at the path.
    file: Option<Vec<u8>>,
    temporary: Option<ExpectedTemporary>,
}

#[derive(Default)]
struct ExpectedTemporary {
    founder: Option<usize>,
    here: BTreeSet<usize>,
    cells: BTreeMap<u64, u8>,
    /// Cells that are claimed and not written.
    claimed: BTreeSet<u64>,
}

/// The writers, by their numbers, which are never used again.
struct World<'a> {
    path: &'a Path,
    writers: BTreeMap<usize, Writer>,
    next: usize,
    model: Expected,
}

impl World<'_> {
    fn run(&mut self, step: &Action) -> Result<(), TestCaseError> {
        match *step {
            Action::Create => self.create(),
            Action::Join(orphan) => self.join(orphan),
            Action::Write(who, cell, value) => self.with(who, |world, id| world.write(id, cell, value)),
            Action::Claim(who, cell) => self.with(who, |world, id| world.claim(id, cell)),
            Action::Commit(who) => self.with(who, |world, id| world.commit(id)),
            Action::Leave(who) => self.with(who, |world, id| world.leave(id, false)),
            Action::Die(who) => self.with(who, |world, id| world.leave(id, true)),
        }
    }

    /// Call `act` for one of the writers, if there are any.
    fn with(
        &mut self,
        who: usize,
        act: impl FnOnce(&mut Self, usize) -> Result<(), TestCaseError>,
    ) -> Result<(), TestCaseError> {
        let ids: Vec<usize> = self.writers.keys().copied().collect();
        match ids.len() {
            0 => Ok(()),
            count => act(self, ids[who % count]),
        }
    }

    fn add(&mut self, writer: Writer) -> usize {
        self.next += 1;
        self.writers.insert(self.next, writer);
        self.next
    }

    fn create(&mut self) -> Result<(), TestCaseError> {
        let spec = Spec {
            name: "a",
            dtype: Dtype::U8,
            shape: &[CELLS],
        };
        let (format, layout) = (Format::Safetensors, LayoutOptions::default());
        let begun = Writer::create(self.path, &[spec], None, format, &layout, &OPTIONS, &Unwatched);
        if self
            .model
            .temporary
            .as_ref()
            .is_some_and(|temporary| !temporary.here.is_empty())
        {
            prop_assert_eq!(code(begun.map(drop)), "busy");
            return Ok(());
        }
        let id = self.add(begun.unwrap());
        self.model.temporary = Some(ExpectedTemporary {
            founder: Some(id),
            here: BTreeSet::from([id]),
            ..ExpectedTemporary::default()
        });
        Ok(())
    }

    fn join(&mut self, finish: bool) -> Result<(), TestCaseError> {
        // A commit waits long for writers that have not left.
        let temporary = self.model.temporary.as_ref();
        let waits =
            temporary.is_some_and(|temporary| temporary.founder.is_none() && !temporary.here.is_empty());
        if waits && finish {
            return Ok(());
        }
        let joined = Writer::join(self.path, finish, &OPTIONS, &Unwatched);
        let expected = match temporary {
            None => Err("nothing-to-join"),
            Some(temporary) if temporary.founder.is_some() => Ok(false),
            Some(_) if !finish => Err("orphaned"),
            Some(_) => Ok(true),
        };
        match expected {
            Err(expected) => prop_assert_eq!(code(joined.map(drop)), expected),
            Ok(is_founder) => {
                let joined = joined.unwrap();
                prop_assert_eq!(joined.is_founder, is_founder);
                let id = self.add(joined);
                let temporary = self.model.temporary.as_mut().unwrap();
                temporary.here.insert(id);
                if is_founder {
                    temporary.founder = Some(id);
                    temporary.claimed.clear();
                }
            }
        }
        Ok(())
    }

    /// Return the reason why writer `id` cannot continue, or `None` if it can.
    fn refusal(&self, id: usize) -> Option<&'static str> {
        match &self.model.temporary {
            Some(temporary) if temporary.here.contains(&id) => {
                temporary.founder.is_none().then_some("orphaned")
            }
            // Its file has ended, one way or the other.
            _ => Some("ended"),
        }
    }

    fn write(&mut self, id: usize, cell: u64, value: u8) -> Result<(), TestCaseError> {
        let refusal = self.refusal(id);
        let at = Index::At(i64::try_from(cell).unwrap());
        let bytes = [value];
        let payload = Payload::from(&bytes[..]);
        let written = self.writers[&id].write("a", &[at], Dtype::U8, &[], &payload, &Unwatched);
        let Some(temporary) = self.model.temporary.as_mut().filter(|_| refusal.is_none()) else {
            return ended(refusal, &code(written));
        };
        let taken = temporary.cells.contains_key(&cell) || temporary.claimed.contains(&cell);
        prop_assert_eq!(code(written), if taken { "filled-twice" } else { "" });
        temporary.cells.entry(cell).or_insert(value);
        if temporary.claimed.contains(&cell) {
            temporary.cells.remove(&cell);
        }
        Ok(())
    }

    fn claim(&mut self, id: usize, cell: u64) -> Result<(), TestCaseError> {
        if self.refusal(id).is_some() {
            return Ok(());
        }
        let temporary = self.model.temporary.as_mut().unwrap();
        if !temporary.cells.contains_key(&cell) && temporary.claimed.insert(cell) {
            let range = cell..cell + 1;
            let claimed = self.writers[&id].journal.claim(std::slice::from_ref(&range));
            prop_assert!(claimed.is_ok());
        }
        Ok(())
    }

    fn commit(&mut self, id: usize) -> Result<(), TestCaseError> {
        let refusal = self.refusal(id);
        let committed = self.writers[&id].commit(&Unwatched);
        let Some(temporary) = self.model.temporary.as_mut().filter(|_| refusal.is_none()) else {
            return ended(refusal, &code(committed));
        };
        if u64::try_from(temporary.cells.len()).unwrap() < CELLS {
            let code = code(committed);
            prop_assert!(["never-filled", "partly-filled"].contains(&&*code), "{}", code);
            return Ok(());
        }
        prop_assert_eq!(code(committed), "");
        self.model.file = Some(temporary.cells.values().copied().collect());
        self.model.temporary = None;
        Ok(())
    }

    fn leave(&mut self, id: usize, dies: bool) -> Result<(), TestCaseError> {
        let mut writer = self.writers.remove(&id).unwrap();
        if dies {
            // Like the end of a process: files are closed, and nothing else happens.
            writer.is_founder = false;
        }
        drop(writer);
        if let Some(temporary) = self.model.temporary.as_mut()
            && temporary.here.remove(&id)
            && temporary.founder == Some(id)
        {
            temporary.founder = None;
            if !dies {
                self.model.temporary = None;
            }
        }
        Ok(())
    }

    /// The path leads to the last committed file, complete.
    fn check(&self) -> Result<(), TestCaseError> {
        let found = std::fs::read(self.path).ok();
        let data = found.map(|bytes| bytes[bytes.len() - usize::try_from(CELLS).unwrap()..].to_vec());
        prop_assert_eq!(&data, &self.model.file);
        Ok(())
    }
}

fn code(done: Result<(), Error>) -> String {
    done.err().map_or(String::new(), |fault| fault.code().to_owned())
}

/// Check that a writer that cannot continue has reported the reason.
fn ended(refusal: Option<&str>, code: &str) -> Result<(), TestCaseError> {
    match refusal {
        Some("ended") => prop_assert!(["committed", "abandoned"].contains(&code), "{}", code),
        refusal => prop_assert_eq!(Some(code), refusal),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn writers_that_come_leave_and_die_do_what_the_model_says(steps in steps()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut world = World { path: &path, writers: BTreeMap::new(), next: 0, model: Expected::default() };
        for step in &steps {
            world.run(step)?;
            world.check()?;
        }
    }
}
