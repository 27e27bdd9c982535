//! Sources of bytes: files, memory, URLs and the caller's own code; and the header that is read from a source.

use std::fmt::{self, Debug};
use std::io::{self, IoSliceMut, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ingot_format::{Header, HeaderWindow, Limits, Row, StopFlag, saturating_usize, to_u64, to_usize};

use crate::error::{Error, Failure};
use crate::memory::Memory;

/// Bytes of a file that your own code reads, such as an entry of an archive or an object of a store.
///
/// [`Archive::from_source`](crate::Archive::from_source) opens the file. Many threads may read at once.
///
/// ```
/// use std::io;
///
/// use ingot_io::{Archive, Dtype, OpenOptions, Source, TensorView, serialize};
///
/// /// A file between other bytes.
/// struct Inside(Vec<u8>, usize);
///
/// impl Source for Inside {
///     fn nbytes(&self) -> u64 {
///         (self.0.len() - self.1) as u64
///     }
///
///     fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
///         let rest = &self.0[self.1..][position as usize..];
///         let count = dest.len().min(rest.len());
///         dest[..count].copy_from_slice(&rest[..count]);
///         Ok(count)
///     }
/// }
///
/// let file = serialize([("bias", TensorView::new(Dtype::U8, vec![2], b"ab")?)], None)?;
/// let archive = Archive::from_source(Inside([b"others".to_vec(), file].concat(), 6), &OpenOptions::default())?;
/// assert_eq!(archive.read("bias")?.as_slice()?, b"ab");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Source: Send + Sync {
    /// Returns the size of the file in bytes.
    fn nbytes(&self) -> u64;

    /// Copies bytes from `position` on into `dest` and returns how many. Zero means that the file ends there; any other
    /// number may be less than the length of `dest`.
    ///
    /// # Errors
    /// Any error of reading. Reads that fail with [`io::ErrorKind::Interrupted`] are repeated.
    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize>;

    /// Returns text that differs once the bytes have changed, such as an ETag; `None` if the source cannot detect that. A
    /// read fails with [`Failure::Changed`] if the text differs from the text at the opening.
    fn version(&self) -> Option<String> {
        None
    }
}

impl<S: Source + ?Sized> Source for Box<S> {
    fn nbytes(&self) -> u64 {
        (**self).nbytes()
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        (**self).read_at(position, dest)
    }

    fn version(&self) -> Option<String> {
        (**self).version()
    }
}

/// Bytes that the caller holds in memory, such as a whole file that came over a network.
///
/// ```
/// use ingot_io::{Archive, Dtype, MemorySource, OpenOptions, TensorView, serialize};
///
/// let file = serialize([("bias", TensorView::new(Dtype::U8, vec![2], b"ab")?)], None)?;
/// let archive = Archive::from_source(MemorySource::new(file), &OpenOptions::default())?;
/// assert_eq!(archive.read("bias")?.as_slice()?, b"ab");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
        to_u64(self.bytes.as_ref().len())
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let bytes = self.bytes.as_ref();
        let rest = to_usize(position)
            .and_then(|at| bytes.get(at..))
            .unwrap_or_default();
        let count = dest.len().min(rest.len());
        dest[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}

/// A [`Source`], with its size and version at the opening.
pub(crate) struct OpenSource<S> {
    source: S,
    nbytes: u64,
    version: Option<String>,
}

impl<S: Source> OpenSource<S> {
    /// Asks `source` for its size and version.
    pub(crate) fn new(source: S) -> OpenSource<S> {
        OpenSource {
            nbytes: source.nbytes(),
            version: source.version(),
            source,
        }
    }
}

impl<S> fmt::Debug for OpenSource<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpenSource({} bytes)", self.nbytes)
    }
}

impl<S: Source> ReadAt for OpenSource<S> {
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read_at(position, dest)?;
        if count > dest.len() {
            return Err(io::Error::other(format!(
                "the source reports {count} bytes, expected at most {}",
                dest.len()
            )));
        }
        Ok(count)
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        Ok((self.source.version() == self.version).then(|| self.source.nbytes()))
    }
}

/// A source of bytes that tensors are read from, such as a file, memory or a URL. It may support more than a [`Source`].
///
/// Implementations may read fewer bytes than `dest` takes and may be interrupted; readers handle both.
pub trait ReadAt: Send + Sync + Debug {
    /// Return the number of bytes at the opening.
    fn nbytes(&self) -> u64;

