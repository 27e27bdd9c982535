//! A file that is mapped into memory.
//!
//! One of the files in which `unsafe` is allowed, because mapping a file is: another process may shorten the
//! file, and touching the pages that are gone then kills the process with SIGBUS. FORMAT.md, "Mapped files", says
//! what that means for users. No Rust reference into a mapping is ever made: the bytes leave as pointers in an
//! exported buffer or by copy, so that a process that writes to the file cannot break what the compiler assumes.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::Arc;
#[cfg(target_os = "linux")]
use std::sync::OnceLock;

#[cfg(target_os = "linux")]
use ingot_format::to_usize;
use memmap2::MmapOptions;
#[cfg(target_os = "linux")]
use memmap2::MmapRaw;

use crate::memory::Memory;

/// A file mapped privately: writing to the memory copies the page and never reaches the file.
#[derive(Debug)]
pub(super) struct Mapping {
    memory: Arc<Memory>,
    /// The file once more, to copy from: in `memory` are also the bytes that users wrote to their tensors. Made when it
    /// is first needed; `None` inside where that failed.
    #[cfg(target_os = "linux")]
    original: OnceLock<Option<MmapRaw>>,
}

impl Mapping {
    /// Map the whole of `file`.
    pub(super) fn new(file: &File) -> io::Result<Mapping> {
        // SAFETY: `map_copy` requires that other processes do not change the file as long as a slice of the mapping is
        // held. No slice is ever made: `Memory` takes over the pages at once and returns only a pointer. Not provable: a
        // process that truncates the file removes pages, and touching a removed page is a SIGBUS, never wrong bytes.
        //
        // Without reserving swap for pages that might be written to: the system would refuse files that are larger
        // than its memory, though hardly any user writes to such tensors.
        let pages = unsafe { MmapOptions::new().no_reserve_swap().map_copy(file) }?;
        Ok(Mapping {
            memory: Arc::new(Memory::from(pages)),
            #[cfg(target_os = "linux")]
            original: OnceLock::new(),
        })
    }

    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Map the whole of `file` to read from.
    #[cfg(target_os = "linux")]
    pub(super) fn unwritten(file: &File) -> io::Result<MmapRaw> {
        MmapOptions::new().map_raw_read_only(file)
    }

    /// Fill `runs` with their bytes of the file and return whether that succeeded. `map` maps the file with
    /// [`Mapping::unwritten`].
    #[cfg(target_os = "linux")]
    pub(super) fn copy_runs(
        &self,
        map: impl FnOnce() -> Option<MmapRaw>,
        runs: &mut [(u64, &mut [u8])],
    ) -> bool {
        let original = self.original.get_or_init(map);
        original
            .as_ref()
            .is_some_and(|pages| copy_by_the_kernel(pages, runs))
    }
}

/// Fills `runs` with their bytes of a mapped file, in one system call; whether it did.
///
/// The kernel copies from this process to itself. Where another process shortened the file it stops at the page that
/// is gone, and nobody gets a SIGBUS. It takes a fifth of the time of reading each run, and little more than copying
/// them here would (2026-11, 256 bytes of every 4 KiB: 0.24 µs per run, against 0.9 and 0.11).
#[cfg(target_os = "linux")]
fn copy_by_the_kernel(pages: &MmapRaw, runs: &mut [(u64, &mut [u8])]) -> bool {
    let from = |(position, dest): &(u64, &mut [u8])| -> Option<libc::iovec> {
        let begin = to_usize(*position)?;
        let lies_in = begin.checked_add(dest.len())? <= pages.len();
        lies_in.then(|| libc::iovec {
            iov_base: pages.as_mut_ptr().wrapping_add(begin).cast(),
            iov_len: dest.len(),
        })
    };
    let Some(sources) = runs.iter().map(from).collect::<Option<Vec<_>>>() else {
        return false;
    };
    let targets = targets(runs);
    let expected: usize = sources.iter().map(|source| source.iov_len).sum();
    let counts = (
        libc::c_ulong::try_from(sources.len()),
        libc::c_ulong::try_from(targets.len()),
    );
    let (Ok(source_count), Ok(target_count)) = counts else {
        return false;
    };
    // SAFETY: `process_vm_writev` asks for
    // - so many vectors from `sources` and from `targets` on: both live until it returns;
    // - memory of this process at the targets that may be written: each is a run, or several that lie side by side, and
    //   all runs are borrowed mutably until it returns. The kernel writes no more than their lengths;
    // - nothing of the sources: it fails where they cannot be read. They lie in `pages` (`lies_in`), into which no
    //   reference is ever made. Tried: without that check `runs_past_the_mapping_are_refused` fails.
    let copied = unsafe {
        libc::process_vm_writev(
            rustix::process::getpid().as_raw_nonzero().get(),
            sources.as_ptr(),
            source_count,
            targets.as_ptr(),
            target_count,
            0,
        )
    };
    usize::try_from(copied).is_ok_and(|copied| copied == expected)
}

