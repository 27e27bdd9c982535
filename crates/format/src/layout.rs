//! Computes the positions of tensors in a new file.

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

/// Options of a writer. The defaults produce the bytes that safetensors and bintensors write.
///
/// ```
/// use ingot_format::{Align, Dtype, Format, LayoutOptions, Spec, layout_with};
///
/// let specs = [Spec { name: "bias", dtype: Dtype::F32, shape: &[2] }];
/// let options = LayoutOptions { align: Align::CacheLine, ..LayoutOptions::default() };
/// let new = layout_with(&specs, None, Format::Safetensors, &options)?;
/// assert_eq!(new.head.len() % 64, 0);
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayoutOptions {
    /// The order of the data.
    pub order: Order,
    /// Minimum number of spaces to reserve after the metadata, so that [`edit_metadata`](crate::edit_metadata) can
    /// write longer metadata without moving the data or an entry.
    pub reserve: u64,
    /// The alignment of the data section.
    pub align: Align,
}

/// The order of tensors in a new file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// The order of FORMAT.md, "Writing": wide elements first, then by name.
    #[default]
    Sorted,
    /// The order of the caller's list.
    Given,
}

/// The alignment of the data section's position. The padding is white space in the header, which every reader accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Align {
    /// 8 bytes, so that the widest elements are aligned if the file is mapped.
    #[default]
    Elements,
    /// 64 bytes: a cache line, the alignment that vector instructions and accelerators need.
    CacheLine,
    /// 4096 bytes: a page, for direct I/O and for sharing blocks between files.
    Page,
}

impl Align {
    /// Returns the alignment of this many bytes; `None` if there is no such choice.
    #[must_use]
    pub fn from_nbytes(nbytes: u64) -> Option<Align> {
        [Align::Elements, Align::CacheLine, Align::Page]
            .into_iter()
            .find(|align| align.nbytes() == nbytes)
    }

    /// Returns the alignment in bytes.
    #[must_use]
    pub fn nbytes(self) -> u64 {
        match self {
            Align::Elements => 8,
            Align::CacheLine => 64,
            Align::Page => 4096,
        }
    }
}

/// A new file without the tensors' bytes.
///
/// ```
/// use ingot_format::{Dtype, Format, Spec, layout};
///
/// let specs = [Spec { name: "bias", dtype: Dtype::F32, shape: &[2] }];
/// let new = layout(&specs, None, Format::Safetensors)?;
/// let mut file = new.head.clone();
/// file.extend([1.0_f32, 2.0].into_iter().flat_map(f32::to_le_bytes));
/// assert_eq!(file.len() as u64, new.header.data_start() + new.header.data_nbytes());
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Layout {
    /// The header of the new file, proven like a header that was read.
    pub header: Header,
    /// The bytes before the data: the length, the header, the padding.
    pub head: Vec<u8>,
    /// The tensors' indices in the caller's list, in data order.
    pub order: Vec<usize>,
}

/// Lays out a file that holds `specs` and `metadata`.
///
/// The same input produces the same bytes: metadata keys are sorted, and tensors are ordered as each format's own
/// library orders them (FORMAT.md, "Writing").
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
/// A duplicate or reserved name, a size that overflows or ends inside a byte, a dtype that the format lacks, a header
/// above [`Limits::HEADER_NBYTES`].
pub fn layout<'a>(
    specs: &[Spec<'a>],
    metadata: Option<&[(&'a str, &'a str)]>,
    format: Format,
) -> Result<Layout, FormatError> {
    layout_with(specs, metadata, format, &LayoutOptions::default())
}

/// Like [`layout()`], with options.
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
/// Like [`layout()`]; [`FormatError::NoRoom`] if `options` reserve space or set an alignment for a `.bt` file.
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
    // A multiple of 8: in a mapped file, an F64 at the start of the data is aligned.
    head.resize(head.len().next_multiple_of(8), b' ');
    let room = room_nbytes(to_u64(head.len()), options)?;
    head.splice(room_at..room_at, core::iter::repeat_n(b' ', room));
    let header_nbytes = to_u64(head.len() - PREFIX_NBYTES);
    head[..PREFIX_NBYTES].copy_from_slice(&header_nbytes.to_le_bytes());
    let header = header.at(to_u64(head.len()));
    Ok(Layout { header, head, order })
}

/// Returns the number of spaces to add to a head of `head_nbytes`.
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

/// Returns the order in which each format's own library writes tensors: wide elements first, so that all are aligned,
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
    // A stable sort, which is fast if the caller has already sorted by name.
    keyed.sort();
    Ok(keyed
        .into_iter()
        .map(|(_, _, number)| extent::index(number))
        .collect())
}

/// Sorts the pairs by key, so that the same metadata produces the same file.
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
    fn from_nbytes_accepts_only_the_bytes_of_an_alignment() {
        for align in [Align::Elements, Align::CacheLine, Align::Page] {
            assert_eq!(Align::from_nbytes(align.nbytes()), Some(align));
        }
        for other in [0, 1, 7, 16, 63, 65, 4095, 8192, u64::MAX] {
            assert_eq!(Align::from_nbytes(other), None);
        }
    }
}
