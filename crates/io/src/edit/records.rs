//! Metadata that speaks of tensors: what it says in a file, and what becomes of it in the next. Nothing else writes it
//! anew when tensors are renamed, left out, put together or shared out.
//!
//! | record | in a file of tensors of other files | in a file of other tensors |
//! |---|---|---|
//! | `ingot.shared`, names without a tensor of their own | made of the names that are taken; a tensor whose own name is not among them is stored under one that is | left out |
//! | `ingot.checksums`, digests of tensors | those of the tensors, under their new names; one of a part that is stored now is made | left out, or made by the save |
//! | `modelspec.hash_sha256`, the digest of the data | that of the file whose data it is, all and in its order; else left out | left out, or made by the save |
//! | `vouch_credential`, a signature of the data | left out | left out |
//! | `sshs_model_hash`, `sshs_legacy_hash`: hashes of the data by kohya's scripts | left out | kept: the scripts compute them for the tensors that they save |
//! | `c2pa:manifest`, `c2pa:manifest.uri`, `__signature__`, `sigstore`: signatures of the whole file | left out, and by an edit of other metadata too | left out |
//!
//! An index speaks of files; what stands under these keys in its metadata says nothing and is left out, and its totals
//! are counted anew.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use ingot_format::{
    CHECKSUMS_KEY, Checksums, Entry, Excerpt, Header, MODEL_SPEC_KEY, Quoted, Remedy, SHARED_KEY,
    SharedError, SharedName, parse_shared, render_shared,
};

use crate::checkpoint::aliases::{named, refused};
use crate::digest::{Algorithm, Digest};
use crate::error::Error;
use crate::file::Archive;
use crate::verify::RecordedDigests;

/// The keys of signatures of a whole file, its metadata too: by C2PA, CryptoTensors and Sigstore.
pub(crate) const SIGNATURES_OF_FILE: [&str; 4] =
    ["c2pa:manifest", "c2pa:manifest.uri", "__signature__", "sigstore"];
/// The key of Vouch's signature of the data.
pub(crate) const SIGNATURE_OF_DATA: &str = "vouch_credential";
/// The keys of hashes of the data by kohya's training scripts.
pub(crate) const TRAINER_HASH_KEYS: [&str; 2] = ["sshs_model_hash", "sshs_legacy_hash"];

/// The keys of metadata that describes the tensors beside it. In metadata that is given for a new file they describe
/// another one.
pub const RECORD_KEYS: [&str; 8] = [
    CHECKSUMS_KEY,
    SHARED_KEY,
    MODEL_SPEC_KEY,
    SIGNATURES_OF_FILE[0],
    SIGNATURES_OF_FILE[1],
    SIGNATURES_OF_FILE[2],
    SIGNATURES_OF_FILE[3],
    SIGNATURE_OF_DATA,
];

/// The keys that a file of tensors of other files leaves out of their metadata: [`RECORD_KEYS`] and the trainers' hashes.
pub const STALE_KEYS: [&str; 10] = {
    let mut keys = [""; 10];
    let (records, hashes) = keys.split_at_mut(RECORD_KEYS.len());
    records.copy_from_slice(&RECORD_KEYS);
    hashes.copy_from_slice(&TRAINER_HASH_KEYS);
    keys
};

/// What a lenient reader passes over in the records of the file at `path`: those that are broken, and names of tensors
/// that it left out.
pub fn passed_over(path: &Path, header: &Header) -> Vec<(Error, Remedy)> {
    let digests = RecordedDigests::of(header, Some(path)).err();
    let mut found: Vec<_> = digests
        .map(|fault| (fault, Remedy::ValueLeftOut))
        .into_iter()
        .collect();
    let Some(text) = header.metadata().and_then(|metadata| metadata.get(SHARED_KEY)) else {
        return found;
    };
    match (parse_shared(text), named(text, header)) {
        (Err(fault), _) | (_, Err(fault)) => found.push((refused(Some(path), fault), Remedy::ValueLeftOut)),
        (Ok(names), Ok(_)) => {
            let left_out: HashSet<&str> = header.all_left_out().map(|left_out| left_out.0).collect();
            let lost = names
                .iter()
                .filter(|shared| left_out.contains(&*shared.of) && header.find(&shared.name).is_none());
            found.extend(lost.map(|shared| {
                let reason = format!("gives it {}, which is left out", Quoted(&shared.of));
                let fault = SharedError::about(&shared.name, &reason);
                (refused(Some(path), fault), Remedy::TensorLeftOut)
            }));
        }
    }
    found
}

