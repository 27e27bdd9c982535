//! Reads files in memory.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::marker::PhantomData;

use crate::entry::Entry;
use crate::error::FormatError;
use crate::extent::{ExtentError, to_u64, to_usize};
use crate::format::Format;
use crate::header::Header;
use crate::limits::Limits;
use crate::raw::PREFIX_NBYTES;
use crate::view::TensorView;

/// The tensors of a `.safetensors` file in memory.
///
/// ```
/// use ingot_format::SafeTensors;
/// let file = b"\x39\0\0\0\0\0\0\0{\"bias\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}12345678";
/// let tensors = SafeTensors::deserialize(file)?;
/// assert_eq!(tensors.names(), ["bias"]);
/// assert_eq!(tensors.tensor("bias")?.data(), b"12345678");
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
pub type SafeTensors<'data> = Tensors<'data, Json>;

/// The tensors of a `.bt` file in memory.
///
/// ```
/// use ingot_format::{BinTensors, Dtype, TensorView, bintensors};
/// let bias = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
/// let file = bintensors::serialize([("bias", bias)], None)?;
/// let tensors = BinTensors::deserialize(&file)?;
/// assert_eq!(tensors.names(), ["bias"]);
/// assert_eq!(tensors.tensor("bias")?.data(), b"12345678");
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
pub type BinTensors<'data> = Tensors<'data, Binary>;

/// The tensors of a file in memory: [`SafeTensors`] or [`BinTensors`]. Only the header is copied.
///
/// Lists of tensors are in data order.
pub struct Tensors<'data, K> {
    header: Header,
    data: &'data [u8],
    kind: PhantomData<K>,
}

/// The file format of a [`Tensors`]: [`Json`] or [`Binary`].
pub trait Kind: sealed::Sealed {
    /// The format.
    const FORMAT: Format;
}

/// Marks [`SafeTensors`].
#[derive(Clone, Copy, Debug)]
pub enum Json {}

/// Marks [`BinTensors`].
#[derive(Clone, Copy, Debug)]
pub enum Binary {}

impl Kind for Json {
    const FORMAT: Format = Format::Safetensors;
}

impl Kind for Binary {
    const FORMAT: Format = Format::Bintensors;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Json {}
    impl Sealed for super::Binary {}
}

impl<'data, K: Kind> Tensors<'data, K> {
    /// Parses the file in `buffer`, which must hold all of it. The tensors' bytes are not copied.
    ///
    /// ```
    /// use ingot_format::SafeTensors;
    /// let file = b"\x08\0\0\0\0\0\0\0{}      ";
    /// assert!(SafeTensors::deserialize(file)?.is_empty());
    /// let fault = SafeTensors::deserialize(&file[..12]).unwrap_err();
    /// assert_eq!(fault.code(), "header-past-end");
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    ///
    /// # Errors
    /// The first rule of FORMAT.md that the file breaks; [`FormatError::OtherFormat`] if it is a valid file of the
    /// other format.
    pub fn deserialize(buffer: &'data [u8]) -> Result<Self, FormatError> {
        let (header_nbytes, header) = Self::read_header(buffer)?;
        Ok(Tensors {
            header,
            // In range, because the header was read from there.
            data: &buffer[PREFIX_NBYTES + header_nbytes..],
            kind: PhantomData,
        })
    }

    /// Returns the length of the header in bytes, without the 8-byte length prefix, and the header's contents. Like the
    /// function of the same name in the safetensors crate, it needs the whole file. [`Header::parse`] needs only the
    /// start.
    ///
    /// ```
    /// use ingot_format::SafeTensors;
    /// let file = b"\x22\0\0\0\0\0\0\0{\"__metadata__\":{\"license\":\"MIT\"}}";
    /// let (header_nbytes, metadata) = SafeTensors::read_metadata(file)?;
    /// assert_eq!(header_nbytes, 34);
    /// assert_eq!(metadata.metadata().as_ref().unwrap()["license"], "MIT");
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    ///
    /// # Errors
    /// Like [`Tensors::deserialize`].
    #[cfg(feature = "std")]
    pub fn read_metadata(buffer: &'data [u8]) -> Result<(usize, crate::tensor::Metadata), FormatError> {
        let (header_nbytes, header) = Self::read_header(buffer)?;
        Ok((header_nbytes, crate::tensor::Metadata::of_header(header)))
    }

