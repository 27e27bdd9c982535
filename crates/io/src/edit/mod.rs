//! Changing a part of a file, and making files from the tensors of others. No tensor is decoded, and none is in memory as a
//! whole.
//!
//! | what changes | how |
//! |---|---|
//! | metadata, if all bytes that differ are in one page | one write into the file, which the kernel copies at once; not if the file has other names too, such as hard links and blobs of a cache |
//! | other metadata, or a tensor | a new file of the same name, written like a [`save`](crate::save); the kernel shares or copies unchanged bytes |
//!
//! A file is locked during an edit, so that a second edit waits for the first, for at most a minute, and starts from
//! its result. A save takes no lock. If one replaces the file during an edit, the edit fails.

mod assemble;
pub(crate) mod held;
mod records;

use std::collections::BTreeMap;
use std::path::Path;

use ingot_format::{
    CHECKSUMS_KEY, Dtype, Entry, Format, Header, LayoutOptions, MODEL_SPEC_KEY, Metadata, Order, Quoted,
    SHARED_KEY, SharedError, edit_metadata, layout_with, to_u64,
};

use self::held::Held;
use self::records::{SIGNATURE_OF_DATA, SIGNATURES_OF_FILE, TRAINER_HASH_KEYS, check_shared};
use crate::checkpoint::aliases::{aliases, refused};
use crate::error::{EditError, Error, Failure, of_step, step, unstorable};
use crate::options::SaveOptions;
use crate::payload::{FileRange, Payload};
use crate::verify::{RecordedDigests, renewed};
use crate::watch::Watch;

pub use assemble::{Inherit, assemble};
pub use records::{Pick, RECORD_KEYS, Role, STALE_KEYS, STATE_KEY, passed_over};

/// The number of bytes of a file that every kernel changes at once: a page.
const PAGE: u64 = 4096;
/// The smallest free space in a rewritten header, for the next edit.
const ROOM: u64 = 512;

/// A change of metadata.
///
/// ```
/// use ingot_io::{Edited, MetadataChange, SaveOptions, Unwatched, update_metadata};
/// # use ingot_io::{Dtype, TensorView, serialize_to_file};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bias = TensorView::new(Dtype::U8, vec![2], b"ab")?;
/// # serialize_to_file([("bias", &bias)], None, &path)?;
///
/// let change = MetadataChange { set: &[("title", "first")], remove: &["draft"], rewrite: false };
/// let edited = update_metadata(&path, &change, &SaveOptions::new(), &Unwatched)?;
/// assert_ne!(edited, Edited::Unchanged);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct MetadataChange<'a> {
    /// Keys with their new values.
    pub set: &'a [(&'a str, &'a str)],
    /// Keys to remove. Absent keys are ignored.
    pub remove: &'a [&'a str],
    /// Whether to write a new file even if a write in place is safe: for readers that read a header twice, and for
    /// disks that tear pages.
    pub rewrite: bool,
}

/// How metadata was changed.
///
/// ```
/// use ingot_io::{Edited, MetadataChange, SaveOptions, Unwatched, update_metadata};
/// # use ingot_io::{Dtype, TensorView, serialize_to_file};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bias = TensorView::new(Dtype::U8, vec![2], b"ab")?;
/// # serialize_to_file([("bias", &bias)], None, &path)?;
///
/// let change = MetadataChange { remove: &["draft"], ..MetadataChange::default() };
/// let edited = update_metadata(&path, &change, &SaveOptions::new(), &Unwatched)?;
/// assert_eq!(edited, Edited::Unchanged);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edited {
    /// It was not changed: it already had these values.
    Unchanged,
    /// The existing file was changed in place.
    InPlace,
    /// A new file replaced the old one.
    Rewritten,
}

