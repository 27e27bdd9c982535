//! Opening files that are inside a directory.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Component, Path, PathBuf};

use super::file::open_for_reading;
use crate::disk::Refusal;
use crate::disk::facts::LINK;

/// A directory beneath which links are checked before a file is opened. This does not protect against a process that
/// exchanges them in between; Windows has no call that does.
#[derive(Debug)]
pub(crate) struct Beneath {
    path: PathBuf,
}

impl Beneath {
    pub(crate) fn of(path: &Path) -> io::Result<Beneath> {
        let path = std::path::absolute(path)?;
        Ok(Beneath { path })
    }

    pub(crate) fn open(&self, name: &OsStr) -> Result<File, Refusal> {
        let mut path = self.path.clone();
        for part in Path::new(name).components() {
            let Component::Normal(part) = part else {
                return Err(Refusal::Elsewhere("it is outside the directory"));
            };
            if part.as_encoded_bytes().contains(&b':') {
                return Err(Refusal::Elsewhere("it is a stream of a file, and no file"));
            }
            path.push(part);
            if path.symlink_metadata()?.is_symlink() {
                return Err(Refusal::Elsewhere(LINK));
            }
        }
        Ok(open_for_reading(&path)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_plain_file_is_opened_and_what_lies_elsewhere_is_not() {
        let outer = tempfile::tempdir().unwrap();
        let inner = outer.path().join("model");
        fs::create_dir_all(inner.join("sub")).unwrap();
        for path in ["secret", "model/plain", "model/sub/plain"] {
            fs::write(outer.path().join(path), b"x").unwrap();
        }
        let beneath = Beneath::of(&inner).unwrap();
        let opened = |name: &str| match beneath.open(OsStr::new(name)) {
            Ok(_) => None,
            Err(Refusal::Elsewhere(reason)) => Some(reason),
            Err(Refusal::System(_)) => Some("system"),
        };
        for name in ["plain", "sub/plain", r"sub\plain"] {
            assert_eq!(opened(name), None, "{name}");
        }
        let absolute = inner.join("plain");
        for name in [
            "../secret",
            r"..\secret",
            r"sub\..\..\secret",
            r"\secret",
            "C:secret",
            r"C:\secret",
            r"\\server\share\secret",
            absolute.to_str().unwrap(),
        ] {
            assert_eq!(opened(name), Some("it is outside the directory"), "{name}");
        }
        assert_eq!(
            opened("plain:stream"),
            Some("it is a stream of a file, and no file")
        );
        assert_eq!(opened("absent"), Some("system"));
    }
}
