//! Which of the two formats a file has.

use core::fmt;

/// A file format. What a file is, its content decides; what a new file becomes, the caller does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// `.safetensors`: a JSON header.
    Safetensors,
    /// `.bt`: a binary header, as bintensors 0.2 writes it.
    Bintensors,
}

impl Format {
    /// The name that options and messages use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Format::Safetensors => "safetensors",
            Format::Bintensors => "bintensors",
        }
    }

    /// The format of a header that starts with `first`, the byte after the length. The two cannot be confused:
    /// JSON starts with `{` or white space, a binary header with 0 or 1. The other control characters count as
    /// binary, because what starts with one was not meant as JSON; rule B1 then says what is wrong.
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
