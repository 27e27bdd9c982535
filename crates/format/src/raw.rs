//! The claims of a header, not yet checked. The codecs read and write them; `header` proves them.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;

use crate::dtype::Dtype;
use crate::entry::Entry;
use crate::error::FormatError;
use crate::extent::{self, index, to_u32, to_u64};
use crate::limits::Limits;
use crate::metadata::Metadata;

/// Bytes of the length field before every header.
pub(crate) const PREFIX_NBYTES: usize = 8;

/// A header as a codec read it, not yet checked, in file order.
#[derive(Clone, Debug, Default)]
pub(crate) struct RawHeader {
    pub(crate) names: String,
    pub(crate) dims: Vec<u64>,
    pub(crate) records: Vec<EntryRecord>,
    pub(crate) metadata: Option<Metadata>,
}

/// One entry. Its name and shape end at the given indices and begin where the previous record's end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntryRecord {
    pub(crate) begin: u64,
    pub(crate) end: u64,
    pub(crate) name_end: u32,
    pub(crate) dims_end: u32,
    pub(crate) dtype: Dtype,
}

impl RawHeader {
    /// Adds an entry whose name and dimensions were just appended to the arenas.
    pub(crate) fn close_entry(&mut self, dtype: Dtype, begin: u64, end: u64) {
        let name_end = to_u32(self.names.len());
        let dims_end = to_u32(self.dims.len());
        self.records.push(EntryRecord {
            begin,
            end,
            name_end,
            dims_end,
            dtype,
        });
    }

    /// Removes the name and dimensions that were appended since the last entry.
    pub(crate) fn drop_open_entry(&mut self) {
        let ends = self
            .records
            .last()
            .map_or((0, 0), |last| (last.name_end, last.dims_end));
        self.names.truncate(index(ends.0));
        self.dims.truncate(index(ends.1));
    }

    /// Reserves memory for this many entries, with the given total of text and dimensions.
    pub(crate) fn reserve(&mut self, entries: usize, text: usize, dims: usize) {
        self.records.reserve(entries);
        self.names.reserve(text);
        self.dims.reserve(dims);
    }

    pub(crate) fn name(&self, number: usize) -> &str {
        let begin = number
            .checked_sub(1)
            .map_or(0, |before| self.records[before].name_end);
        &self.names[index(begin)..index(self.records[number].name_end)]
    }

    pub(crate) fn entry(&self, number: usize) -> Entry<'_> {
        let record = &self.records[number];
        let (name_begin, dims_begin) = match number.checked_sub(1) {
            None => (0, 0),
            Some(before) => (self.records[before].name_end, self.records[before].dims_end),
        };
        Entry {
            name: &self.names[index(name_begin)..index(record.name_end)],
            dtype: record.dtype,
            shape: &self.dims[index(dims_begin)..index(record.dims_end)],
            begin: record.begin,
            end: record.end,
        }
    }

    /// Iterates over all entries in the order of the list.
    pub(crate) fn entries(&self) -> impl ExactSizeIterator<Item = Entry<'_>> + DoubleEndedIterator + Clone {
        (0..self.records.len()).map(|number| self.entry(number))
    }

    /// Iterates over all names in the order of the list. One pass is faster than a lookup by number for each.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let mut begin = 0;
        self.records.iter().map(move |record| {
            let name = index(begin)..index(record.name_end);
            begin = record.name_end;
            &self.names[name]
        })
    }

    /// Sorts the entries into data order. Writers of safetensors may list them in any order; most already use data
    /// order.
    pub(crate) fn in_data_order(self) -> RawHeader {
        if self.records.is_sorted_by_key(|record| (record.begin, record.end)) {
            return self;
        }
        let mut order: Vec<usize> = (0..self.records.len()).collect();
        order.sort_by_key(|&number| (self.records[number].begin, self.records[number].end));
        let mut sorted = RawHeader {
            names: String::with_capacity(self.names.len()),
            dims: Vec::with_capacity(self.dims.len()),
            records: Vec::with_capacity(self.records.len()),
            metadata: None,
        };
        for entry in order.into_iter().map(|number| self.entry(number)) {
            sorted.names.push_str(entry.name);
            sorted.dims.extend_from_slice(entry.shape);
            sorted.close_entry(entry.dtype, entry.begin, entry.end);
        }
        RawHeader {
            metadata: self.metadata,
            ..sorted
        }
    }
}

/// Returns the fault of an entry whose shape and dtype take `nbytes`, if it breaks rule F9 or F10.
#[cold]
pub(crate) fn broken_range(
    entry: &Entry<'_>,
    nbytes: Result<u64, extent::ExtentError>,
) -> Option<FormatError> {
    let (tensor, dtype, shape) = (entry.name.to_owned(), entry.dtype, entry.shape.to_owned());
    match nbytes {
        Err(reason) => Some(FormatError::Extent {
            tensor,
            dtype,
            shape,
            reason,
        }),
        Ok(expected) if entry.begin.checked_add(expected) != Some(entry.end) => {
            let (begin, end) = (entry.begin, entry.end);
            Some(FormatError::SizeMismatch {
                tensor,
                dtype,
                shape,
                expected,
                begin,
                end,
            })
        }
        Ok(_) => None,
    }
}

/// Memory in bytes that the entries, dimensions and metadata pairs of one header may take.
///
/// A dimension needs only one byte of the file and an entry five, so the header's length alone is a poor bound on
/// memory. bintensors stops at the same sum and counts more for each item, so every file that it reads is accepted
/// here.
const ROOM_NBYTES: usize = 100_000_000;

/// Rejects a header that takes more than [`ROOM_NBYTES`].
pub(crate) fn check_room(entries: usize, dims: usize, pairs: usize) -> Result<(), FormatError> {
    let found = [
        (entries, size_of::<EntryRecord>()),
        (dims, size_of::<u64>()),
        // The ends of the key and of the value.
        (pairs, 2 * size_of::<u32>()),
    ]
    .into_iter()
    .fold(0_usize, |sum, (count, each)| {
        sum.saturating_add(count.saturating_mul(each))
    });
    if found > ROOM_NBYTES {
        return Err(FormatError::HeaderTooLarge {
            found: to_u64(found),
            limit: Limits::HEADER_NBYTES,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_may_take_all_the_room_there_is_and_no_byte_more() {
        let dims = ROOM_NBYTES / size_of::<u64>();
        assert_eq!(dims * size_of::<u64>(), ROOM_NBYTES);
        assert_eq!(check_room(0, dims, 0), Ok(()));
        let fault = check_room(0, dims, 1).unwrap_err();
        let expected = FormatError::HeaderTooLarge {
            found: to_u64(ROOM_NBYTES) + 8,
            limit: Limits::HEADER_NBYTES,
        };
        assert_eq!(fault, expected);
    }
}
