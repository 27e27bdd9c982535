//! From the bytes of a header to what it says, and back: nothing is checked here but that it can be read.
//!
//! What is read is a [`RawHeader`](crate::raw::RawHeader), whose claims `header` proves.

pub(crate) mod binary;
pub(crate) mod json;
