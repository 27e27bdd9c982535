//! Memory by address: what is written to a file, and where what is read goes.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use super::pages::populate;

/// Bytes where they lie: memory that stays readable for `'a`, but that others may change.
///
/// A framework hands over memory that any thread of the program may write to, so this is no `&[u8]` and gives
/// none that lasts.
#[derive(Clone, Copy)]
pub struct Bytes<'a> {
    start: NonNull<u8>,
    len: usize,
    owner: PhantomData<&'a [u8]>,
}

impl<'a> Bytes<'a> {
    /// `len` bytes from `start` on. `None` where `start` is null, as it is in tensors whose memory was freed; unless `len`
    /// is 0, as it is for the empty arrays of some frameworks.
    ///
    /// # Safety
    /// - When `start` is not null and `len` is not 0, the `len` bytes from `start` on are one region of initialised memory,
    ///   mapped for reading for all of `'a`, and `len` is at most `isize::MAX`.
    /// - They may change at any time. Then the file gets some of the old bytes and some of the new.
    #[must_use]
    pub unsafe fn new(start: *const u8, len: usize) -> Option<Bytes<'a>> {
        match NonNull::new(start.cast_mut()) {
            Some(start) => Some(Bytes {
                start,
                len,
                owner: PhantomData,
            }),
            None => (len == 0).then(|| Bytes::from(&[][..])),
        }
    }

    /// The size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.start.as_ptr().addr()
    }

    /// Calls `write` with the bytes of `range`. `write` hands them to the operating system and keeps nothing.
    ///
    /// # Errors
    /// What `write` says; that there are not so many bytes, without calling it.
    pub(crate) fn lend<E: From<io::Error>>(
        &self,
        range: Range<usize>,
        write: impl FnOnce(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Range { start: begin, end } = range;
        if begin > end || end > self.len {
            return Err(self.ended(end).into());
        }
        // SAFETY: `add` asks for an offset within the same allocation that does not pass `isize::MAX`:
        // `begin <= end <= self.len`, and `new` was promised `self.len` readable bytes in one region.
        let start = unsafe { self.start.add(begin) };
        // SAFETY: `from_raw_parts` asks for
        // - a non-null pointer, aligned for u8: `NonNull`, and every address is aligned for bytes;
        // - `end - begin` initialised, readable bytes in one allocation, at most `isize::MAX`: `end <= self.len`, for
        //   which `new` was promised all of this, for `'a`, which outlives this call because `self` has it;
        // - no write to them while the slice lives. Nobody can prove this where Python code holds the same memory.
        //   The slice lives for one system call, through which no compiler sees the bytes, so that the consequence is
        //   what `new` says: a file with bytes from before and after the write. Tried: without the check above,
        //   `a_range_past_the_end_is_refused` fails.
        let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), end - begin) };
        write(bytes)
    }

    /// Fills `into` with the bytes from `begin` on.
    ///
    /// # Errors
    /// When there are fewer.
    pub(crate) fn read(&self, begin: usize, into: &mut [u8]) -> io::Result<()> {
        if self.copy_into(begin, into) == into.len() {
            Ok(())
        } else {
            Err(self.ended(begin.saturating_add(into.len())))
        }
    }

    fn ended(&self, expected: usize) -> io::Error {
        ended(self.len, expected)
    }

    /// Copies the bytes from `begin` on into `into`, as many as both have, and says how many.
    pub fn copy_into(&self, begin: usize, into: &mut [u8]) -> usize {
        let begin = begin.min(self.len);
        let count = into.len().min(self.len - begin);
        // SAFETY: `add` asks for an offset within the same allocation: `begin <= self.len`, as in `lend`.
        let start = unsafe { self.start.add(begin) };
        // SAFETY: `copy`, which lets both sides overlap, asks for
        // - `count` readable bytes at the source: `begin + count <= self.len`, see `new`;
        // - `count` writable bytes at the destination: `count <= into.len()`, and `into` is borrowed mutably;
        // - alignment: bytes have none.
        // Not provable: that no thread writes to the source meanwhile. The consequence is as `new` says. Tried: without
        // the second `min` above, `a_range_past_the_end_is_refused` fails.
        unsafe { std::ptr::copy(start.as_ptr(), into.as_mut_ptr(), count) };
        count
    }
}

/// That bytes up to `expected` were asked for, of a payload that has `nbytes`.
pub(crate) fn ended(nbytes: usize, expected: usize) -> io::Error {
    let message = format!("a tensor gave {nbytes} bytes, expected {expected}");
    io::Error::new(io::ErrorKind::UnexpectedEof, message)
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(bytes: &'a [u8]) -> Bytes<'a> {
        Bytes {
            start: NonNull::from(bytes).cast(),
            len: bytes.len(),
            owner: PhantomData,
        }
    }
}

impl fmt::Debug for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({} bytes)", self.len)
    }
}

