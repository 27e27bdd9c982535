//! Errors by the system's numbers, and waiting for temporary ones.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use windows_sys::Win32::Foundation::{
    ERROR_ALREADY_EXISTS, ERROR_BUSY, ERROR_CANT_RESOLVE_FILENAME, ERROR_INVALID_FUNCTION,
    ERROR_LOCK_VIOLATION, ERROR_NOT_SUPPORTED, ERROR_SHARING_VIOLATION, ERROR_TOO_MANY_OPEN_FILES,
    WIN32_ERROR,
};

/// How long to wait for a file that another program has for a moment: a virus scanner, an indexer, a backup.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long to sleep before the next attempt.
const PAUSE: Duration = Duration::from_millis(2);

#[allow(
    clippy::cast_possible_wrap,
    reason = "the standard library has the same numbers with a sign"
)]
pub(super) fn numbered(number: WIN32_ERROR) -> io::Error {
    io::Error::from_raw_os_error(number as i32)
}

pub(super) fn has_number(fault: &io::Error, number: WIN32_ERROR) -> bool {
    fault.raw_os_error().and_then(|found| u32::try_from(found).ok()) == Some(number)
}

/// Return whether the name exists.
pub(crate) fn exists() -> io::Error {
    numbered(ERROR_ALREADY_EXISTS)
}

pub(crate) fn is_a_directory() -> io::Error {
    // The system's own number for this has another meaning.
    io::ErrorKind::IsADirectory.into()
}

/// Another process is changing the file.
pub(crate) fn in_use() -> io::Error {
    numbered(ERROR_BUSY)
}

pub(crate) fn unsupported() -> io::Error {
    numbered(ERROR_NOT_SUPPORTED)
}

pub(super) fn too_many_links() -> io::Error {
    numbered(ERROR_CANT_RESOLVE_FILENAME)
}

#[cfg(test)]
pub(crate) fn out_of_descriptors() -> io::Error {
    numbered(ERROR_TOO_MANY_OPEN_FILES)
}

/// Return whether the file system cannot rename a file over another one. On Windows no such file system is known.
pub(crate) fn is_replaced_by_copy(_: &io::Error) -> bool {
    false
}

/// Return whether a lock was refused because the file system has no locks.
pub(crate) fn has_no_locks(fault: &io::Error) -> bool {
    has_number(fault, ERROR_NOT_SUPPORTED) || has_number(fault, ERROR_INVALID_FUNCTION)
}

/// A process may have millions of handles.
pub(crate) fn is_out_of_descriptors(fault: &io::Error) -> bool {
    has_number(fault, ERROR_TOO_MANY_OPEN_FILES)
}

/// Return whether another process has the file open without sharing it.
pub(super) fn is_shared_by_nobody(fault: &io::Error) -> bool {
    has_number(fault, ERROR_SHARING_VIOLATION) || has_number(fault, ERROR_LOCK_VIOLATION)
}

/// Tries `work` again for a second, as long as its error `passes`.
pub(super) fn patiently<T>(
    passes: impl Fn(&io::Error) -> bool,
    mut work: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let begin = Instant::now();
    loop {
        match work() {
            Err(fault) if passes(&fault) && begin.elapsed() < PATIENCE => thread::sleep(PAUSE),
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_is_waited_for_and_anything_else_is_told_at_once() {
        let mut left = 3;
        let outcome = patiently(is_shared_by_nobody, || match left {
            0 => Ok("there"),
            _ => {
                left -= 1;
                Err(numbered(ERROR_SHARING_VIOLATION))
            }
        });
        assert_eq!(outcome.unwrap(), "there");
        let mut calls = 0;
        let outcome = patiently(is_shared_by_nobody, || {
            calls += 1;
            Err::<(), _>(in_use())
        });
        assert!(has_number(&outcome.unwrap_err(), ERROR_BUSY));
        assert_eq!(calls, 1);
    }
}
