//! What the fuzz targets need and nobody else should see. No part of the API.

use ingot_format::Dtype;

use crate::convert::naive;
use crate::memory::StridedDest;
pub use crate::writer::journal_model::{Step, run};

/// The number that a pattern of a float stands for, found by the shape of its dtype alone; `None` for NaN.
#[must_use]
pub fn value(dtype: Dtype, pattern: u32) -> Option<f64> {
    naive::value(dtype, pattern)
}

/// Elements of `itemsize` bytes in `memory`, in which all of them have to lie. `strides` are in bytes.
#[must_use]
pub fn strided<'a>(
    memory: &'a mut [u8],
    itemsize: usize,
    shape: &[usize],
    strides: &[isize],
) -> Option<StridedDest<'a>> {
    StridedDest::over(memory, itemsize, shape, strides)
}
