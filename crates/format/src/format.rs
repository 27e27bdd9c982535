//! The two file formats.

use core::fmt;

/// A file format. Readers detect it from the file's contents; writers take it from the caller.
///
/// ```
/// use ingot_format::Format;
///
/// assert_eq!(Format::of_header(b'{'), Some(Format::Safetensors));
/// assert_eq!(Format::Bintensors.name(), "bintensors");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// `.safetensors`: a JSON header.
    Safetensors,
    /// `.bt`: a binary header, as bintensors 0.2 writes it.
    Bintensors,
}

impl Format {
    /// The name used in options and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Format::Safetensors => "safetensors",
            Format::Bintensors => "bintensors",
        }
    }

    /// Returns the format of a header that starts with `first`, the byte after the length. The two cannot be confused:
    /// JSON starts with `{` or white space, a binary header with 0 or 1. The other control characters count as binary,
    /// because no JSON starts with one; rule B1 then reports the fault.
    #[must_use]
    pub const fn of_header(first: u8) -> Option<Format> {
        match first {
            b'{' | b' ' | b'\t' | b'\n' | b'\r' => Some(Format::Safetensors),
            0..=0x1f => Some(Format::Bintensors),
            _ => None,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