/// Fails where `text` as the record of shared tensors of the file at `path` is none that a reader takes, or speaks of
/// names that are tensors of their own or of tensors that are not there.
pub(crate) fn check_shared(text: &str, header: &Header, path: &Path) -> Result<(), Error> {
    let fault = match (parse_shared(text), named(text, header)) {
        (Err(fault), _) | (_, Err(fault)) => Some(fault),
        (Ok(names), Ok(_)) => names.into_iter().find_map(|shared| {
            let reason = match (header.find(&shared.name), header.find(&shared.of)) {
                (Some(_), _) => "gives it another tensor than its own",
                (None, None) => "gives it a tensor that the file lacks",
                (None, Some(_)) => return None,
            };
            Some(SharedError::about(&shared.name, reason))
        }),
    };
    fault.map_or(Ok(()), |fault| Err(refused(Some(path), fault)))
}

/// A tensor of another file, and its name in the new one.
#[derive(Clone, Copy, Debug)]
pub struct Pick<'a> {
    /// The file.
    pub file: &'a Archive,
    /// The tensor, by its place in the order of the data.
    pub number: usize,
    /// What it is called from now on.
    pub name: &'a str,
    /// What the name is in the file.
    pub role: Role<'a>,
}

/// What a name of a file stands for.
#[derive(Clone, Copy, Debug)]
pub enum Role<'a> {
    /// A tensor that is stored.
    Tensor,
    /// The same tensor again: [`Alias`](crate::binding::Alias). It is stored once, under the name with [`Role::Tensor`] where
    /// that is picked too.
    Alias,
    /// A part of it.
    Part(&'a Excerpt),
}

/// A tensor that a new file stores: one of another file, or a part of one that goes by itself from now on.
#[derive(Clone, Debug)]
pub(crate) struct Stored<'a> {
    pub(crate) file: &'a Archive,
    pub(crate) entry: Entry<'a>,
    pub(crate) name: &'a str,
    pub(crate) part: Option<Excerpt>,
}

/// Which of `picks` the new file stores, and the record of the others.
///
/// A tensor whose own name is not picked is stored under the first of its other names, or else as the first part that
/// holds all others; where there is none, each part is stored by itself.
pub(crate) fn settled<'a>(picks: &[Pick<'a>]) -> (Vec<Stored<'a>>, Option<String>) {
    let mut others: BTreeMap<(*const Archive, usize), Vec<&Pick<'a>>> = BTreeMap::new();
    let mut homes = HashMap::new();
    let mut stored = Vec::new();
    for pick in picks {
        let tensor = (std::ptr::from_ref(pick.file), pick.number);
        if let Role::Tensor = pick.role {
            homes.insert(tensor, pick.name);
            stored.extend(Stored::of(pick));
        } else {
            others.entry(tensor).or_default().push(pick);
        }
    }
    let mut record = Vec::new();
    for (tensor, mut names) in others {
        names.sort_by_key(|pick| pick.name);
        match homes.get(&tensor) {
            Some(home) => record.extend(names.iter().map(|pick| pick.shared(home, pick.part().cloned()))),
            None => settle_homeless(&names, &mut stored, &mut record),
        }
    }
    let text = (!record.is_empty()).then(|| render_shared(&mut record));
    (stored, text)
}

/// As [`settled`], for the names of one tensor whose own is not among them.
fn settle_homeless<'a>(names: &[&Pick<'a>], stored: &mut Vec<Stored<'a>>, record: &mut Vec<SharedName>) {
    let whole = names.iter().find(|pick| pick.part().is_none());
    let Some(home) = whole.or_else(|| holding_all(names)) else {
        let mut first: BTreeMap<&Excerpt, &str> = BTreeMap::new();
        for pick in names {
            let Some(part) = pick.part() else { continue };
            match first.get(part) {
                Some(twin) => record.push(pick.shared(twin, None)),
                None => {
                    first.insert(part, pick.name);
                    stored.extend(Stored::of(pick));
                }
            }
        }
        return;
    };
    stored.extend(Stored::of(home));
    let begin = home.part().map_or(0, Excerpt::begin);
    for pick in names.iter().filter(|pick| pick.name != home.name) {
        let is_twin = pick.part() == home.part();
        let part = pick
            .part()
            .filter(|_| !is_twin)
            .and_then(|part| part.counted_from(begin));
        record.push(pick.shared(home.name, part));
    }
}

