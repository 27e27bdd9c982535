//! What the fuzz targets need and nobody else should see. No part of the API.

use alloc::string::String;

/// Compares the quick reader of JSON headers with the reference reader: `Ok(true)` when the quick one took `text`
/// and both say the same, `Ok(false)` when it stepped aside.
///
/// # Errors
/// How they differ.
pub fn quick_equals_reference(text: &str) -> Result<bool, String> {
    crate::codec::json::compare(text)
}
