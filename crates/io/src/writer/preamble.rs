//! The beginning of the journal of a shared file: the facts that others need to join.

use std::ffi::{OsStr, OsString};
use std::fs::File;

use ingot_format::{saturating_usize, to_u64, to_usize};
use xxhash_rust::xxh3::xxh3_64;

use super::journal::JournalFault;
use crate::disk::{self, name_bytes, name_of};
use crate::payload::FileRange;

/// The magic number at the start, and the version of the rest.
const MAGIC: [u8; 8] = *b"ingot-w2";
/// Bytes before the hash: the magic, the size of the file, and the name of the temporary file after its length.
const SAID: u64 = 8 + 8 + 8 + 256;
/// Bytes of the preamble, with the XXH3 of the bytes before it.
pub(super) const NBYTES: u64 = SAID + 8;

/// `None` if the name of the temporary file is too long.
pub(super) fn render(nbytes: u64, name: &OsStr) -> Option<Vec<u8>> {
    let name = name_bytes(name)?;
    let mut preamble = MAGIC.to_vec();
    preamble.extend(nbytes.to_le_bytes());
    preamble.extend(to_u64(name.len()).to_le_bytes());
    preamble.extend(name);
    let said = to_usize(SAID)?;
    (preamble.len() <= said).then(|| {
        preamble.resize(said, 0);
        preamble.extend(xxh3_64(&preamble).to_le_bytes());
        preamble
    })
}

/// Return the size of the file and the name of the temporary file. `None` if the process that made the journal has not
/// written them yet, or fills the file alone.
pub(super) fn read(notes: &File) -> Result<Option<(u64, OsString)>, JournalFault> {
    if disk::facts(notes)?.nbytes == 0 {
        return Ok(None);
    }
    let mut preamble = vec![0; saturating_usize(NBYTES)];
    FileRange::new(notes, 0, NBYTES).read(0, &mut preamble)?;
    parse(&preamble).map(Some).ok_or(JournalFault::Broken)
}

fn parse(preamble: &[u8]) -> Option<(u64, OsString)> {
    let (said, hash) = preamble.split_last_chunk()?;
    if xxh3_64(said) != u64::from_le_bytes(*hash) {
        return None;
    }
    let rest = said.strip_prefix(&MAGIC)?;
    let (nbytes, rest) = rest.split_first_chunk()?;
    let (len, rest) = rest.split_first_chunk()?;
    let name = rest.get(..to_usize(u64::from_le_bytes(*len))?)?;
    Some((u64::from_le_bytes(*nbytes), name_of(name)?))
}
