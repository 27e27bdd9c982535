//! The `.bt` format: a binary header.
//!
//! Has the names that the root of the bintensors crate has.

pub use crate::{BinTensors, Dtype, FormatError as BinTensorError, TensorView, View};

#[cfg(feature = "std")]
crate::serialize::serialize_as!(crate::Format::Bintensors, "bintensors", "BinTensors");
