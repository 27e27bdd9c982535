//! A file whose tensors become known one by one.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use ingot_format::{Dtype, Format, FormatError, Layout, LayoutOptions, Order, Spec, layout_with, to_u64};

use super::writer::{PIECE, put};
use crate::error::{EditError, Error};
use crate::options::SaveOptions;
use crate::payload::Payload;
use crate::save::Temp;
use crate::watch::Watch;

/// A file to which tensors are appended. Its header has space in front, which is filled when it is committed.
///
/// ```
/// use ingot_io::{Appender, Archive, Dtype, OpenOptions, Payload, SaveOptions, Unwatched};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("grown.safetensors");
/// let mut file = Appender::create(&path, 4096, None, &SaveOptions::default(), &Unwatched)?;
/// for name in ["a", "b"] {
///     file.append(name, Dtype::F32, &[2], &Payload::from(&b"12345678"[..]), &Unwatched)?;
/// }
/// file.commit(&Unwatched)?;
/// assert_eq!(Archive::open(&path, &OpenOptions::default())?.tensors().count(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Appender {
    /// `None` once it is committed.
    draft: Option<Temp>,
    path: PathBuf,
    options: SaveOptions,
    metadata: Option<Vec<(String, String)>>,
    /// Bytes before the data.
    reserved: u64,
    /// Bytes of the header as far as it is known.
    header_nbytes: u64,
    tensors: Vec<(String, Dtype, Vec<u64>)>,
    names: HashSet<String>,
    /// Bytes of data that were appended.
    end: u64,
    process: u32,
}

/// What an entry takes at most, beside its name and its dimensions: the words, two numbers of 20 digits, commas.
const AROUND_ENTRY: u64 = 110;

