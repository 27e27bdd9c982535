//! A tensor in memory, and the interface through which writers read tensors.

use alloc::borrow::{Cow, ToOwned};
use alloc::vec::Vec;

use crate::dtype::Dtype;
use crate::error::FormatError;
use crate::extent::{self, ExtentError, dims, to_u64, to_usize};
use crate::selection::{Index, Selection, SelectionError};

/// The interface through which a writer reads a tensor. Implement it for a framework's own tensors to write them with
/// [`crate::serialize`] or [`crate::to_vec`].
///
/// It is implemented for [`TensorView`] and `&TensorView` only, not for every `&V`: many programs implement it for
/// their type and for references to it, and a blanket implementation would conflict with theirs.
///
/// ```
/// use std::borrow::Cow;
/// use ingot_format::{Dtype, SafeTensors, View, safetensors};
///
/// struct Matrix { shape: [usize; 2], elements: Vec<f32> }
///
/// impl View for Matrix {
///     fn dtype(&self) -> Dtype { Dtype::F32 }
///     fn shape(&self) -> &[usize] { &self.shape }
///     fn data(&self) -> Cow<'_, [u8]> { self.elements.iter().flat_map(|x| x.to_le_bytes()).collect() }
///     fn data_len(&self) -> usize { self.elements.len() * 4 }
/// }
///
/// let identity = Matrix { shape: [2, 2], elements: vec![1.0, 0.0, 0.0, 1.0] };
/// let file = safetensors::serialize([("identity", identity)], None)?;
/// assert_eq!(SafeTensors::deserialize(&file)?.tensor("identity")?.shape(), [2, 2]);
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
pub trait View {
    /// Type of the elements.
    fn dtype(&self) -> Dtype;

    /// Elements along each dimension, outermost first. Empty for a scalar.
    fn shape(&self) -> &[usize];

    /// The elements in file form: little-endian, in row-major order, without gaps. A writer calls this once per tensor,
    /// when it writes the tensor, so that tensors may be fetched from elsewhere one at a time.
    fn data(&self) -> Cow<'_, [u8]>;

    /// The number of bytes that [`View::data`] will return. A writer first calls this for all tensors, and rejects a
    /// length that does not fit shape and dtype before it writes anything.
    fn data_len(&self) -> usize;
}

/// A tensor in borrowed memory: its dtype, its shape, and exactly the bytes that they describe.
///
/// Shapes are `usize` here, as in the safetensors crate, and `u64` in headers. On machines with smaller addresses, a
/// file whose dimensions do not fit into `usize` is rejected when it is deserialized.
///
/// ```
/// use ingot_format::{Dtype, TensorView};
/// let bytes: Vec<u8> = [1.0_f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
/// let view = TensorView::new(Dtype::F32, vec![2], &bytes)?;
/// assert_eq!((view.dtype(), view.shape(), view.data()), (Dtype::F32, &[2][..], &bytes[..]));
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorView<'data> {
    dtype: Dtype,
    shape: Vec<usize>,
    data: &'data [u8],
}

impl<'data> TensorView<'data> {
    /// Creates a view of `data`.
    ///
    /// ```
    /// use ingot_format::{Dtype, TensorView};
    /// assert!(TensorView::new(Dtype::BF16, vec![2, 3], &[0; 12]).is_ok());
    /// let fault = TensorView::new(Dtype::BF16, vec![2, 3], &[0; 11]).unwrap_err();
    /// assert_eq!(fault.to_string(), "shape [2, 3] of BF16 needs 12 bytes, data has 11");
    /// ```
    ///
    /// # Errors
    /// [`FormatError::InvalidTensorView`] if the length of `data` does not fit shape and dtype, or if these have no
    /// size in bytes (rule F9).
    pub fn new(dtype: Dtype, shape: Vec<usize>, data: &'data [u8]) -> Result<Self, FormatError> {
        if extent::nbytes(dtype, &dims(&shape)) == Ok(to_u64(data.len())) {
            Ok(TensorView { dtype, shape, data })
        } else {
            Err(FormatError::InvalidTensorView(dtype, shape, data.len()))
        }
    }

    /// Creates a view whose dtype, shape and data are known to agree, because a [`crate::Header`] has proven it.
    pub(crate) fn proven(dtype: Dtype, shape: Vec<usize>, data: &'data [u8]) -> Self {
        TensorView { dtype, shape, data }
    }