    /// Check that the source can have as many bytes as its size says, before all of them are read.
    ///
    /// # Errors
    /// The file is larger than its file system.
    fn check_size(&self) -> io::Result<()> {
        Ok(())
    }

    /// Copy bytes from `position` on into `dest` and return how many. Zero means that the source ends there.
    ///
    /// # Errors
    /// Errors of the device and of the system.
    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize>;

    /// Return whether [`ReadAt::read_vectored_at`] fills several destinations.
    fn is_vectored(&self) -> bool {
        false
    }

    /// Copy bytes from `position` on into `dests`, one after the other, and return how many. Zero means that the source
    /// ends there.
    ///
    /// # Errors
    /// Errors of the device and of the system.
    fn read_vectored_at(&self, position: u64, dests: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let first = dests.iter_mut().find(|dest| !dest.is_empty());
        first.map_or(Ok(0), |dest| self.read_at(position, dest))
    }

    /// Fill `dest` with the blocks of rows, one after another, and return whether the source could do that. If it could
    /// not, `dest` may hold anything. The rows count from the beginning of the source.
    fn copy_rows(&self, _rows: &[Row], _dest: &mut [u8]) -> bool {
        false
    }

    /// Return the longest gap between two runs that is read and discarded instead of starting another read, in bytes. For
    /// sources that have [`ReadAt::stream`].
    fn gap_nbytes(&self) -> u64 {
        0
    }

    /// Return the bytes of a span as a stream, for sources for which starting a read takes long. All reads of such a source
    /// use this. A read that waits, such as over a network, fails soon after `stop` is set. The kind of that error is not
    /// [`io::ErrorKind::Interrupted`], after which a read is repeated.
    fn stream<'s>(&'s self, _span: Range<u64>, _stop: StopFlag<'s>) -> Option<Box<dyn Read + 's>> {
        None
    }

    /// Return the memory of the source, if it is memory that tensors may be views of.
    fn memory(&self) -> Option<&Arc<Memory>> {
        None
    }

    /// Return the name of the backend that reads from this source, and the reason for it.
    fn backend(&self) -> (&'static str, &'static str) {
        ("source", "bytes that a `Source` reads")
    }

    /// Return whether reads wait for something other than this machine's memory and disks, so that many at once take no
    /// longer than one.
    fn waits(&self) -> bool {
        false
    }

    /// Return how many reads to run at once if each waits. From a FUSE mount that takes 5 ms for each 128 KiB, 64 reads are
    /// twice as fast as 16 (2026-11).
    fn reads_at_once(&self) -> usize {
        64
    }

    /// Return whether most of these bytes would come from a disk, so that parallel reads help. Checks a sample.
    fn is_cold(&self, _span: &Range<u64>) -> bool {
        false
    }

    /// Advise the system to drop these bytes from the page cache, since this process does not read them again soon.
    fn forget(&self, _span: Range<u64>) {}

    /// Return the version, for other processes that open the same source. `None` if they can read the header as fast as they
    /// could receive it, or if the source has no versions.
    fn version(&self) -> Option<String> {
        None
    }

    /// Return the number of bytes now. It differs from [`ReadAt::nbytes`] if the source has changed; `None` if it has changed
    /// and the size is the same.
    ///
    /// # Errors
    /// Errors of the system.
    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        Ok(Some(self.nbytes()))
    }
}

/// Fill `dest` from `position` on. Short and interrupted reads are continued.
pub(crate) fn read_exactly(
    source: &dyn ReadAt,
    position: u64,
    dest: &mut [u8],
    stop: StopFlag<'_>,
) -> Result<(), Failure> {
    let end = source.nbytes().min(position.saturating_add(to_u64(dest.len())));
    let mut stream = source.stream(position..end.max(position), stop);
    read_until(position, dest.len(), |found| match &mut stream {
        Some(stream) => stream.read(&mut dest[found..]),
        None => source.read_at(position + to_u64(found), &mut dest[found..]),
    })
}

/// Call `read` with the number of bytes so far, until it has returned `expected` bytes in all. Interrupted reads are
/// repeated. The bytes begin at `position`, which the error names.
pub(crate) fn read_until(
    position: u64,
    expected: usize,
    mut read: impl FnMut(usize) -> io::Result<usize>,
) -> Result<(), Failure> {
    let mut found = 0;
    while found < expected {
        let fault = match read(found) {
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
            expected: to_u64(expected),
            found: to_u64(found),
            source: fault,
        });
    }
    Ok(())
}

