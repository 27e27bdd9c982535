//! The page cache: how much of a file it holds, and advice about it.
//!
//! One of the files in which `unsafe` is allowed, because no library has the system calls that report this.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::AsRawFd;

use ingot_format::{to_u64, to_usize};
use rustix::fs::{Advice, fadvise};

/// Bytes of one query. The system examines each page: 1 µs for these, 7 ms for 2 GiB (2026-11).
const WINDOW_NBYTES: u64 = 64 << 10;

/// The number of the system call, which libc lacks on many machines. On MIPS the call has another number, and
/// this number is unused.
const CACHESTAT: libc::c_long = 451;

/// Return whether most of these bytes would come from a disk, judging by a sample at `windows` positions. False if the
/// system does not report it. Linux reports it only for files that the process may write to.
pub(super) fn is_cold(file: &File, range: &Range<u64>, windows: u64) -> bool {
    let (mut cached, mut asked) = (0, 0);
    let step = ((range.end.saturating_sub(range.start)) / windows).max(WINDOW_NBYTES);
    let mut at = range.start;
    while at < range.end {
        let window = at..range.end.min(at + WINDOW_NBYTES);
        let Some(nbytes) = by_cachestat(file, &window).or_else(|| by_mincore(file, &window)) else {
            return false;
        };
        cached += nbytes;
        asked += window.end - window.start;
        at += step;
    }
    2 * cached < asked
}

/// Double the kernel's read-ahead of sequential reads. Each answer of a remote file system takes as long, regardless of
/// its size, and the kernel requests at most 128 KiB at once from a FUSE mount. Random reads are not affected.
pub(super) fn read_far_ahead(file: &File) {
    // This is advice: reads work without it.
    let _ = fadvise(file, 0, None, Advice::Sequential);
}

/// Free the pages of the cache that hold these bytes, including the pages at both ends. The system keeps pages that were not
/// yet written to the disk, and pages that a process has mapped and touched.
pub(super) fn forget(file: &File, span: &Range<u64>) {
    let page = to_u64(rustix::param::page_size());
    let begin = span.start - span.start % page;
    let nbytes = span.end.next_multiple_of(page).saturating_sub(begin);
    // A length of 0 would mean the rest of the file. This is advice: nothing depends on it.
    if let Some(nbytes) = NonZeroU64::new(nbytes).filter(|_| !span.is_empty()) {
        let _ = fadvise(file, begin, Some(nbytes), Advice::DontNeed);
    }
}

/// Count the bytes of the cached pages, on Linux 6.5 and later.
fn by_cachestat(file: &File, window: &Range<u64>) -> Option<u64> {
    let range = [window.start, window.end - window.start];
    // Pages in the cache, and four other counts.
    let mut counts = [0_u64; 5];
    // SAFETY: `cachestat` requires
    // - a `struct cachestat_range`, two u64: `range` is that, and lives until it returns;
    // - a `struct cachestat`, five u64, that may be written: `counts` is that, and is borrowed by this call only.
    // A kernel that does not know the number returns an error and does nothing.
    let code = unsafe {
        libc::syscall(
            CACHESTAT,
            file.as_raw_fd(),
            range.as_ptr(),
            counts.as_mut_ptr(),
            0_u32,
        )
    };
    (code == 0).then(|| counts[0].saturating_mul(to_u64(rustix::param::page_size())))
}

/// As [`by_cachestat`], through a mapping, for older kernels.
fn by_mincore(file: &File, window: &Range<u64>) -> Option<u64> {
    let page = rustix::param::page_size();
    let begin = window.start - window.start % to_u64(page);
    let len = to_usize(window.end - begin)?;
    let pages = memmap2::MmapOptions::new()
        .offset(begin)
        .len(len)
        .map_raw_read_only(file)
        .ok()?;
    let mut flags = vec![0_u8; len.div_ceil(page)];
    // SAFETY: `mincore` requires
    // - an address on the border of a page, of `len` bytes that are mapped: a mapping begins at one, as `begin` does in
    //   the file, and is `len` bytes long. None of them is touched;
    // - a writable byte for each page, from `flags` on: there are as many, and they are borrowed by this call only.
    let code = unsafe { libc::mincore(pages.as_mut_ptr().cast(), len, flags.as_mut_ptr().cast()) };
    let cached = flags.iter().filter(|&&flag| flag & 1 == 1).count();
    (code == 0).then(|| to_u64(cached * page))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_in_the_cache_and_what_was_dropped_is_not() {
        let file = tempfile::tempfile().unwrap();
        let nbytes = 4 << 20;
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![7; 4 << 20], 0).unwrap();
        let window = 5..WINDOW_NBYTES;
        for ask in [by_cachestat, by_mincore] {
            // Some systems support neither of the two calls.
            assert!(ask(&file, &window).is_none_or(|cached| cached >= WINDOW_NBYTES));
        }
        assert!(!is_cold(&file, &(0..nbytes), 4));
        file.sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        let asked = [by_cachestat(&file, &window), by_mincore(&file, &window)];
        // A file system in memory keeps its pages.
        if asked.iter().flatten().all(|&cached| cached == 0) && asked.iter().any(Option::is_some) {
            assert!(is_cold(&file, &(0..nbytes), 4));
        }
        assert!(!is_cold(&file, &(0..0), 4), "nothing is not cold");
    }

    #[test]
    fn what_is_forgotten_leaves_the_rest_where_it_is() {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![7; 4 << 20], 0).unwrap();
        file.sync_all().unwrap();
        let cached = |span: Range<u64>| by_cachestat(&file, &span).or_else(|| by_mincore(&file, &span));
        forget(&file, &(7..7));
        let before = cached(0..4 << 20);
        // Neither end is at the border of a page.
        forget(&file, &((1 << 20) + 5..(3 << 20) - 5));
        // A file system in memory keeps its pages.
        if before.is_some() && cached((1 << 20)..(3 << 20)) == Some(0) {
            assert!(before >= Some(4 << 20));
            // Fewer than all bytes are dropped, since pages may be in groups.
            assert!(cached(0..4 << 20) > Some(0));
        }
    }
}
