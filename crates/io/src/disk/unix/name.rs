//! Names of files, which are bytes.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// A name as bytes that [`name_of`] takes.
#[allow(clippy::unnecessary_wraps, reason = "on Windows a name may be no text")]
pub(crate) fn name_bytes(name: &OsStr) -> Option<&[u8]> {
    Some(name.as_bytes())
}

/// Return the name that [`name_bytes`] encoded as these bytes.
#[allow(clippy::unnecessary_wraps, reason = "on Windows not all bytes are a name")]
pub(crate) fn name_of(bytes: &[u8]) -> Option<OsString> {
    Some(OsString::from_vec(bytes.to_vec()))
}

/// Shorten a name to at most `most` bytes, for names that contain it. Some systems refuse names that are not UTF-8, so
/// no character is cut in two.
pub(crate) fn cut(name: &OsStr, most: usize) -> Cow<'_, OsStr> {
    let bytes = name.as_bytes();
    let end = match name.to_str() {
        _ if bytes.len() <= most => bytes.len(),
        Some(text) => (0..=most)
            .rev()
            .find(|&cut| text.is_char_boundary(cut))
            .unwrap_or(0),
        None => most,
    };
    OsStr::from_bytes(&bytes[..end]).into()
}
