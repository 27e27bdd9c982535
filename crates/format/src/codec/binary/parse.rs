//! Reading the binary header, in one pass.

use alloc::string::ToString;
use alloc::vec::Vec;
use core::str;

use super::varint;
use crate::dtype::Dtype;
use crate::error::FormatError;
use crate::extent::{to_u64, to_usize};

use crate::finding::{Remedy, Understood, Unread};
use crate::metadata::Metadata;
use crate::raw::{PREFIX_NBYTES, RawHeader, check_room};

/// Reads a header. Rules F4, F7, F8 and B1 to B4.
pub(crate) fn parse(header: &[u8]) -> Result<RawHeader, FormatError> {
    let mut cursor = Cursor { header, rest: header };
    let mut raw = RawHeader::default();
    if cursor.has_metadata()? {
        let metadata = metadata(&mut cursor)?;
        if let Some(key) = metadata.duplicate() {
            return Err(FormatError::DuplicateMetadataKey { key: key.to_string() });
        }
        raw.metadata = Some(metadata);
    }
    entries(&mut cursor, &mut raw, &mut Vec::new(), &mut Err)?;
    cursor.padding()?;
    Ok(raw)
}

/// Reads the valid entries of a header. A header that breaks B1 to B3 or F4 cannot be split into items, because the
/// beginning of the next item is unknown.
pub(crate) fn salvage(header: &[u8]) -> Result<Understood, FormatError> {
    let mut cursor = Cursor { header, rest: header };
    let mut understood = Understood::default();
    if cursor.has_metadata()? {
        let metadata = metadata(&mut cursor)?;
        understood.keep_last_of_each(Some(metadata));
    }
    let Understood {
        raw,
        unread,
        findings,
    } = &mut understood;
    entries(&mut cursor, raw, unread, &mut |fault| {
        findings.add(fault, Remedy::TensorLeftOut);
        Ok(())
    })?;
    if let Err(fault) = cursor.padding() {
        findings.add(fault, Remedy::Rewritten);
    }
    Ok(understood)
}

/// Reads the number of pairs, and the pairs.
fn metadata(cursor: &mut Cursor<'_>) -> Result<Metadata, FormatError> {
    // The lengths of key and value.
    const MIN_PAIR_NBYTES: usize = 2;
    let count = cursor.count("metadata count", MIN_PAIR_NBYTES)?;
    check_room(0, 0, count)?;
    let mut metadata = Metadata::default();
    for _ in 0..count {
        metadata.push(cursor.string("metadata key")?);
        metadata.push(cursor.string("metadata value")?);
    }
    Ok(metadata)
}

/// Reads the number of tensors, and an entry for each. `unknown` handles an entry with an unknown dtype: it returns an
/// error, or the entry's claim is added to `unread`.
fn entries(
    cursor: &mut Cursor<'_>,
    raw: &mut RawHeader,
    unread: &mut Vec<Unread>,
    // A single function for both readers, so that all work per entry is inlined into it.
    unknown: &mut dyn FnMut(FormatError) -> Result<(), FormatError>,
) -> Result<(), FormatError> {
    // The name's length, dtype, rank, begin and end.
    const MIN_ENTRY_NBYTES: usize = 5;
    // Most tensors of a checkpoint are matrices.
    const USUAL_RANK: usize = 2;
    let count = cursor.count("tensor count", MIN_ENTRY_NBYTES)?;
    let pairs = raw.metadata.as_ref().map_or(0, Metadata::len);
    check_room(count, 0, pairs)?;
    raw.records.reserve_exact(count);
    raw.dims.reserve(USUAL_RANK * count);
    // Space for all possible names: reserved memory that is never written to occupies no pages.
    raw.names.reserve(cursor.rest.len() - MIN_ENTRY_NBYTES * count);
    for _ in 0..count {
        let name = cursor.string("tensor name")?;
        raw.names.push_str(name);
        let number = cursor.number("dtype")?;
        let dtype = u8::try_from(number).ok().and_then(Dtype::from_bintensors_number);
        if dtype.is_none() {
            unknown(unknown_dtype(name, number))?;
        }
        let rank = cursor.count("rank", 1)?;
        check_room(count, raw.dims.len() + rank, pairs)?;
        for _ in 0..rank {
            raw.dims.push(cursor.number("dimension")?);
        }
        let begin = cursor.number("data range")?;
        let end = cursor.number("data range")?;
        match dtype {
            Some(dtype) => raw.close_entry(dtype, begin, end),
            None => {
                raw.drop_open_entry();
                let tensor = name.to_string();
                unread.push(Unread { tensor, begin, end });
            }
        }
    }
    Ok(())
}

