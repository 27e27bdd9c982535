//! The `.safetensors` format: a JSON header.
//!
//! Has the names that the root of the safetensors crate has.

mod json;
mod parse;
pub(crate) mod render;

#[cfg(feature = "fuzzing")]
pub(crate) use parse::compare;
pub(crate) use parse::{Compact, parse};
pub(crate) use render::{data_rank, render};

pub use crate::{Dtype, FormatError as SafeTensorError, SafeTensors, TensorView, View};

#[cfg(feature = "std")]
crate::serialize::serialize_as!(crate::Format::Safetensors, "safetensors", "SafeTensors");
