//! Memory that outlives its maker, and where in it a tensor's bytes are.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ingot_format::Dtype;
use memmap2::{MmapOptions, MmapRaw};

use super::block::Block;

/// Memory that tensors share. It is freed with the last of them, and never moved or resized.
#[derive(Debug)]
pub struct Memory(Held);

#[derive(Debug)]
enum Held {
    Private(Block),
    /// A mapped file. They are counted.
    Mapped(MmapRaw),
}

static MAPPED_FILES: AtomicUsize = AtomicUsize::new(0);

/// How many files are mapped by this process.
pub(crate) fn mapped_files() -> usize {
    MAPPED_FILES.load(Ordering::Relaxed)
}

impl Memory {
    /// Map the whole of `file` privately: writing to the memory copies the page and never reaches the file.
    pub(crate) fn map(file: &File) -> io::Result<Memory> {
        // SAFETY: `map_copy` requires that other processes do not change the file as long as a slice of the mapping is
        // held. No slice is ever made: `MmapRaw` takes over the pages at once and returns only a pointer. Not provable: a
        // process that truncates the file removes pages, and touching a removed page is a SIGBUS, never wrong bytes.
        //
        // No swap is reserved for pages that might be written to: the system would otherwise refuse files that are
        // larger than its memory, though hardly any user writes to such tensors.
        let pages = unsafe { MmapOptions::new().no_reserve_swap().map_copy(file) }?;
        MAPPED_FILES.fetch_add(1, Ordering::Relaxed);
        Ok(Memory(Held::Mapped(MmapRaw::from(pages))))
    }

    /// The first byte. Readable and writable for [`Memory::len`] bytes as long as `self` lives. The holders of its regions
    /// agree on reads and writes at the same time.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.0 {
            Held::Private(block) => block.as_mut_ptr(),
            Held::Mapped(mapping) => mapping.as_mut_ptr(),
        }
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            Held::Private(block) => block.len(),
            Held::Mapped(mapping) => mapping.len(),
        }
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copy bytes from `at` on into `dest`, as many as there are, and return their number.
    pub fn copy_to(&self, at: usize, dest: &mut [u8]) -> usize {
        let count = dest.len().min(self.len().saturating_sub(at));
        if count == 0 {
            return 0;
        }
        let from = self.as_ptr().wrapping_add(at);
        // SAFETY: `copy_nonoverlapping` requires
        // - a source readable for `count` bytes: `at + count` is at most `len`, and `self` keeps the pages. It cannot be
        //   proven that a mapped file still has these bytes, see the head of file/rows.rs; nor that no other thread
        //   writes to them meanwhile, which would copy some old and some new bytes;
        // - a destination writable for `count` bytes: `dest` is at least that long;
        // - no overlap: `dest` is an exclusive reference, and none is ever made into the pages.
        unsafe { std::ptr::copy_nonoverlapping(from, dest.as_mut_ptr(), count) };
        count
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if matches!(self.0, Held::Mapped(_)) {
            MAPPED_FILES.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl From<Block> for Memory {
    fn from(block: Block) -> Memory {
        Memory(Held::Private(block))
    }
}

/// A tensor's bytes in memory. They keep the memory alive.
///
/// The memory is ingot's own, or a mapping of the file. [`Region::as_slice`] and [`Region::as_f32`] borrow from memory of
/// ingot's own, which no one writes to. Another process may write to a mapped file, or shorten it: its bytes are copied
/// ([`Region::to_vec`]), or borrowed by [`Region::as_slice_unchecked`], under its contract. A file that is opened with
/// [`Backend::Pread`](crate::Backend::Pread) is never mapped.
///
/// ```
/// use ingot_io::{Archive, Backend, Dtype, OpenOptions, TensorView, serialize_to_file};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let values: Vec<u8> = [1.0_f32, 2.0].into_iter().flat_map(f32::to_le_bytes).collect();
/// serialize_to_file([("bias", TensorView::new(Dtype::F32, vec![2], &values)?)], None, &path)?;
///
/// let archive = Archive::open(&path, &OpenOptions::new().backend(Backend::Pread))?;
/// let bias = archive.read("bias")?;
/// assert_eq!(bias.as_f32()?, [1.0, 2.0]);
/// assert_eq!(bias.as_slice()?, values);
/// let wrong = bias.as_elements::<i64>().unwrap_err();
/// assert_eq!(wrong.to_string(), "the elements have another dtype: expected I64, found F32");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Region {
    memory: Arc<Memory>,
    at: usize,
    nbytes: usize,
    /// The dtype of the elements; `U8` if it is unknown.
    dtype: Dtype,
}

/// Why bytes cannot be borrowed.
///
/// ```
/// use ingot_io::{Archive, BorrowError, Dtype, MemorySource, OpenOptions, TensorView, serialize};
///
/// let file = serialize([("bias", TensorView::new(Dtype::U8, vec![2], b"ab")?)], None)?;
/// let archive = Archive::from_source(MemorySource::new(file), &OpenOptions::default())?;
/// let wrong = archive.read("bias")?.as_f32().unwrap_err();
/// assert_eq!(wrong, BorrowError::Dtype { expected: Dtype::F32, found: Dtype::U8 });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BorrowError {
    /// They are in a mapped file, which another process may change.
    Mapped,
    /// The elements have another dtype.
    Dtype {
        /// That of the slice.
        expected: Dtype,
        /// That of the tensor.
        found: Dtype,
    },
    /// The first byte is not aligned for the elements.
    Unaligned {
        /// What its address must be a multiple of.
        alignment: usize,
    },
    /// The machine is big-endian; the bytes of a file are little-endian.
    BigEndian,
}