/// Memory for bytes that are discarded.
const WASTE_NBYTES: usize = 16 << 10;

/// One long read of a span of a source. Bytes that are not needed are discarded.
pub(crate) struct Stream<'s> {
    bytes: Box<dyn Read + 's>,
    /// The position of the next byte in the source.
    position: u64,
}

impl<'s> Stream<'s> {
    /// Return the bytes of `span`, if the source has [`ReadAt::stream`].
    pub(crate) fn new(source: &'s dyn ReadAt, span: Range<u64>, stop: StopFlag<'s>) -> Option<Stream<'s>> {
        let position = span.start;
        let bytes = source.stream(span, stop)?;
        Some(Stream { bytes, position })
    }

    /// Fill `dest` with the bytes from `position` on, which is not before the end of the last read.
    pub(crate) fn fill(&mut self, position: u64, dest: &mut [u8]) -> Result<(), Failure> {
        let mut waste = [0; WASTE_NBYTES];
        read_until(position, dest.len(), |found| {
            while self.position < position {
                let most = saturating_usize(position - self.position).min(WASTE_NBYTES);
                if self.read(&mut waste[..most])? == 0 {
                    return Ok(0);
                }
            }
            self.read(&mut dest[found..])
        })
    }

    fn read(&mut self, dest: &mut [u8]) -> io::Result<usize> {
        let count = self.bytes.read(dest)?;
        self.position += to_u64(count);
        Ok(count)
    }
}

/// Bytes of the first read, and bytes of a long header that are in memory at a time. Most headers are shorter, so that one
/// read is enough, and the bytes fit in a core's cache.
const START_NBYTES: u64 = 64 << 10;

/// Bytes of the length before the header.
const PREFIX_NBYTES: usize = 8;

/// Read and check the header. It is copied to memory of our own first, never parsed in a mapping, so that it cannot change
/// after the check. `path` is for the errors.
///
/// # Errors
/// [`Failure::Header`]; [`Failure::Read`].
pub fn read_header(source: &dyn ReadAt, path: Option<&Path>, limits: &Limits) -> Result<Header, Error> {
    let in_file = |fault| Failure::Header(fault).about(path, None);
    let unread = |failure: Failure| failure.about(path, None);
    let mut start = vec![0; saturating_usize(source.nbytes().min(START_NBYTES))];
    read_exactly(source, 0, &mut start, StopFlag::never()).map_err(unread)?;
    let head_nbytes = Header::head_nbytes(&start, source.nbytes(), limits).map_err(in_file)?;
    if head_nbytes > to_u64(start.len()) {
        // Each window is a read. If starting a read takes long, one more read of the whole header is faster.
        if source.gap_nbytes() == 0
            && let Some(header) = read_through_window(source, head_nbytes, &mut start).map_err(unread)?
        {
            return Ok(header);
        }
        // The window was overwritten.
        start.resize(saturating_usize(head_nbytes), 0);
        read_exactly(source, 0, &mut start, StopFlag::never()).map_err(unread)?;
    }
    Header::parse(&start, source.nbytes(), limits).map_err(in_file)
}

/// Parse a header in the form that common writers emit, in parts, so that it is never in memory as a whole: allocating
/// fresh pages for the header of 100,000 tensors, 13 MB, took half of the time of opening the file. `window` has the
/// start of the file, and later one part of the header after the other. `None` if the header must be read as a whole.
fn read_through_window(
    source: &dyn ReadAt,
    head_nbytes: u64,
    window: &mut [u8],
) -> Result<Option<Header>, Failure> {
    let mut header = HeaderWindow::new(head_nbytes, source.nbytes());
    let (mut position, mut begin, mut end) = (to_u64(window.len()), PREFIX_NBYTES, window.len());
    loop {
        match header.feed(&window[begin..end]) {
            None | Some(0) => return Ok(None),
            Some(taken) => begin += taken,
        }
        if begin == end && position == head_nbytes {
            return Ok(header.finish());
        }
        window.copy_within(begin..end, 0);
        (begin, end) = (0, end - begin);
        let more = saturating_usize(head_nbytes - position).min(window.len() - end);
        read_exactly(source, position, &mut window[end..end + more], StopFlag::never())?;
        position += to_u64(more);
        end += more;
    }
}
