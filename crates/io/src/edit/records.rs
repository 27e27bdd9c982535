//! Records: metadata that describes the tensors of its file. This module alone rewrites records when tensors are renamed,
//! dropped, merged or split.
//! | record | in a new file with tensors copied from files | in a new file with the caller's own tensors |
//! |---|---|---|
//! | `ingot.shared`, names without a tensor of their own | made again for the copied names; if a tensor is copied by its other
//! names only, it is stored under one of them | left out |
//! | `ingot.checksums`, digests of tensors | the tensors' digests, under their new names; the digest of a part that becomes a
//! tensor is computed | left out, or made by the save |
//! | `modelspec.hash_sha256`, the digest of the data | copied if the data is the whole data of one file in its order; else left
//! out | left out, or made by the save |
//! | `vouch_credential`, a signature of the data | left out | left out |
//! | `sshs_model_hash`, `sshs_legacy_hash`: hashes of the data by kohya's scripts | left out | kept: the scripts compute them for
//! the tensors that they save |
//! | `c2pa:manifest`, `c2pa:manifest.uri`, `__signature__`, `sigstore`: signatures of the whole file | left out, and by an edit
//! of other metadata too | left out |
//! | `ingot.state`, a training state | given by the caller with the tensors' new names, or left out if one of them is left out |
//! left out |
//! | `ingot.delta`, the record of a patch | left out | left out |
//!
//! An index describes files, so entries under these keys in its metadata are removed, and its totals are computed again.
//! Only a training state stays, since it refers to tensors by name, and the
//! index has all names.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use ingot_format::{
    CHECKSUMS_KEY, Checksums, DELTA_KEY, Excerpt, Header, MODEL_SPEC_KEY, Quoted, Remedy, SHARED_KEY,
    SharedError, SharedName, parse_shared, render_shared,
};

use crate::checkpoint::aliases::{named, refused};
use crate::digest::{Algorithm, Digest};
use crate::error::Error;
use crate::file::{Archive, Tensor};
use crate::verify::RecordedDigests;

/// The keys of signatures of a whole file, its metadata too: by C2PA, CryptoTensors and Sigstore.
pub(crate) const SIGNATURES_OF_FILE: [&str; 4] =
    ["c2pa:manifest", "c2pa:manifest.uri", "__signature__", "sigstore"];
/// The key of a training state, a tree that names tensors of the file.
pub const STATE_KEY: &str = "ingot.state";
/// The key of Vouch's signature of the data.
pub(crate) const SIGNATURE_OF_DATA: &str = "vouch_credential";
/// The keys of hashes of the data by kohya's training scripts.
pub(crate) const TRAINER_HASH_KEYS: [&str; 2] = ["sshs_model_hash", "sshs_legacy_hash"];

/// The keys of records. If a caller passes metadata with such a key for a new file, the record describes another file.
pub const RECORD_KEYS: [&str; 10] = [
    CHECKSUMS_KEY,
    SHARED_KEY,
    MODEL_SPEC_KEY,
    SIGNATURES_OF_FILE[0],
    SIGNATURES_OF_FILE[1],
    SIGNATURES_OF_FILE[2],
    SIGNATURES_OF_FILE[3],
    SIGNATURE_OF_DATA,
    STATE_KEY,
    DELTA_KEY,
];

/// The keys that a file of tensors of other files leaves out of their metadata: [`RECORD_KEYS`] and the trainers' hashes.
pub const STALE_KEYS: [&str; 12] = {
    let mut keys = [""; 12];
    let (records, hashes) = keys.split_at_mut(RECORD_KEYS.len());
    records.copy_from_slice(&RECORD_KEYS);
    hashes.copy_from_slice(&TRAINER_HASH_KEYS);
    keys
};

