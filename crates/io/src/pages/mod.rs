//! Private memory of this process: whole pages of the system, zero until they are written to. `unix` and `windows` have the
//! same type, and one of the two is compiled.
#![allow(unsafe_code)]

use std::ops::Range;

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
use unix as system;
#[cfg(windows)]
use windows as system;

pub(crate) use system::Pages;
pub(crate) use system::populate;

/// The size of a huge page on the machines that have them.
pub(crate) const HUGE_PAGE_NBYTES: usize = 2 << 20;

impl Pages {
    /// The bytes, as long as no other code writes to them.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `from_raw_parts` requires
        // - a non-null pointer to `len` initialised bytes in one allocation, at most `isize::MAX`: the system mapped them,
        //   zeroed, and `self` keeps them;
        // - no write to them while the slice lives: `bytes_mut` borrows `self` exclusively, and writers by
        //   `as_mut_ptr` promise that no slice lives (`Region`, in region.rs).
        unsafe { std::slice::from_raw_parts(self.as_mut_ptr(), self.len()) }
    }

    /// The bytes, to be written to.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `from_raw_parts_mut` requires what `from_raw_parts` does in `bytes`, and for no other access while the
        // slice lives: `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len()) }
    }

    /// Request memory from the system for a range at once, which is faster than page by page. The range is untouched, or its
    /// bytes do not matter: some systems write zeros.
    pub(crate) fn populate(&mut self, range: Range<usize>) {
        let fresh = &mut self.bytes_mut()[range];
        // SAFETY: requires bytes that may be written, whose values do not matter, and that no other code uses: `fresh` is
        // borrowed exclusively, and the caller does not need its bytes.
        unsafe { populate(fresh.as_mut_ptr(), fresh.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compiles if `Pages` may be sent and shared, which Windows has only by `unsafe impl`.
    const _: () = {
        const fn is_sent_and_shared<T: Send + Sync>() {}
        is_sent_and_shared::<Pages>();
    };

    #[test]
    fn pages_are_zero_and_keep_what_is_written_to_them() {
        for nbytes in [1, 4096, (5 << 20) + 7] {
            let mut pages = Pages::allocate(nbytes).unwrap();
            assert_eq!(pages.len(), nbytes);
            assert_eq!(pages.as_mut_ptr().addr() % 4096, 0);
            assert!(pages.bytes().iter().all(|byte| *byte == 0));
            pages.want_huge(0..nbytes);
            pages.populate(0..nbytes);
            pages.bytes_mut().fill(7);
            assert!(pages.bytes().iter().all(|byte| *byte == 7));
        }
    }

    #[test]
    fn offered_pages_have_old_bytes_or_zeros_and_keep_what_is_written_to_them() {
        let mut pages = Pages::allocate(1 << 20).unwrap();
        pages.bytes_mut().fill(7);
        let Some(mut pages) = pages.offered() else {
            assert_ne!(std::env::consts::OS, "linux");
            return;
        };
        assert!(pages.bytes().iter().all(|byte| [0, 7].contains(byte)));
        pages.populate(0..1 << 20);
        pages.bytes_mut().fill(9);
        assert!(pages.bytes().iter().all(|byte| *byte == 9));
    }

    #[test]
    fn more_pages_than_there_are_addresses_are_refused() {
        assert!(Pages::allocate(1 << 50).is_err());
    }
}
