//! Remote files as sources of bytes, and as files of tensors.

use std::io::{self, Read};
use std::ops::Range;

use ingot_format::{Header, Limits, StopFlag, to_u64, to_usize};
use ingot_remote::{Fault, GAP_NBYTES, READS_AT_ONCE, RemoteFile, Resource};

use crate::file::ReadAt;

impl ReadAt for RemoteFile {
    fn nbytes(&self) -> u64 {
        self.nbytes()
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let nbytes = self.nbytes();
        let end = nbytes.min(position.saturating_add(to_u64(dest.len())));
        let count = to_usize(end.saturating_sub(position)).unwrap_or(0);
        let mut reader = self.reader(position..end, StopFlag::never());
        reader.read_exact(&mut dest[..count])?;
        Ok(count)
    }

    fn gap_nbytes(&self) -> u64 {
        GAP_NBYTES
    }

    fn stream<'s>(&'s self, span: Range<u64>, stop: StopFlag<'s>) -> Option<Box<dyn Read + 's>> {
        Some(Box::new(self.reader(span, stop)))
    }

    fn waits(&self) -> bool {
        true
    }

    fn reads_at_once(&self) -> usize {
        READS_AT_ONCE
    }

    fn version(&self) -> Option<String> {
        self.description()
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        Ok(RemoteFile::nbytes_now(self))
    }
}

/// Open a file of tensors, and request the rest of its header if it is longer than the first bytes.
pub(super) fn open(
    resource: Resource,
    start_nbytes: u64,
    limits: &Limits,
    stop: StopFlag<'_>,
) -> Result<RemoteFile, Fault> {
    let mut file = RemoteFile::begin(resource, start_nbytes, stop)?;
    // Errors are reported when the header is parsed. A header beyond the limits is not requested.
    if let Ok(head_nbytes) = Header::head_nbytes(file.start(), file.nbytes(), limits) {
        file.extend_start(head_nbytes, stop)?;
    }
    Ok(file)
}
