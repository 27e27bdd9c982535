//! [`ingot_io`] under the name of the safetensors crate, for programs whose libraries ask for that one:
//!
//! ```toml
//! [patch.crates-io]
//! safetensors = { path = "../ingot/crates/safetensors" }
//! ```
//!
//! Cargo takes a patch only from a package that bears the name of what it replaces, and that is all that this one adds:
//! it has the names of safetensors 0.8.0, and no others. A program of one's own writes
//! `safetensors = { package = "ingot-io", … }` in place of a patch, and has all of ingot.

pub use ingot_io::{Dtype, SafeTensorError, SafeTensors, View, serialize, serialize_to_file, slice, tensor};
