//! Reading the header of a file.

use std::io;
use std::path::Path;

use ingot_format::{Header, Limits, to_u64, to_usize};

use crate::error::Error;
use crate::execute::{HUGE_PAGE_NBYTES, memory};
use crate::source::{Source, read_full};

/// Bytes that the first read takes. Most headers are shorter, so that it is the only one.
const START_NBYTES: u64 = 64 << 10;

/// A header from this size on gets a huge page, though it may not fill it: faulting in 4 KiB pages one by one was a
/// third of the time that opening 100,000 tensors took (November 2026).
const HUGE_FROM_NBYTES: usize = 512 << 10;

/// Reads the header into memory of our own, never from a mapping: what was checked cannot change afterwards.
/// `path` is for the errors.
pub(crate) fn read_header(
    source: &dyn Source,
    path: Option<&Path>,
    limits: &Limits,
) -> Result<Header, Error> {
    let in_file = |fault| Error::Header {
        path: path.map(Path::to_owned),
        fault,
    };
    let mut start = vec![0; size(source.nbytes().min(START_NBYTES))];
    read(source, path, 0, &mut start)?;
    let head_nbytes = size(Header::head_nbytes(&start, source.nbytes(), limits).map_err(in_file)?);
    if head_nbytes <= start.len() {
        return Header::parse(&start, source.nbytes(), limits).map_err(in_file);
    }
    let room = if head_nbytes < HUGE_FROM_NBYTES {
        head_nbytes
    } else {
        head_nbytes.max(HUGE_PAGE_NBYTES)
    };
    let mut head = memory(room).map_err(|source| Error::OutOfMemory {
        path: path.map(Path::to_owned),
        nbytes: to_u64(head_nbytes),
        source: Some(source),
    })?;
    let (first, rest) = head[..head_nbytes].split_at_mut(start.len());
    first.copy_from_slice(&start);
    read(source, path, start.len(), rest)?;
    Header::parse(&head[..head_nbytes], source.nbytes(), limits).map_err(in_file)
}

/// Fills `dest` from `at` on.
fn read(source: &dyn Source, path: Option<&Path>, at: usize, dest: &mut [u8]) -> Result<(), Error> {
    let expected = dest.len();
    let fault = |found: usize, source: Option<io::Error>| Error::Read {
        path: path.map(Path::to_owned),
        tensor: None,
        position: to_u64(at),
        expected: to_u64(expected),
        found: to_u64(found),
        source,
    };
    match read_full(source, to_u64(at), dest) {
        Ok(found) if found == expected => Ok(()),
        Ok(found) => Err(fault(found, None)),
        Err(source) => Err(fault(0, Some(source))),
    }
}

/// A size that memory can have; one that it cannot have fails when it is asked for.
fn size(nbytes: u64) -> usize {
    to_usize(nbytes).unwrap_or(usize::MAX)
}