#[cold]
fn unknown_dtype(name: &str, number: u64) -> FormatError {
    FormatError::UnknownDtype {
        tensor: name.to_string(),
        dtype: number.to_string(),
    }
}

/// A position in the header. Each method consumes the bytes that it returns.
struct Cursor<'h> {
    header: &'h [u8],
    rest: &'h [u8],
}

impl<'h> Cursor<'h> {
    /// Rule B1.
    fn has_metadata(&mut self) -> Result<bool, FormatError> {
        match self.byte("metadata option")? {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(FormatError::InvalidOption { found }),
        }
    }

    fn byte(&mut self, reading: &'static str) -> Result<u8, FormatError> {
        let (&byte, rest) = self
            .rest
            .split_first()
            .ok_or_else(|| past_end(self.position(), reading))?;
        self.rest = rest;
        Ok(byte)
    }

    /// Rules B2 and B3.
    #[inline]
    fn number(&mut self, reading: &'static str) -> Result<u64, FormatError> {
        let position = self.position();
        varint::take(&mut self.rest).map_err(|fault| match fault {
            varint::Fault::Cut => past_end(position, reading),
            varint::Fault::Malformed => FormatError::InvalidVarint { position },
        })
    }

    /// Reads the number of items that follow, each of at least `min_nbytes`. Rule B3: they must fit into the header, so
    /// that a hostile count allocates nothing.
    #[inline]
    fn count(&mut self, reading: &'static str, min_nbytes: usize) -> Result<usize, FormatError> {
        let position = self.position();
        let count = self.number(reading)?;
        match to_usize(count) {
            Some(count) if count <= self.rest.len() / min_nbytes => Ok(count),
            _ => Err(past_end(position, reading)),
        }
    }

    /// Reads a length and that many bytes of text.
    #[inline]
    fn string(&mut self, reading: &'static str) -> Result<&'h str, FormatError> {
        let position = self.position();
        let nbytes = self.count(reading, 1)?;
        let (text, rest) = self
            .rest
            .split_at_checked(nbytes)
            .ok_or_else(|| past_end(position, reading))?;
        // F4
        let text = str::from_utf8(text).map_err(|fault| FormatError::InvalidUtf8 {
            position: self.position() + to_u64(fault.valid_up_to()),
        })?;
        self.rest = rest;
        Ok(text)
    }

    /// Rule B4.
    fn padding(&self) -> Result<(), FormatError> {
        const MAX_NBYTES: usize = 7;
        let spaces = self
            .rest
            .iter()
            .take(MAX_NBYTES)
            .take_while(|&&byte| byte == b' ')
            .count();
        if spaces == self.rest.len() {
            return Ok(());
        }
        Err(FormatError::InvalidPadding {
            position: self.position() + to_u64(spaces),
        })
    }

    /// Returns the position, counted from the start of the file.
    fn position(&self) -> u64 {
        to_u64(PREFIX_NBYTES + self.header.len() - self.rest.len())
    }
}

#[cold]
fn past_end(position: u64, reading: &'static str) -> FormatError {
    FormatError::UnexpectedEnd { position, reading }
}