/// Changes the metadata of the file at `path`. No tensor is read.
///
/// ```
/// use ingot_io::{
///     Archive, Dtype, MetadataChange, OpenOptions, SaveOptions, TensorView, Unwatched, serialize_to_file,
///     update_metadata,
/// };
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// serialize_to_file([("bias", &TensorView::new(Dtype::F32, vec![2], b"12345678")?)], None, &path)?;
///
/// let change = MetadataChange { set: &[("title", "first")], ..MetadataChange::default() };
/// update_metadata(&path, &change, &SaveOptions::default(), &Unwatched)?;
/// let archive = Archive::open(&path, &OpenOptions::default())?;
/// assert_eq!(archive.header().text("title"), Some("first"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Failure::Shared`] for a record of shared tensors that belongs to another file: a reader would refuse it, or tensors
/// would get names that they never had. [`Failure::Checksums`] for a record of digests that a verifying reader would refuse.
/// [`Failure::Unstorable`] if the header would be too large; the file is unchanged. The errors of opening the file.
/// [`Failure::Write`]; [`Failure::Edit`] with [`EditError::Overtaken`]; [`Failure::Interrupted`].
pub fn update_metadata(
    path: &Path,
    change: &MetadataChange<'_>,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<Edited, Error> {
    let held = Held::open(path, watch)?;
    let (head, header) = held.head()?;
    let old: Option<Pairs<'_>> = header.metadata().map(|metadata| metadata.iter().collect());
    let mut new = changed(header.metadata(), change);
    if old == new {
        return Ok(Edited::Unchanged);
    }
    if let (Some(old), Some(new)) = (old, &mut new) {
        remove_stale_signatures(&old, new);
    }
    let new = new.map(Vec::from_iter);
    if let Some((_, record)) = change.set.iter().find(|pair| pair.0 == SHARED_KEY) {
        check_shared(record, &header, path)?;
    }
    if let Some((_, record)) = change.set.iter().find(|pair| pair.0 == CHECKSUMS_KEY) {
        RecordedDigests::parse(record, &header, Some(path))?;
    }
    if !change.rewrite
        && !held.is_shared
        && let Some(edited) = edit_metadata(&head, &header, new.as_deref())
        && let Some((begin, bytes)) = within_a_page(&head, &edited)
    {
        held.check()?;
        held.overwrite(begin, bytes, options.durable)?;
        return Ok(Edited::InPlace);
    }
    let head = head_for_the_data(path, &header, new.as_deref())?;
    let data = FileRange::new(held.file(), header.data_start(), header.data_nbytes());
    held.replace(&head, &header, &[Payload::File(data)], options, watch)?;
    held.release();
    Ok(Edited::Rewritten)
}

/// Write `payload` as the tensor `name` of the file at `path`, which must have the tensor's dtype and shape. All other
/// bytes of the file stay unchanged. `name` may be an alias, and aliases ([`aliases`](crate::binding::aliases)) stay
/// aliases of the tensor.
///
/// The file's digest of the tensor is computed again. ModelSpec's digest, which covers all data, and signatures become
/// wrong and are removed, since computing that digest again would need all data.
///
/// It always writes a new file: a tensor is too long for an atomic change, and a reader must not see a half of it.
///
/// ```
/// use ingot_io::{
///     Archive, Dtype, OpenOptions, Payload, SaveOptions, TensorView, Unwatched, replace_tensor, serialize_to_file,
/// };
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// serialize_to_file([("bias", &TensorView::new(Dtype::F32, vec![2], b"12345678")?)], None, &path)?;
///
/// let new = Payload::from(&b"abcdefgh"[..]);
/// replace_tensor(&path, "bias", Dtype::F32, &[2], &new, &SaveOptions::default(), &Unwatched)?;
/// assert_eq!(Archive::open(&path, &OpenOptions::default())?.read("bias")?.to_vec(), b"abcdefgh");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Failure::UnknownTensor`]; [`Failure::Shared`] for the name of a part of a tensor; [`Failure::Edit`] with
/// [`EditError::Mismatch`]; and as for [`update_metadata`].
pub fn replace_tensor(
    path: &Path,
    name: &str,
    dtype: Dtype,
    shape: &[u64],
    payload: &Payload<'_>,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let held = Held::open(path, watch)?;
    let (head, header) = held.head()?;
    let entry = stored_as(name, &header, path)?;
    if (entry.dtype, entry.shape) != (dtype, shape) || payload.nbytes() != entry.nbytes() {
        let mismatch = EditError::Mismatch {
            expected: (entry.dtype, entry.shape.to_owned()),
            found: (dtype, shape.to_owned()),
        };
        return Err(mismatch.about(path).of(name));
    }
    let range = |begin: u64, end: u64| {
        Payload::File(FileRange::new(
            held.file(),
            header.data_start() + begin,
            end - begin,
        ))
    };
    let payloads = [
        range(0, entry.begin),
        payload.clone(),
        range(entry.end, header.data_nbytes()),
    ];
    let head = head_with_digest(path, head, &header, entry.name, payload, watch)?;
    held.replace(&head, &header, &payloads, options, watch)?;
    held.release();
    Ok(())
}