    /// Type of the elements.
    ///
    /// ```
    /// # use ingot_format::{Dtype, TensorView};
    /// assert_eq!(TensorView::new(Dtype::U8, vec![1], &[7])?.dtype(), Dtype::U8);
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements along each dimension, outermost first. Empty for a scalar.
    ///
    /// ```
    /// # use ingot_format::{Dtype, TensorView};
    /// assert_eq!(TensorView::new(Dtype::U8, vec![2, 2], &[1, 2, 3, 4])?.shape(), [2, 2]);
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The bytes, with the lifetime of the buffer rather than of this view. They may have any alignment, so read wider
    /// elements with `from_le_bytes` or copy them.
    ///
    /// ```
    /// # use ingot_format::{Dtype, TensorView};
    /// let buffer = [1, 2, 3, 4];
    /// let data = TensorView::new(Dtype::I16, vec![2], &buffer)?.data();
    /// let elements: Vec<i16> = data.chunks(2).map(|x| i16::from_le_bytes([x[0], x[1]])).collect();
    /// assert_eq!(elements, [0x0201, 0x0403]);
    /// # Ok::<(), ingot_format::FormatError>(())
    /// ```
    #[must_use]
    pub fn data(&self) -> &'data [u8] {
        self.data
    }

    /// Returns the shape of the selection of `index` and a copy of its bytes. Use [`Selection::runs`] to find the bytes
    /// without copying them.
    ///
    /// ```
    /// # use ingot_format::{Dtype, Index, TensorView};
    /// let matrix = TensorView::new(Dtype::U8, vec![2, 3], &[1, 2, 3, 4, 5, 6])?;
    /// let (shape, last_column) = matrix.select(&[Index::WHOLE, Index::At(-1)])?;
    /// assert_eq!((shape, last_column), (vec![2], vec![3, 6]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Like [`Selection::new`]; [`SelectionError::Extent`] also if the result does not fit into memory: a list with
    /// repeated indices can make it larger than the tensor.
    pub fn select(&self, index: &[Index]) -> Result<(Vec<usize>, Vec<u8>), SelectionError> {
        let selection = Selection::new(self.dtype, &dims(&self.shape), index)?;
        let mut bytes = Vec::new();
        let shape = selection.shape().iter().map(|&dim| to_usize(dim)).collect();
        let shape: Option<Vec<usize>> = to_usize(selection.nbytes())
            .and_then(|len| bytes.try_reserve_exact(len).ok())
            .and(shape);
        let Some(shape) = shape else {
            return Err(SelectionError::Extent {
                dtype: self.dtype,
                shape: selection.shape().to_owned(),
                reason: ExtentError::Overflow,
            });
        };
        for run in selection.runs() {
            // Always in range: the selection is proven to be inside a tensor of this shape, and `data` has that size.
            let run = to_usize(run.begin).zip(to_usize(run.end));
            bytes.extend_from_slice(
                run.and_then(|(begin, end)| self.data.get(begin..end))
                    .unwrap_or_default(),
            );
        }
        Ok((shape, bytes))
    }
}

impl View for TensorView<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.data)
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}

impl View for &TensorView<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.data)
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use alloc::vec;

    #[test]
    fn refuses_data_of_another_length() {
        let fault = TensorView::new(Dtype::F32, vec![2, 3], &[0; 20]).unwrap_err();
        assert_eq!(fault, FormatError::InvalidTensorView(Dtype::F32, vec![2, 3], 20));
        assert_eq!(fault.code(), "wrong-length");
        assert_eq!(fault.expected_found(), Some((24, 20)));
        assert_eq!(
            fault.to_string(),
            "shape [2, 3] of F32 needs 24 bytes, data has 20"
        );
    }

    #[test]
    fn refuses_shapes_without_a_size() {
        let overflow = TensorView::new(Dtype::U8, vec![usize::MAX, 9], &[]).unwrap_err();
        assert_eq!(overflow.code(), "size-overflow");
        let half = TensorView::new(Dtype::F4, vec![3], &[0, 0]).unwrap_err();
        assert_eq!(half.code(), "partial-byte");
        assert_eq!(half.to_string(), "shape [3] of F4: its 12 bits end inside a byte");
        assert!(TensorView::new(Dtype::F4, vec![4], &[0, 0]).is_ok());
    }

    #[test]
    fn selects_repeated_and_no_places() {
        let row = TensorView::new(Dtype::U8, vec![1, 1 << 20], &[7; 1 << 20]).unwrap();
        let (shape, bytes) = row.select(&[Index::from(vec![0, 0]), Index::from(..2)]).unwrap();
        assert_eq!((shape, bytes), (vec![2, 2], vec![7; 4]));
        let empty = row.select(&[Index::from(1..)]).unwrap();
        assert_eq!(empty, (vec![0, 1 << 20], vec![]));
    }

    #[test]
    fn a_view_is_written_as_it_is_and_so_is_a_reference_to_it() {
        fn fields(view: impl View) -> (Dtype, Vec<usize>, Vec<u8>, usize) {
            (
                view.dtype(),
                view.shape().to_vec(),
                view.data().into_owned(),
                view.data_len(),
            )
        }
        let view = TensorView::new(Dtype::U16, vec![2, 1], b"abcd").unwrap();
        let expected = (Dtype::U16, vec![2, 1], b"abcd".to_vec(), 4);
        assert_eq!((fields(&view), fields(view)), (expected.clone(), expected));
    }

    #[test]
    fn accepts_scalars_and_empty_tensors() {
        assert!(TensorView::new(Dtype::F64, vec![], &[0; 8]).is_ok());
        assert!(TensorView::new(Dtype::F64, vec![0, 3], &[]).is_ok());
    }
}
