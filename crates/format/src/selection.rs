//! Slices of a tensor.
