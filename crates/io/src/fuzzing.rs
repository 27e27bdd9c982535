//! Items for the fuzz targets only. No part of the API.

use ingot_format::Dtype;

use crate::convert::naive;
use crate::memory::Dest;
pub use crate::writer::journal_model::{Step, run};

/// The number that a pattern of a float represents, computed from the shape of its dtype alone; `None` for NaN.
#[must_use]
pub fn value(dtype: Dtype, pattern: u32) -> Option<f64> {
    naive::value(dtype, pattern)
}

/// Elements of `itemsize` bytes in `memory`, in which all of them have to be. `strides` are in bytes.
#[must_use]
pub fn strided<'a>(
    memory: &'a mut [u8],
    itemsize: usize,
    shape: &[usize],
    strides: &[isize],
) -> Option<Dest<'a>> {
    Dest::over(memory, itemsize, shape, strides)
}
