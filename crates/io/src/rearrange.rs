//! Files made of tensors of other files: merged, split, renamed, in the other format.

use std::path::Path;

use ingot_format::{Format, FormatError, LayoutOptions, Spec, layout_with};

use crate::edit::origin::Origin;
use crate::edit::{EditError, Guard};
use crate::error::Error;
use crate::payload::{Payload, Section};
use crate::save::{SaveOptions, save};
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

/// Writes the file at `path` that holds `picks` and `metadata`: byte for byte the file that saving the same tensors
/// gives. Their bytes are copied by the kernel, or shared where the file system can, so that next to no memory is taken.
///
/// `path` may be that of one of the files that are picked from.
///
/// # Errors
/// [`Error::Edit`] with [`EditError::Duplicate`], or with [`EditError::Overtaken`] when one of the files changes
/// meanwhile; [`Error::Unstorable`] for what the format cannot hold; all of that before the disk is touched, but for a
/// change. [`Error::Write`], [`Error::Interrupted`].
pub fn assemble(
    path: &Path,
    picks: &[Pick<'_>],
    metadata: Option<&[(&str, &str)]>,
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
    let layout =
        layout_with(&specs, metadata, format, layout_options).map_err(|fault| refused(path, picks, fault))?;
    let mut payloads = Vec::new();
    let mut run: Option<(&Origin, u64, u64)> = None;
    for &number in &layout.order {
        let (origin, _, entry) = &entries[number];
        run = match run {
            // Neighbours that stay neighbours are copied at once.
            Some((same, begin, end)) if std::ptr::eq(same, *origin) && end == entry.begin => {
                Some((same, begin, entry.end))
            }
            before => {
                payloads.extend(before.map(payload));
                Some((*origin, entry.begin, entry.end))
            }
        };
    }
    payloads.extend(run.map(payload));
    let check = || {
        picks
            .chunk_by(same_origin)
            .try_for_each(|run| run[0].origin.check())
    };
    let guard = Guard::new(watch, &check);
    let saved = save(path, &layout.head, &payloads, options, &guard);
    guard.outcome(saved.map_err(Section::fault))
}

fn payload<'a>((origin, begin, end): (&'a Origin, u64, u64)) -> Payload<'a> {
    origin.range(begin, end)
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
