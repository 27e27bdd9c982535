//! A header whose every claim has been checked.

use alloc::borrow::ToOwned;
use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::codec::{binary, json};
use crate::entry::{Entry, Spec};
use crate::error::FormatError;
use crate::extent::{self, index, to_u64};
use crate::finding::{Finding, Remedy};
use crate::format::Format;
use crate::limits::{Leniency, Limits};
use crate::metadata::Metadata;
use crate::name_order::{SameName, order};
use crate::raw::{PREFIX_NBYTES, RawHeader, broken_range};
use crate::salvage::sound;
use crate::sniff::Foreign;

/// The header of a file after all checks: the entries cover the data section exactly, in file order, without hole or
/// overlap; every size is shape times dtype; every name is unique. Later code relies on this. With
/// [`Leniency::Salvage`] there may be bytes that belong to no entry; everything else is still true.
///
/// Names and shapes are stored back to back in two arenas, so that a header costs a few allocations instead of several
/// per tensor, and less than twice its own bytes.
///
/// ```
/// use ingot_format::{Header, Limits};
///
/// let text = br#"{"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
/// let header = Header::parse_json(text, &Limits::default())?;
/// assert_eq!((header.len(), header.data_nbytes()), (1, 8));
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Header {
    raw: RawHeader,
    format: Format,
    data_start: u64,
    data_nbytes: u64,
    /// Entries in name order; empty if that is the order of the file.
    by_name: Vec<u32>,
    findings: Box<[Finding]>,
}

impl Header {
    /// Estimates the bytes that this header takes when written, for reserving memory.
    pub(crate) fn likely_nbytes(&self) -> usize {
        // The punctuation around an entry in JSON, and numbers of a usual size.
        const AROUND_ENTRY: usize = 72;
        const AROUND_DIMENSION: usize = 6;
        self.raw.names.len() + self.raw.records.len() * AROUND_ENTRY + self.raw.dims.len() * AROUND_DIMENSION
    }

    /// Returns the number of bytes at the start of a file that [`Header::parse`] needs: the length and the header
    /// itself. This needs only the first 8 bytes and the file's size, so that a hostile file's length is checked before
    /// anything is allocated.
    ///
    /// # Errors
    /// Rules F1, F2 and F3; [`FormatError::Foreign`] if `start`, which may hold more of the file, is recognised as
    /// another format.
    pub fn head_nbytes(start: &[u8], file_nbytes: u64, limits: &Limits) -> Result<u64, FormatError> {
        head_nbytes(start, file_nbytes, limits).map_err(|fault| name_foreign(start, fault))
    }

    /// Parses the header at the start of a file of `file_nbytes` bytes. `head` holds at least the first
    /// [`Header::head_nbytes`] of them.
    ///
    /// ```
    /// use ingot_format::{Header, Limits};
    /// let file = b"\x39\0\0\0\0\0\0\0{\"bias\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}12345678";
    /// let header = Header::parse(file, file.len() as u64, &Limits::default())?;
    /// let bias = header.get("bias").unwrap();
    /// assert_eq!((bias.dtype.code(), bias.shape, bias.nbytes()), ("F32", &[2][..], 8));
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    ///
    /// # Errors
    /// The first rule of FORMAT.md that the file breaks. With [`Leniency::Salvage`] only F1 to F3, and F5 and B1 to B3
    /// if the header cannot be split into entries.
    pub fn parse(head: &[u8], file_nbytes: u64, limits: &Limits) -> Result<Header, FormatError> {
        let data_start = Header::head_nbytes(head, file_nbytes, limits)?;
        let text = extent::to_usize(data_start)
            .and_then(|end| head.get(PREFIX_NBYTES..end))
            .ok_or(FormatError::HeaderPastEnd {
                header_nbytes: data_start - 8,
                file_nbytes: to_u64(head.len()),
            })?;
        let format = text
            .first()
            .and_then(|&first| Format::of_header(first))
            .unwrap_or(Format::Safetensors);
        let data_nbytes = file_nbytes - data_start;
        let leniency = match limits.leniency {
            // Harmless deviations are reported too.
            Leniency::Salvage => Leniency::Refuse,
            other => other,
        };
        let raw = match format {
            Format::Safetensors => json::parse(text, leniency),
            Format::Bintensors => binary::parse(text),
        };
        raw.and_then(|raw| Header::prove(raw, format, data_start, data_nbytes))
            .or_else(|fault| match limits.leniency {
                Leniency::Accept | Leniency::Refuse => Err(fault),
                Leniency::Salvage => Header::salvage(text, fault, format, data_start, data_nbytes),
            })
            .map_err(|fault| name_foreign(head, fault))
    }