    /// Returns the header and its length. All of its sizes fit into memory.
    fn read_header(buffer: &'data [u8]) -> Result<(usize, Header), FormatError> {
        let header = Header::parse(buffer, to_u64(buffer.len()), &Limits::default())?;
        if header.format() != K::FORMAT {
            return Err(FormatError::OtherFormat {
                expected: K::FORMAT,
                found: header.format(),
            });
        }
        if let Some(entry) = header.entries().find(|entry| shape(entry).is_none()) {
            return Err(FormatError::Extent {
                tensor: entry.name.to_owned(),
                dtype: entry.dtype,
                shape: entry.shape.to_owned(),
                reason: ExtentError::Overflow,
            });
        }
        // The header is inside `buffer`, so its length fits into memory.
        let data_start = to_usize(header.data_start()).unwrap_or(buffer.len());
        Ok((data_start - PREFIX_NBYTES, header))
    }

    /// Returns all tensors with their names.
    ///
    /// ```
    /// # use ingot_format::{Dtype, SafeTensors, TensorView, serialize};
    /// let file = serialize([("bias", TensorView::new(Dtype::U8, vec![2], &[1, 2])?)], None)?;
    /// for (name, view) in SafeTensors::deserialize(&file)?.tensors() {
    ///     assert_eq!((name.as_str(), view.data()), ("bias", &[1, 2][..]));
    /// }
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    #[must_use]
    pub fn tensors(&self) -> Vec<(String, TensorView<'data>)> {
        self.iter().map(|(name, view)| (name.to_owned(), view)).collect()
    }

    /// Iterates over all tensors with their names.
    ///
    /// ```
    /// # use ingot_format::{Dtype, SafeTensors, TensorView, serialize};
    /// let wide = TensorView::new(Dtype::F32, vec![1], &[0; 4])?;
    /// let narrow = TensorView::new(Dtype::U8, vec![1], &[0])?;
    /// let file = serialize([("narrow", narrow), ("wide", wide)], None)?;
    /// let tensors = SafeTensors::deserialize(&file)?;
    /// assert!(tensors.iter().map(|(name, _)| name).eq(["wide", "narrow"]), "in the order of the data");
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, TensorView<'data>)> {
        self.header.entries().map(|entry| (entry.name, self.view(&entry)))
    }

    /// Returns the tensor `name`.
    ///
    /// ```
    /// # use ingot_format::{Dtype, FormatError, SafeTensors, TensorView, serialize};
    /// let file = serialize([("bias", TensorView::new(Dtype::U8, vec![2], &[1, 2])?)], None)?;
    /// let tensors = SafeTensors::deserialize(&file)?;
    /// assert_eq!(tensors.tensor("bias")?.shape(), [2]);
    /// assert_eq!(tensors.tensor("gain"), Err(FormatError::TensorNotFound("gain".into())));
    /// # Ok::<(), FormatError>(())
    /// ```
    ///
    /// # Errors
    /// [`FormatError::TensorNotFound`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'data>, FormatError> {
        match self.header.get(name) {
            Some(entry) => Ok(self.view(&entry)),
            None => Err(FormatError::TensorNotFound(name.to_owned())),
        }
    }

    /// Returns the names of all tensors.
    ///
    /// ```
    /// # use ingot_format::{Dtype, SafeTensors, TensorView, serialize};
    /// let byte = TensorView::new(Dtype::U8, vec![1], &[0])?;
    /// let file = serialize([("b", &byte), ("a", &byte)], None)?;
    /// assert_eq!(SafeTensors::deserialize(&file)?.names(), ["a", "b"]);
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.header.entries().map(|entry| entry.name).collect()
    }

    /// Returns the number of tensors.
    ///
    /// ```
    /// # use ingot_format::SafeTensors;
    /// assert_eq!(SafeTensors::deserialize(b"\x02\0\0\0\0\0\0\0{}")?.len(), 0);
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    #[must_use]
    pub fn len(&self) -> usize {
        self.header.len()
    }

    /// Returns whether there are no tensors.
    ///
    /// ```
    /// # use ingot_format::SafeTensors;
    /// assert!(SafeTensors::deserialize(b"\x02\0\0\0\0\0\0\0{}")?.is_empty());
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.header.is_empty()
    }

    /// Returns the header of the file.
    ///
    /// ```
    /// # use ingot_format::SafeTensors;
    /// let tensors = SafeTensors::deserialize(b"\x02\0\0\0\0\0\0\0{}")?;
    /// assert_eq!(tensors.header().file_nbytes(), 10);
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    fn view(&self, entry: &Entry<'_>) -> TensorView<'data> {
        // Neither fallback is ever used: `read_header` has checked the shapes, and the header is proven to cover `data`
        // exactly.
        let range = to_usize(entry.begin).zip(to_usize(entry.end));
        let data = range.and_then(|(begin, end)| self.data.get(begin..end));
        TensorView::proven(
            entry.dtype,
            shape(entry).unwrap_or_default(),
            data.unwrap_or_default(),
        )
    }
}

