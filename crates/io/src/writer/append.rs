//! A file whose tensors are appended one by one.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use ingot_format::{Dtype, Format, FormatError, Layout, LayoutOptions, Order, Spec, layout_with, to_u64};

use super::fill::Filler;
use crate::error::{EditError, Error, unstorable};
use crate::options::SaveOptions;
use crate::payload::Payload;
use crate::save::Temp;
use crate::watch::Watch;

/// A file to which tensors are appended. It begins with reserved space for the header, which the commit writes.
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
    temp: Option<Temp>,
    path: PathBuf,
    metadata: Option<Vec<(String, String)>>,
    /// Bytes before the data.
    reserved: u64,
    /// Bytes of the header for the tensors so far.
    header_nbytes: u64,
    tensors: Vec<(String, Dtype, Vec<u64>)>,
    names: HashSet<String>,
    /// The number of appended bytes of data.
    end: u64,
}

/// The largest size of an entry besides its name and dimensions: the words, two numbers of 20 digits, commas.
const AROUND_ENTRY: u64 = 110;

impl Appender {
    /// Begin the file at `path`, with `reserve` bytes for the header.
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
            .map_err(unstorable(path))?;
        let head_nbytes = to_u64(empty.head.len());
        let room = LayoutOptions {
            reserve: reserve.saturating_sub(head_nbytes).next_multiple_of(8),
            ..LayoutOptions::default()
        };
        // Fails if the header is longer than a header may be.
        let reserved = layout_with(&[], metadata, Format::Safetensors, &room).map_err(unstorable(path))?;
        Ok(Appender {
            temp: Some(Temp::create(path, 0, options, watch)?),
            path: path.to_owned(),
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
    /// [`Failure::Unstorable`](crate::Failure::Unstorable) if the name exists or is reserved, or the size is invalid;
    /// [`Failure::Edit`](crate::Failure::Edit) with [`EditError::ReserveFull`], [`EditError::Mismatch`] or
    /// [`EditError::Committed`]; [`Failure::Write`](crate::Failure::Write). The file is unchanged then.
    pub fn append(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[u64],
        payload: &Payload<'_>,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        self.open()?;
        let spec = Spec { name, dtype, shape };
        let expected = self.check(&spec)?;
        if payload.nbytes() != expected {
            let fault = FormatError::WrongLength {
                tensor: name.to_owned(),
                dtype,
                shape: shape.to_owned(),
                expected,
                found: payload.nbytes(),
            };
            return Err(unstorable(&self.path)(fault));
        }
        let mut header_nbytes = self.header_nbytes + entry_nbytes(&spec);
        if header_nbytes > self.reserved {
            // If the estimate is close to the limit, the exact size of the header is computed. The remaining space is
            // then filled by estimates again, so this happens only a few times for any number of tensors.
            header_nbytes = to_u64(self.laid_out(Some(spec))?.head.len());
        }
        if header_nbytes > self.reserved {
            let fault = EditError::ReserveFull {
                expected: self.reserved,
                found: header_nbytes,
            };
            return Err(fault.about(&self.path).of(name));
        }
        let position = self.reserved + self.end;
        let temp = self.open()?;
        temp.grow_to(position + expected);
        Filler::new(temp, watch).put(payload, 0..expected, position)?;
        self.header_nbytes = header_nbytes;
        self.end += expected;
        self.names.insert(name.to_owned());
        self.tensors.push((name.to_owned(), dtype, shape.to_owned()));
        Ok(())
    }

    /// Write the header of the file, and rename it to its path.
    ///
    /// # Errors
    /// [`Failure::Write`](crate::Failure::Write); [`Failure::Edit`](crate::Failure::Edit) with [`EditError::Committed`].
    pub fn commit(&mut self, watch: &dyn Watch) -> Result<(), Error> {
        let head = self.laid_out(None)?.head;
        let nbytes = self.reserved + self.end;
        let temp = self.open()?;
        temp.write(&head, 0)?;
        // Bytes of a failed append belong to no tensor.
        let cut = temp.file().set_len(nbytes);
        cut.map_err(|fault| temp.write_fault(fault))?;
        temp.publish(watch)?;
        self.temp = None;
        Ok(())
    }

    /// The temporary file, until the commit.
    fn open(&mut self) -> Result<&mut Temp, Error> {
        match &mut self.temp {
            Some(temp) => temp.check_process().map(|()| temp),
            None => Err(EditError::Committed.about(&self.path)),
        }
    }

    /// Check the rules for one tensor, and return its size.
    fn check(&self, spec: &Spec<'_>) -> Result<u64, Error> {
        let (one, options) = (std::slice::from_ref(spec), LayoutOptions::default());
        let alone = layout_with(one, None, Format::Safetensors, &options).map_err(unstorable(&self.path))?;
        if self.names.contains(spec.name) {
            let tensor = spec.name.to_owned();
            return Err(unstorable(&self.path)(FormatError::DuplicateTensor { tensor }));
        }
        Ok(alone.header.data_nbytes())
    }

    /// Return the header for the appended tensors and `next`, as long as the reserved one, unless it is longer.
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
                .map_err(unstorable(&self.path))
        };
        let tight = lay_out(0)?;
        match self.reserved.checked_sub(to_u64(tight.head.len())) {
            Some(room) => lay_out(room),
            None => Ok(tight),
        }
    }
}

/// Return the largest possible size of the entry.
fn entry_nbytes(spec: &Spec<'_>) -> u64 {
    // A control character takes six bytes.
    AROUND_ENTRY + 6 * to_u64(spec.name.len()) + 21 * to_u64(spec.shape.len())
}
