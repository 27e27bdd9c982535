//! The `.safetensors` format: a JSON header.
//!
//! Has the names of the safetensors crate, its modules `slice` and `tensor` among them.

#[cfg(feature = "std")]
pub use crate::tensor;
pub use crate::{Dtype, SafeTensorError, SafeTensors, TensorView, View, slice};

#[cfg(feature = "std")]
crate::serialize::serialize_as!(crate::Format::Safetensors, "safetensors", "SafeTensors");
