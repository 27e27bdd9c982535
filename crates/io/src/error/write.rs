//! What can fail while a file is written, and what its user can do about it.

use std::io;

/// What can fail, as [`Error::Write`](super::Error::Write) says it after "could not".
pub(crate) mod step {
    pub(crate) const OPEN: &str = "open it for writing";
    pub(crate) const READ_ONLY: &str = "replace it, since it is read-only";
    pub(crate) const CREATE: &str = "create a temporary file";
    #[cfg(unix)]
    pub(crate) const RESERVE: &str = "reserve space";
    pub(crate) const READ: &str = "get the bytes of a tensor";
    pub(crate) const SEAL: &str = "put digests at its beginning";
    pub(crate) const WRITE: &str = "write";
    #[cfg(unix)]
    pub(crate) const JOURNAL: &str = "use what its writers noted beside it";
    #[cfg(unix)]
    pub(crate) const OWNER: &str = "tell by a lock whether the writer that began it is still there";
    pub(crate) const ATTRIBUTES: &str = "copy mode and owner";
    pub(crate) const FLUSH: &str = "flush";
    pub(crate) const RENAME: &str = "rename the temporary file over it";
    #[cfg(unix)]
    pub(crate) const FLUSH_DIRECTORY: &str = "flush its directory, though it is written";
    pub(crate) const COPY: &str = "overwrite it in place, so it holds a mix of old and new bytes";
}

/// What the user can do about a fault.
pub(super) fn hint(step: &str, fault: &io::Error) -> Option<&'static str> {
    use io::ErrorKind::{NotSeekable, PermissionDenied, ResourceBusy};
    match (step, fault.kind()) {
        (step::CREATE | step::RENAME, PermissionDenied | ResourceBusy) => {
            Some("an existing file can be written in place instead, though not atomically (atomic=False)")
        }
        (step::SEAL, NotSeekable) => Some("what is streamed keeps no checksums"),
        (step::READ_ONLY, PermissionDenied) => {
            Some("it can be replaced all the same (replace_read_only=True)")
        }
        _ => None,
    }
}