/// The memory of runs, those side by side as one.
#[cfg(target_os = "linux")]
fn targets(runs: &mut [(u64, &mut [u8])]) -> Vec<libc::iovec> {
    let mut targets: Vec<libc::iovec> = Vec::new();
    for (_, dest) in runs {
        match targets.last_mut() {
            Some(last) if last.iov_base.addr() + last.iov_len == dest.as_ptr().addr() => {
                last.iov_len += dest.len();
            }
            _ => targets.push(libc::iovec {
                iov_base: dest.as_mut_ptr().cast(),
                iov_len: dest.len(),
            }),
        }
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::super::local::LocalFile;
    use super::super::read_at::ReadAt as _;
    use super::*;

    fn mapped(bytes: &[u8]) -> (tempfile::NamedTempFile, LocalFile) {
        let named = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(named.path(), bytes).unwrap();
        let file = LocalFile::of(File::open(named.path()).unwrap()).unwrap();
        file.map().unwrap();
        (named, file)
    }

    #[test]
    fn reads_are_of_the_file_and_not_of_what_was_written_to_its_tensors_and_end_with_it() {
        let (_file, source) = mapped(b"0123456789");
        let first = source.memory().unwrap().as_ptr();
        // SAFETY: the mapping is writable for ten bytes, and nobody else uses it.
        unsafe { first.write(b'x') };
        let mut dest = [0; 20];
        assert_eq!(source.read_at(0, &mut dest).unwrap(), 10);
        assert_eq!(&dest[..11], b"0123456789\0");
        assert_eq!(source.read_at(9, &mut dest).unwrap(), 1);
        assert_eq!(source.read_at(10, &mut dest).unwrap(), 0);
    }

    #[test]
    fn a_mapped_file_that_is_shortened_is_read_to_its_end_or_cannot_be_shortened() {
        let (file, source) = mapped(&[7; 20_000]);
        let shortened = file.as_file().set_len(5000);
        let left = if shortened.is_ok() { 5000 } else { 20_000 };
        assert_eq!(source.nbytes_now().unwrap(), Some(left));
        let mut dest = vec![0; 20_000];
        assert_eq!(
            source.read_at(0, &mut dest).unwrap(),
            usize::try_from(left).unwrap()
        );
        assert_eq!(shortened.is_err(), cfg!(windows), "{shortened:?}");
    }

    #[cfg(target_os = "linux")]
    mod copied_by_the_kernel {
        use super::*;

        #[test]
        fn runs_are_copied_from_the_file_and_not_from_what_was_written_to_its_tensors() {
            let (_file, source) = mapped(b"0123456789");
            let first = source.memory().unwrap().as_ptr();
            // SAFETY: the mapping is writable for ten bytes, and nobody else uses it.
            unsafe { first.write(b'x') };
            let (mut one, mut two) = ([0; 2], [0; 2]);
            assert!(source.copy_runs(&mut [(7, &mut one), (0, &mut two)]));
            assert_eq!((&one, &two), (b"78", b"01"));
        }

        #[test]
        fn runs_past_the_mapping_are_refused() {
            let (_file, source) = mapped(&[7; 9000]);
            let mut dest = [0; 2];
            assert!(!source.copy_runs(&mut [(8999, &mut dest)]));
            assert!(!source.copy_runs(&mut [(u64::MAX, &mut dest)]));
        }

        #[test]
        fn a_shortened_file_is_no_crash() {
            let (file, source) = mapped(&[7; 20_000]);
            let (mut one, mut two) = ([0; 2], [0; 2]);
            let mut runs: [(u64, &mut [u8]); 2] = [(5, &mut one), (17_000, &mut two)];
            assert!(source.copy_runs(&mut runs));
            file.as_file().set_len(5000).unwrap();
            assert!(!source.copy_runs(&mut runs));
        }
    }
}
