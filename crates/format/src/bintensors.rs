//! The `.bt` format: a binary header.
//!
//! This module has the names that the root of the bintensors crate has.
//!
//! ```
//! use ingot_format::bintensors::{BinTensorError, BinTensors, Dtype, TensorView, serialize};
//!
//! let bias = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
//! let file = serialize([("bias", &bias)], None)?;
//! assert_eq!(BinTensors::deserialize(&file)?.names(), ["bias"]);
//!
//! let cut = BinTensors::deserialize(&file[..file.len() - 1]);
//! assert!(matches!(cut, Err(BinTensorError::Truncated { expected: 8, found: 7, .. })));
//! # Ok::<(), BinTensorError>(())
//! ```

pub use crate::{BinTensors, Dtype, FormatError as BinTensorError, TensorView, View};

#[cfg(feature = "std")]
crate::serialize::serialize_as!(crate::Format::Bintensors, "bintensors", "BinTensors");
