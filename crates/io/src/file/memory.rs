//! Bytes that are in memory already.

use std::io;

use super::Source;

/// Bytes that the caller holds in memory, such as a whole file that came over a network.
#[derive(Debug)]
pub struct MemorySource<B> {
    bytes: B,
}

impl<B: AsRef<[u8]>> MemorySource<B> {
    /// Reads from `bytes`.
    pub fn new(bytes: B) -> MemorySource<B> {
        MemorySource { bytes }
    }
}

impl<B: AsRef<[u8]> + Send + Sync> Source for MemorySource<B> {
    fn nbytes(&self) -> u64 {
        ingot_format::to_u64(self.bytes.as_ref().len())
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let bytes = self.bytes.as_ref();
        let rest = ingot_format::to_usize(position)
            .and_then(|at| bytes.get(at..))
            .unwrap_or_default();
        let count = dest.len().min(rest.len());
        dest[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}
