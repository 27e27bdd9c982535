//! Files made of tensors of other files: merged, split, renamed, in the other format.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use ingot_format::{
    CHECKSUMS_KEY, Checksums, Entry, Format, FormatError, Header, LayoutOptions, Spec, layout_with,
};

use crate::edit::origin::Origin;
use crate::edit::{EditError, Guard};
use crate::error::Error;
use crate::hash::{Algorithm, Digest, MODEL_SPEC_KEY};
use crate::payload::{Payload, Section};
use crate::save::{SaveOptions, save_data};
use crate::watch::Watch;

/// A tensor of another file, and its name in the new one.
#[derive(Clone, Copy, Debug)]
pub struct Pick<'a> {
    /// The file.
    pub origin: &'a Origin,
    /// The tensor, by its place in the order of the data.
    pub number: usize,
    /// What it is called from now on.
    pub name: &'a str,
}

/// What becomes of the digests that files keep in their metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inherit {
    /// Those of tensors go with them, under their new names: they are of the same bytes. A file keeps digests of one
    /// algorithm, so where files have several, it is that of the most tensors. ModelSpec's hash, which is of all data,
    /// stays in the metadata where all data does.
    #[default]
    Digests,
    /// Nothing: the metadata is taken as it is.
    Nothing,
}

/// Writes the file at `path` that holds `picks` and `metadata`: byte for byte the file that saving the same tensors
/// gives. Their bytes are copied by the kernel, or shared where the file system can, so that next to no memory is taken.
///
/// `path` may be that of one of the files that are picked from.
///
/// # Errors
/// [`Error::Edit`] with [`EditError::Duplicate`], or with [`EditError::Overtaken`] when one of the files changes
/// meanwhile; [`Error::Unstorable`] for what the format cannot hold; all of that before the disk is touched, but for a
/// change. [`Error::Write`], [`Error::Interrupted`].
#[allow(clippy::too_many_arguments, reason = "where, of what, and how")]
pub fn assemble(
    path: &Path,
    picks: &[Pick<'_>],
    metadata: Option<&[(&str, &str)]>,
    inherit: Inherit,
    format: Format,
    layout_options: &LayoutOptions,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let entries: Vec<_> = picks
        .iter()
        .filter_map(|pick| Some((pick.origin, pick.name, pick.origin.header().entry(pick.number)?)))
        .collect();
    let specs: Vec<Spec<'_>> = entries
        .iter()
        .map(|(_, name, entry)| Spec {
            name,
            dtype: entry.dtype,
            shape: entry.shape,
        })
        .collect();
    let record = match inherit {
        Inherit::Digests => carried(picks),
        Inherit::Nothing => None,
    };
    let mut pairs = metadata.map(<[_]>::to_vec);
    if let Some(record) = &record {
        let pairs = pairs.get_or_insert_default();
        pairs.retain(|pair| pair.0 != CHECKSUMS_KEY);
        pairs.push((CHECKSUMS_KEY, record));
    }
    let lay_out = |pairs: Option<&[(&str, &str)]>| {
        layout_with(&specs, pairs, format, layout_options).map_err(|fault| refused(path, picks, fault))
    };
    let mut layout = lay_out(pairs.as_deref())?;
    let runs = runs(
        layout
            .order
            .iter()
            .map(|&number| (entries[number].0, &entries[number].2)),
    );
    if let Some(pairs) = &mut pairs
        && inherit == Inherit::Digests
        && !is_all_of_one(&runs)
        && let Some(stale) = pairs.iter().position(|pair| pair.0 == MODEL_SPEC_KEY)
    {
        pairs.remove(stale);
        layout = lay_out(Some(pairs))?;
    }
    let payloads: Vec<Payload<'_>> = runs
        .iter()
        .map(|&(origin, begin, end)| origin.range(begin, end))
        .collect();
    let check = || {
        picks
            .chunk_by(same_origin)
            .try_for_each(|run| run[0].origin.check())
    };
    let guard = Guard::new(watch, &check);
    let nbytes = layout.header.data_nbytes();
    let saved = save_data(path, &layout.head, nbytes, &payloads, options, &guard);
    guard.outcome(saved.map_err(Section::fault))
}

/// Bytes of the data sections, in the order of the new file. Neighbours that stay neighbours are one run.
fn runs<'a>(entries: impl Iterator<Item = (&'a Origin, &'a Entry<'a>)>) -> Vec<(&'a Origin, u64, u64)> {
    let mut runs: Vec<(&Origin, u64, u64)> = Vec::new();
    for (origin, entry) in entries {
        match runs.last_mut() {
            Some((same, _, end)) if std::ptr::eq(*same, origin) && *end == entry.begin => *end = entry.end,
            _ => runs.push((origin, entry.begin, entry.end)),
        }
    }
    runs
}

/// Whether these are all data of a file, in its order.
fn is_all_of_one(runs: &[(&Origin, u64, u64)]) -> bool {
    matches!(*runs, [(origin, 0, end)] if end == origin.header().data_nbytes())
}

/// The record of the digests that the files keep of these tensors; `None` where they keep none that can be used.
fn carried(picks: &[Pick<'_>]) -> Option<String> {
    let mut records = HashMap::new();
    let mut known: Vec<(&str, Algorithm, String)> = Vec::new();
    for pick in picks {
        let header = pick.origin.header();
        let record = records
            .entry(std::ptr::from_ref(pick.origin))
            .or_insert_with(|| record_of(header));
        if let Some((algorithm, record)) = record
            && let Some(digest) = header.entry(pick.number).and_then(|entry| record.get(entry.name))
            && Digest::from_hex(*algorithm, digest).is_some()
        {
            known.push((pick.name, *algorithm, digest.to_owned()));
        }
    }
    let of = |algorithm| known.iter().filter(|digest| digest.1 == algorithm).count();
    let algorithm = Algorithm::ALL
        .into_iter()
        .max_by_key(|&algorithm| of(algorithm))?;
    let digests = known.iter().filter(|digest| digest.1 == algorithm);
    let record = Checksums::new(
        algorithm.name(),
        digests.map(|(name, _, digest)| (*name, Cow::Borrowed(digest.as_str()))),
    );
    // A name that comes twice is refused with the tensors.
    record
        .ok()
        .filter(|record| record.iter().len() > 0)
        .map(|record| record.render())
}

fn record_of(header: &Header) -> Option<(Algorithm, Checksums<'_>)> {
    let record = Checksums::parse(header.metadata()?.get(CHECKSUMS_KEY)?).ok()?;
    Some((Algorithm::from_name(record.algorithm())?, record))
}

fn same_origin(a: &Pick<'_>, b: &Pick<'_>) -> bool {
    std::ptr::eq(a.origin, b.origin)
}

/// Says of a name that comes twice where it comes from.
fn refused(path: &Path, picks: &[Pick<'_>], fault: FormatError) -> Error {
    let FormatError::DuplicateTensor { tensor } = &fault else {
        return Error::Unstorable {
            path: Some(path.to_owned()),
            fault,
        };
    };
    let mut files = picks
        .iter()
        .filter(|pick| pick.name == tensor)
        .map(|pick| pick.origin.path());
    match (files.next(), files.next()) {
        (Some(first), Some(second)) => Error::Edit {
            path: path.to_owned(),
            fault: EditError::Duplicate {
                tensor: tensor.clone(),
                first: first.to_owned(),
                second: second.to_owned(),
            },
        },
        _ => Error::Unstorable {
            path: Some(path.to_owned()),
            fault,
        },
    }
}
