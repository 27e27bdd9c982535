//! The file that a save makes or replaces, and whether it may be replaced.

use std::fs;
use std::io;
use std::path::Path;

use crate::disk::{self, DirectoryEntry, Resolved, resolve};
use crate::error::{EditError, Error, unopened};
use crate::options::SaveOptions;
use crate::watch::Watch;

/// Check whether a save with `options` may write to `path`: every save makes the same checks before it writes.
///
/// A symbolic link is followed, and need not lead to a file. Pipes and devices are not opened.
///
/// # Errors
/// [`Failure::Open`](crate::Failure::Open) if a file exists and `options` keep it; [`Failure::Write`](crate::Failure::Write)
/// if it is read-only, or the path cannot be written to; [`Failure::Edit`](crate::Failure::Edit) for a blob of a
/// content-addressed store.
pub fn check_destination(path: &Path, options: &SaveOptions, watch: &dyn Watch) -> Result<(), Error> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() && !found.is_dir() => return Ok(()),
        Err(fault) if fault.kind() == io::ErrorKind::NotFound => return Ok(()),
        _ => {}
    }
    match resolve(path, watch) {
        Ok(Resolved::Entry(entry)) => check(&entry, path, options),
        Ok(Resolved::Nameless(_) | Resolved::Stream(_)) => Ok(()),
        Err(fault) => Err(fault.in_save(path, 0)),
    }
}

/// Check whether `entry`, to which `path` leads, may be replaced.
pub(super) fn check(entry: &DirectoryEntry, path: &Path, options: &SaveOptions) -> Result<(), Error> {
    let checked = entry.check(options);
    checked.map_err(|fault| explain(path, 0, options, fault))
}

/// The entry to which `path` leads, for a file that gets its name when it is complete.
pub(super) fn find(path: &Path, watch: &dyn Watch) -> Result<DirectoryEntry, Error> {
    match resolve(path, watch).map_err(|fault| fault.in_save(path, 0))? {
        Resolved::Entry(entry) => Ok(entry),
        Resolved::Nameless(_) | Resolved::Stream(_) => Err(EditError::NoPlace.about(path)),
    }
}

/// The error for `stop`, which kept the file at `path` from being written.
pub(super) fn explain(path: &Path, nbytes: u64, options: &SaveOptions, fault: Error) -> Error {
    let exists = |source: &io::Error| source.kind() == io::ErrorKind::AlreadyExists;
    if options.keeps_existing() && fault.system().is_some_and(exists) {
        is_there(path)
    } else {
        fault.in_save(path, nbytes)
    }
}

/// The error for a file that exists and is not to be replaced.
pub(crate) fn is_there(path: &Path) -> Error {
    unopened(path)(disk::exists())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Replace;
    use crate::watch::Unwatched;

    fn code(path: &Path, replace: Replace) -> Option<String> {
        let options = SaveOptions {
            replace,
            ..SaveOptions::default()
        };
        check_destination(path, &options, &Unwatched)
            .err()
            .map(|error| error.to_string())
    }

    #[test]
    fn only_a_file_that_exists_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert_eq!(code(&path, Replace::Nothing), None);
        fs::write(&path, "old").unwrap();
        assert_eq!(code(&path, Replace::Nothing), Some(is_there(&path).to_string()));
        assert_eq!(code(&path, Replace::Atomic), None);
        assert!(code(folder.path(), Replace::Atomic).is_some());
    }

    /// Root may write to read-only files; on Windows no user may.
    #[test]
    fn a_read_only_file_is_kept() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let before = file.as_file().metadata().unwrap().permissions();
        let mut after = before.clone();
        after.set_readonly(true);
        fs::set_permissions(file.path(), after).unwrap();
        // On wine, root may write to it.
        let may_write = !cfg!(windows) && fs::File::options().write(true).open(file.path()).is_ok();
        assert_eq!(code(file.path(), Replace::Atomic).is_none(), may_write);
        let options = SaveOptions {
            replace_read_only: true,
            ..SaveOptions::default()
        };
        assert!(check_destination(file.path(), &options, &Unwatched).is_ok());
        // Windows removes no read-only file.
        fs::set_permissions(file.path(), before).unwrap();
    }
}
