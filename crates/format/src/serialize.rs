//! Serialization of tensors to whole files.

use alloc::borrow::{Cow, ToOwned};
use alloc::vec::Vec;

use crate::entry::Spec;
use crate::error::FormatError;
use crate::extent::{to_u64, to_usize};
use crate::format::Format;
use crate::layout::{Layout, layout};
use crate::view::View;

/// Returns the bytes of a file that holds `data` and `metadata`. Does the same as [`crate::serialize`] for either
/// format. It does not need `std`, whose `HashMap` is an argument there.
///
/// The same input produces the same bytes, in any order of the input.
///
/// ```
/// use ingot_format::{Dtype, Format, SafeTensors, TensorView, to_vec};
/// let bias = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
/// let file = to_vec([("bias", bias)], Some(&[("license", "MIT")]), Format::Safetensors)?;
/// let tensors = SafeTensors::deserialize(&file)?;
/// assert_eq!(tensors.tensor("bias")?.data(), b"12345678");
/// assert_eq!(tensors.header().metadata().and_then(|metadata| metadata.get("license")), Some("MIT"));
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
///
/// # Errors
/// Errors of [`layout()`]; [`FormatError::WrongLength`] if a tensor's bytes do not fit its shape and dtype;
/// [`FormatError::TooLargeForMemory`].
pub fn to_vec<S: AsRef<str>, V: View>(
    data: impl IntoIterator<Item = (S, V)>,
    metadata: Option<&[(&str, &str)]>,
    format: Format,
) -> Result<Vec<u8>, FormatError> {
    let contents = Contents::new(data, metadata, format)?;
    let file_nbytes = contents.layout.header.file_nbytes();
    let mut file = Vec::new();
    // Views may fetch their bytes from elsewhere, so all of them together need not fit into memory.
    to_usize(file_nbytes)
        .and_then(|len| file.try_reserve_exact(len).ok())
        .ok_or(FormatError::TooLargeForMemory { nbytes: file_nbytes })?;
    file.extend_from_slice(contents.head());
    for data in contents.data() {
        file.extend_from_slice(&data?);
    }
    Ok(file)
}

/// A file that is ready to be written: every tensor has its position, and its announced size is correct. For writing to
/// targets that this crate does not support itself.
///
/// ```
/// use ingot_format::{Contents, Dtype, Format, TensorView};
/// let bias = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
/// let contents = Contents::new([("bias", bias)], None, Format::Safetensors)?;
/// let mut file = contents.head().to_vec();
/// for data in contents.data() {
///     file.extend_from_slice(&data?);
/// }
/// assert!(file.ends_with(b"12345678"));
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
#[derive(Debug)]
pub struct Contents<S, V> {
    layout: Layout,
    tensors: Vec<(S, V)>,
}

impl<S: AsRef<str>, V: View> Contents<S, V> {
    /// Lays out a file of `format` with `data` and `metadata`.
    ///
    /// # Errors
    /// Errors of [`layout()`]; [`FormatError::WrongLength`] if the announced size of a tensor does not fit its shape
    /// and dtype.
    pub fn new(
        data: impl IntoIterator<Item = (S, V)>,
        metadata: Option<&[(&str, &str)]>,
        format: Format,
    ) -> Result<Self, FormatError> {
        let tensors: Vec<(S, V)> = data.into_iter().collect();
        let mut dims: Vec<u64> = Vec::new();
        for (_, view) in &tensors {
            dims.extend(view.shape().iter().copied().map(to_u64));
        }
        let mut rest = dims.as_slice();
        let specs: Vec<Spec<'_>> = tensors
            .iter()
            .map(|(name, view)| {
                // If a view's shape changes between two calls, its length is wrong, which is detected below; this must
                // not panic.
                let (shape, after) = rest.split_at(view.shape().len().min(rest.len()));
                rest = after;
                Spec {
                    name: name.as_ref(),
                    dtype: view.dtype(),
                    shape,
                }
            })
            .collect();
        let layout = layout(&specs, metadata, format)?;
        let contents = Contents { layout, tensors };
        for number in 0..contents.tensors.len() {
            let found = contents.view(number).data_len();
            contents.expect_nbytes(number, found)?;
        }
        Ok(contents)
    }