impl Appender {
    /// Begins the file at `path`, with `reserve` bytes for the header.
    ///
    /// # Errors
    /// As [`Writer::create`](crate::Writer::create).
    pub fn create(
        path: &Path,
        reserve: u64,
        metadata: Option<&[(&str, &str)]>,
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<Appender, Error> {
        let empty = layout_with(&[], metadata, Format::Safetensors, &LayoutOptions::default())
            .map_err(|fault| unstorable(path, fault))?;
        let head_nbytes = to_u64(empty.head.len());
        let room = LayoutOptions {
            reserve: reserve.saturating_sub(head_nbytes).next_multiple_of(8),
            ..LayoutOptions::default()
        };
        // Only for what it refuses: more than a header may have.
        let reserved = layout_with(&[], metadata, Format::Safetensors, &room)
            .map_err(|fault| unstorable(path, fault))?;
        let draft = Temp::create(path, 0, options, watch)?;
        Ok(Appender {
            draft: Some(draft),
            path: path.to_owned(),
            options: *options,
            metadata: metadata.map(|pairs| {
                pairs
                    .iter()
                    .map(|&(key, value)| (key.to_owned(), value.to_owned()))
                    .collect()
            }),
            reserved: to_u64(reserved.head.len()),
            header_nbytes: head_nbytes,
            tensors: Vec::new(),
            names: HashSet::new(),
            end: 0,
            process: std::process::id(),
        })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a tensor.
    ///
    /// # Errors
    /// [`Error::Unstorable`] for a name that is there or reserved, or a size that is none; [`Error::Edit`] with
    /// [`EditError::ReserveFull`], [`EditError::Mismatch`] or [`EditError::Committed`]; [`Error::Write`]. The file is as
    /// it was then.
    pub fn append(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[u64],
        payload: &Payload<'_>,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        self.check_open()?;
        let spec = Spec { name, dtype, shape };
        let expected = self.check(&spec)?;
        if payload.nbytes() != expected {
            return Err(unstorable(
                &self.path,
                FormatError::WrongLength {
                    tensor: name.to_owned(),
                    dtype,
                    shape: shape.to_owned(),
                    expected,
                    found: payload.nbytes(),
                },
            ));
        }
        let mut header_nbytes = self.header_nbytes + entry_nbytes(&spec);
        if header_nbytes > self.reserved {
            // Close: now it is worth knowing how large the header is. What is left after that is used up by guesses
            // again, so this happens a few times for any number of tensors.
            header_nbytes = to_u64(self.laid_out(Some(spec))?.head.len());
        }
        if header_nbytes > self.reserved {
            return Err(self.refuse(EditError::ReserveFull {
                tensor: name.to_owned(),
                expected: self.reserved,
                found: header_nbytes,
            }));
        }
        self.write(payload, watch)?;
        self.header_nbytes = header_nbytes;
        self.end += expected;
        self.names.insert(name.to_owned());
        self.tensors.push((name.to_owned(), dtype, shape.to_owned()));
        Ok(())
    }

    /// Gives the file its header and its name.
    ///
    /// # Errors
    /// [`Error::Write`]; [`Error::Edit`] with [`EditError::Committed`].
    pub fn commit(&mut self, watch: &dyn Watch) -> Result<(), Error> {
        self.check_open()?;
        let head = self.laid_out(None)?.head;
        let (existing, durable) = (self.options.existing(), self.options.durable);
        let Some(draft) = &mut self.draft else {
            return Err(self.refuse(EditError::Committed));
        };
        draft.write(&head, 0)?;
        // What a failed append left behind is no tensor's.
        draft
            .file()
            .set_len(self.reserved + self.end)
            .map_err(|fault| draft.write_fault(fault))?;
        draft.publish(existing, durable, watch)?;
        self.draft = None;
        Ok(())
    }

    fn write(&mut self, payload: &Payload<'_>, watch: &dyn Watch) -> Result<(), Error> {
        let Some(draft) = &mut self.draft else {
            return Err(self.refuse(EditError::Committed));
        };
        draft.grow_to(self.reserved + self.end + payload.nbytes());
        let (mut begin, mut buffer) = (0, Vec::new());
        while begin < payload.nbytes() {
            if watch.interrupted() {
                return Err(Error::Interrupted);
            }
            let count = (payload.nbytes() - begin).min(PIECE);
            let position = self.reserved + self.end + begin;
            put(payload, begin, count, draft.file(), position, &mut buffer, watch)
                .map_err(|fault| draft.write_fault(fault))?;
            begin += count;
        }
        Ok(())
    }

    fn check_open(&self) -> Result<(), Error> {
        match &self.draft {
            None => Err(self.refuse(EditError::Committed)),
            Some(_) if self.process != std::process::id() => Err(self.refuse(EditError::Forked)),
            Some(_) => Ok(()),
        }
    }

    /// What one tensor alone must keep to, and its size.
    fn check(&self, spec: &Spec<'_>) -> Result<u64, Error> {
        let alone = layout_with(
            std::slice::from_ref(spec),
            None,
            Format::Safetensors,
            &LayoutOptions::default(),
        );
        let alone = alone.map_err(|fault| unstorable(&self.path, fault))?;
        if self.names.contains(spec.name) {
            let fault = FormatError::DuplicateTensor {
                tensor: spec.name.to_owned(),
            };
            return Err(unstorable(&self.path, fault));
        }
        Ok(alone.header.data_nbytes())
    }

    /// The header for the tensors that are there, and for `next`, as long as what was reserved, if it is not longer.
    fn laid_out(&self, next: Option<Spec<'_>>) -> Result<Layout, Error> {
        let specs: Vec<Spec<'_>> = self
            .tensors
            .iter()
            .map(|(name, dtype, shape)| Spec {
                name,
                dtype: *dtype,
                shape,
            })
            .chain(next)
            .collect();
        let pairs: Option<Vec<(&str, &str)>> = self
            .metadata
            .as_ref()
            .map(|pairs| pairs.iter().map(|(key, value)| (&**key, &**value)).collect());
        let lay_out = |reserve| {
            let options = LayoutOptions {
                order: Order::Given,
                reserve,
                ..LayoutOptions::default()
            };
            layout_with(&specs, pairs.as_deref(), Format::Safetensors, &options)
                .map_err(|fault| unstorable(&self.path, fault))
        };
        let tight = lay_out(0)?;
        match self.reserved.checked_sub(to_u64(tight.head.len())) {
            Some(room) => lay_out(room),
            None => Ok(tight),
        }
    }

    fn refuse(&self, fault: EditError) -> Error {
        fault.about(&self.path)
    }
}

/// The most that the entry takes.
fn entry_nbytes(spec: &Spec<'_>) -> u64 {
    // A control character takes six bytes.
    AROUND_ENTRY + 6 * to_u64(spec.name.len()) + 21 * to_u64(spec.shape.len())
}

fn unstorable(path: &Path, fault: FormatError) -> Error {
    Error::Unstorable {
        path: Some(path.to_owned()),
        fault,
    }
}
