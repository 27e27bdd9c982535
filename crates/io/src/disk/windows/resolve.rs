//! Resolving the destination of a path.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf, Prefix};

use super::directory::Directory;
use super::fault::{is_a_directory, too_many_links};
use super::name::device;
use crate::disk::Resolved;
use crate::disk::entry::{BESIDE_BLOBS, BLOBS, Entered, Walk, is_digest};
use crate::error::{Error, Step, step};
use crate::watch::Watch;

/// The most links to follow, as on Windows.
const LINKS: usize = 63;

/// Follows `path` to its end.
pub(crate) fn resolve(path: &Path, _: &dyn Watch) -> Result<Resolved, Error> {
    follow(path)
}

fn follow(path: &Path) -> Result<Resolved, Error> {
    if is_device(path) {
        // Output that `print!` has buffered must come first.
        let opened = io::stdout()
            .flush()
            .and_then(|()| File::options().write(true).open(path));
        return opened.map(Resolved::Stream).step(step::OPEN);
    }
    let mut path = rooted(path).step(step::OPEN)?;
    let mut walk = Walk::default();
    for _ in 0..LINKS {
        let (Some(name), Some(parent)) = (path.file_name(), path.parent()) else {
            return Err(is_a_directory()).step(step::OPEN);
        };
        let directory = Directory::at(parent).step(step::OPEN)?;
        let of_blobs = is_digest(name) && is_of_blobs(parent);
        let link = match walk.enter(directory, name, of_blobs)? {
            Entered::End(entry) => return Ok(Resolved::Entry(entry)),
            Entered::Link((directory, name)) => fs::read_link(directory.path(name)),
        };
        path = link
            .and_then(|link| rooted(&parent.join(link)))
            .step(step::OPEN)?;
    }
    Err(too_many_links()).step(step::OPEN)
}

/// Return whether the directory at `path` has the blobs of a content-addressed store.
fn is_of_blobs(path: &Path) -> bool {
    let is_beside = |name| path.with_file_name(name).is_dir();
    path.file_name() == Some(BLOBS.as_ref()) && BESIDE_BLOBS.into_iter().any(is_beside)
}

/// A pipe, a console, another device.
fn is_device(path: &Path) -> bool {
    match path.components().next() {
        Some(Component::Prefix(prefix)) => matches!(prefix.kind(), Prefix::DeviceNS(_)),
        // A file by itself, without a directory.
        Some(Component::Normal(name)) => name == path.as_os_str() && is_whole(name),
        _ => false,
    }
}

/// Return whether the name is a device's without an extension.
fn is_whole(name: &OsStr) -> bool {
    device(name).is_some() && !name.as_encoded_bytes().contains(&b'.')
}

/// Return the absolute path of a possible file.
fn rooted(path: &Path) -> io::Result<PathBuf> {
    if path.as_os_str().is_empty() {
        return Err(io::ErrorKind::NotFound.into());
    }
    if path.as_os_str().as_encoded_bytes().ends_with(b"\\")
        || path.as_os_str().as_encoded_bytes().ends_with(b"/")
    {
        return Err(is_a_directory());
    }
    let is_verbatim =
        matches!(path.components().next(), Some(Component::Prefix(prefix)) if prefix.kind().is_verbatim());
    // Return the device that older versions of Windows would write to instead of this name.
    if let Some(device) = path.file_name().and_then(device).filter(|_| !is_verbatim) {
        let message = format!(
            "Windows keeps this name for the device {device}, whatever follows it: choose another one for the file"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    std::path::absolute(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_leads_to_a_name_in_a_directory_or_it_is_said_why_not() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("there"), b"x").unwrap();
        let followed = |path: &Path| {
            follow(path).map_err(|fault| {
                let kind = fault.system().map_or(io::ErrorKind::Other, io::Error::kind);
                io::Error::new(kind, fault.to_string())
            })
        };
        let led = |name: &str| match followed(&folder.path().join(name))? {
            Resolved::Entry(entry) => Ok((entry.name, entry.existing.is_some())),
            _ => Err(io::Error::other("no entry")),
        };
        assert_eq!(led("there").unwrap(), ("there".into(), true));
        assert_eq!(led("new").unwrap(), ("new".into(), false));
        for (name, kind) in [
            ("", io::ErrorKind::IsADirectory),
            ("there/", io::ErrorKind::IsADirectory),
            (r"new\", io::ErrorKind::IsADirectory),
            ("absent/new", io::ErrorKind::NotFound),
            ("aux.safetensors", io::ErrorKind::InvalidInput),
        ] {
            assert_eq!(led(name).unwrap_err().kind(), kind, "{name}");
        }
        assert_eq!(
            followed(Path::new("")).err().map(|fault| fault.kind()),
            Some(io::ErrorKind::NotFound)
        );
        assert!(matches!(follow(Path::new("NUL")), Ok(Resolved::Stream(_))));
    }
}