impl fmt::Display for BorrowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BorrowError::Mapped => {
                f.write_str("the bytes are in a mapped file, which another process may change — open it with Backend::Pread, or copy them by to_vec")
            }
            BorrowError::Dtype { expected, found } => {
                write!(f, "the elements have another dtype: expected {expected}, found {found}")
            }
            BorrowError::Unaligned { alignment } => {
                write!(f, "the bytes are not aligned to {alignment} — copy them by to_vec")
            }
            BorrowError::BigEndian => f.write_str("the elements are little-endian, and this machine is big-endian"),
        }
    }
}

impl std::error::Error for BorrowError {}

mod sealed {
    /// # Safety
    /// Every bit pattern is a value, and there is no padding.
    #[allow(clippy::missing_safety_doc, reason = "only this file can implement it")]
    pub unsafe trait Sealed: Copy {}
}

/// A number type that is the element of a dtype: `u8` to `u64`, `i8` to `i64`, `f32` and `f64`.
///
/// ```
/// use ingot_io::{Dtype, Plain};
///
/// assert_eq!(<f32 as Plain>::DTYPE, Dtype::F32);
/// ```
pub trait Plain: sealed::Sealed {
    /// The dtype with such elements.
    const DTYPE: Dtype;
}

macro_rules! plain {
    ($($number:ty => $dtype:ident),+) => {$(
        // SAFETY: the trait asks that every bit pattern is a value and that there is no padding: true of every integer and
        // every float of the language.
        unsafe impl sealed::Sealed for $number {}
        impl Plain for $number {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )+};
}

plain!(u8 => U8, u16 => U16, u32 => U32, u64 => U64, i8 => I8, i16 => I16, i32 => I32, i64 => I64, f32 => F32, f64 => F64);

impl Region {
    /// `nbytes` bytes from `at` on, cut at the end of the memory.
    pub(crate) fn new(memory: Arc<Memory>, at: usize, nbytes: usize) -> Region {
        let at = at.min(memory.len());
        let nbytes = nbytes.min(memory.len() - at);
        let dtype = Dtype::U8;
        Region {
            memory,
            at,
            nbytes,
            dtype,
        }
    }

    /// The same with elements of `dtype`.
    pub(crate) fn of(mut self, dtype: Dtype) -> Region {
        self.dtype = dtype;
        self
    }

    /// The first byte: readable and writable for [`Region::len`] bytes as long as the region lives.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr().wrapping_add(self.at)
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nbytes
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nbytes == 0
    }

    /// Borrows the bytes.
    ///
    /// # Errors
    /// [`BorrowError::Mapped`] if they are in a mapped file, which another process may change.
    pub fn as_slice(&self) -> Result<&[u8], BorrowError> {
        match self.memory.0 {
            Held::Mapped(_) => Err(BorrowError::Mapped),
            // SAFETY: `as_slice_unchecked` asks that no one writes to the bytes or takes them away: the pages are private
            // memory of this process, which was filled before it became a region, and no safe code writes to it.
            Held::Private(_) => Ok(unsafe { self.as_slice_unchecked() }),
        }
    }

    /// Borrows the bytes, even from a mapped file.
    ///
    /// # Safety
    /// As long as the slice lives,
    /// - no process shortens the file: touching bytes that are gone ends this process with SIGBUS;
    /// - no process writes to the file, or replaces its contents other than by renaming a new file over it;
    /// - nothing writes through [`Region::as_ptr`] of this region or of another one of the same file.
    ///
    /// For files that are only ever replaced as a whole, as ingot's saves and the Hugging Face cache do, this holds.
    #[must_use]
    pub unsafe fn as_slice_unchecked(&self) -> &[u8] {
        // SAFETY: `from_raw_parts` requires
        // - a non-null pointer, aligned for u8: it points to pages or a mapping, and every address is aligned for bytes;
        // - `nbytes` initialised bytes in one allocation, at most `isize::MAX`: `new` cut them at the end of the memory,
        //   which `self` keeps;
        // - no writes as long as the slice lives: the caller promises this.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.nbytes) }
    }

    /// Borrows the elements as numbers of type `T`.
    ///
    /// # Errors
    /// [`BorrowError::Mapped`]; [`BorrowError::Dtype`] if they are of another dtype; [`BorrowError::Unaligned`], which
    /// parts of tensors may be; [`BorrowError::BigEndian`].
    pub fn as_elements<T: Plain>(&self) -> Result<&[T], BorrowError> {
        if self.dtype != T::DTYPE {
            return Err(BorrowError::Dtype {
                expected: T::DTYPE,
                found: self.dtype,
            });
        }
        if cfg!(target_endian = "big") && size_of::<T>() > 1 {
            return Err(BorrowError::BigEndian);
        }
        let bytes = self.as_slice()?;
        // SAFETY: `align_to` asks that the bytes are valid as elements: every bit pattern is (`Plain` is sealed).
        let (before, elements, after) = unsafe { bytes.align_to::<T>() };
        if before.is_empty() && after.is_empty() {
            Ok(elements)
        } else {
            Err(BorrowError::Unaligned {
                alignment: align_of::<T>(),
            })
        }
    }

    /// Borrows the elements of a tensor of `F32`: [`Region::as_elements`] of `f32`.
    ///
    /// # Errors
    /// As [`Region::as_elements`].
    pub fn as_f32(&self) -> Result<&[f32], BorrowError> {
        self.as_elements()
    }

    /// The memory of the bytes; many regions may share one.
    #[doc(hidden)]
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Where in the memory they begin.
    #[doc(hidden)]
    #[must_use]
    pub fn at(&self) -> usize {
        self.at
    }

    /// A copy of the bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.nbytes];
        self.memory.copy_to(self.at, &mut copy);
        copy
    }

    pub(crate) fn aligned_to(&self, alignment: usize) -> bool {
        self.as_ptr().addr().is_multiple_of(alignment)
    }
}

