//! The sources of a tensor's bytes in a file that is written. Saves, edits and writers use them.

mod file;
mod scattered;

use std::fmt::Debug;
use std::io;

use ingot_format::{FormatError, Header, StopFlag, to_u64, to_usize};

use crate::device::DeviceBytes;
use crate::error::{Error, Failure};
use crate::file::{Archive, read_exactly};
use crate::memory::Bytes;
use crate::watch::{Asked, Watch};
use crate::workers::watched;

pub use file::FileRange;
pub(crate) use file::shares_blocks;
pub(crate) use scattered::Scattered;

/// The bytes of one tensor that are written to a file.
///
/// `Payload::from` takes a `&[u8]`; [`Produce`] makes the bytes piece by piece, when they are written.
///
/// ```
/// use ingot_io::{Dtype, Format, Payload, SaveOptions, Spec, Unwatched, layout, save};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
///
/// let specs = [Spec { name: "bias", dtype: Dtype::U8, shape: &[2] }];
/// let new = layout(&specs, None, Format::Safetensors)?;
/// let bias = Payload::from(&b"ab"[..]);
/// assert_eq!(bias.nbytes(), 2);
/// save(&path, &new, &[bias], &SaveOptions::new(), &Unwatched)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Payload<'a> {
    /// Memory. If it is not contiguous, it is packed piece by piece during the save.
    #[doc(hidden)]
    Bytes(Bytes<'a>),
    /// A range of another file. The system copies it, or shares its blocks if the file system supports that.
    #[doc(hidden)]
    File(FileRange<'a>),
    /// Bytes of an archive that is not a local file, such as one behind a URL. Any thread may read them; reads block.
    #[doc(hidden)]
    Section {
        archive: &'a Archive,
        position: u64,
        nbytes: u64,
    },
    /// Elements from several positions of another payload.
    #[doc(hidden)]
    Gathered(&'a dyn Gather),
    /// Device memory, which ingot copies to the host.
    #[doc(hidden)]
    Device(&'a DeviceBytes),
    /// Bytes that are produced piece by piece during the save.
    Produced(&'a dyn Produce),
}

impl Payload<'_> {
    /// Return the size in bytes.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        match self {
            Payload::Bytes(bytes) => to_u64(bytes.len()),
            Payload::File(range) => range.nbytes(),
            Payload::Section { nbytes, .. } => *nbytes,
            Payload::Gathered(gathered) => gathered.nbytes(),
            Payload::Device(bytes) => to_u64(bytes.len()),
            Payload::Produced(source) => source.nbytes(),
        }
    }

    /// Fill all of `into` with the bytes from `begin` on. A read that waits for a network fails soon after `stop` is set.
    ///
    /// # Errors
    /// The payload has fewer bytes, or the file or the producer fails.
    #[doc(hidden)]
    pub fn read(&self, begin: u64, into: &mut [u8], stop: StopFlag<'_>) -> io::Result<()> {
        let at = || to_usize(begin).ok_or(io::ErrorKind::InvalidInput);
        match self {
            Payload::Bytes(bytes) => bytes.read(at()?, into)?,
            Payload::File(range) => range.read(begin, into)?,
            Payload::Section {
                archive, position, ..
            } => {
                let read = read_exactly(archive.source(), position + begin, into, stop);
                read.map_err(|failure| io::Error::other(archive.explain(failure)))?;
            }
            Payload::Gathered(gathered) => gathered.read(begin, into, stop)?,
            Payload::Device(bytes) => copied_out(bytes, at()?, into, stop)?,
            Payload::Produced(source) => source.produce(begin, into)?,
        }
        Ok(())
    }

    /// Return whether reading waits for a network.
    pub(crate) fn waits(&self) -> bool {
        match self {
            Payload::Section { nbytes, .. } => *nbytes > 0,
            Payload::Gathered(gathered) => gathered.waits(),
            _ => false,
        }
    }

    /// As [`Payload::read`], for the thread of the caller: it polls `watch` while another thread waits for the bytes.
    ///
    /// # Errors
    /// As [`Payload::read`]; an I/O error that contains [`Failure::Interrupted`], which [`of_step`](crate::error::of_step)
    /// extracts.
    pub(crate) fn read_watched(&self, begin: u64, into: &mut [u8], watch: &dyn Watch) -> io::Result<()> {
        // A payload that does not wait is read here, since a producer runs on this thread.
        let read = |stop: StopFlag<'_>| self.read(begin, into, stop);
        watched(self.waits(), read, &Asked(watch))
            .map_err(|_| io::Error::other(Error::from(Failure::Interrupted)))?
    }
}

fn copied_out(bytes: &DeviceBytes, begin: usize, into: &mut [u8], stop: StopFlag<'_>) -> io::Result<()> {
    let (range, mut filled) = (begin..begin + into.len(), 0);
    bytes.each(range, stop, |some| {
        into[filled..filled + some.len()].copy_from_slice(some);
        filled += some.len();
        Ok(())
    })
}

/// Check that `payloads` match `header`: one for each tensor, in data order and with the tensor's size.
///
/// # Errors
/// [`FormatError::WrongLength`] for the first tensor that differs, [`FormatError::TrailingBytes`] if there are more
/// payloads than tensors.
pub(crate) fn prove_sizes(header: &Header, payloads: &[Payload<'_>]) -> Result<(), FormatError> {
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

/// Check that there are `expected` bytes of data.
pub(crate) fn prove_total(expected: u64, found: u64) -> Result<(), FormatError> {
    if found == expected {
        Ok(())
    } else {
        Err(FormatError::TrailingBytes { expected, found })
    }
}

impl<'a> From<&'a [u8]> for Payload<'a> {
    fn from(bytes: &'a [u8]) -> Payload<'a> {
        Payload::Bytes(Bytes::from(bytes))
    }
}

impl Archive {
    /// Return the bytes `begin..end` of the data section.
    pub(crate) fn payload(&self, begin: u64, end: u64) -> Payload<'_> {
        let position = self.header().data_start() + begin;
        match self.local() {
            Some(file) => Payload::File(FileRange::of_local(file, position, end - begin)),
            None => Payload::Section {
                archive: self,
                position,
                nbytes: end - begin,
            },
        }
    }
}

/// Assembles the bytes of a tensor from another payload, on any thread.
pub trait Gather: Debug + Sync {
    /// Return the size in bytes.
    fn nbytes(&self) -> u64;

    /// Return whether reading waits for a network.
    fn waits(&self) -> bool;

    /// Fill `into` with the bytes from `begin` on.
    ///
    /// # Errors
    /// As [`Payload::read`].
    fn read(&self, begin: u64, into: &mut [u8], stop: StopFlag<'_>) -> io::Result<()>;
}

/// Produces the bytes of a tensor piece by piece, such as a tensor on a device that only its framework can copy from.
///
/// ```
/// use std::io;
///
/// use ingot_io::{Dtype, Format, Payload, Produce, SaveOptions, Spec, Unwatched, layout, save};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
///
/// #[derive(Debug)]
/// struct Zeros(u64);
///
/// impl Produce for Zeros {
///     fn nbytes(&self) -> u64 {
///         self.0
///     }
///
///     fn produce(&self, _begin: u64, into: &mut [u8]) -> io::Result<()> {
///         into.fill(0);
///         Ok(())
///     }
/// }
///
/// let specs = [Spec { name: "bias", dtype: Dtype::U8, shape: &[4] }];
/// let new = layout(&specs, None, Format::Safetensors)?;
/// save(&path, &new, &[Payload::Produced(&Zeros(4))], &SaveOptions::new(), &Unwatched)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Produce: Debug + Sync {
    /// Return the size in bytes.
    fn nbytes(&self) -> u64;

    /// Fill `into` with the bytes from `begin` on. Called for consecutive pieces, on the thread that called save.
    ///
    /// # Errors
    /// Any error ends the save and becomes its error.
    fn produce(&self, begin: u64, into: &mut [u8]) -> io::Result<()>;
}
