//! The `.safetensors` format: a JSON header.
//!
//! This module has the names of the safetensors crate, including its modules `slice` and `tensor`.
//!
//! ```
//! use ingot_format::safetensors::slice::IndexOp;
//! use ingot_format::safetensors::{Dtype, SafeTensorError, SafeTensors, TensorView, serialize};
//!
//! let table = TensorView::new(Dtype::U8, vec![3, 2], b"abcdef")?;
//! let file = serialize([("table", &table)], None)?;
//! let tensors = SafeTensors::deserialize(&file)?;
//! let rows = tensors.tensor("table")?.slice(1..).map(|rows| rows.flatten().copied().collect::<Vec<u8>>());
//! assert_eq!(rows.as_deref(), Ok(&b"cdef"[..]));
//! # Ok::<(), SafeTensorError>(())
//! ```

#[cfg(feature = "std")]
pub use crate::tensor;
pub use crate::{Dtype, SafeTensorError, SafeTensors, TensorView, View, slice};

#[cfg(feature = "std")]
crate::serialize::serialize_as!(crate::Format::Safetensors, "safetensors", "SafeTensors");
