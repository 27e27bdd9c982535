//! The `.safetensors` format: a JSON header.
//!
//! Has the names of the safetensors crate, its modules `slice` and `tensor` among them.

mod json;
mod parse;
pub(crate) mod render;

#[cfg(feature = "fuzzing")]
pub(crate) use parse::compare;
pub(crate) use parse::{Compact, parse, plain_nbytes};
pub(crate) use render::{data_rank, render, render_metadata};

#[cfg(feature = "std")]
pub use crate::tensor;
pub use crate::{Dtype, SafeTensorError, SafeTensors, TensorView, View, slice};

#[cfg(feature = "std")]
crate::serialize::serialize_as!(crate::Format::Safetensors, "safetensors", "SafeTensors");