/// The tensor with this name or alias.
fn stored_as<'h>(name: &str, header: &'h Header, path: &Path) -> Result<Entry<'h>, Error> {
    if let Some(entry) = header.get(name) {
        return Ok(entry);
    }
    let others = aliases(std::iter::once((Some(path), header)))?;
    let alias = others.iter().find(|alias| alias.name == name);
    match alias.and_then(|alias| Some((alias, header.entry(alias.number)?))) {
        None => Err(Failure::UnknownTensor { nearest: None }.about(Some(path), Some(name))),
        Some((alias, entry)) if alias.part.is_none() => Ok(entry),
        Some((_, entry)) => {
            let reason = format!("has it as a part of {}: replace that", Quoted(entry.name));
            Err(refused(Some(path), SharedError::about(name, &reason)))
        }
    }
}

/// Return the head of the file after the tensor `name` got the bytes of `payload`: a new head if the file records a
/// digest of the tensor.
fn head_with_digest(
    path: &Path,
    head: Vec<u8>,
    header: &Header,
    name: &str,
    payload: &Payload<'_>,
    watch: &dyn Watch,
) -> Result<Vec<u8>, Error> {
    let record = renewed(header, name, payload, watch)
        .map_err(|source| of_step(step::READ, source).in_save(path, header.file_nbytes()))?;
    let of_all: Vec<&str> = [MODEL_SPEC_KEY, SIGNATURE_OF_DATA]
        .into_iter()
        .chain(TRAINER_HASH_KEYS)
        .chain(SIGNATURES_OF_FILE)
        .collect();
    if record.is_none() && !of_all.iter().any(|key| header.text(key).is_some()) {
        return Ok(head);
    }
    let set: Vec<(&str, &str)> = record.iter().map(|record| (CHECKSUMS_KEY, &**record)).collect();
    let change = MetadataChange {
        set: &set,
        remove: &of_all,
        ..MetadataChange::default()
    };
    let pairs = changed(header.metadata(), &change).map(Vec::from_iter);
    match edit_metadata(&head, header, pairs.as_deref()) {
        Some(edited) => Ok(edited),
        None => head_for_the_data(path, header, pairs.as_deref()),
    }
}

/// Metadata by key.
type Pairs<'a> = BTreeMap<&'a str, &'a str>;

/// Return the metadata after `change`; `None` if there is none and none is added.
fn changed<'a>(old: Option<&'a Metadata>, change: &MetadataChange<'a>) -> Option<Pairs<'a>> {
    if old.is_none() && change.set.is_empty() {
        return None;
    }
    let mut pairs: Pairs<'a> = old.into_iter().flat_map(Metadata::iter).collect();
    pairs.extend(change.set.iter().copied());
    pairs.retain(|key, _| !change.remove.contains(key));
    Some(pairs)
}

