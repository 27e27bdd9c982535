//! Where tensors go in a new file.

use alloc::borrow::ToOwned;
use alloc::vec::Vec;

use crate::codec::{binary, json};
use crate::entry::Spec;
use crate::error::FormatError;
use crate::extent::{self, to_u32, to_u64};
use crate::format::Format;
use crate::header::Header;
use crate::limits::Limits;
use crate::metadata::{METADATA_KEY, Metadata};
use crate::raw::{PREFIX_NBYTES, RawHeader, check_room};

/// What a writer may choose. By default the bytes are those that safetensors and bintensors write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayoutOptions {
    /// The order of the data.
    pub order: Order,
    /// Bytes of room for longer metadata, at least: spaces after it, so that [`edit_metadata`](crate::edit_metadata)
    /// need not move the data, nor an entry.
    pub reserve: u64,
    /// Where the data begins.
    pub align: Align,
}

/// The order of tensors in a new file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// As FORMAT.md, "Writing", says: wide elements first, then by name.
    #[default]
    Sorted,
    /// As they were given.
    Given,
}

/// What the position of the data section is a multiple of. The padding is white space in the header, so every reader
/// takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Align {
    /// 8 bytes, so that the widest elements are aligned where the file is mapped.
    #[default]
    Elements,
    /// 64 bytes: a cache line, and what vector instructions and accelerators ask for.
    CacheLine,
    /// 4096 bytes: a page, for direct reading and for sharing blocks between files.
    Page,
}

impl Align {
    /// The alignment of so many bytes; `None` where there is no such choice.
    #[must_use]
    pub fn from_nbytes(nbytes: u64) -> Option<Align> {
        [Align::Elements, Align::CacheLine, Align::Page]
            .into_iter()
            .find(|align| align.nbytes() == nbytes)
    }

    /// In bytes.
    #[must_use]
    pub fn nbytes(self) -> u64 {
        match self {
            Align::Elements => 8,
            Align::CacheLine => 64,
            Align::Page => 4096,
        }
    }
}

/// A new file, but for the tensors' bytes.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The header of the new file, proven like one that was read.
    pub header: Header,
    /// Its bytes: the length, the header, the padding. The data follows at once.
    pub head: Vec<u8>,
    /// The tensors' places in the list that was given, in the order of their data.
    pub order: Vec<usize>,
}

/// Lays out a file that holds `specs` and `metadata`.
///
/// The same input gives the same bytes: metadata keys are sorted, tensors ordered as each format's own library
/// orders them (FORMAT.md, "Writing").
///
/// ```
/// use ingot_format::{Dtype, Format, Spec, layout};
/// let specs = [
///     Spec { name: "mask", dtype: Dtype::U8, shape: &[3] },
///     Spec { name: "bias", dtype: Dtype::F32, shape: &[2] },
/// ];
/// let new = layout(&specs, None, Format::Safetensors)?;
/// assert_eq!(new.order, [1, 0], "wider elements first");
/// assert_eq!(new.head.len() % 8, 0);
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
///
/// # Errors
/// A name twice or reserved, a size that overflows or ends inside a byte, a dtype that the format lacks, a header
/// above [`Limits::HEADER_NBYTES`].
pub fn layout<'a>(
    specs: &[Spec<'a>],
    metadata: Option<&[(&'a str, &'a str)]>,
    format: Format,
) -> Result<Layout, FormatError> {
    layout_with(specs, metadata, format, &LayoutOptions::default())
}

