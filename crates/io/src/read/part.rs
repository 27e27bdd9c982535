//! What is wanted of a tensor, and memory of the caller that it fits.

use std::ops::Range;

use ingot_format::{Dtype, Index, Selection, to_u64};

use super::plan::{Piece, Place};
use crate::convert::{converts, is_float};
use crate::error::{Error, Failure, Misfit, size};
use crate::file::Tensor;
use crate::memory::{Region, StridedDest, alignment};

/// What is wanted of a tensor, and as what. Proven to be possible.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    tensor: Tensor<'a>,
    /// `None` for all of it. Boxed, since most parts are whole tensors, of which there are many.
    selection: Option<Box<Selection>>,
    /// Whether the index has a list of places. Its result is always a copy.
    has_list: bool,
    dtype: Dtype,
}

impl<'a> Part<'a> {
    /// What `index` takes of `tensor`; an empty index takes all. Floats are converted to `dtype`, if there is one. What
    /// is no float stays what it is.
    ///
    /// # Errors
    /// [`Error::Slice`] when the index does not fit; [`Error::Conversion`] between dtypes that are not converted.
    pub fn new(tensor: Tensor<'a>, index: &[Index], dtype: Option<Dtype>) -> Result<Part<'a>, Error> {
        let selection = match index {
            [] => None,
            index => Some(Box::new(tensor.selection(index)?)),
        };
        let stored = tensor.entry().dtype;
        let dtype = dtype.filter(|_| is_float(stored)).unwrap_or(stored);
        if !converts(stored, dtype) {
            return Err(Error::Conversion {
                path: tensor.archive().path().map(ToOwned::to_owned),
                tensor: tensor.entry().name.to_owned(),
                stored,
                wanted: dtype,
            });
        }
        Ok(Part {
            tensor,
            selection,
            has_list: index.iter().any(|part| matches!(part, Index::Pick(_))),
            dtype,
        })
    }

    /// The bytes of `tensor` in `range`, counted from its first byte. The range is clipped to the tensor, and may begin
    /// and end anywhere, also where elements are narrower than a byte.
    ///
    /// # Errors
    /// [`Error::Slice`] if the range cannot be an index.
    pub fn bytes(tensor: Tensor<'a>, range: Range<i64>) -> Result<Part<'a>, Error> {
        let nbytes = [tensor.entry().nbytes()];
        let selection = Selection::new(Dtype::U8, &nbytes, &[range.into()]);
        Ok(Part {
            tensor,
            selection: Some(Box::new(selection.map_err(|fault| tensor.misindexed(fault))?)),
            has_list: false,
            dtype: tensor.entry().dtype,
        })
    }

    /// The tensor.
    #[must_use]
    pub fn tensor(&self) -> &Tensor<'a> {
        &self.tensor
    }

    /// The shape of the result.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        let selected = self.selection.as_deref().map(Selection::shape);
        selected.unwrap_or(self.tensor.entry().shape)
    }

    /// The dtype of the result.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The bytes of the result.
    ///
    /// Only dtypes of whole bytes are converted; for others both widths are one.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        let selected = self.selection.as_deref().map(Selection::nbytes);
        let stored = selected.unwrap_or_else(|| self.tensor.entry().nbytes());
        let width = |dtype: Dtype| dtype.bits().div_ceil(8);
        match self.converted() {
            Some((from, to)) => (stored / width(from)).saturating_mul(width(to)),
            None => stored,
        }
    }

    /// The dtypes in the file and in memory, where they differ.
    fn converted(&self) -> Option<(Dtype, Dtype)> {
        let stored = self.tensor.entry().dtype;
        (stored != self.dtype).then_some((stored, self.dtype))
    }

    /// What is to be read for it of the file with this number, without a place.
    pub(super) fn piece(&self, file: usize) -> Result<Piece<'_>, Failure> {
        let start = self.tensor.start();
        // What lies together needs no list of runs.
        let (position, gathered) = match self.selection.as_deref() {
            None => (start, None),
            Some(selection) if selection.is_contiguous() => {
                (start + selection.span().map_or(0, |run| run.begin), None)
            }
            Some(selection) => (start, Some(selection)),
        };
        Ok(Piece {
            file,
            position,
            gathered,
            converted: self.converted(),
            alignment: alignment(self.dtype),
            place: Place {
                nbytes: size(self.nbytes())?,
                ..Place::default()
            },
        })
    }

    /// The region of the mapping that holds the part unchanged, if there is one. A list is never read from the mapping,
    /// in which the caller may have changed values.
    pub(super) fn view(&self) -> Option<Region> {
        if self.has_list || self.converted().is_some() {
            return None;
        }
        match self.selection.as_deref() {
            Some(selection) => self.tensor.view(selection),
            None => self.tensor.mapped(),
        }
    }

    pub(super) fn refuse(&self, misfit: Misfit) -> Error {
        Error::Destination {
            path: self.tensor.archive().path().map(ToOwned::to_owned),
            tensor: self.tensor.entry().name.to_owned(),
            misfit,
        }
    }
}

impl<'a> From<Tensor<'a>> for Part<'a> {
    /// All of a tensor as it is.
    fn from(tensor: Tensor<'a>) -> Part<'a> {
        Part {
            tensor,
            selection: None,
            has_list: false,
            dtype: tensor.entry().dtype,
        }
    }
}

/// Memory of others for one part.
#[derive(Debug)]
pub struct Target<'d> {
    /// What its elements are.
    pub dtype: Dtype,
    /// How many there are, along each dimension.
    pub shape: &'d [u64],
    /// Where they lie. Of as many bytes as dtype and shape say.
    pub memory: StridedDest<'d>,
}

impl Target<'_> {
    pub(super) fn misfit(&self, part: &Part<'_>) -> Option<Misfit> {
        if self.dtype != part.dtype {
            return Some(Misfit::Dtype {
                expected: part.dtype,
                found: self.dtype,
            });
        }
        let fits = self.shape == part.shape() && part.nbytes() == to_u64(self.memory.len());
        (!fits).then(|| Misfit::Shape {
            expected: part.shape().to_owned(),
            found: self.shape.to_owned(),
        })
    }
}
