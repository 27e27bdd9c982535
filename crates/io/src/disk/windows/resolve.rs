//! Finding out what a path leads to.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf, Prefix};

use super::directory::Directory;
use super::fault::{in_use, is_a_directory, too_many_links};
use super::name::device;
use crate::disk::{DirectoryEntry, Kind, Resolved};
use crate::error::{Step, Stop, step};
use crate::watch::Watch;

/// As many links as Windows follows.
const LINKS: usize = 63;

/// Follows `path` to its end.
pub(crate) fn resolve(path: &Path, _: &dyn Watch) -> Result<Resolved, Stop> {
    follow(path).step(step::OPEN)
}

/// Follows symlinks one by one, because the last directory on the way is where the new file has to be made.
fn follow(path: &Path) -> io::Result<Resolved> {
    if is_device(path) {
        // What `print!` holds back belongs in front.
        io::stdout().flush()?;
        return File::options().write(true).open(path).map(Resolved::Stream);
    }
    let mut path = rooted(path)?;
    for _ in 0..LINKS {
        let (Some(name), Some(parent)) = (path.file_name(), path.parent()) else {
            return Err(is_a_directory());
        };
        let directory = Directory::at(parent)?;
        let existing = directory.facts(name)?;
        match existing.map(|facts| facts.kind) {
            None | Some(Kind::File) => {
                let name = name.to_owned();
                return Ok(Resolved::Entry(DirectoryEntry {
                    directory,
                    name,
                    existing,
                }));
            }
            Some(Kind::Link) => path = rooted(&parent.join(fs::read_link(&path)?))?,
            Some(Kind::Directory) => return Err(is_a_directory()),
            Some(Kind::Other) => return Err(in_use()),
        }
    }
    Err(too_many_links())
}

/// A pipe, a console, another device.
fn is_device(path: &Path) -> bool {
    match path.components().next() {
        Some(Component::Prefix(prefix)) => matches!(prefix.kind(), Prefix::DeviceNS(_)),
        // By itself, and not in a directory.
        Some(Component::Normal(name)) => name == path.as_os_str() && is_whole(name),
        _ => false,
    }
}

/// Whether the name is that of a device, and no more than that.
fn is_whole(name: &OsStr) -> bool {
    device(name).is_some() && !name.as_encoded_bytes().contains(&b'.')
}

/// The path from the root, of what may be a file.
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
    // What older versions of Windows would write to instead, and lose.
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
        let led = |name: &str| match follow(&folder.path().join(name))? {
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
            follow(Path::new("")).err().map(|fault| fault.kind()),
            Some(io::ErrorKind::NotFound)
        );
        assert!(matches!(follow(Path::new("NUL")), Ok(Resolved::Stream(_))));
    }
}
