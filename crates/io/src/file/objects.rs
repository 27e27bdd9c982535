//! Bytes that the caller's own code reads, and bytes in memory.

use std::fmt;
use std::io;

use ingot_format::{to_u64, to_usize};

use super::read_at::ReadAt;

/// Bytes of a file that your own code reads, such as an entry of an archive or an object of a store.
///
/// [`Archive::from_source`](crate::Archive::from_source) opens the file that they are. Many threads may read at once.
///
/// ```
/// use std::io;
///
/// use ingot_io::{Archive, Dtype, Limits, Source, TensorView, serialize};
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
/// let archive = Archive::from_source(Inside([b"others".to_vec(), file].concat(), 6), &Limits::default())?;
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

    /// Returns text that differs once the bytes have changed, such as an ETag; `None` if nothing shows that. A read
    /// fails with [`Error::Changed`](crate::Error::Changed) if the text differs from that at the opening.
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
pub struct Given<S> {
    source: S,
    nbytes: u64,
    version: Option<String>,
}

impl<S: Source> Given<S> {
    /// Asks `source` for its size and version.
    pub fn new(source: S) -> Given<S> {
        Given {
            nbytes: source.nbytes(),
            version: source.version(),
            source,
        }
    }
}

impl<S> fmt::Debug for Given<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Given({} bytes)", self.nbytes)
    }
}

impl<S: Source> ReadAt for Given<S> {
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
