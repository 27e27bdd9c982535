//! Files made of tensors of other files: merged, split, renamed, in the other format.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use ingot_format::{
    CHECKSUMS_KEY, Dtype, Format, FormatError, LayoutOptions, MODEL_SPEC_KEY, SHARED_KEY, SharedError, Spec,
};

use super::held::Guard;
use super::records::{Pick, Stored, checksums, settled, with_records};
use crate::checkpoint::aliases::unit;
use crate::digest::{Keep, NewHeader};
use crate::error::{EditError, Error, Stop, step, unstorable};
use crate::file::Archive;
use crate::options::SaveOptions;
use crate::payload::{Payload, Scattered};
use crate::save::{Pieces, save_pieces};
use crate::verify::digest_of;
use crate::watch::Watch;

/// Which digests of its tensors the new file keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inherit {
    /// They go with the tensors, under their new names: they are of the same bytes. A file keeps digests of one
    /// algorithm, so where files have several, it is that of the most tensors.
    #[default]
    Digests,
    /// The new file has none.
    Nothing,
    /// These, computed while the bytes are copied.
    Computed(Keep),
}

/// Writes the file at `path` that holds `picks` and `metadata`: byte for byte the file that saving the same tensors
/// gives. Their bytes are copied by the kernel, or shared where the file system can, so that next to no memory is taken.
///
/// What `metadata` has under [`RECORD_KEYS`](crate::binding::RECORD_KEYS) was made for other files. The record of shared tensors
/// is made of the picks; `inherit` says whether there is one of digests; ModelSpec's hash, where `metadata` has one, is
/// that of the file whose data this is, and left out where it is not all data of one file, unless it is computed.
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
    refuse_twice(path, picks)?;
    let (tensors, shared) = settled(picks);
    let gathered = tensors.iter().map(apart).collect::<Result<Vec<_>, _>>()?;
    let sources = tensors
        .iter()
        .zip(&gathered)
        .map(extent)
        .collect::<Result<Vec<_>, _>>()?;
    let shapes = tensors.iter().map(shape).collect::<Result<Vec<_>, _>>()?;
    let specs: Vec<Spec<'_>> = tensors
        .iter()
        .zip(&shapes)
        .map(|(tensor, shape)| Spec {
            name: tensor.name,
            dtype: tensor.entry.dtype,
            shape,
        })
        .collect();
    let (mut digests, mut keep) = (None, Keep::default());
    match inherit {
        Inherit::Nothing => {}
        Inherit::Computed(computed) => keep = computed,
        Inherit::Digests => {
            digests = checksums(&tensors, |tensor, algorithm| {
                digest_of(&extent((tensor, &apart(tensor)?))?.payload(), algorithm, watch)
                    .map_err(|source| Stop::of(step::READ, source).about(path, 0))
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
    let check = || picks.chunk_by(same_file).try_for_each(|run| check(run[0].file));
    let guard = Guard::new(watch, &check);
    let saved = save_pieces(path, Pieces::of_all(&head, &payloads), options, &guard);
    let saved = saved.or_else(|fault| match fault {
        // The likeliest reason for a file that cannot be copied from, and the more useful thing to say.
        Error::Write { .. } => check().and(Err(fault)),
        _ => Err(fault),
    });
    guard.outcome(saved)
}

/// Bytes of the new file, from one place.
#[derive(Clone, Copy, Debug)]
enum Extent<'a> {
    /// From the data section of a file, between two of its bytes.
    Range(&'a Archive, u64, u64),
    /// From all over a tensor.
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

/// What takes a part together whose elements lie apart.
fn apart<'a>(tensor: &Stored<'a>) -> Result<Option<Scattered<'a>>, Error> {
    let Some(part) = tensor.part.as_ref().filter(|part| !part.is_packed()) else {
        return Ok(None);
    };
    let unit = unit(tensor.entry.dtype).ok_or_else(|| unstorable_part(tensor))?;
    let whole = tensor.file.payload(tensor.entry.begin, tensor.entry.end);
    Ok(Some(Scattered::new(whole, part.clone(), unit)))
}

fn extent<'a>((tensor, apart): (&Stored<'a>, &'a Option<Scattered<'a>>)) -> Result<Extent<'a>, Error> {
    let (begin, end) = (tensor.entry.begin, tensor.entry.end);
    Ok(match (&tensor.part, apart) {
        (_, Some(gathered)) => Extent::Scattered(gathered),
        (None, None) => Extent::Range(tensor.file, begin, end),
        (Some(part), None) => {
            let unit = unit(tensor.entry.dtype).ok_or_else(|| unstorable_part(tensor))?;
            Extent::Range(
                tensor.file,
                begin + part.begin() * unit,
                begin + part.end() * unit,
            )
        }
    })
}

/// The shape in the new header. A part of F4 is counted in bytes, which hold two elements each.
fn shape<'a>(tensor: &Stored<'a>) -> Result<Cow<'a, [u64]>, Error> {
    let Some(part) = &tensor.part else {
        return Ok(Cow::Borrowed(tensor.entry.shape));
    };
    let mut shape = part.shape().to_vec();
    if tensor.entry.dtype == Dtype::F4 {
        *shape.last_mut().ok_or_else(|| unstorable_part(tensor))? *= 2;
    }
    Ok(Cow::Owned(shape))
}

/// Two elements to a byte need a dimension.
fn unstorable_part(tensor: &Stored<'_>) -> Error {
    Error::Shared {
        path: Some(tensor.file.path_or_buffer().to_owned()),
        fault: SharedError::about(tensor.name, "has it as a part that cannot be stored by itself"),
    }
}

/// Fail if the file was written to since it was opened.
fn check(file: &Archive) -> Result<(), Error> {
    match file.check_unchanged() {
        Err(_) if file.local().is_some() => Err(EditError::Overtaken.about(file.path_or_buffer())),
        checked => checked,
    }
}

/// Neighbours in the new file that are neighbours in another are one extent.
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

/// ModelSpec's hash of the file whose data this is, all of it and in its order.
fn hash_of_all<'a>(extents: &[Extent<'a>]) -> Option<&'a str> {
    match *extents {
        [Extent::Range(file, 0, end)] if end == file.header().data_nbytes() => {
            file.header().metadata()?.get(MODEL_SPEC_KEY)
        }
        _ => None,
    }
}

fn same_file(a: &Pick<'_>, b: &Pick<'_>) -> bool {
    std::ptr::eq(a.file, b.file)
}

/// Refuses a name that comes twice, and says where from.
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
            tensor: pick.name.to_owned(),
            first: other.file.path_or_buffer().to_owned(),
            second: pick.file.path_or_buffer().to_owned(),
        };
        return Err(duplicate.about(path));
    }
    Ok(())
}