/// Return the faults that a lenient reader ignores in the records of the file at `path`: broken records, and names of
/// tensors that it left out.
pub fn passed_over(path: &Path, header: &Header) -> Vec<(Error, Remedy)> {
    let digests = RecordedDigests::of(header, Some(path)).err();
    let mut found: Vec<_> = digests
        .map(|fault| (fault, Remedy::ValueLeftOut))
        .into_iter()
        .collect();
    let Some(text) = header.text(SHARED_KEY) else {
        return found;
    };
    match shared_names(text, header) {
        Err(fault) => found.push((refused(Some(path), fault), Remedy::ValueLeftOut)),
        Ok(names) => {
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

/// Fail if readers would reject `text` as the record of shared tensors of the file at `path`, or if it has names of
/// stored tensors, or refers to tensors that the file lacks.
pub(crate) fn check_shared(text: &str, header: &Header, path: &Path) -> Result<(), Error> {
    let check = |shared: SharedName| {
        let reason = match (header.find(&shared.name), header.find(&shared.of)) {
            (Some(_), _) => "refers to another tensor for this stored name",
            (None, None) => "refers to a tensor that the file lacks",
            (None, Some(_)) => return Ok(()),
        };
        Err(SharedError::about(&shared.name, reason))
    };
    shared_names(text, header)
        .and_then(|names| names.into_iter().try_for_each(check))
        .map_err(|fault| refused(Some(path), fault))
}

/// Return the names in `text`, a record of shared tensors, if readers of `header` accept it.
fn shared_names(text: &str, header: &Header) -> Result<Vec<SharedName>, SharedError> {
    let names = parse_shared(text)?;
    named(text, header)?;
    Ok(names)
}

/// A tensor of another file, and its name in the new one.
#[derive(Clone, Copy, Debug)]
pub struct Pick<'a> {
    /// The stored tensor.
    pub tensor: Tensor<'a>,
    /// The new name.
    pub name: &'a str,
    /// The part of the tensor that the old name has.
    pub role: Role<'a>,
}

/// The meaning of a name in a file.
#[derive(Clone, Copy, Debug)]
pub enum Role<'a> {
    /// A stored tensor.
    Tensor,
    /// The same tensor again: [`Alias`](crate::binding::Alias). It is stored once, under the name with [`Role::Tensor`]
    /// if that is picked too.
    Alias,
    /// A part of it.
    Part(&'a Excerpt),
}

/// Return the tensors of `picks` that the new file stores, and the record of all other names.
///
/// A tensor whose own name is not picked is stored under the first of its other names, or otherwise as the first part
/// that contains all others. If no part does, each part is stored by itself.
pub(crate) fn settled<'a>(picks: &[Pick<'a>]) -> (Vec<Pick<'a>>, Option<String>) {
    let mut others: BTreeMap<(*const Archive, usize), Vec<&Pick<'a>>> = BTreeMap::new();
    let mut homes = HashMap::new();
    let mut stored = Vec::new();
    for pick in picks {
        let tensor = (std::ptr::from_ref(pick.file()), pick.tensor.number());
        if let Role::Tensor = pick.role {
            homes.insert(tensor, pick.name);
            stored.push(*pick);
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

/// As [`settled`], for the aliases of a tensor whose own name is not picked.
fn settle_homeless<'a>(names: &[&Pick<'a>], stored: &mut Vec<Pick<'a>>, record: &mut Vec<SharedName>) {
    let whole = names.iter().find(|pick| pick.part().is_none());
    let Some(home) = whole.or_else(|| holding_all(names)) else {
        let mut first: BTreeMap<&Excerpt, &str> = BTreeMap::new();
        for pick in names {
            let Some(part) = pick.part() else { continue };
            match first.get(part) {
                Some(twin) => record.push(pick.shared(twin, None)),
                None => {
                    first.insert(part, pick.name);
                    stored.push(**pick);
                }
            }
        }
        return;
    };
    stored.push(**home);
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

/// Return the first of these parts that is contiguous and contains all others.
fn holding_all<'p, 'a>(names: &'p [&Pick<'a>]) -> Option<&'p &'p Pick<'a>> {
    let parts = || names.iter().filter_map(|pick| pick.part());
    let begin = parts().map(Excerpt::begin).min()?;
    let end = parts().map(Excerpt::end).max()?;
    names.iter().find(|pick| {
        pick.part()
            .is_some_and(|part| part.is_packed() && part.begin() == begin && part.end() == end)
    })
}

impl<'a> Pick<'a> {
    pub(super) fn file(&self) -> &'a Archive {
        self.tensor.archive()
    }

    pub(super) fn part(&self) -> Option<&'a Excerpt> {
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

/// Return the record of the files' digests of these tensors; `None` if there are no usable ones. `digest` computes the
/// digest of a part that becomes a tensor.
///
/// A file keeps digests of one algorithm. If the files have several, the algorithm of the most tensors wins.
pub(crate) fn checksums(
    stored: &[Pick<'_>],
    mut digest: impl FnMut(&Pick<'_>, Algorithm) -> Result<Digest, Error>,
) -> Result<Option<String>, Error> {
    let mut records = HashMap::new();
    let mut known: Vec<(&Pick<'_>, Algorithm, String)> = Vec::new();
    for pick in stored {
        let record = records
            .entry(std::ptr::from_ref(pick.file()))
            .or_insert_with(|| digests_of(pick.file().header()));
        if let Some((algorithm, record)) = record
            && let Some(digest) = record.get(pick.tensor.entry().name)
            && Digest::from_hex(*algorithm, digest).is_some()
        {
            known.push((pick, *algorithm, digest.to_owned()));
        }
    }
    let of = |algorithm| known.iter().filter(|known| known.1 == algorithm).count();
    let Some(algorithm) = Algorithm::ALL.into_iter().max_by_key(|&algorithm| of(algorithm)) else {
        return Ok(None);
    };
    known.retain(|known| known.1 == algorithm);
    for (pick, _, text) in &mut known {
        if pick.part().is_some() {
            *text = digest(pick, algorithm)?.to_string();
        }
    }
    let digests = known
        .iter()
        .map(|(pick, _, text)| (pick.name, Cow::Borrowed(text.as_str())));
    // A duplicate name makes no record here. The layout of the tensors reports it.
    let record = Checksums::new(algorithm.name(), digests).ok();
    Ok(record
        .filter(|record| record.iter().len() > 0)
        .map(|record| record.render()))
}

fn digests_of(header: &Header) -> Option<(Algorithm, Checksums<'_>)> {
    let record = Checksums::parse(header.text(CHECKSUMS_KEY)?).ok()?;
    Some((Algorithm::from_name(record.algorithm())?, record))
}

/// Return `pairs` with these records in place of existing ones under the same keys. A training state stays, since the
/// caller has renamed its tensors.
pub(crate) fn with_records<'p>(
    pairs: Option<&[(&'p str, &'p str)]>,
    records: &[(&'p str, Option<&'p str>)],
) -> Option<Vec<(&'p str, &'p str)>> {
    let records = records.iter().filter_map(|&(key, text)| Some((key, text?)));
    let mut all = pairs.map(|pairs| {
        let texts = pairs
            .iter()
            .filter(|pair| pair.0 == STATE_KEY || !RECORD_KEYS.contains(&pair.0));
        texts.copied().collect::<Vec<_>>()
    });
    for record in records {
        all.get_or_insert_default().push(record);
    }
    all
}
