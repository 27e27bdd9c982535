//! Aliases: additional names of a stored tensor, or of a part of one, in the metadata of a file (`ingot.shared`).
//! FORMAT.md, "Shared tensors".

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::Path;

use ingot_format::{
    Dtype, Entry, Excerpt, Header, Quoted, SHARED_KEY, Selection, SharedError, SharedName, parse_shared,
};

use crate::error::{Error, Failure};
use crate::file::{Archive, Tensor, TensorId};

/// Another name for a tensor of some files, or for a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alias {
    /// The name.
    pub name: String,
    /// The file that has the tensor.
    pub file: usize,
    /// The tensor, by its place in the order of the data.
    pub number: usize,
    /// The part of it; `None` for all.
    pub part: Option<Excerpt>,
}

/// Return the names that the records of a checkpoint's files add to the names of its tensors. A record does not change the
/// name of a stored tensor. A name is ignored if its file lacks the tensor: the record may have been copied with other
/// metadata. If two files add one name, the first file has it.
///
/// # Errors
/// [`Failure::Shared`] if a record is invalid, or puts a part outside of its tensor.
pub fn aliases<'h>(
    files: impl Iterator<Item = (Option<&'h Path>, &'h Header)> + Clone,
) -> Result<Vec<Alias>, Error> {
    let mut added: Vec<Alias> = Vec::new();
    // The names of all tensors, and the added names. Most files have no record, and need no such set.
    let mut taken: Option<HashSet<Cow<'h, str>>> = None;
    for (file, (path, header)) in files.clone().enumerate() {
        let Some(text) = header.text(SHARED_KEY) else {
            continue;
        };
        let taken = taken.get_or_insert_with(|| {
            let headers = files.clone().map(|(_, header)| header);
            headers.flat_map(Header::names).map(Cow::Borrowed).collect()
        });
        for alias in named(text, header).map_err(|fault| refused(path, fault))? {
            if taken.insert(Cow::Owned(alias.name.clone())) {
                added.push(Alias { file, ..alias });
            }
        }
    }
    Ok(added)
}

pub(crate) fn refused(path: Option<&Path>, fault: SharedError) -> Error {
    Failure::Shared(fault).about(path, None)
}

/// The names in a record whose tensors are in the file.
pub(crate) fn named(text: &str, header: &Header) -> Result<Vec<Alias>, SharedError> {
    let mut found = Vec::new();
    for SharedName { name, of, part } in parse_shared(text)? {
        let Some(number) = header.find(&of) else {
            continue;
        };
        let room = header.entry(number).and_then(|entry| elements(&entry));
        let lies_in = |part: &Excerpt| room.is_some_and(|room| part.end() <= room && part.count() <= room);
        if !part.as_ref().is_none_or(lies_in) {
            let outside = format!("puts it outside of {}", Quoted(&of));
            return Err(SharedError::about(&name, &outside));
        }
        found.push(Alias {
            name,
            file: 0,
            number,
            part,
        });
    }
    Ok(found)
}

/// Count the elements of a tensor as an [`Excerpt`] does; `None` if they end inside of bytes.
fn elements(entry: &Entry<'_>) -> Option<u64> {
    Some(entry.nbytes() / unit(entry.dtype)?)
}

/// Return the bytes of one element as an [`Excerpt`] counts them.
pub(crate) fn unit(dtype: Dtype) -> Option<u64> {
    match dtype.bits() {
        4 => Some(1),
        bits => bits.is_multiple_of(8).then_some(bits / 8),
    }
}

/// The aliases of a checkpoint. They are read like stored tensors.
#[derive(Debug, Default)]
pub(super) struct Aliases {
    pub(super) all: Vec<Alias>,
    /// The tensor of each alias.
    views: Vec<Option<View>>,
    ids: HashMap<String, TensorId>,
}

/// The entry that a header would have for an alias.
#[derive(Debug)]
struct View {
    shape: Vec<u64>,
    /// `None` if the elements are contiguous in C order.
    strides: Option<Vec<u64>>,
    begin: u64,
    end: u64,
}

impl Aliases {
    pub(super) fn of(files: &[&Archive]) -> Result<Aliases, Error> {
        let all = aliases(files.iter().map(|file| (file.path(), file.header())))?;
        let id = |(rank, alias): (usize, &Alias)| {
            // After the numbers of the stored tensors.
            let number = files[alias.file].header().len() + rank;
            let file = alias.file;
            (alias.name.clone(), TensorId { file, number })
        };
        let view = |alias: &Alias| View::of(&files[alias.file].header().entry(alias.number)?, alias);
        Ok(Aliases {
            ids: all.iter().enumerate().map(id).collect(),
            views: all.iter().map(view).collect(),
            all,
        })
    }

    pub(super) fn id(&self, name: &str) -> Option<TensorId> {
        self.ids.get(name).copied()
    }

    /// The tensor with a number that [`Aliases::id`] returned, in its file.
    pub(super) fn tensor<'a>(
        &'a self,
        file: &'a Archive,
        number: usize,
    ) -> Option<Result<Tensor<'a>, Error>> {
        let rank = number.checked_sub(file.header().len())?;
        let (alias, view) = (self.all.get(rank)?, self.views.get(rank)?);
        let stored = file.header().entry(alias.number)?;
        let entry = |view: &'a View| Entry {
            name: &alias.name,
            dtype: stored.dtype,
            shape: &view.shape,
            begin: view.begin,
            end: view.end,
        };
        let tensor = |view: &'a View| file.alias(alias.number, entry(view), view.strides.as_deref());
        let unreadable = || SharedError::about(&alias.name, "has it as a part that no header can describe");
        let tensor = view.as_ref().map(tensor);
        Some(tensor.ok_or_else(|| refused(file.path(), unreadable())))
    }
}

impl View {
    /// `None` for a part of an F4 tensor that is no F4 tensor itself: with two elements in a byte, its last dimension must be
    /// contiguous.
    fn of(stored: &Entry<'_>, alias: &Alias) -> Option<View> {
        let Some(part) = &alias.part else {
            return Some(View {
                shape: stored.shape.to_vec(),
                strides: None,
                begin: stored.begin,
                end: stored.end,
            });
        };
        let unit = unit(stored.dtype)?;
        let begin = stored.begin + part.begin() * unit;
        let (mut shape, mut strides) = (part.shape().to_vec(), part.stride().to_vec());
        if stored.dtype == Dtype::F4 {
            let (last, step) = (shape.last_mut()?, strides.last_mut()?);
            if *last > 1 && *step != 1 {
                return None;
            }
            *last *= 2;
            for (stride, dim) in strides.iter_mut().zip(part.shape()) {
                *stride = if *dim > 1 { *stride * 2 } else { 0 };
            }
            *strides.last_mut()? = 1;
        }
        let strides = (!part.is_packed()).then_some(strides);
        if let Some(strides) = &strides {
            // Every read of the alias makes this selection again, and cannot fail then.
            Selection::strided(stored.dtype, &shape, strides, &[]).ok()?;
        }
        Some(View {
            shape,
            strides,
            begin,
            end: begin + part.count() * unit,
        })
    }
}