/// The first of these parts in whose elements, one after the other, all others lie.
fn holding_all<'p, 'a>(names: &'p [&Pick<'a>]) -> Option<&'p &'p Pick<'a>> {
    let parts = || names.iter().filter_map(|pick| pick.part());
    let begin = parts().map(Excerpt::begin).min()?;
    let end = parts().map(Excerpt::end).max()?;
    names.iter().find(|pick| {
        pick.part()
            .is_some_and(|part| part.is_packed() && part.begin() == begin && part.end() == end)
    })
}

impl<'a> Stored<'a> {
    /// `None` where the file has no such tensor.
    fn of(pick: &Pick<'a>) -> Option<Stored<'a>> {
        Some(Stored {
            file: pick.file,
            entry: pick.file.header().entry(pick.number)?,
            name: pick.name,
            part: pick.part().cloned(),
        })
    }
}

impl<'a> Pick<'a> {
    fn part(&self) -> Option<&'a Excerpt> {
        match self.role {
            Role::Part(part) => Some(part),
            Role::Tensor | Role::Alias => None,
        }
    }

    fn shared(&self, of: &str, part: Option<Excerpt>) -> SharedName {
        SharedName {
            name: self.name.to_owned(),
            of: of.to_owned(),
            part,
        }
    }
}

/// The record of the digests that files keep of these tensors; `None` where they keep none that can be used. Of a part
/// that is a tensor of its own now there is no digest yet: `digest` takes it.
///
/// A file keeps digests of one algorithm. Where files have several, it is that of the most tensors.
pub(crate) fn checksums(
    tensors: &[Stored<'_>],
    mut digest: impl FnMut(&Stored<'_>, Algorithm) -> Result<Digest, Error>,
) -> Result<Option<String>, Error> {
    let mut records = HashMap::new();
    let mut known: Vec<(&Stored<'_>, Algorithm, String)> = Vec::new();
    for tensor in tensors {
        let record = records
            .entry(std::ptr::from_ref(tensor.file))
            .or_insert_with(|| digests_of(tensor.file.header()));
        if let Some((algorithm, record)) = record
            && let Some(digest) = record.get(tensor.entry.name)
            && Digest::from_hex(*algorithm, digest).is_some()
        {
            known.push((tensor, *algorithm, digest.to_owned()));
        }
    }
    let of = |algorithm| known.iter().filter(|known| known.1 == algorithm).count();
    let Some(algorithm) = Algorithm::ALL.into_iter().max_by_key(|&algorithm| of(algorithm)) else {
        return Ok(None);
    };
    known.retain(|known| known.1 == algorithm);
    for (tensor, _, text) in &mut known {
        if tensor.part.is_some() {
            *text = digest(tensor, algorithm)?.to_string();
        }
    }
    let digests = known
        .iter()
        .map(|(tensor, _, text)| (tensor.name, Cow::Borrowed(text.as_str())));
    // A name that comes twice is refused with the tensors.
    let record = Checksums::new(algorithm.name(), digests).ok();
    Ok(record
        .filter(|record| record.iter().len() > 0)
        .map(|record| record.render()))
}

fn digests_of(header: &Header) -> Option<(Algorithm, Checksums<'_>)> {
    let record = Checksums::parse(header.metadata()?.get(CHECKSUMS_KEY)?).ok()?;
    Some((Algorithm::from_name(record.algorithm())?, record))
}

/// `pairs` with these records in place of any that they have, under those keys whose records are there.
pub(crate) fn with_records<'p>(
    pairs: Option<&[(&'p str, &'p str)]>,
    records: &[(&'p str, Option<&'p str>)],
) -> Option<Vec<(&'p str, &'p str)>> {
    let records = records.iter().filter_map(|&(key, text)| Some((key, text?)));
    let mut all = pairs.map(|pairs| {
        let texts = pairs.iter().filter(|pair| !RECORD_KEYS.contains(&pair.0));
        texts.copied().collect::<Vec<_>>()
    });
    for record in records {
        all.get_or_insert_default().push(record);
    }
    all
}
