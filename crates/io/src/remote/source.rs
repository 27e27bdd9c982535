//! A remote file as a [`Source`], and as a file of tensors.

use std::io::{self, Read};
use std::ops::Range;

use ingot_format::{FormatError, Header, Limits, StopFlag, to_u64, to_usize};
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
        self.told()
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        Ok(RemoteFile::nbytes_now(self))
    }
}

/// Asks for the start of a file of tensors, and for the rest of its header where that is longer.
pub(super) fn open(
    resource: Resource,
    start_nbytes: u64,
    limits: &Limits,
    stop: StopFlag<'_>,
) -> Result<RemoteFile, Fault> {
    let mut file = RemoteFile::begin(resource, start_nbytes, stop)?;
    // What is wrong with it is said when the header is read. Nothing is asked for that a header may not have.
    if let Ok(head_nbytes) = Header::head_nbytes(file.start(), file.nbytes(), limits) {
        file.extend_start(head_nbytes, stop)?;
    }
    Ok(file)
}

/// The header of a file of tensors, which [`open`] has asked for.
pub(super) fn header(file: &RemoteFile, limits: &Limits) -> Result<Header, FormatError> {
    Header::parse(file.start(), file.nbytes(), limits)
}