    /// Returns the layout of the file.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The file's bytes before the data: the length, the header, the padding.
    #[must_use]
    pub fn head(&self) -> &[u8] {
        &self.layout.head
    }

    /// Iterates over the tensors' bytes in file order. Each view is called only when its turn comes.
    ///
    /// # Errors
    /// [`FormatError::WrongLength`] if a tensor returns more or fewer bytes than it announced.
    pub fn data(&self) -> impl ExactSizeIterator<Item = Result<Cow<'_, [u8]>, FormatError>> {
        (0..self.tensors.len()).map(|number| {
            let data = self.view(number).data();
            // Checked again, because the trait cannot force a view to return the announced size, and a wrong header
            // must not be written.
            self.expect_nbytes(number, data.len())?;
            Ok(data)
        })
    }

    /// Returns the tensor at `number` in data order.
    fn view(&self, number: usize) -> &V {
        &self.tensors[self.layout.order[number]].1
    }

    /// Checks that `found` is the size of the tensor at `number` in data order.
    fn expect_nbytes(&self, number: usize, found: usize) -> Result<(), FormatError> {
        let found = to_u64(found);
        match self.layout.header.entry(number) {
            Some(entry) if entry.nbytes() != found => Err(FormatError::WrongLength {
                tensor: entry.name.to_owned(),
                dtype: entry.dtype,
                shape: entry.shape.to_owned(),
                expected: entry.nbytes(),
                found,
            }),
            _ => Ok(()),
        }
    }
}

/// `serialize` of one format, with the signature that the safetensors crate has.
#[cfg(feature = "std")]
macro_rules! serialize_as {
    ($format:expr, $name:literal, $tensors:literal) => {
        #[doc = concat!("The ", $name, " file that holds `data` and `metadata`, in memory.")]
        ///
        /// The same input produces the same bytes, in any order of the input. [`crate::to_vec`] does the same without
        /// `std`.
        ///
        /// ```
        /// use std::collections::HashMap;
        #[doc = concat!("use ingot_format::{Dtype, ", $tensors, ", TensorView, ", $name, "};")]
        /// let bias = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
        /// let metadata = HashMap::from([("license".to_owned(), "MIT".to_owned())]);
        #[doc = concat!("let file = ", $name, "::serialize([(\"bias\", &bias)], Some(metadata))?;")]
        #[doc = concat!("assert_eq!(", $tensors, "::deserialize(&file)?.tensor(\"bias\")?, bias);")]
        /// # Ok::<(), ingot_format::FormatError>(())
        /// ```
        ///
        /// # Errors
        /// A duplicate or reserved name, a size that overflows or ends inside a byte, a dtype that the format lacks, a
        /// header that is too large, bytes that do not fit shape and dtype, too little memory.
        #[allow(
            clippy::implicit_hasher,
            reason = "a caller who passes `None` would have to name a hasher"
        )]
        pub fn serialize<S: AsRef<str>, V: $crate::View>(
            data: impl IntoIterator<Item = (S, V)>,
            metadata: Option<std::collections::HashMap<std::string::String, std::string::String>>,
        ) -> Result<std::vec::Vec<u8>, $crate::FormatError> {
            let metadata = $crate::serialize::pairs(metadata.as_ref());
            $crate::to_vec(data, metadata.as_deref(), $format)
        }
    };
}

#[cfg(feature = "std")]
pub(crate) use serialize_as;

