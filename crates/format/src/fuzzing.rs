//! Entry points for the fuzz targets only. Not part of the API.

use alloc::string::String;

/// Compares the fast reader of JSON headers with the reference reader. Returns `Ok(true)` if the fast reader parsed
/// `text` and both agree, `Ok(false)` if it left `text` to the reference reader.
///
/// # Errors
/// A description of the difference.
pub fn quick_equals_reference(text: &str) -> Result<bool, String> {
    crate::codec::json::compare(text)
}
