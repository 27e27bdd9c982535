//! One long read, of which only some is wanted.

use std::io::{self, Read};
use std::ops::Range;

use ingot_format::{to_u64, to_usize};

use crate::error::Failure;
use crate::source::Source;

/// Memory that what nobody wants passes through.
const WASTE_NBYTES: usize = 16 << 10;

/// The bytes of a span of a source, as they come.
pub(crate) struct Stream<'s> {
    bytes: Box<dyn Read + 's>,
    /// Where the next byte lies in the source.
    position: u64,
}

impl<'s> Stream<'s> {
    /// The bytes of `span`, where the source gives them like this.
    pub(crate) fn new(source: &'s dyn Source, span: Range<u64>) -> Option<Stream<'s>> {
        let position = span.start;
        let bytes = source.stream(span)?;
        Some(Stream { bytes, position })
    }

    /// Fills `dest` with the bytes from `position` on, which is not before what was read last.
    pub(crate) fn fill(&mut self, position: u64, dest: &mut [u8]) -> Result<(), Failure> {
        let mut waste = [0; WASTE_NBYTES];
        while self.position < position {
            let left = to_usize(position - self.position).unwrap_or(usize::MAX);
            let most = left.min(WASTE_NBYTES);
            self.read(&mut waste[..most]).map_err(|source| Failure::Read {
                position,
                expected: dest.len(),
                found: 0,
                source,
            })?;
        }
        let mut found = 0;
        while found < dest.len() {
            found += self.read(&mut dest[found..]).map_err(|source| Failure::Read {
                position,
                expected: dest.len(),
                found,
                source,
            })?;
        }
        Ok(())
    }

    /// Reads once. That there is no more is a failure without an error of the system.
    fn read(&mut self, dest: &mut [u8]) -> Result<usize, Option<io::Error>> {
        match self.bytes.read(dest) {
            Ok(0) => Err(None),
            Ok(count) => {
                self.position += to_u64(count);
                Ok(count)
            }
            Err(fault) => Err(Some(fault)),
        }
    }
}