    /// Parses the JSON of a header without a file. The data section is assumed to end with the last tensor, so that
    /// rule F12 always holds; `data_start` is the position of the data in a file with exactly this text.
    ///
    /// ```
    /// use ingot_format::{Header, Limits};
    /// let text = br#"{"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    /// let header = Header::parse_json(text, &Limits::default())?;
    /// assert_eq!((header.len(), header.data_nbytes()), (1, 8));
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    ///
    /// # Errors
    /// Rules F3 to F11.
    pub fn parse_json(text: &[u8], limits: &Limits) -> Result<Header, FormatError> {
        let header_nbytes = to_u64(text.len());
        if header_nbytes > limits.header_nbytes() {
            return Err(FormatError::HeaderTooLarge {
                found: header_nbytes,
                limit: limits.header_nbytes(),
            });
        }
        let raw = json::parse(text, limits.leniency)?;
        let ends = raw.records.iter().map(|record| record.end);
        let data_nbytes = ends.max().unwrap_or(0);
        let data_start = header_nbytes + to_u64(PREFIX_NBYTES);
        Header::prove(raw, Format::Safetensors, data_start, data_nbytes)
    }

    /// Proves rules F7 and F9 to F12. This is the only way to make a `Header`.
    pub(crate) fn prove(
        raw: RawHeader,
        format: Format,
        data_start: u64,
        data_nbytes: u64,
    ) -> Result<Header, FormatError> {
        let raw = match format {
            Format::Safetensors => raw.in_data_order(),
            // Rule F11 requires a binary header to list its tensors in this order already.
            Format::Bintensors => raw,
        };
        Header::prove_sound(raw, Gaps::Refused, format, data_start, data_nbytes)
    }

    /// Proves selected entries, and adds the faults of the others. There may be bytes between the entries.
    pub(crate) fn prove_sound(
        raw: RawHeader,
        gaps: Gaps,
        format: Format,
        data_start: u64,
        data_nbytes: u64,
    ) -> Result<Header, FormatError> {
        let by_name = prove_names(&raw)?;
        match gaps {
            Gaps::Refused => prove_ranges::<false>(&raw, data_nbytes)?,
            Gaps::Found(_) => prove_ranges::<true>(&raw, data_nbytes)?,
        }
        Ok(Header {
            raw,
            format,
            data_start,
            data_nbytes,
            by_name,
            findings: match gaps {
                Gaps::Refused => Box::default(),
                Gaps::Found(findings) => findings,
            },
        })
    }

    /// Returns the sound part of a header that was rejected for `fault`.
    fn salvage(
        text: &[u8],
        fault: FormatError,
        format: Format,
        data_start: u64,
        data_nbytes: u64,
    ) -> Result<Header, FormatError> {
        let understood = match format {
            Format::Safetensors => json::salvage(text)?,
            Format::Bintensors => binary::salvage(text)?,
        };
        let (raw, mut findings) = sound(understood, data_nbytes);
        if findings.is_empty() {
            // For example, entries of a `.bt` header that are out of order.
            findings.add(fault.clone(), Remedy::Rewritten);
        }
        let gaps = Gaps::Found(findings.all().ok_or(fault)?);
        Header::prove_sound(raw, gaps, format, data_start, data_nbytes)
    }

    /// Returns the faults that [`Leniency::Salvage`] found and how each was handled; empty if the file breaks no rule.
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Iterates over the names of the tensors that were left out, each with the reason. A name may occur twice.
    pub fn all_left_out(&self) -> impl Iterator<Item = (&str, &FormatError)> {
        let left_out = self.findings.iter();
        let left_out = left_out.filter(|found| found.remedy == Remedy::TensorLeftOut);
        left_out.filter_map(|found| Some((found.fault.tensor()?, &found.fault)))
    }

