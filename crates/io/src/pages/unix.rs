//! Pages from an anonymous mapping.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;

#[cfg(target_os = "linux")]
use memmap2::{Advice, UncheckedAdvice};
use memmap2::{MmapMut, MmapRaw};

/// Private memory of this process.
#[derive(Debug)]
pub(crate) struct Pages(MmapRaw);

impl Pages {
    /// `nbytes` bytes, one at least, which cost nothing before they are touched.
    pub(crate) fn allocate(nbytes: usize) -> io::Result<Pages> {
        MmapMut::map_anon(nbytes).map(|pages| Pages(MmapRaw::from(pages)))
    }

    /// The first byte. Readable and writable for [`Pages::len`] bytes as long as `self` lives.
    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Request huge pages, if the system has them.
    #[cfg(target_os = "linux")]
    pub(crate) fn want_huge(&self, range: Range<usize>) {
        // A kernel without them loses nothing, so the answer does not matter.
        let _ = self.0.advise_range(Advice::HugePage, range.start, range.len());
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn want_huge(&self, _: Range<usize>) {}

    /// Leave the pages out of the memory of forked children, so that writing to them never replaces a page.
    #[cfg(target_os = "linux")]
    pub(crate) fn keep_from_children(&self) {
        // Without it a child costs memory, so the answer does not matter.
        let _ = self.0.advise(Advice::DontFork);
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn keep_from_children(&self) {}

    /// Offer all pages to the system, which takes them when it needs memory. Each byte is an old one or zero from then on,
    /// until its page is written to. Return None if the system cannot do that.
    #[cfg(target_os = "linux")]
    pub(crate) fn offered(self) -> Option<Pages> {
        // SAFETY: `unchecked_advise` requires that no code relies on the bytes: `self` is the only way to them, so no slice
        // lives, and the caller knows that they are old or zero.
        let offered = unsafe { self.0.unchecked_advise(UncheckedAdvice::Free) };
        offered.is_ok().then_some(self)
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn offered(self) -> Option<Pages> {
        None
    }
}

/// Request pages for fresh memory. A failure is ignored: the first write to each page then requests it.
///
/// # Safety
/// The `nbytes` bytes from `start` on are mapped for writing.
#[cfg(target_os = "linux")]
pub(crate) unsafe fn populate(start: *mut u8, nbytes: usize) {
    use rustix::mm::{Advice, madvise};
    let page = rustix::param::page_size();
    let (begin, end) = (start.addr(), start.addr() + nbytes);
    let (first, last) = (begin.next_multiple_of(page), end - end % page);
    if first >= last {
        return;
    }
    let start = start.wrapping_add(first - begin);
    // SAFETY: `madvise` asks that the advice does no harm to users of the memory from `start` on for `last - first` bytes:
    // it is part of the memory that the caller promised, and `PopulateWrite` changes no byte.
    let populated = unsafe { madvise(start.cast(), last - first, Advice::LinuxPopulateWrite) };
    // Kernels before 5.14 do not know it.
    let _ = populated;
}

/// Other systems allocate a page at the first write to it.
#[cfg(not(target_os = "linux"))]
pub(crate) unsafe fn populate(_: *mut u8, _: usize) {}
