//! Basic indices as strides, for views without copying.

use alloc::vec::Vec;

use super::{Index, SelectionError, Taken, Units, take};

/// The positions of the selected elements among the tensor's elements, which are in C order. Counted in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strides {
    /// The first element.
    pub begin: u64,
    /// The last element.
    pub end: u64,
    /// The shape of the result.
    pub shape: Vec<u64>,
    /// Distance from one element to the next along each dimension of the result. 0 for a dimension of one element.
    pub strides: Vec<u64>,
}

impl Strides {
    /// Computes the strides of `index` for a tensor of this shape. `None` if it has a list of indices, or selects
    /// nothing. The product of `shape` must fit into 64 bits, as it does for every tensor of a file.
    ///
    /// ```
    /// use ingot_format::{Index, Strides};
    /// let columns = Strides::new(&[6, 5], &[Index::WHOLE, Index::from(1..3)])?.unwrap();
    /// assert_eq!((columns.begin, columns.end), (1, 27));
    /// assert_eq!((columns.shape, columns.strides), (vec![6, 2], vec![5, 1]));
    /// # Ok::<(), ingot_format::SelectionError>(())
    /// ```
    ///
    /// # Errors
    /// If the index does not fit the shape.
    pub fn new(shape: &[u64], index: &[Index]) -> Result<Option<Strides>, SelectionError> {
        Strides::of(shape, None, index)
    }

    /// As [`Strides::new`], for a tensor with these `strides` along each dimension, if given. They must be strides that
    /// [`Selection::strided`](super::Selection::strided) accepts.
    ///
    /// # Errors
    /// If the index does not fit the shape.
    pub fn of(
        shape: &[u64],
        strides: Option<&[u64]>,
        index: &[Index],
    ) -> Result<Option<Strides>, SelectionError> {
        let (taken, result) = take(shape, index)?;
        let is_list = index.iter().any(|part| matches!(part, Index::Pick(_)));
        if is_list || result.contains(&0) {
            return Ok(None);
        }
        // No dimension is empty, so no partial product exceeds the product of all dimensions.
        let mut units = Units::new(1, shape, strides);
        let (mut begin, mut end) = (0, 0);
        let mut steps = Vec::with_capacity(taken.len());
        for taken in taken.iter().rev() {
            let unit = units.next();
            let Taken::Even { start, count, step } = *taken else {
                return Ok(None);
            };
            // If only one element is selected, the step may be larger than the dimension, and the product could overflow.
            let stride = if count > 1 { step * unit } else { 0 };
            begin += start * unit;
            end += start * unit + (count - 1) * stride;
            steps.push(stride);
        }
        let spoken_of = index.iter().filter(|part| part.takes_a_dimension()).count();
        let left_over = taken.len() - spoken_of;
        // The first dimension comes last, so that `pop` returns the dimensions in order.
        let mut next = || steps.pop().unwrap_or(0);
        let mut strides = Vec::with_capacity(result.len());
        for part in index {
            match part {
                Index::At(_) => drop(next()),
                Index::Rest => strides.extend((0..left_over).map(|_| next())),
                Index::NewAxis => strides.push(0),
                Index::Span { .. } | Index::Pick(_) => strides.push(next()),
            }
        }
        strides.extend((strides.len()..result.len()).map(|_| next()));
        Ok(Some(Strides {
            begin,
            end,
            shape: result,
            strides,
        }))
    }
}
