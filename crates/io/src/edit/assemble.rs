//! Files made of tensors of other files: merged, split, renamed, in the other format.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use ingot_format::{
    CHECKSUMS_KEY, Dtype, Entry, Format, FormatError, LayoutOptions, MODEL_SPEC_KEY, SHARED_KEY, SharedError,
    Spec,
};

use super::held::Guard;
use super::records::{Pick, checksums, settled, with_records};
use crate::checkpoint::aliases::{refused, unit};
use crate::digest::{Keep, NewHeader};
use crate::error::{EditError, Error, Failure, of_step, step, unstorable};
use crate::file::Archive;
use crate::payload::{Payload, Scattered};
use crate::save::Pieces;
use crate::verify::digest_of;
use crate::watch::Watch;

/// The digests of tensors that the new file records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inherit {
    /// Copy the digests of the tensors, under their new names. A file has digests of one algorithm, so if the files
    /// have several, the algorithm with the most tensors is used.
    #[default]
    Digests,
    /// No digests.
    Nothing,
    /// Compute these digests while the bytes are copied.
    Computed(Keep),
}

/// Write a file with `picks` and `metadata` by `save`: byte for byte the file that saving the same tensors writes. In a file
/// at a path, the kernel copies their bytes, or shares them if the file system can, so that this takes hardly any memory.
/// `path` is the name of the new file in errors. `save` stops if its watch says so.
///
/// Entries of `metadata` under [`RECORD_KEYS`](crate::binding::RECORD_KEYS) describe other files. The record of shared
/// tensors is made from the picks, and the record of digests according to `inherit`. ModelSpec's hash, if `metadata`
/// has one, is copied if the new file has the whole data section of a file, or computed; otherwise it is removed.
///
/// `path` may be the path of one of the source files.
///
/// # Errors
/// [`Failure::Edit`] with [`EditError::Duplicate`]; [`Failure::Unstorable`] for tensors or metadata that the format cannot
/// hold; both before the disk is touched. [`Failure::Edit`] with [`EditError::Overtaken`] if one of the files changes
/// meanwhile; [`Failure::Write`], [`Failure::Interrupted`].
#[allow(clippy::too_many_arguments, reason = "where, of what, and how")]
pub fn assemble(
    path: &Path,
    save: impl FnOnce(Result<Pieces<'_>, FormatError>, &dyn Watch) -> Result<(), Error>,
    picks: &[Pick<'_>],
    metadata: Option<&[(&str, &str)]>,
    inherit: Inherit,
    format: Format,
    layout_options: &LayoutOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    refuse_twice(path, picks)?;
    let (stored, shared) = settled(picks);
    let gathered = stored.iter().map(apart).collect::<Result<Vec<_>, _>>()?;
    let sources = stored
        .iter()
        .zip(&gathered)
        .map(extent)
        .collect::<Result<Vec<_>, _>>()?;
    let shapes = stored.iter().map(shape).collect::<Result<Vec<_>, _>>()?;
    let specs: Vec<Spec<'_>> = stored
        .iter()
        .zip(&shapes)
        .map(|(pick, shape)| Spec {
            name: pick.name,
            dtype: pick.tensor.entry().dtype,
            shape,
        })
        .collect();
    let (mut digests, mut keep) = (None, Keep::default());
    match inherit {
        Inherit::Nothing => {}
        Inherit::Computed(computed) => keep = computed,
        Inherit::Digests => {
            digests = checksums(&stored, |pick, algorithm| {
                digest_of(&extent((pick, &apart(pick)?))?.payload(), algorithm, watch)
                    .map_err(|source| of_step(step::READ, source).in_save(path, 0))
            })?
        }
    }
    let lay_out = |hash: Option<&str>| {
        let records = [
            (CHECKSUMS_KEY, digests.as_deref()),
            (SHARED_KEY, shared.as_deref()),
            (MODEL_SPEC_KEY, hash),
        ];
        let pairs = with_records(metadata, &records);
        let pairs = pairs.as_deref();
        NewHeader::new(&specs, pairs, format, layout_options, keep).map_err(unstorable(path))
    };
    let mut head = lay_out(None)?;
    let extents = joined(head.layout().order.iter().map(|&number| sources[number]));
    let wanted = metadata.is_some_and(|pairs| pairs.iter().any(|pair| pair.0 == MODEL_SPEC_KEY));
    if let Some(hash) = hash_of_all(&extents).filter(|_| wanted) {
        // The order of the data does not depend on metadata.
        head = lay_out(Some(hash))?;
    }
    let payloads: Vec<Payload<'_>> = extents.iter().map(Extent::payload).collect();
    let check = || picks.chunk_by(same_file).try_for_each(|run| check(run[0].file()));
    let guard = Guard::new(watch, &check);
    let saved = save(Pieces::of_all(&head, &payloads), &guard);
    let saved = saved.or_else(|fault| match fault {
        // The likeliest reason why a file cannot be copied, and the more useful error.
        _ if matches!(fault.failure(), Failure::Write { .. }) => check().and(Err(fault)),
        _ => Err(fault),
    });
    guard.outcome(saved)
}

/// A source of bytes of the new file.
#[derive(Clone, Copy, Debug)]
enum Extent<'a> {
    /// A range of the data section of a file.
    Range(&'a Archive, u64, u64),
    /// Elements from several positions of a tensor.
    Scattered(&'a Scattered<'a>),
}

impl<'a> Extent<'a> {
    fn payload(&self) -> Payload<'a> {
        match *self {
            Extent::Range(file, begin, end) => file.payload(begin, end),
            Extent::Scattered(gathered) => Payload::Gathered(gathered),
        }
    }
}

/// Return the payload of a part whose elements are not contiguous.
fn apart<'a>(pick: &Pick<'a>) -> Result<Option<Scattered<'a>>, Error> {
    let Some(part) = pick.part().filter(|part| !part.is_packed()) else {
        return Ok(None);
    };
    let entry = pick.tensor.entry();
    let unit = unit(entry.dtype).ok_or_else(|| unstorable_part(pick))?;
    let whole = pick.file().payload(entry.begin, entry.end);
    Ok(Some(Scattered::new(whole, part.clone(), unit)))
}

