//! What can fail while a file is written, and what its user can do about it.

use std::io;
use std::path::Path;

/// What can fail, as [`Error::Write`](super::Error::Write) says it after "could not".
pub(crate) mod step {
    pub(crate) const OPEN: &str = "open it for writing";
    pub(crate) const READ_ONLY: &str = "replace it, since it is read-only";
    pub(crate) const CREATE: &str = "create a temporary file";
    pub(crate) const RESERVE: &str = "reserve space";
    pub(crate) const READ: &str = "get the bytes of a tensor";
    pub(crate) const SEAL: &str = "put digests at its beginning";
    pub(crate) const WRITE: &str = "write";
    pub(crate) const JOURNAL: &str = "use what its writers noted beside it";
    pub(crate) const OWNER: &str = "tell by a lock whether the writer that began it is still there";
    pub(crate) const ATTRIBUTES: &str = "copy mode and owner";
    pub(crate) const FLUSH: &str = "flush";
    pub(crate) const RENAME: &str = "rename the temporary file over it";
    pub(crate) const FLUSH_DIRECTORY: &str = "flush its directory, though it is written";
    pub(crate) const COPY: &str = "overwrite it in place, so it holds a mix of old and new bytes";
}

/// What the user can do about a fault in writing to `path`.
pub(super) fn hint(path: &Path, step: &str, fault: &io::Error) -> Option<&'static str> {
    use io::ErrorKind::{NotSeekable, PermissionDenied, ResourceBusy};
    match (step, fault.kind()) {
        _ if is_mapped(fault) => Some(
            "a program has it mapped into memory, perhaps this one: close that, or load files without backend=\"mmap\"",
        ),
        _ if is_held(fault) => Some(
            "another program has it open, perhaps mapped into memory, and lets nobody replace it: close that, or save to another name",
        ),
        (step::CREATE | step::RENAME, PermissionDenied | ResourceBusy) if path.exists() => Some(
            "save_file(..., atomic=False) writes an existing file in place instead, though not atomically",
        ),
        (step::SEAL, NotSeekable) => Some("what is streamed keeps no checksums"),
        (step::READ_ONLY, PermissionDenied) => {
            Some("write_options={\"replace_read_only\": True} replaces it")
        }
        _ => None,
    }
}

/// `ERROR_USER_MAPPED_FILE` of Windows, which has no such number elsewhere.
fn is_mapped(fault: &io::Error) -> bool {
    cfg!(windows) && fault.raw_os_error() == Some(1224)
}

/// `ERROR_SHARING_VIOLATION` and `ERROR_LOCK_VIOLATION` of Windows.
fn is_held(fault: &io::Error) -> bool {
    cfg!(windows) && matches!(fault.raw_os_error(), Some(32 | 33))
}
