//! The choice of how a file is read.

use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::path::Path;

use super::local::LocalFile;
use crate::error::{Error, unopened};
use crate::memory::mapped_files;
use crate::options::{BACKEND_VARIABLE, Backend, THREADS_VARIABLE};

/// Files that are mapped at once by default; further files are read. A process has 65,530 mappings on Linux, and allocators
/// and thread stacks use some of them.
const MOST_MAPPED: usize = 16_384;

/// Choose the backend of `file` if the caller requests `asked`, map the file if that is the backend, and return the choice
/// with its reason.
pub(super) fn attach(
    file: &LocalFile,
    asked: Backend,
    path: &Path,
) -> Result<(Backend, Cow<'static, str>), Error> {
    let variable = std::env::var(BACKEND_VARIABLE).ok();
    let choice = choose(asked, variable.as_deref(), file.remote(), mapped_files())?;
    if choice.0 == Backend::Pread {
        return Ok(choice);
    }
    match file.map() {
        Ok(()) => Ok(choice),
        // Address space may be limited, or the file system unable to map.
        Err(fault) if asked == Backend::Auto => {
            let why = format!("mapping the file failed: {fault}");
            Ok((Backend::Pread, why.into()))
        }
        Err(fault) => Err(unopened(path)(fault)),
    }
}

/// Choose the backend of a file, with the reason. `remote` is its file system if reading from it waits for a network or another
/// process, `variable` the value of [`BACKEND_VARIABLE`] if that is set, and `mapped` the number of mapped files.
fn choose(
    asked: Backend,
    variable: Option<&str>,
    remote: Option<&'static str>,
    mapped: usize,
) -> Result<(Backend, Cow<'static, str>), Error> {
    let chosen = |backend, why| Ok((backend, why));
    if asked != Backend::Auto {
        return chosen(asked, "asked for by the caller".into());
    }
    match variable {
        None | Some("" | "auto") => {}
        Some(name) => {
            let backend = Backend::from_name(name).ok_or_else(|| Error::UnknownBackend {
                found: name.to_owned(),
            })?;
            return chosen(backend, format!("{BACKEND_VARIABLE}={backend}").into());
        }
    }
    if cfg!(windows) {
        let why = "mapped files on Windows count against the commit limit and cannot be replaced";
        return chosen(Backend::Pread, why.into());
    }
    // Not if it depends on the page cache: from the disk both backends take as long (2026-11: 2 GiB in 1.2 to 1.4 s), and a
    // mapping leaves its pages to the next process.
    match remote {
        Some(name) => chosen(Backend::Pread, format!("{name} is slow to map").into()),
        None if mapped >= MOST_MAPPED => chosen(
            Backend::Pread,
            format!("{mapped} files are mapped already").into(),
        ),
        None => chosen(Backend::Mmap, "local file system".into()),
    }
}

/// Return the value of [`THREADS_VARIABLE`].
pub(crate) fn threads_of_environment() -> Result<Option<NonZeroUsize>, Error> {
    match std::env::var(THREADS_VARIABLE) {
        Ok(found) if !found.is_empty() => found
            .parse()
            .map(Some)
            .map_err(|_| Error::InvalidThreads { found }),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::remote_file_system;

    fn chosen(asked: Backend, variable: Option<&str>) -> (Backend, Cow<'static, str>) {
        choose(asked, variable, None, 0).unwrap()
    }

    #[test]
    fn the_caller_comes_before_the_environment_and_that_before_the_file() {
        assert_eq!(chosen(Backend::Mmap, Some("pread")).0, Backend::Mmap);
        assert_eq!(chosen(Backend::Auto, Some("pread")).0, Backend::Pread);
        assert_eq!(chosen(Backend::Auto, Some("pread")).1, "INGOT_BACKEND=pread");
        assert_eq!(chosen(Backend::Auto, Some("auto")), chosen(Backend::Auto, None));
        assert_eq!(chosen(Backend::Auto, Some("")), chosen(Backend::Auto, None));
    }

    #[test]
    fn a_backend_that_is_none_is_refused_with_the_choices() {
        let refusal = choose(Backend::Auto, Some("mmpa"), None, 0).unwrap_err();
        assert_eq!(refusal.code(), "unknown-backend");
        assert_eq!(
            refusal.to_string(),
            "INGOT_BACKEND `mmpa` is unknown: expected one of auto, mmap, pread"
        );
        assert!(
            choose(Backend::Mmap, Some("mmpa"), None, 0).is_ok(),
            "the caller has said which"
        );
    }

    #[test]
    #[cfg(not(windows))]
    fn no_more_files_are_mapped_by_default_than_a_process_has_mappings_for() {
        let chosen = |asked, mapped| choose(asked, None, None, mapped).unwrap().0;
        assert_eq!(chosen(Backend::Auto, MOST_MAPPED - 1), Backend::Mmap);
        assert_eq!(chosen(Backend::Auto, MOST_MAPPED), Backend::Pread);
        assert_eq!(chosen(Backend::Mmap, MOST_MAPPED), Backend::Mmap);
    }

    #[test]
    fn what_comes_over_a_network_is_read_and_what_does_not_is_mapped() {
        if cfg!(windows) {
            let choice = choose(Backend::Auto, None, None, 0).unwrap();
            assert_eq!(choice.0, Backend::Pread, "{}", choice.1);
            return;
        }
        for name in ["NFS", "FUSE"] {
            let choice = choose(Backend::Auto, None, Some(name), 0).unwrap();
            assert_eq!(
                (choice.0, &*choice.1),
                (Backend::Pread, &*format!("{name} is slow to map"))
            );
            assert_eq!(
                choose(Backend::Mmap, None, Some(name), 0).unwrap().0,
                Backend::Mmap
            );
        }
        assert_eq!(remote_file_system(&tempfile::tempfile().unwrap()), None);
    }
}