fn extent<'a>((pick, apart): (&Pick<'a>, &'a Option<Scattered<'a>>)) -> Result<Extent<'a>, Error> {
    let Entry {
        begin, end, dtype, ..
    } = *pick.tensor.entry();
    Ok(match (pick.part(), apart) {
        (_, Some(gathered)) => Extent::Scattered(gathered),
        (None, None) => Extent::Range(pick.file(), begin, end),
        (Some(part), None) => {
            let unit = unit(dtype).ok_or_else(|| unstorable_part(pick))?;
            Extent::Range(
                pick.file(),
                begin + part.begin() * unit,
                begin + part.end() * unit,
            )
        }
    })
}

/// The shape in the new header. A part of F4 is counted in bytes, which hold two elements each.
fn shape<'a>(pick: &Pick<'a>) -> Result<Cow<'a, [u64]>, Error> {
    let Some(part) = pick.part() else {
        return Ok(Cow::Borrowed(pick.tensor.entry().shape));
    };
    let mut shape = part.shape().to_vec();
    if pick.tensor.entry().dtype == Dtype::F4 {
        *shape.last_mut().ok_or_else(|| unstorable_part(pick))? *= 2;
    }
    Ok(Cow::Owned(shape))
}

/// Two elements to a byte need a dimension.
fn unstorable_part(pick: &Pick<'_>) -> Error {
    let fault = SharedError::about(pick.name, "has it as a part that cannot be stored by itself");
    refused(Some(pick.file().path_or_buffer()), fault)
}

/// Fail if the file was written to since it was opened.
fn check(file: &Archive) -> Result<(), Error> {
    match file.check_unchanged() {
        Err(_) if file.local().is_some() => Err(EditError::Overtaken.about(file.path_or_buffer())),
        checked => checked,
    }
}

/// Neighbours in the new file that are also neighbours in a source form one extent.
fn joined<'a>(sources: impl Iterator<Item = Extent<'a>>) -> Vec<Extent<'a>> {
    let mut extents: Vec<Extent<'_>> = Vec::new();
    for source in sources {
        match (extents.last_mut(), source) {
            (Some(Extent::Range(same, _, end)), Extent::Range(file, begin, last))
                if std::ptr::eq(*same, file) && *end == begin =>
            {
                *end = last;
            }
            _ => extents.push(source),
        }
    }
    extents
}

/// Return ModelSpec's hash of the file whose data this is, completely and in order.
fn hash_of_all<'a>(extents: &[Extent<'a>]) -> Option<&'a str> {
    match *extents {
        [Extent::Range(file, 0, end)] if end == file.header().data_nbytes() => {
            file.header().text(MODEL_SPEC_KEY)
        }
        _ => None,
    }
}

fn same_file(a: &Pick<'_>, b: &Pick<'_>) -> bool {
    std::ptr::eq(a.file(), b.file())
}

/// Refuse duplicate names, and report their files.
fn refuse_twice(path: &Path, picks: &[Pick<'_>]) -> Result<(), Error> {
    let mut first: HashMap<&str, &Pick<'_>> = HashMap::with_capacity(picks.len());
    for pick in picks {
        let Some(other) = first.insert(pick.name, pick) else {
            continue;
        };
        if same_file(other, pick) {
            let tensor = pick.name.to_owned();
            return Err(unstorable(path)(FormatError::DuplicateTensor { tensor }));
        }
        let duplicate = EditError::Duplicate {
            first: other.file().path_or_buffer().to_owned(),
            second: pick.file().path_or_buffer().to_owned(),
        };
        return Err(duplicate.about(path).of(pick.name));
    }
    Ok(())
}