impl<K> Clone for Tensors<'_, K> {
    fn clone(&self) -> Self {
        Tensors {
            header: self.header.clone(),
            data: self.data,
            kind: PhantomData,
        }
    }
}

/// Prints a summary of the header, since the data would fill the screen.
impl<K> fmt::Debug for Tensors<'_, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensors")
            .field("format", &self.header.format())
            .field("len", &self.header.len())
            .field("data_nbytes", &self.data.len())
            .finish_non_exhaustive()
    }
}

/// Converts the shape to one in memory; `None` if it exceeds the machine's address width.
fn shape(entry: &Entry<'_>) -> Option<Vec<usize>> {
    entry.shape.iter().map(|&dim| to_usize(dim)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, to_vec};
    use alloc::string::ToString;
    use alloc::vec;

    fn file(format: Format) -> Vec<u8> {
        let bias = TensorView::new(Dtype::F32, vec![2], b"12345678").unwrap();
        to_vec([("bias", bias)], None, format).unwrap()
    }

    #[test]
    fn each_reads_its_own_format_and_names_the_other() {
        let (json, binary) = (file(Format::Safetensors), file(Format::Bintensors));
        assert!(SafeTensors::deserialize(&json).is_ok());
        assert!(BinTensors::deserialize(&binary).is_ok());
        let fault = SafeTensors::deserialize(&binary).unwrap_err();
        assert_eq!(fault.code(), "other-format");
        assert_eq!(
            fault.to_string(),
            "not the requested format: expected safetensors, found bintensors"
        );
        assert_eq!(BinTensors::deserialize(&json).unwrap_err().code(), "other-format");
    }

    #[test]
    fn a_reader_counts_its_tensors_and_prints_without_their_bytes() {
        let buffer = file(Format::Safetensors);
        let tensors = SafeTensors::deserialize(&buffer).unwrap();
        assert_eq!((tensors.len(), tensors.is_empty()), (1, false));
        assert_eq!(
            alloc::format!("{tensors:?}"),
            "Tensors { format: Safetensors, len: 1, data_nbytes: 8, .. }"
        );
        let none = SafeTensors::deserialize(b"\x02\0\0\0\0\0\0\0{}").unwrap();
        assert_eq!((none.len(), none.is_empty()), (0, true));
    }

    #[test]
    fn views_outlive_the_reader() {
        let buffer = file(Format::Safetensors);
        let view = SafeTensors::deserialize(&buffer).unwrap().tensor("bias").unwrap();
        assert_eq!(view.data(), b"12345678");
    }

    #[test]
    fn the_error_for_an_unknown_name_contains_it() {
        let buffer = file(Format::Safetensors);
        let fault = SafeTensors::deserialize(&buffer)
            .unwrap()
            .tensor("gain")
            .unwrap_err();
        assert_eq!(fault.code(), "unknown-tensor");
        assert_eq!(fault.tensor(), Some("gain"));
        assert_eq!(fault.to_string(), "tensor `gain`: there is no such tensor");
    }
}
