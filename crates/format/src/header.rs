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

/// The header of a file, proven: the entries cover the data section exactly, in file order, without hole or
/// overlap, every size equals shape times dtype, every name is there once. Nothing downstream checks again.
/// With [`Leniency::Salvage`] there may be bytes that belong to no entry, and all else holds.
///
/// Names and shapes lie back to back in two arenas, so that a header costs a few allocations, not some per
/// tensor, and less than twice its own bytes.
#[derive(Clone, Debug)]
pub struct Header {
    raw: RawHeader,
    format: Format,
    data_start: u64,
    data_nbytes: u64,
    /// Entries in the order of their names; empty where that is the order of the file.
    by_name: Vec<u32>,
    findings: Box<[Finding]>,
}

impl Header {
    /// About the bytes that this header takes when it is written, for making room.
    pub(crate) fn likely_nbytes(&self) -> usize {
        // What stands around names and numbers in JSON, and numbers of a usual size.
        const AROUND_ENTRY: usize = 72;
        const AROUND_DIMENSION: usize = 6;
        self.raw.names.len() + self.raw.records.len() * AROUND_ENTRY + self.raw.dims.len() * AROUND_DIMENSION
    }

    /// Bytes at the start of a file that [`Header::parse`] needs: the length and the header itself. Asks for no
    /// more than the first 8 bytes and the file's size, so that nothing is allocated on the word of a hostile
    /// file.
    ///
    /// # Errors
    /// Rules F1, F2 and F3; [`FormatError::Foreign`] when `start`, however much of the file it holds, is
    /// recognised as something else.
    pub fn head_nbytes(start: &[u8], file_nbytes: u64, limits: &Limits) -> Result<u64, FormatError> {
        head_nbytes(start, file_nbytes, limits).map_err(|fault| name_foreign(start, fault))
    }

    /// Reads the header at the start of a file of `file_nbytes` bytes. `head` holds at least the first
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
    /// The first rule of FORMAT.md that the file breaks. With [`Leniency::Salvage`] that is one of F1 to F3, or the
    /// header cannot be taken apart into entries: F5, B1 to B3.
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
            // What is harmless is told of too.
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

    /// Reads the JSON of a header whose file is not there. What its tensors take is taken for all that the file holds,
    /// so that rule F12 holds of itself; `data_start` is where the data would begin in a file with just this text.
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

    /// Rules F7 and F9 to F12: the only way to a `Header`.
    pub(crate) fn prove(
        raw: RawHeader,
        format: Format,
        data_start: u64,
        data_nbytes: u64,
    ) -> Result<Header, FormatError> {
        let raw = match format {
            Format::Safetensors => raw.in_data_order(),
            // A binary header must list its tensors in that order already (rule F11).
            Format::Bintensors => raw,
        };
        Header::prove_sound(raw, Gaps::Refused, format, data_start, data_nbytes)
    }

    /// The same of entries that were chosen, with what was found wrong with the others. There may be bytes between them.
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

    /// The header of what is sound in one that is refused for `fault`.
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
            // Such as entries of a `.bt` header that stand out of order.
            findings.add(fault.clone(), Remedy::Rewritten);
        }
        let gaps = Gaps::Found(findings.all().ok_or(fault)?);
        Header::prove_sound(raw, gaps, format, data_start, data_nbytes)
    }

    /// What [`Leniency::Salvage`] found wrong with the file, and what it did about it; nothing where the file breaks no
    /// rule.
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The names of the tensors that were left out, each with why. A name may come twice.
    pub fn all_left_out(&self) -> impl Iterator<Item = (&str, &FormatError)> {
        let left_out = self.findings.iter();
        let left_out = left_out.filter(|found| found.remedy == Remedy::TensorLeftOut);
        left_out.filter_map(|found| Some((found.fault.tensor()?, &found.fault)))
    }

    /// Why the tensor `name` was left out, where it was.
    #[must_use]
    pub fn left_out(&self, name: &str) -> Option<&FormatError> {
        self.all_left_out()
            .find(|left_out| left_out.0 == name)
            .map(|left_out| left_out.1)
    }

    /// The format that the file has.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// How many tensors there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.raw.records.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.raw.records.is_empty()
    }

    /// The tensor at `number` in the order of the data.
    #[must_use]
    pub fn entry(&self, number: usize) -> Option<Entry<'_>> {
        (number < self.len()).then(|| self.raw.entry(number))
    }

    /// All tensors in the order of their data.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = Entry<'_>> + Clone {
        self.raw.entries()
    }

    /// The same, as a codec writes it.
    pub(crate) fn raw(&self) -> &RawHeader {
        &self.raw
    }

    /// What a new file with the same tensors is laid out from, in the order of their data.
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

    /// All tensors in the order of their names, byte by byte.
    pub fn entries_by_name(&self) -> impl ExactSizeIterator<Item = Entry<'_>> + Clone {
        (0..self.len()).map(|rank| self.raw.entry(self.nth_by_name(rank)))
    }

    /// All names in the order of the data.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        (0..self.len()).map(|number| self.raw.name(number))
    }

    /// All names in their own order, byte by byte.
    pub fn names_by_name(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        (0..self.len()).map(|rank| self.raw.name(self.nth_by_name(rank)))
    }

    /// Where the tensor `name` stands in the order of the data.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        // A binary search over ranks, which needs no second copy of the names.
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

    /// The tensor `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Entry<'_>> {
        self.find(name).map(|number| self.raw.entry(number))
    }

    /// The metadata; `None` where the file has none at all, which is not the same as having an empty one.
    #[must_use]
    pub fn metadata(&self) -> Option<&Metadata> {
        self.raw.metadata.as_ref()
    }

    /// Where the data section begins, counted from the start of the file.
    #[must_use]
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Bytes in the data section.
    #[must_use]
    pub fn data_nbytes(&self) -> u64 {
        self.data_nbytes
    }

    /// Bytes that a file with this header has.
    #[must_use]
    pub fn file_nbytes(&self) -> u64 {
        // Cannot overflow: `prove` was given the two as parts of a file's size.
        self.data_start + self.data_nbytes
    }

    /// The same header in a file whose data section begins at `data_start`.
    pub(crate) fn at(self, data_start: u64) -> Header {
        Header { data_start, ..self }
    }

    /// The same header with other metadata.
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

/// Rules F1 to F3.
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
    // No overflow: the limit has 32 bits.
    let head_nbytes = header_nbytes + to_u64(PREFIX_NBYTES);
    if head_nbytes > file_nbytes {
        return Err(FormatError::HeaderPastEnd {
            header_nbytes,
            file_nbytes,
        });
    }
    Ok(head_nbytes)
}

/// Says what the file is, where it was refused and is recognised.
fn name_foreign(start: &[u8], fault: FormatError) -> FormatError {
    // A length below 4 GiB before a brace: a broken file, but ours. A header of 640 bytes begins it like a pickle,
    // and advice to unpickle it would be wrong.
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

/// Rule F7 for names: gives their order, empty where it is the order of the file.
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

/// What to make of bytes that belong to no entry.
pub(crate) enum Gaps {
    /// Rules F11 and F12 forbid them.
    Refused,
    /// They are among these findings.
    Found(Box<[Finding]>),
}

/// Rules F9 to F12, on entries in the order of their data.
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

/// Rule F11: entry `number` does not begin at `covered`, where the one before it ends.
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
