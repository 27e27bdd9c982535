//! Errors by the numbers of the system, so that Python raises the class that it has for each.

use std::io;

use rustix::io::Errno;

/// Something has the name.
pub(crate) fn exists() -> io::Error {
    Errno::EXIST.into()
}

pub(crate) fn is_a_directory() -> io::Error {
    Errno::ISDIR.into()
}

/// Another process is changing the file.
pub(crate) fn in_use() -> io::Error {
    Errno::BUSY.into()
}

pub(crate) fn unsupported() -> io::Error {
    Errno::OPNOTSUPP.into()
}

/// This process has as many files open as it may.
#[cfg(test)]
pub(crate) fn out_of_descriptors() -> io::Error {
    Errno::MFILE.into()
}

/// Return whether the file system cannot rename a file over another, so that the bytes have to be copied.
pub(crate) fn is_replaced_by_copy(fault: &io::Error) -> bool {
    let fault = Errno::from_io_error(fault);
    matches!(fault, Some(Errno::NOSYS | Errno::OPNOTSUPP | Errno::XDEV))
}

/// Return whether a lock was refused because the file system has no locks.
pub(crate) fn has_no_locks(fault: &io::Error) -> bool {
    let fault = Errno::from_io_error(fault);
    matches!(
        fault,
        Some(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK | Errno::INVAL)
    )
}

pub(crate) fn is_out_of_descriptors(fault: &io::Error) -> bool {
    matches!(Errno::from_io_error(fault), Some(Errno::MFILE | Errno::NFILE))
}