// SAFETY: a `Bytes` only reads. `new` was promised that the memory is readable for `'a`, which holds from every
// thread, and that whoever writes to it meanwhile accepts mixed bytes.
unsafe impl Send for Bytes<'_> {}
// SAFETY: as for `Send`; a shared `Bytes` has no state of its own that changes.
unsafe impl Sync for Bytes<'_> {}

/// Where bytes go that are read: memory that stays writable for `'a`, and that only the holder fills.
///
/// The memory may be a framework's, which any thread of the program may look at meanwhile, so a `Dest` is no
/// `&mut [u8]` and gives none that lasts.
pub struct Dest<'a> {
    start: NonNull<u8>,
    len: usize,
    /// Whether the system has yet to find pages for it.
    is_untouched: bool,
    owner: PhantomData<&'a mut [u8]>,
}

impl<'a> Dest<'a> {
    /// `len` bytes from `start` on. `None` where `start` is null, unless `len` is 0.
    ///
    /// # Safety
    /// - When `start` is not null and `len` is not 0, the `len` bytes from `start` on are one region of initialised memory, mapped for
    ///   reading and writing for all of `'a`, and `len` is at most `isize::MAX`.
    /// - Nobody else writes to them for `'a`. Whoever reads them meanwhile gets some of the old bytes and some of the
    ///   new.
    #[must_use]
    pub unsafe fn new(start: *mut u8, len: usize) -> Option<Dest<'a>> {
        match NonNull::new(start) {
            Some(start) => Some(Dest {
                start,
                len,
                is_untouched: false,
                owner: PhantomData,
            }),
            None => (len == 0).then(|| Dest::from(&mut [][..])),
        }
    }

    /// Fresh memory of the system, which is faster to fill when its pages are asked for in one go.
    pub(crate) fn untouched(bytes: &'a mut [u8]) -> Dest<'a> {
        Dest {
            is_untouched: true,
            ..Dest::from(bytes)
        }
    }

    /// The size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to fill.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte.
    pub(crate) fn addr(&self) -> usize {
        self.start.addr().get()
    }

    /// The first `at` bytes, or all where there are no more, and the rest.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Dest<'a>, Dest<'a>) {
        let at = at.min(self.len);
        // SAFETY: `add` asks for an offset within the same allocation that does not pass `isize::MAX`: `at` is at most
        // `self.len`, and `new` was promised so many bytes in one region. Tried: without the `min` above,
        // `a_dest_is_cut_where_it_ends` fails.
        let middle = unsafe { self.start.add(at) };
        let part = |start, len| Dest { start, len, ..self };
        (part(self.start, at), part(middle, self.len - at))
    }

    /// Has the system find pages for the memory, if it is fresh.
    pub(crate) fn populate(&mut self) {
        if self.is_untouched {
            // SAFETY: asks for `len` bytes from `start` on that may be written, are zero, and that nobody else uses: `new`
            // was promised the first and the last, and `is_untouched` says that nobody has written to them since the
            // system gave them.
            unsafe { populate(self.start.as_ptr(), self.len) };
            self.is_untouched = false;
        }
    }

    /// Calls `write` with the bytes, to be filled. `write` hands them to the operating system, or copies into them, and
    /// keeps nothing.
    pub(crate) fn fill<R>(&mut self, write: impl FnOnce(&mut [u8]) -> R) -> R {
        self.is_untouched = false;
        // SAFETY: `from_raw_parts_mut` asks for
        // - a non-null pointer, aligned for u8: `NonNull`, and every address is aligned for bytes;
        // - `self.len` initialised bytes, readable and writable, in one allocation, at most `isize::MAX`: `new` was
        //   promised all of this for `'a`, which outlives this call because `self` has it;
        // - no other access to them while the slice lives. That nobody writes `new` was promised, and `self` is
        //   borrowed mutably. That no thread reads them meanwhile nobody can prove where Python code holds the same
        //   memory; the consequence is what `new` says.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) };
        write(bytes)
    }
}

impl Dest<'_> {
    /// Calls `write` with the bytes of all of them, in their order, to be filled as by [`Dest::fill`].
    pub(crate) fn fill_all<R>(dests: &mut [Dest<'_>], write: impl FnOnce(Vec<&mut [u8]>) -> R) -> R {
        let lent = dests.iter_mut().map(|dest| {
            dest.is_untouched = false;
            // SAFETY: `from_raw_parts_mut` asks for what it asks for in `fill`. Nothing else accesses the bytes while the
            // slice lives: no two of `dests` share any, since each is the only one that may write to its own (`new`,
            // `split_at`), and all are borrowed mutably until `write` returns.
            unsafe { std::slice::from_raw_parts_mut(dest.start.as_ptr(), dest.len) }
        });
        write(lent.collect())
    }
}

impl<'a> From<&'a mut [u8]> for Dest<'a> {
    fn from(bytes: &'a mut [u8]) -> Dest<'a> {
        Dest {
            len: bytes.len(),
            start: NonNull::from(bytes).cast(),
            is_untouched: false,
            owner: PhantomData,
        }
    }
}