/// Borrows the pairs of a map.
#[cfg(feature = "std")]
pub(crate) fn pairs(
    metadata: Option<&std::collections::HashMap<std::string::String, std::string::String>>,
) -> Option<Vec<(&str, &str)>> {
    let pairs = metadata?
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()));
    Some(pairs.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, SafeTensors, TensorView};
    use alloc::string::ToString;
    use alloc::vec;

    fn view(dtype: Dtype, shape: &[usize], data: &'static [u8]) -> TensorView<'static> {
        TensorView::new(dtype, shape.to_vec(), data).unwrap()
    }

    fn to_safetensors<V: View>(data: Vec<(&str, V)>) -> Result<Vec<u8>, FormatError> {
        to_vec(data, None, Format::Safetensors)
    }

    /// A view that announces one size and returns another.
    pub(super) struct Liar {
        pub(super) claimed: usize,
        pub(super) given: usize,
    }

    impl View for Liar {
        fn dtype(&self) -> Dtype {
            Dtype::F32
        }
        fn shape(&self) -> &[usize] {
            &[2, 3]
        }
        fn data(&self) -> Cow<'_, [u8]> {
            vec![0; self.given].into()
        }
        fn data_len(&self) -> usize {
            self.claimed
        }
    }

    #[test]
    fn a_written_file_reads_back() {
        let file = to_safetensors(vec![
            ("mask", view(Dtype::U8, &[3], b"abc")),
            ("bias", view(Dtype::F32, &[2], b"12345678")),
            ("empty", view(Dtype::F64, &[0, 4], b"")),
        ])
        .unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(tensors.names(), ["empty", "bias", "mask"]);
        assert_eq!(tensors.tensor("mask").unwrap().data(), b"abc");
        assert_eq!(tensors.tensor("bias").unwrap().data(), b"12345678");
        assert_eq!(tensors.tensor("empty").unwrap().shape(), [0, 4]);
        assert_eq!(tensors.iter().len(), 3);
        assert_eq!(tensors.tensors().len(), 3);
    }

    #[test]
    fn refuses_two_tensors_with_one_name() {
        let byte = view(Dtype::U8, &[1], b"a");
        let fault = to_safetensors(vec![("a", &byte), ("b", &byte), ("a", &byte)]).unwrap_err();
        assert_eq!(fault.code(), "duplicate-tensor");
        assert_eq!(fault.tensor(), Some("a"));
    }

    #[test]
    fn refuses_the_reserved_name() {
        let byte = view(Dtype::U8, &[1], b"a");
        let fault = to_safetensors(vec![(crate::METADATA_KEY, byte)]).unwrap_err();
        assert_eq!(fault, FormatError::ReservedName);
    }

    #[test]
    fn refuses_a_view_that_announces_or_returns_a_wrong_length() {
        for (claimed, given) in [(20, 24), (24, 20), (28, 28)] {
            let fault = to_safetensors(vec![("w", Liar { claimed, given })]).unwrap_err();
            assert_eq!(fault.code(), "wrong-length");
            assert_eq!(fault.tensor(), Some("w"));
            assert_eq!(fault.expected_found().unwrap().0, 24);
        }
        let fault = to_safetensors(vec![(
            "w",
            Liar {
                claimed: 20,
                given: 24,
            },
        )])
        .unwrap_err();
        assert_eq!(
            fault.to_string(),
            "tensor `w`: shape [2, 3] of F32 needs 24 bytes, data has 20"
        );
    }

    /// A view that needs more memory than any machine has.
    struct Vast;

    impl View for Vast {
        fn dtype(&self) -> Dtype {
            Dtype::U8
        }
        fn shape(&self) -> &[usize] {
            &[usize::MAX / 16]
        }
        fn data(&self) -> Cow<'_, [u8]> {
            unreachable!("asked for bytes that have no room")
        }
        fn data_len(&self) -> usize {
            usize::MAX / 16
        }
    }

    #[cfg(feature = "std")]
    #[test]
    fn the_metadata_of_a_map_is_stored() {
        let metadata: std::collections::HashMap<_, _> = [("format", "pt"), ("step", "7")]
            .map(|(key, value)| (key.to_string(), value.to_string()))
            .into();
        let tensors = [("w", view(Dtype::U8, &[1], &[7]))];
        let file = crate::safetensors::serialize(tensors, Some(metadata.clone())).unwrap();
        let (_, header) = SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(header.metadata(), &Some(metadata));
    }

    #[test]
    fn refuses_a_file_larger_than_memory() {
        let fault = to_safetensors(vec![("vast", Vast)]).unwrap_err();
        assert_eq!(fault.code(), "too-large-for-memory");
    }
}