/// Remove the signatures of the whole file that `new` has from `old`, because the edit breaks them. They stay if the edit
/// changes only signatures, as a tool does that signs a file.
fn remove_stale_signatures(old: &Pairs<'_>, new: &mut Pairs<'_>) {
    let is_signature = |key: &str| SIGNATURES_OF_FILE.contains(&key);
    let is_lost = |(key, value): (&&str, &&str)| !is_signature(key) && new.get(key) != Some(value);
    let is_added = |key: &&str| !is_signature(key) && !old.contains_key(key);
    if old.iter().any(is_lost) || new.keys().any(is_added) {
        new.retain(|key, value| !is_signature(key) || old.get(key) != Some(value));
    }
}

/// Return the position of the first difference of the two, which have one length, and the bytes of `new` up to the last
/// difference. `None` if these are not in one page.
fn within_a_page<'n>(old: &[u8], new: &'n [u8]) -> Option<(u64, &'n [u8])> {
    let same = |pair: &(&u8, &u8)| pair.0 == pair.1;
    let begin = old.iter().zip(new).take_while(same).count();
    let end = new.len() - old.iter().rev().zip(new.iter().rev()).take_while(same).count();
    let bytes = new.get(begin..end)?;
    let last = to_u64(end).checked_sub(1)?;
    (to_u64(begin) / PAGE == last / PAGE).then_some((to_u64(begin), bytes))
}

/// Return the head of a file with other metadata and the same data in the same order. The data moves by whole pages, so
/// that a file system can share its blocks; this also gives the header free space.
fn head_for_the_data(
    path: &Path,
    header: &Header,
    metadata: Option<&[(&str, &str)]>,
) -> Result<Vec<u8>, Error> {
    let specs = header.specs();
    let lay_out = |reserve| {
        let options = LayoutOptions {
            order: Order::Given,
            reserve,
            ..LayoutOptions::default()
        };
        layout_with(&specs, metadata, header.format(), &options)
    };
    let tight = lay_out(0).map_err(unstorable(path))?;
    if header.format() != Format::Safetensors {
        return Ok(tight.head);
    }
    // Up to the next position with the same offset in its page.
    let least = to_u64(tight.head.len()) + ROOM;
    let reserve = ROOM + (header.data_start() % PAGE + PAGE - least % PAGE) % PAGE;
    // Free space is optional, so it never makes a header too large.
    Ok(lay_out(reserve).unwrap_or(tight).head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_differs_within_a_page_is_all_that_differs(
            old in proptest::collection::vec(0..2_u8, 4000..4200),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 0..2_u8), 1..4),
        ) {
            let mut new = old.clone();
            for (at, byte) in &changes {
                let at = at.index(new.len());
                new[at] = *byte;
            }
            let differing: Vec<usize> = (0..old.len()).filter(|&at| old[at] != new[at]).collect();
            let pages: std::collections::BTreeSet<usize> = differing.iter().map(|at| at / 4096).collect();
            match within_a_page(&old, &new) {
                None => prop_assert!(differing.is_empty() || pages.len() > 1),
                Some((begin, bytes)) => {
                    let begin = usize::try_from(begin).unwrap();
                    prop_assert_eq!(Some(&begin), differing.first());
                    let mut patched = old.clone();
                    patched[begin..begin + bytes.len()].copy_from_slice(bytes);
                    prop_assert_eq!(patched, new);
                    prop_assert_eq!(pages.len(), 1);
                }
            }
        }
    }

    #[test]
    fn a_change_sets_removes_and_leaves() {
        let change = MetadataChange {
            set: &[("b", "2"), ("a", "1")],
            remove: &["c", "absent"],
            ..MetadataChange::default()
        };
        assert_eq!(
            changed(None, &change),
            Some(Pairs::from([("a", "1"), ("b", "2")]))
        );
        let none = MetadataChange {
            set: &[],
            remove: &["c"],
            ..MetadataChange::default()
        };
        assert_eq!(changed(None, &none), None);
    }
}
