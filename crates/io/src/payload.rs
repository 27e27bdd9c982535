//! What a tensor's part of a file is made from.

use std::io;

use ingot_format::{FormatError, Header, to_u64, to_usize};

use crate::memory::{Bytes, Strided};

mod file;
mod gathered;
mod produced;
mod section;

pub use file::FileRange;
#[cfg(unix)]
pub(crate) use file::shares_blocks;
pub(crate) use gathered::Gathered;
pub use produced::Produce;
pub(crate) use section::Section;

/// The bytes of one tensor, on their way to a file.
#[derive(Clone, Debug)]
pub enum Payload<'a> {
    /// They lie in memory as the file is to have them.
    Bytes(Bytes<'a>),
    /// They lie in memory in another order. They are packed piece by piece, as they are written.
    Strided(Strided<'a>),
    /// They lie in another file. The system copies or shares them there, where it can.
    File(FileRange<'a>),
    /// They lie in a source that waits for each read.
    Section(Section<'a>),
    /// They are somewhere else, such as on another device, and are fetched piece by piece.
    Produced(&'a dyn Produce),
}

impl Payload<'_> {
    /// The size in bytes.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        match self {
            Payload::Bytes(bytes) => to_u64(bytes.len()),
            Payload::Strided(strided) => to_u64(strided.len()),
            Payload::File(range) => range.nbytes(),
            Payload::Section(section) => section.nbytes(),
            Payload::Produced(source) => source.nbytes(),
        }
    }

    /// Fills `into` with the bytes from `begin` on, all of it.
    ///
    /// # Errors
    /// When there are not that many; when another file, or whoever produces the bytes, does not give them.
    pub fn read(&self, begin: u64, into: &mut [u8]) -> io::Result<()> {
        let at = || to_usize(begin).ok_or(io::ErrorKind::InvalidInput);
        match self {
            Payload::Bytes(bytes) => bytes.read(at()?, into)?,
            Payload::Strided(strided) => strided.read(at()?, into)?,
            Payload::File(range) => range.read(begin, into)?,
            Payload::Section(section) => section.read(begin, into)?,
            Payload::Produced(source) => source.produce(begin, into)?,
        }
        Ok(())
    }
}

/// Proves that `payloads` have just the bytes that `header` promises: one for each tensor, in the order of the data, of its
/// size.
///
/// # Errors
/// [`FormatError::WrongLength`] for the first tensor of which that is not true, [`FormatError::TrailingBytes`] where there
/// are payloads left.
pub fn prove_sizes(header: &Header, payloads: &[Payload<'_>]) -> Result<(), FormatError> {
    let mut sizes = payloads.iter().map(Payload::nbytes);
    for entry in header.entries() {
        let (expected, found) = (entry.nbytes(), sizes.next().unwrap_or(0));
        if found != expected {
            return Err(FormatError::WrongLength {
                tensor: entry.name.to_owned(),
                dtype: entry.dtype,
                shape: entry.shape.to_owned(),
                expected,
                found,
            });
        }
    }
    prove_total(
        header.data_nbytes(),
        sizes.fold(header.data_nbytes(), u64::saturating_add),
    )
}

/// Proves that there are `expected` bytes of data.
pub(crate) fn prove_total(expected: u64, found: u64) -> Result<(), FormatError> {
    match found == expected {
        true => Ok(()),
        false => Err(FormatError::TrailingBytes { expected, found }),
    }
}

impl<'a> From<&'a [u8]> for Payload<'a> {
    fn from(bytes: &'a [u8]) -> Payload<'a> {
        Payload::Bytes(Bytes::from(bytes))
    }
}
