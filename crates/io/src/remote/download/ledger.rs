//! What is known of shards that have their names while the index does not.
//!
//! Files get their names one by one. Whoever is broken off in between has left shards which the next call could not tell
//! from somebody else's. So before the first of them gets its name, the notes of all are written down behind the bytes of
//! the index, in the file that becomes the index and loses them then.

use std::io::Read;
use std::path::Path;

use ingot_format::{to_u64, to_usize};

use super::incoming::Incoming;
use crate::error::Error;
use crate::payload::FileRange;
use crate::remote::journal::{Journal, Record};
use crate::save::partial::Partial;
use crate::watch::Watch;

/// Bytes of notes that are read at most. A TiB takes 2 MiB of them.
const NBYTES: u64 = 256 << 20;

/// The notes of all shards of an index, in the order of their names.
pub(super) struct Ledger {
    notes: Vec<u8>,
}

impl Ledger {
    /// The one that a call was broken off behind, which fetched the same index.
    pub(super) fn left(path: &Path, index: &[u8], watch: &dyn Watch) -> Option<Ledger> {
        let file = Partial::left(path, watch)?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        let mut left = Vec::new();
        let most = to_u64(index.len()).saturating_add(NBYTES);
        file.take(most).read_to_end(&mut left).ok()?;
        let notes = left.strip_prefix(index)?;
        (!notes.is_empty()).then(|| Ledger {
            notes: notes.to_vec(),
        })
    }

    /// The hashes that the parts of each file had. What is of another version has none, nor has what follows a file that
    /// had another size.
    pub(super) fn records(&self, journals: &[Journal]) -> Vec<Option<Vec<Record>>> {
        let mut rest = &*self.notes;
        let mut take = |journal: &Journal| {
            let (notes, after) = rest.split_at_checked(journal.notes_nbytes())?;
            rest = after;
            journal.records_in(notes)
        };
        journals.iter().map(&mut take).collect()
    }

    /// Writes the bytes of an index into the file that becomes it, and behind them what is known of its shards.
    pub(super) fn write(
        partial: &mut Partial,
        index: &[u8],
        shards: &[Incoming],
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        let notes = shards.iter().map(Incoming::notes);
        let bytes = [index.to_vec()]
            .into_iter()
            .chain(notes)
            .collect::<Vec<_>>()
            .concat();
        // What stands there already may be all that vouches for shards which have their names.
        if holds(partial, &bytes) {
            return Ok(());
        }
        partial.begin_anew(to_u64(bytes.len()), watch)?;
        partial.write(&bytes, 0)
    }
}

fn holds(partial: &Partial, bytes: &[u8]) -> bool {
    let is_as_long = |len| to_usize(len) == Some(bytes.len());
    if !partial
        .file()
        .metadata()
        .is_ok_and(|metadata| is_as_long(metadata.len()))
    {
        return false;
    }
    let mut held = vec![0; bytes.len()];
    let range = FileRange::new(partial.file(), 0, to_u64(bytes.len()));
    range.read(0, &mut held).is_ok() && held == bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Unwatched;

    #[test]
    fn a_shard_is_known_by_its_version_and_its_place() {
        let journals =
            |versions: [&str; 2], first| [Journal::new(first, versions[0]), Journal::new(5, versions[1])];
        let written = journals(["one", "two"], 3);
        let notes = [written[0].notes(&[[1; 16]]), written[1].notes(&[[2; 16]])].concat();
        let ledger = Ledger { notes };
        let known = |journals: &[Journal]| ledger.records(journals);
        assert_eq!(known(&written), [Some(vec![[1; 16]]), Some(vec![[2; 16]])]);
        assert_eq!(known(&journals(["other", "two"], 3)), [None, Some(vec![[2; 16]])]);
        assert_eq!(known(&journals(["one", "two"], 2 << 20)), [None, None]);
    }

    #[test]
    fn what_was_left_of_another_index_is_no_ledger() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("index.json");
        assert!(Ledger::left(&path, b"{}", &Unwatched).is_none());
        std::fs::write(folder.path().join(".index.json.ingot-part"), "{}notes").unwrap();
        assert_eq!(Ledger::left(&path, b"{}", &Unwatched).unwrap().notes, b"notes");
        for other in [&b"{ "[..], b"{}notes", b"{}notes and more"] {
            assert!(Ledger::left(&path, other, &Unwatched).is_none());
        }
    }
}
