//! Conversion between the bytes of a header and its claims. Only the syntax is checked here.
//!
//! The result of reading is a [`RawHeader`](crate::raw::RawHeader), whose claims `header` proves.

pub(crate) mod binary;
pub(crate) mod json;