/// The alignment of elements of this dtype: the size of an element.
pub(crate) fn alignment(dtype: Dtype) -> usize {
    match dtype.bits() {
        64 => 8,
        32 => 4,
        16 => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A region in private memory, with the bytes `0, 1, 2, …` from `at` on.
    fn owned(at: usize, nbytes: usize) -> Region {
        let mut block = Block::allocate(at + nbytes).unwrap();
        block
            .dest()
            .fill(|bytes| bytes.iter_mut().zip(0..).for_each(|(byte, value)| *byte = value));
        Region::new(Arc::new(Memory::from(block)), at, nbytes)
    }

    #[test]
    fn private_memory_is_borrowed() {
        let region = owned(4, 8);
        assert_eq!(region.as_slice(), Ok(&[4, 5, 6, 7, 8, 9, 10, 11][..]));
        let words = region.clone().of(Dtype::U32);
        assert_eq!(words.as_elements::<u32>(), Ok(&[0x0706_0504, 0x0B0A_0908][..]));
        let empty = owned(4, 0).of(Dtype::F32);
        assert_eq!(empty.as_f32(), Ok(&[][..]));
    }

    #[test]
    fn elements_of_another_dtype_are_not_borrowed() {
        let expected = BorrowError::Dtype {
            expected: Dtype::F32,
            found: Dtype::I32,
        };
        assert_eq!(owned(0, 8).of(Dtype::I32).as_f32(), Err(expected));
        assert!(owned(0, 8).as_f32().is_err(), "bytes have no elements");
    }

    // Fails without the check of both ends: then four bytes too few are borrowed.
    #[test]
    fn unaligned_elements_are_not_borrowed() {
        for at in 1..4 {
            let unaligned = owned(at, 8).of(Dtype::F32);
            assert_eq!(unaligned.as_f32(), Err(BorrowError::Unaligned { alignment: 4 }));
            assert_eq!(unaligned.as_slice().map(<[u8]>::len), Ok(8));
        }
    }

    // Fails without the check of the memory's kind: then the mapping is borrowed.
    #[test]
    fn a_mapping_is_borrowed_by_contract_only() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"12345678").unwrap();
        let region = Region::new(Arc::new(Memory::map(&file).unwrap()), 0, 8).of(Dtype::F32);
        assert_eq!(region.as_slice(), Err(BorrowError::Mapped));
        assert_eq!(region.as_f32(), Err(BorrowError::Mapped));
        // SAFETY: the slice asks that no one shortens the file, writes to it or to the region: as above.
        assert_eq!(unsafe { region.as_slice_unchecked() }, b"12345678");
    }
}
