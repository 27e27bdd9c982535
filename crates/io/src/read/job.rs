//! The tensor or the part of it to read, and its destination.

use std::ops::Range;

use ingot_format::{Dtype, Index, Selection, SharedError, to_u64};

use super::plan::Piece;
use crate::convert::{converts, is_float};
use crate::device::Onto;
use crate::error::{Error, Failure, Misfit, size};
use crate::file::Tensor;
use crate::memory::{Dest, Region, alignment};

/// A tensor or a part of it, the dtype to read it as, and the memory to read it into.
///
/// A job exists only if it is possible: its index fits the tensor, and its dtypes convert.
///
/// ```
/// use ingot_io::{Archive, Dtype, Index, Job, MemorySource, OpenOptions, ReadOptions, Unwatched, read};
/// # use ingot_io::{TensorView, serialize};
///
/// # let file = serialize([("bias", TensorView::new(Dtype::U8, vec![4], b"abcd")?)], None)?;
/// let archive = Archive::from_source(MemorySource::new(file), &OpenOptions::default())?;
/// let last_two = Job::new(archive.find("bias")?, &[Index::from(-2..)], None)?;
/// let found = read([last_two], &ReadOptions::new(), &Unwatched)?;
/// assert_eq!(found[0].as_slice()?, b"cd");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Job<'a> {
    tensor: Tensor<'a>,
    /// `None` for the whole tensor. Boxed, since most jobs read whole tensors, and there may be many.
    selection: Option<Box<Selection>>,
    /// Whether the index has a list of places. Its result is always a copy.
    has_list: bool,
    dtype: Dtype,
    /// The device to read onto; `None` for the host.
    onto: Option<&'a Onto>,
}

impl<'a> Job<'a> {
    /// Read what `index` selects of `tensor`; an empty index selects everything. Floats are converted to `dtype` if it is
    /// given. Other dtypes stay as they are.
    ///
    /// # Errors
    /// [`Failure::Slice`] if the index does not fit; [`Failure::Conversion`] if the dtypes do not convert.
    pub fn new(tensor: Tensor<'a>, index: &[Index], dtype: Option<Dtype>) -> Result<Job<'a>, Error> {
        let selection = match index {
            [] if tensor.strides().is_none() => None,
            index => Some(Box::new(tensor.selection(index)?)),
        };
        let stored = tensor.entry().dtype;
        let dtype = dtype.filter(|_| is_float(stored)).unwrap_or(stored);
        if !converts(stored, dtype) {
            let failure = Failure::Conversion {
                stored,
                wanted: dtype,
            };
            return Err(failure.about(tensor.archive().path(), Some(tensor.entry().name)));
        }
        Ok(Job {
            selection,
            has_list: index.iter().any(|part| matches!(part, Index::Pick(_))),
            dtype,
            ..Job::from(tensor)
        })
    }

    /// Read the bytes of `tensor` in `range`, counted from its first byte. The range is clipped to the tensor, and may begin
    /// and end anywhere, even inside an element.
    ///
    /// # Errors
    /// [`Failure::Slice`] if the range cannot be an index; [`Failure::Shared`] for an alias of a part that is not contiguous.
    pub fn bytes(tensor: Tensor<'a>, range: Range<i64>) -> Result<Job<'a>, Error> {
        if tensor.strides().is_some() {
            let fault = SharedError::about(tensor.entry().name, "has it as a part that is not contiguous");
            return Err(Failure::Shared(fault).about(tensor.archive().path(), None));
        }
        let nbytes = [tensor.entry().nbytes()];
        let selection = Selection::new(Dtype::U8, &nbytes, &[range.into()]);
        Ok(Job {
            selection: Some(Box::new(selection.map_err(|fault| tensor.misindexed(fault))?)),
            ..Job::from(tensor)
        })
    }

    /// Read onto a device instead of the host, if one is given.
    #[doc(hidden)]
    #[must_use]
    pub fn onto(self, onto: Option<&'a Onto>) -> Job<'a> {
        Job { onto, ..self }
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

    /// The size of the result in bytes.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        let selected = self.selection.as_deref().map(Selection::nbytes);
        let stored = selected.unwrap_or_else(|| self.tensor.entry().nbytes());
        // Only dtypes of whole bytes are converted.
        let width = |dtype: Dtype| dtype.bits().div_ceil(8);
        match self.converted() {
            Some((from, to)) => (stored / width(from)).saturating_mul(width(to)),
            None => stored,
        }
    }

    /// The dtypes in the file and in memory, if they differ.
    fn converted(&self) -> Option<(Dtype, Dtype)> {
        let stored = self.tensor.entry().dtype;
        (stored != self.dtype).then_some((stored, self.dtype))
    }

    /// The device to read onto.
    pub(crate) fn device(&self) -> Option<&'a Onto> {
        self.onto
    }

    /// The bytes to read of file number `file`, without a place in memory.
    pub(super) fn piece(&self, file: usize) -> Result<Piece<'_>, Failure> {
        let start = self.tensor.start();
        // Contiguous bytes need no list of runs.
        let (position, gathered) = match self.selection.as_deref() {
            None => (start, None),
            Some(selection) if selection.is_contiguous() => {
                (start + selection.span().map_or(0, |run| run.begin), None)
            }
            Some(selection) => (start, Some(selection)),
        };
        Ok(Piece {
            gathered,
            converted: self.converted(),
            alignment: alignment(self.dtype),
            ..Piece::straight(file, position, size(self.nbytes())?)
        })
    }

    /// Return the region of the file's mapping that holds the result unchanged, if there is one. A list is never read from
    /// the mapping, in which the caller may have changed values.
    pub(super) fn view(&self) -> Option<Region> {
        if self.has_list || self.onto.is_some() || self.converted().is_some() {
            return None;
        }
        let view = match self.selection.as_deref() {
            Some(selection) => self.tensor.view(selection),
            None => self.tensor.mapped(),
        };
        view.map(|region| region.of(self.dtype))
    }

    pub(super) fn refuse(&self, misfit: Misfit) -> Error {
        Failure::Destination(misfit).about(self.tensor.archive().path(), Some(self.tensor.entry().name))
    }
}

impl<'a> From<Tensor<'a>> for Job<'a> {
    /// Read a whole tensor as it is, to the host.
    fn from(tensor: Tensor<'a>) -> Job<'a> {
        Job {
            tensor,
            // The selection of an alias was made with the table of aliases.
            selection: tensor
                .strides()
                .and_then(|_| tensor.selection(&[]).ok())
                .map(Box::new),
            has_list: false,
            dtype: tensor.entry().dtype,
            onto: None,
        }
    }
}

/// The caller's memory for one job.
#[derive(Debug)]
pub struct Target<'d> {
    /// The dtype of the elements.
    pub dtype: Dtype,
    /// The number of elements along each dimension.
    pub shape: &'d [u64],
    /// The memory, with as many bytes as dtype and shape need.
    pub memory: Dest<'d>,
}

impl Target<'_> {
    /// Return why the target does not fit its job.
    pub(super) fn misfit(&self, job: &Job<'_>) -> Option<Misfit> {
        if self.dtype != job.dtype {
            return Some(Misfit::Dtype {
                expected: job.dtype,
                found: self.dtype,
            });
        }
        let fits = self.shape == job.shape() && job.nbytes() == to_u64(self.memory.len());
        (!fits).then(|| Misfit::Shape {
            expected: job.shape().to_owned(),
            found: self.shape.to_owned(),
        })
    }
}
