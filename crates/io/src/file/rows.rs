//! Rows that are copied from a mapping of their file.
//!
//! One of the files in which `unsafe` is allowed, because copying from a mapping is unsafe: another process may truncate the
//! file, and touching the removed pages then kills the process with SIGBUS. FORMAT.md, "Mapped files", describes the
//! consequences for users. No Rust reference into a mapping is ever made: the bytes leave as pointers in an exported buffer or
//! by copy, so that a process that writes to the file cannot break the compiler's assumptions.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

use std::mem;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use ingot_format::{Row, to_u64, to_usize};
use memmap2::{MmapRaw, UncheckedAdvice};

use crate::memory::copy_units;

/// Bytes of a mapping that are in this process at once while rows are copied from it.
const MOST_NBYTES: u64 = 16 << 20;

/// A second mapping of a file whose tensors are in memory, to copy rows from: the first one also has the bytes that users
/// wrote to their tensors. It is made when it is first needed, and is `None` if that failed.
#[derive(Debug, Default)]
pub(super) struct RowReader {
    pages: OnceLock<Option<MmapRaw>>,
    /// Bytes that copies of rows have spanned.
    copied_nbytes: AtomicU64,
}

impl RowReader {
    /// Fill `dest` with the blocks of `rows` and return whether that succeeded. `map` maps the whole file, and `is_whole`
    /// checks its size.
    pub(super) fn copy(
        &self,
        map: impl FnOnce() -> Option<MmapRaw>,
        rows: &[Row],
        dest: &mut [u8],
        is_whole: impl FnOnce() -> bool,
    ) -> bool {
        let pages = self.pages.get_or_init(map);
        let Some(pages) = pages
            .as_ref()
            .filter(|pages| copy_from(pages, rows, dest, is_whole))
        else {
            return false;
        };
        let span: u64 = rows
            .iter()
            .map(|row| row.stride.max(row.nbytes) * row.count)
            .sum();
        let before = self.copied_nbytes.fetch_add(span, Ordering::Relaxed);
        if (before + span) / MOST_NBYTES > before / MOST_NBYTES {
            remove_pages(pages);
        }
        true
    }
}

/// Fill `dest` with the blocks of `rows`, and return whether all of them could be copied. `is_whole` checks the file just
/// before the copy.
///
/// This copy takes half the time of a copy by the kernel (`process_vm_writev`), and a fifth of the time of reading each
/// block (2026-11, 512 of every 2048 bytes). With `MADV_POPULATE_READ` before it, it takes 1.5 times as long, and the
/// gap between the check and the copy stays.
fn copy_from(pages: &MmapRaw, rows: &[Row], dest: &mut [u8], is_whole: impl FnOnce() -> bool) -> bool {
    let end = |row: &Row| {
        let reach = row.count.checked_sub(1)?.checked_mul(row.stride)?;
        row.begin.checked_add(reach)?.checked_add(row.nbytes)
    };
    let lies_in = |row: &Row| end(row).is_some_and(|end| end <= to_u64(pages.len()));
    let wanted = rows.iter().map(|row| row.nbytes.saturating_mul(row.count));
    let fits = wanted.fold(0, u64::saturating_add) == to_u64(dest.len());
    if !fits || !rows.iter().all(lies_in) || !is_whole() {
        return false;
    }
    let mut rest = dest;
    for row in rows {
        let number = |value: u64| to_usize(value).unwrap_or(0);
        let (into, after) = mem::take(&mut rest).split_at_mut(number(row.nbytes * row.count));
        let from = pages.as_mut_ptr().wrapping_add(number(row.begin)).cast_const();
        let stride = isize::try_from(row.stride).unwrap_or(0);
        // SAFETY: `copy_units` requires
        // - as many readable blocks, `stride` bytes apart from `from` on, as `into` has room for: `into` has room for
        // `count`, and all of them are in `pages` (`lies_in`), which stay mapped while they are borrowed. All numbers
        // are at most the length of the mapping, so that none was replaced by 0; only the stride of a single block may
        // be larger, and it is not used. Without that check `rows_past_the_mapping_are_rejected` fails;
        // - that the blocks do not overlap `into`: the mapping is only ever read, and `into` is borrowed mutably.
        // Not provable: that no process shortens the file after `is_whole` returned. Touching a page that is gone ends
        // this process with SIGBUS, as with a tensor that is a view. docs/explained/backends.md says so. Without the
        // check `a_shortened_file_is_rejected` ends with SIGBUS.
        unsafe { copy_units(from, stride, number(row.nbytes), into) };
        rest = after;
    }
    true
}

/// Remove all pages of `mapping` from this process. Until then they count as its memory, although the page cache holds them.
fn remove_pages(mapping: &MmapRaw) {
    // SAFETY: `unchecked_advise` asks that no code expects the pages to keep changes: the mapping is never written to, no
    // reference into it is ever made, and the next copy from a page brings the page of the file back.
    //
    // Advice: if it is refused, the pages stay until the mapping is dropped.
    let _ = unsafe { mapping.unchecked_advise(UncheckedAdvice::DontNeed) };
}

#[cfg(test)]
mod tests {
    use super::super::local::tests::mapped;
    use super::super::source::ReadAt as _;
    use super::*;

    fn row(begin: u64, nbytes: u64, count: u64, stride: u64) -> Row {
        Row {
            begin,
            nbytes,
            count,
            stride,
        }
    }

    #[test]
    fn rows_are_copied_from_the_file_and_not_from_what_was_written_to_its_tensors() {
        let (_file, source) = mapped(b"0123456789");
        let first = source.memory().unwrap().as_ptr();
        // SAFETY: the mapping is writable for ten bytes, and no other code uses it.
        unsafe { first.write(b'x') };
        let mut dest = [0; 9];
        let rows = [row(7, 3, 1, 0), row(0, 1, 4, 2), row(5, 1, 2, 0)];
        assert!(source.copy_rows(&rows, &mut dest));
        assert_eq!(&dest, b"789024655");
    }

    #[test]
    fn rows_past_the_mapping_are_rejected() {
        let (_file, source) = mapped(&[7; 9000]);
        let ends = [
            row(8999, 2, 1, 0),
            row(1000, 1, 2, 8000),
            row(u64::MAX, 1, 2, 1),
            row(0, 2, 1, u64::MAX),
        ];
        let copied = ends.map(|row| source.copy_rows(&[row], &mut [0; 2]));
        assert_eq!(copied, [false, false, false, true]);
        assert!(
            !source.copy_rows(&[row(0, 1, 3, 1)], &mut [0; 2]),
            "too little room"
        );
    }

    #[test]
    fn a_shortened_file_is_rejected() {
        let (file, source) = mapped(&[7; 20_000]);
        let (rows, mut dest) = ([row(5, 2, 2, 17_000)], [0; 4]);
        assert!(source.copy_rows(&rows, &mut dest));
        file.as_file().set_len(5000).unwrap();
        assert!(!source.copy_rows(&rows, &mut dest));
    }
}