    /// Returns the reason why the tensor `name` was left out, if it was.
    #[must_use]
    pub fn left_out(&self, name: &str) -> Option<&FormatError> {
        self.all_left_out()
            .find(|left_out| left_out.0 == name)
            .map(|left_out| left_out.1)
    }

    /// Returns the format of the file.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns the number of tensors.
    #[must_use]
    pub fn len(&self) -> usize {
        self.raw.records.len()
    }

    /// Returns whether there are no tensors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.raw.records.is_empty()
    }

    /// Returns the tensor with index `number` in data order.
    #[must_use]
    pub fn entry(&self, number: usize) -> Option<Entry<'_>> {
        (number < self.len()).then(|| self.raw.entry(number))
    }

    /// Iterates over all tensors in data order.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = Entry<'_>> + Clone {
        self.raw.entries()
    }

    /// The entries in the form that a codec writes.
    pub(crate) fn raw(&self) -> &RawHeader {
        &self.raw
    }

    /// Returns the tensors in data order, as input for the layout of a new file.
    #[must_use]
    pub fn specs(&self) -> Vec<Spec<'_>> {
        self.entries()
            .map(|entry| Spec {
                name: entry.name,
                dtype: entry.dtype,
                shape: entry.shape,
            })
            .collect()
    }

    /// Iterates over all tensors in byte order of their names.
    pub fn entries_by_name(&self) -> impl ExactSizeIterator<Item = Entry<'_>> + Clone {
        (0..self.len()).map(|rank| self.raw.entry(self.nth_by_name(rank)))
    }

    /// Iterates over all names in data order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        (0..self.len()).map(|number| self.raw.name(number))
    }

    /// Iterates over all names in byte order.
    pub fn names_by_name(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        (0..self.len()).map(|rank| self.raw.name(self.nth_by_name(rank)))
    }

    /// Returns the index of the tensor `name` in data order.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        // A binary search over the name order, which needs no second copy of the names.
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.raw.name(self.nth_by_name(middle)).cmp(name) {
                core::cmp::Ordering::Less => low = middle + 1,
                core::cmp::Ordering::Greater => high = middle,
                core::cmp::Ordering::Equal => return Some(self.nth_by_name(middle)),
            }
        }
        None
    }

    /// Returns the tensor `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Entry<'_>> {
        self.find(name).map(|number| self.raw.entry(number))
    }

    /// Returns the metadata; `None` if the file has none, which differs from having an empty one.
    #[must_use]
    pub fn metadata(&self) -> Option<&Metadata> {
        self.raw.metadata.as_ref()
    }

    /// Returns the text that the metadata has for `key`.
    #[must_use]
    pub fn text(&self, key: &str) -> Option<&str> {
        self.metadata()?.get(key)
    }

    /// Returns the position of the data section, counted from the start of the file.
    #[must_use]
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Returns the size of the data section in bytes.
    #[must_use]
    pub fn data_nbytes(&self) -> u64 {
        self.data_nbytes
    }

    /// Returns the size of a file with this header in bytes.
    #[must_use]
    pub fn file_nbytes(&self) -> u64 {
        // Cannot overflow: `prove` received both as parts of a file's size.
        self.data_start + self.data_nbytes
    }

    /// Returns the same header for a file whose data section begins at `data_start`.
    pub(crate) fn at(self, data_start: u64) -> Header {
        Header { data_start, ..self }
    }

    /// Returns the same header with other metadata.
    pub(crate) fn with_metadata(&self, metadata: Option<Metadata>) -> Header {
        let raw = RawHeader {
            names: self.raw.names.clone(),
            dims: self.raw.dims.clone(),
            records: self.raw.records.clone(),
            metadata,
        };
        Header {
            raw,
            by_name: self.by_name.clone(),
            findings: self.findings.clone(),
            ..*self
        }
    }

    fn nth_by_name(&self, rank: usize) -> usize {
        self.by_name.get(rank).map_or(rank, |&number| index(number))
    }
}