impl fmt::Debug for Dest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dest({} bytes)", self.len)
    }
}

// SAFETY: a `Dest` is the only way to write to its memory, as a `&mut [u8]` is, and the memory is writable from every
// thread: `new` was promised both.
unsafe impl Send for Dest<'_> {}
// SAFETY: a shared `Dest` gives nothing but its length.
unsafe impl Sync for Dest<'_> {}

#[cfg(test)]
mod tests {
    use super::*;

    const _: fn() = || {
        fn crosses_threads<T: Send + Sync>() {}
        crosses_threads::<Bytes<'_>>();
        crosses_threads::<Dest<'_>>();
    };

    #[test]
    fn a_range_past_the_end_is_refused() {
        let bytes = [1, 2, 3];
        let payload = Bytes::from(&bytes[..2]);
        for range in [1..9, 7..9, 2..3] {
            let lent = payload.lend(range.clone(), |_| Err::<(), _>(io::Error::other("lent")));
            let refused = lent.unwrap_err().to_string();
            assert_eq!(refused, format!("a tensor gave 2 bytes, expected {}", range.end));
        }
        assert!(
            payload
                .lend(1..2, |lent| if lent == [2] {
                    Ok(())
                } else {
                    Err(io::Error::other("others"))
                })
                .is_ok()
        );
        let mut into = [0; 4];
        assert!(payload.read(1, &mut into).is_err() && payload.read(8, &mut into).is_err());
        assert_eq!(payload.copy_into(1, &mut into), 1);
        assert_eq!(payload.copy_into(8, &mut into), 0);
        assert_eq!(into, [2, 0, 0, 0]);
    }

    #[test]
    fn a_dest_is_cut_where_it_ends() {
        let mut bytes = [0; 4];
        let (mut first, rest) = Dest::from(&mut bytes[..3]).split_at(2);
        let (mut second, mut nothing) = rest.split_at(9);
        assert_eq!((first.len(), second.len(), nothing.len()), (2, 1, 0));
        first.fill(|part| part.fill(1));
        second.fill(|part| part.fill(2));
        nothing.fill(|part| assert!(part.is_empty()));
        assert_eq!(bytes, [1, 1, 2, 0]);
    }

    #[test]
    fn null_is_an_empty_dest() {
        // SAFETY: `new` accepts null with a length of 0.
        let mut dest = unsafe { Dest::new(std::ptr::null_mut(), 0) }.unwrap();
        assert!(dest.is_empty());
        dest.fill(|bytes| assert!(bytes.is_empty()));
        // SAFETY: and with any other.
        assert!(unsafe { Dest::new(std::ptr::null_mut(), 1) }.is_none());
    }

    #[test]
    fn null_is_an_empty_payload() {
        // SAFETY: `new` accepts null with a length of 0.
        let payload = unsafe { Bytes::new(std::ptr::null(), 0) }.unwrap();
        assert!(payload.is_empty());
        assert!(
            payload
                .lend(0..0, |lent| if lent.is_empty() {
                    Ok(())
                } else {
                    Err(io::Error::other("some"))
                })
                .is_ok()
        );
        // SAFETY: and with any other.
        assert!(unsafe { Bytes::new(std::ptr::null(), 1) }.is_none());
    }

    // Here and not in tests/save.rs because only this file may turn a mapping into a payload. Tried: when the in-place
    // way writes without a second file, this fails.
    #[test]
    fn a_payload_may_lie_in_the_file_that_it_replaces() {
        use crate::save::save_data;
        use crate::{Payload, Replace, SaveOptions, Unwatched};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let old: Vec<u8> = (0..9_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
        for replace in [Replace::Atomic, Replace::InPlace] {
            std::fs::write(&path, &old).unwrap();
            let file = std::fs::File::open(&path).unwrap();
            // SAFETY: `map_copy_read_only` asks that nobody shortens the file while the mapping is used. The save below
            // is the only one that touches it, and gives it more bytes than it had.
            let mapped = unsafe { memmap2::MmapOptions::new().map_copy_read_only(&file).unwrap() };
            // SAFETY: `new` asks for `len` readable bytes: the mapping has them, until it is dropped after the save.
            let bytes = unsafe { Bytes::new(mapped.as_ptr(), mapped.len()) }.unwrap();
            let payload = Payload::Bytes(bytes);
            let options = SaveOptions {
                durable: false,
                replace,
                ..SaveOptions::default()
            };
            // The head moves all bytes on, so that writing straight into the file would overwrite unread ones.
            let head = vec![b'h'; 2_000_000];
            let (payloads, nbytes) = ([payload.clone(), payload], 2 * ingot_format::to_u64(old.len()));
            save_data(&path, &head, nbytes, &payloads, &options, &Unwatched).unwrap();
            assert!(
                std::fs::read(&path).unwrap() == [&head[..], &old, &old].concat(),
                "{replace:?}"
            );
        }
    }
}