/// As [`layout()`], with what a writer may choose.
///
/// ```
/// use ingot_format::{Align, Format, LayoutOptions, layout_with};
/// let options = LayoutOptions { reserve: 100, align: Align::CacheLine, ..LayoutOptions::default() };
/// let new = layout_with(&[], None, Format::Safetensors, &options)?;
/// assert_eq!(new.head.len() % 64, 0);
/// assert!(new.head.len() > 8 + 100);
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
///
/// # Errors
/// As [`layout()`]; [`FormatError::NoRoom`] where a `.bt` file shall have room or be aligned.
pub fn layout_with<'a>(
    specs: &[Spec<'a>],
    metadata: Option<&[(&'a str, &'a str)]>,
    format: Format,
    options: &LayoutOptions,
) -> Result<Layout, FormatError> {
    if format == Format::Bintensors && (options.reserve, options.align) != (0, Align::Elements) {
        return Err(FormatError::NoRoom);
    }
    let mut order = data_order(specs, format)?;
    if options.order == Order::Given {
        order = (0..specs.len()).collect();
    }
    let metadata = metadata.map(sorted).transpose()?;
    let mut raw = RawHeader {
        metadata,
        ..RawHeader::default()
    };
    if format == Format::Bintensors {
        let dims = specs.iter().map(|spec| spec.shape.len()).sum();
        let pairs = raw.metadata.as_ref().map_or(0, Metadata::len);
        check_room(specs.len(), dims, pairs)?;
    }
    raw.reserve(
        specs.len(),
        specs.iter().map(|spec| spec.name.len()).sum(),
        specs.iter().map(|spec| spec.shape.len()).sum(),
    );
    let mut begin = 0_u64;
    for spec in order.iter().map(|&number| &specs[number]) {
        let end = extent::nbytes(spec.dtype, spec.shape)
            .and_then(|nbytes| begin.checked_add(nbytes).ok_or(extent::ExtentError::Overflow))
            .map_err(|reason| FormatError::Extent {
                tensor: spec.name.to_owned(),
                dtype: spec.dtype,
                shape: spec.shape.to_owned(),
                reason,
            })?;
        raw.names.push_str(spec.name);
        raw.dims.extend_from_slice(spec.shape);
        raw.close_entry(spec.dtype, begin, end);
        begin = end;
    }
    let header = Header::prove(raw, format, 0, begin)?;
    let mut head = Vec::with_capacity(PREFIX_NBYTES + header.likely_nbytes());
    head.resize(PREFIX_NBYTES, 0);
    let room_at = match format {
        Format::Safetensors => json::render(header.raw(), &mut head),
        Format::Bintensors => {
            binary::render(header.raw(), &mut head);
            head.len()
        }
    };
    // 8, so that the data begins where an F64 placed first is aligned when the file is mapped.
    head.resize(head.len().next_multiple_of(8), b' ');
    let room = room_nbytes(to_u64(head.len()), options)?;
    head.splice(room_at..room_at, core::iter::repeat_n(b' ', room));
    let header_nbytes = to_u64(head.len() - PREFIX_NBYTES);
    head[..PREFIX_NBYTES].copy_from_slice(&header_nbytes.to_le_bytes());
    let header = header.at(to_u64(head.len()));
    Ok(Layout { header, head, order })
}

/// Spaces to add to a head of `head_nbytes`.
fn room_nbytes(head_nbytes: u64, options: &LayoutOptions) -> Result<usize, FormatError> {
    let whole = head_nbytes
        .checked_add(options.reserve)
        .and_then(|nbytes| nbytes.checked_next_multiple_of(options.align.nbytes()))
        .unwrap_or(u64::MAX);
    let found = whole - to_u64(PREFIX_NBYTES);
    extent::to_usize(whole - head_nbytes)
        .filter(|_| found <= Limits::HEADER_NBYTES)
        .ok_or(FormatError::HeaderTooLarge {
            found,
            limit: Limits::HEADER_NBYTES,
        })
}

/// The order in which each format's own library writes tensors: wide elements first, so that all lie aligned,
/// then by name.
fn data_order(specs: &[Spec<'_>], format: Format) -> Result<Vec<usize>, FormatError> {
    let mut keyed = Vec::with_capacity(specs.len());
    for (number, spec) in specs.iter().enumerate() {
        let rank = match format {
            Format::Safetensors if spec.name == METADATA_KEY => return Err(FormatError::ReservedName),
            Format::Safetensors => Some(json::data_rank(spec.dtype)),
            Format::Bintensors => spec.dtype.bintensors_number(),
        };
        let rank = rank.ok_or_else(|| FormatError::UnsupportedDtype {
            tensor: spec.name.to_owned(),
            dtype: spec.dtype,
            format,
        })?;
        keyed.push((core::cmp::Reverse(rank), spec.name, to_u32(number)));
    }
    // Stable, to profit from callers who sorted by name already.
    keyed.sort();
    Ok(keyed
        .into_iter()
        .map(|(_, _, number)| extent::index(number))
        .collect())
}

/// The pairs in the order of their keys, so that the same metadata gives the same file.
pub(crate) fn sorted(pairs: &[(&str, &str)]) -> Result<Metadata, FormatError> {
    let mut pairs = pairs.to_vec();
    pairs.sort_unstable();
    let mut metadata = Metadata::default();
    for (key, value) in pairs {
        metadata.push(key);
        metadata.push(value);
    }
    match metadata.duplicate() {
        Some(key) => Err(FormatError::DuplicateMetadataKey { key: key.to_owned() }),
        None => Ok(metadata),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alignment_is_chosen_by_its_bytes_and_no_other_number() {
        for align in [Align::Elements, Align::CacheLine, Align::Page] {
            assert_eq!(Align::from_nbytes(align.nbytes()), Some(align));
        }
        for other in [0, 1, 7, 16, 63, 65, 4095, 8192, u64::MAX] {
            assert_eq!(Align::from_nbytes(other), None);
        }
    }
}