/// Checks rules F1 to F3.
fn head_nbytes(start: &[u8], file_nbytes: u64, limits: &Limits) -> Result<u64, FormatError> {
    let prefix = start.first_chunk::<PREFIX_NBYTES>();
    let header_nbytes = match prefix {
        Some(prefix) if file_nbytes >= to_u64(PREFIX_NBYTES) => u64::from_le_bytes(*prefix),
        _ => {
            return Err(FormatError::TooShort {
                file_nbytes: file_nbytes.min(to_u64(start.len())),
            });
        }
    };
    if header_nbytes > limits.header_nbytes() {
        return Err(FormatError::HeaderTooLarge {
            found: header_nbytes,
            limit: limits.header_nbytes(),
        });
    }
    // No overflow: the limit fits into 32 bits.
    let head_nbytes = header_nbytes + to_u64(PREFIX_NBYTES);
    if head_nbytes > file_nbytes {
        return Err(FormatError::HeaderPastEnd {
            header_nbytes,
            file_nbytes,
        });
    }
    Ok(head_nbytes)
}

/// Replaces the fault of a rejected file by the name of its format, if that is recognised.
fn name_foreign(start: &[u8], fault: FormatError) -> FormatError {
    // A length below 4 GiB before a brace: a broken file of ours. If the header has 640 bytes, the file begins like a
    // pickle, and advice to unpickle it would be wrong.
    if let [_, _, _, _, 0, 0, 0, 0, b'{', ..] = start {
        return fault;
    }
    match Foreign::of_start(start) {
        Some(kind) => FormatError::Foreign {
            kind,
            fault: alloc::boxed::Box::new(fault),
        },
        None => fault,
    }
}

/// Checks rule F7 for names. Returns their order, empty if it is the order of the file.
fn prove_names(raw: &RawHeader) -> Result<Vec<u32>, FormatError> {
    if raw.names().is_sorted_by(|a, b| a < b) {
        return Ok(Vec::new());
    }
    order(&raw.names, raw.records.iter().map(|record| record.name_end)).map_err(|SameName(first, _)| {
        FormatError::DuplicateTensor {
            tensor: raw.name(first).to_owned(),
        }
    })
}

/// How to handle bytes that belong to no entry.
pub(crate) enum Gaps {
    /// Rejected by rules F11 and F12.
    Refused,
    /// Allowed; these findings include them.
    Found(Box<[Finding]>),
}

/// Checks rules F9 to F12 on entries in data order.
fn prove_ranges<const MAY_GAP: bool>(raw: &RawHeader, data_nbytes: u64) -> Result<(), FormatError> {
    let mut covered = 0;
    let mut dims_begin = 0;
    for (number, record) in raw.records.iter().enumerate() {
        let dims_end = index(record.dims_end);
        let nbytes = extent::nbytes(record.dtype, &raw.dims[dims_begin..dims_end]);
        let has_its_size = nbytes.is_ok_and(|nbytes| record.begin.checked_add(nbytes) == Some(record.end));
        let follows = record.begin == covered || MAY_GAP && record.begin > covered;
        if !has_its_size || !follows {
            return Err(
                broken_range(&raw.entry(number), nbytes).unwrap_or_else(|| misplaced(raw, number, covered))
            );
        }
        covered = record.end;
        dims_begin = dims_end;
    }
    match covered.cmp(&data_nbytes) {
        core::cmp::Ordering::Equal => Ok(()),
        core::cmp::Ordering::Less if MAY_GAP => Ok(()),
        core::cmp::Ordering::Less => Err(FormatError::TrailingBytes {
            expected: covered,
            found: data_nbytes,
        }),
        core::cmp::Ordering::Greater => {
            let cut = raw.records.partition_point(|record| record.end <= data_nbytes);
            let tensor = raw.entry(cut).name.to_owned();
            Err(FormatError::Truncated {
                tensor,
                expected: covered,
                found: data_nbytes,
            })
        }
    }
}

/// Rule F11: entry `number` does not begin at `covered`, the end of the previous one.
#[cold]
fn misplaced(raw: &RawHeader, number: usize, covered: u64) -> FormatError {
    let entry = raw.entry(number);
    let tensor = entry.name.to_owned();
    match number.checked_sub(1) {
        Some(before) if entry.begin < covered => FormatError::Overlap {
            tensor,
            other: raw.entry(before).name.to_owned(),
            begin: entry.begin,
            end: covered,
        },
        _ => FormatError::Hole {
            tensor,
            begin: covered,
            end: entry.begin,
        },
    }
}
