//! Basic indices as strides: what they take without copying.

use alloc::vec::Vec;

use super::{Index, SelectionError, Taken, take};

/// Where the elements that an index takes lie among those of the tensor, which are in C order. Counted in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strides {
    /// The first element.
    pub begin: u64,
    /// The last element.
    pub end: u64,
    /// The shape of the result.
    pub shape: Vec<u64>,
    /// From one element to the next along each dimension of the result. 0 where there is no next.
    pub strides: Vec<u64>,
}

impl Strides {
    /// What `index` takes of a tensor of this shape. `None` where it takes a list of places, or nothing. The number of the
    /// tensor's elements has to fit, as it does for every tensor of a file.
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
    /// When the index does not fit the shape.
    pub fn new(shape: &[u64], index: &[Index]) -> Result<Option<Strides>, SelectionError> {
        let (taken, result) = take(shape, index)?;
        let is_list = index.iter().any(|part| matches!(part, Index::Pick(_)));
        if is_list || result.contains(&0) {
            return Ok(None);
        }
        // Of no dimension is anything empty, so that the products are no larger than that of all.
        let mut unit = 1;
        let (mut begin, mut end) = (0, 0);
        let mut steps = Vec::with_capacity(taken.len());
        for (taken, dim) in taken.iter().zip(shape).rev() {
            let Taken::Even { start, count, step } = *taken else {
                return Ok(None);
            };
            // With one turn the step may be longer than the dimension, and the product overflow.
            let stride = if count > 1 { step * unit } else { 0 };
            begin += start * unit;
            end += start * unit + (count - 1) * stride;
            steps.push(stride);
            unit *= dim;
        }
        let spoken_of = index.iter().filter(|part| part.takes_a_dimension()).count();
        let left_over = taken.len() - spoken_of;
        // The first dimension last, as they are wanted.
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
