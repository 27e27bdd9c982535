//! Where bytes come from.

use std::fmt::Debug;
use std::io::{self, IoSliceMut, Read};
use std::ops::Range;
use std::sync::Arc;

use ingot_format::{Row, StopFlag, saturating_usize, to_u64};

use crate::error::Failure;
use crate::memory::Memory;

/// A run of bytes that tensors can be read from: a file, a mapping, memory, a URL; with what each can do besides a
/// [`Source`](super::Source).
///
/// Implementations may read fewer bytes than `dest` takes and may be interrupted; readers deal with both.
pub trait ReadAt: Send + Sync + Debug {
    /// Bytes there were when the source was opened.
    fn nbytes(&self) -> u64;

    /// Check that there can be as many bytes as the size says, before all of them are read.
    ///
    /// # Errors
    /// The file is larger than its file system.
    fn check_size(&self) -> io::Result<()> {
        Ok(())
    }

    /// Copies bytes from `position` on into `dest`, and says how many. None means that there are no more.
    ///
    /// # Errors
    /// Whatever the device or the system says.
    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize>;

    /// Whether [`ReadAt::read_vectored_at`] is more than one read.
    fn is_vectored(&self) -> bool {
        false
    }

    /// Copies bytes from `position` on into all of `dests`, one after the other, and says how many. None means that there
    /// are no more.
    ///
    /// # Errors
    /// Whatever the device or the system says.
    fn read_vectored_at(&self, position: u64, dests: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let first = dests.iter_mut().find(|dest| !dest.is_empty());
        first.map_or(Ok(0), |dest| self.read_at(position, dest))
    }

    /// Fill `dest` with the blocks of rows, one after another, and return whether the source could do that. If it could
    /// not, `dest` may hold anything. The rows count from the beginning of the source.
    fn copy_rows(&self, _rows: &[Row], _dest: &mut [u8]) -> bool {
        false
    }

    /// Bytes between two runs that are better read and thrown away than stepped over by beginning another read; for
    /// sources that have [`ReadAt::stream`].
    fn gap_nbytes(&self) -> u64 {
        0
    }

    /// The bytes of a span that lies in the source, as they come: for sources where it is beginning a read that costs, of
    /// which all is read like this. Where a read waits long, as over a network, it ends with an error soon after `stop`
    /// is set; that error is not of the kind [`io::ErrorKind::Interrupted`], which is tried again.
    fn stream<'s>(&'s self, _span: Range<u64>, _stop: StopFlag<'s>) -> Option<Box<dyn Read + 's>> {
        None
    }

    /// The bytes as memory that tensors may lie in, where the source is such memory.
    fn memory(&self) -> Option<&Arc<Memory>> {
        None
    }

    /// Whether a read waits for something other than this machine's memory and disks, so that many at once take no
    /// longer than one.
    fn waits(&self) -> bool {
        false
    }

    /// How many reads are best under way at once where each waits. From a FUSE mount that takes 5 ms for each 128 KiB, 64
    /// get twice as much as 16 do (2026-11).
    fn reads_at_once(&self) -> usize {
        64
    }

    /// Whether most of these bytes would have to come from a disk, so that reads overtake each other. Looks at no more
    /// than some of them.
    fn is_cold(&self, _span: &Range<u64>) -> bool {
        false
    }

    /// Gives up the page cache's copy of these bytes, which nobody here reads again soon. Advice: it may stay.
    fn forget(&self, _span: Range<u64>) {}

    /// What other processes that open the same know this version by, besides its size; `None` where they open it as fast as
    /// they are told of it, and where nothing tells versions apart.
    fn version(&self) -> Option<String> {
        None
    }

    /// Bytes there are now. Differs from [`ReadAt::nbytes`] when someone wrote to the file since; `None` when
    /// they were overwritten and their number is the same.
    ///
    /// # Errors
    /// Whatever the system says.
    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        Ok(Some(self.nbytes()))
    }
}

/// Fills `dest` from `position` on. Sources may give less than they are asked for, and be interrupted.
pub(crate) fn read_exactly(
    source: &dyn ReadAt,
    position: u64,
    dest: &mut [u8],
    stop: StopFlag<'_>,
) -> Result<(), Failure> {
    let expected = dest.len();
    let end = source.nbytes().min(position.saturating_add(to_u64(expected)));
    if let Some(mut stream) = Stream::new(source, position..end.max(position), stop) {
        return stream.fill(position, dest);
    }
    let mut found = 0;
    while found < expected {
        let fault = match source.read_at(position + to_u64(found), &mut dest[found..]) {
            Ok(0) => None,
            Ok(count) => {
                found += count;
                continue;
            }
            Err(fault) if fault.kind() == io::ErrorKind::Interrupted => continue,
            Err(fault) => Some(fault),
        };
        return Err(Failure::Read {
            position,
            expected,
            found,
            source: fault,
        });
    }
    Ok(())
}

/// Memory that what nobody wants passes through.
const WASTE_NBYTES: usize = 16 << 10;

/// The bytes of a span of a source, as they come: one long read, of which only some is wanted.
pub(crate) struct Stream<'s> {
    bytes: Box<dyn Read + 's>,
    /// Where the next byte lies in the source.
    position: u64,
}

impl<'s> Stream<'s> {
    /// The bytes of `span`, where the source gives them like this.
    pub(crate) fn new(source: &'s dyn ReadAt, span: Range<u64>, stop: StopFlag<'s>) -> Option<Stream<'s>> {
        let position = span.start;
        let bytes = source.stream(span, stop)?;
        Some(Stream { bytes, position })
    }

    /// Fills `dest` with the bytes from `position` on, which is not before what was read last.
    pub(crate) fn fill(&mut self, position: u64, dest: &mut [u8]) -> Result<(), Failure> {
        let expected = dest.len();
        let failure = |found, source| Failure::Read {
            position,
            expected,
            found,
            source,
        };
        let mut waste = [0; WASTE_NBYTES];
        while self.position < position {
            let most = saturating_usize(position - self.position).min(WASTE_NBYTES);
            let read = self.read(&mut waste[..most]);
            read.map_err(|source| failure(0, source))?;
        }
        let mut found = 0;
        while found < expected {
            let read = self.read(&mut dest[found..]);
            found += read.map_err(|source| failure(found, source))?;
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
