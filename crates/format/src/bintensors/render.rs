//! Writing the binary header.

use alloc::vec::Vec;

use crate::header::Header;

/// Appends the binary form of `header`, without length and padding.
pub(crate) fn render(_header: &Header, _out: &mut Vec<u8>) {}
