//! A partial file, which stays after an interruption, with a name that later calls can compute.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::windows::fs::OpenOptionsExt;

use windows_sys::Win32::Storage::FileSystem::FILE_FLAG_OPEN_REPARSE_POINT;

use super::attributes::Attributes;
use super::directory::Directory;
use crate::disk::{Birth, Facts, Kind};

/// Open the file `name` for reading and writing. Create it if it does not exist.
pub(crate) fn open_or_make(directory: &Directory, name: &OsStr, birth: Birth) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.custom_flags(FILE_FLAG_OPEN_REPARSE_POINT);
    match birth {
        Birth::Usual => directory.opened(name, &options),
        Birth::Private => directory.opened_privately(name, &options),
    }
}

/// Return whether a file is a regular one with one name. Its access list protects it from other users.
pub(crate) fn is_ours(facts: &Facts) -> bool {
    facts.kind == Kind::File && facts.names <= 1
}

/// Keep other users out of `file`, which an earlier call may have made, until it is complete and gets these attributes.
pub(crate) fn confine(file: &File, attributes: &Attributes) -> io::Result<()> {
    attributes.begin(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{facts, facts_at};

    #[test]
    fn a_file_of_one_name_is_ours_and_a_device_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let device = File::options().read(true).open("NUL").unwrap();
        assert!(is_ours(&facts_at(file.path()).unwrap()) && !is_ours(&facts(&device).unwrap()));
    }

    #[test]
    fn what_was_left_is_opened_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        for birth in [Birth::Usual, Birth::Private] {
            let open = || open_or_make(&directory, "part".as_ref(), birth).unwrap();
            let before = facts(&open()).unwrap();
            std::fs::write(folder.path().join("part"), b"abc").unwrap();
            let after = facts(&open()).unwrap();
            assert_eq!((after.identity, after.nbytes), (before.identity, 3));
        }
    }
}
