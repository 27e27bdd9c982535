//! Calls on open files and on paths.

use std::fs::File;
use std::io;
use std::os::windows::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::Duration;

use ingot_format::to_u64;
use windows_sys::Win32::Foundation::{
    ERROR_ACCESS_DENIED, ERROR_DISK_FULL, ERROR_FILE_TOO_LARGE, ERROR_HANDLE_DISK_FULL,
    ERROR_INVALID_FUNCTION, ERROR_INVALID_PARAMETER,
};
use windows_sys::Win32::Storage::FileSystem::{
    FILE_ATTRIBUTE_DIRECTORY, FILE_ATTRIBUTE_REPARSE_POINT, FILE_FLAG_BACKUP_SEMANTICS,
    FILE_FLAG_OPEN_REPARSE_POINT, FILE_READ_ATTRIBUTES, LOCKFILE_EXCLUSIVE_LOCK, LOCKFILE_FAIL_IMMEDIATELY,
};

use super::calls::{self, information, is_deleted, set_sparse};
use super::fault::{has_number, is_a_directory, is_shared_by_nobody, patiently};
use crate::disk::{Facts, Kind, Lock, Size};

/// The position of locks: after the end of any file, since other processes cannot read locked bytes on Windows.
const LOCKED: u64 = 1 << 62;
/// The byte that a process locks while it appends to a journal.
const APPENDING: u64 = LOCKED + 1;

/// Bytes that are reserved in one call: no limit, since reserving takes no time.
pub(crate) const RESERVED_AT_ONCE: u64 = u64::MAX;

/// The error for a path that is not a file on a disk.
const NO_FILE: Facts = Facts {
    kind: Kind::Other,
    identity: (0, 0),
    nbytes: 0,
    modified: (0, 0),
    names: 1,
    mode: 0,
    owner: (0, 0),
};

/// Return whether a file is a regular one with one name. Its access list protects it from other users.
#[cfg(feature = "remote")]
pub(crate) fn is_ours(facts: &Facts) -> bool {
    facts.kind == Kind::File && facts.names <= 1
}

/// Create a directory, with its parents, unless there is one. It inherits the access list of its parent.
#[cfg(feature = "remote")]
pub(crate) fn create_private_directory(path: &Path) -> io::Result<()> {
    std::fs::create_dir_all(path)
}

/// Return whether it is a directory. Its access list protects it from other users.
#[cfg(feature = "remote")]
pub(crate) fn is_private_directory(facts: &Facts) -> bool {
    facts.kind == Kind::Directory
}

/// Return the facts of an open file.
pub(crate) fn facts(file: &File) -> io::Result<Facts> {
    let found = match information(file) {
        // A device, a pipe, a console.
        Err(fault)
            if has_number(&fault, ERROR_INVALID_FUNCTION) || has_number(&fault, ERROR_INVALID_PARAMETER) =>
        {
            return Ok(NO_FILE);
        }
        found => found?,
    };
    let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
    let attributes = found.dwFileAttributes;
    let kind = match attributes {
        // Not a placeholder whose contents another program must download first, such as OneDrive: it has this mark too.
        _ if attributes & FILE_ATTRIBUTE_REPARSE_POINT != 0 && file.metadata()?.is_symlink() => Kind::Link,
        _ if attributes & FILE_ATTRIBUTE_DIRECTORY != 0 => Kind::Directory,
        _ => Kind::File,
    };
    let modified = pair(
        found.ftLastWriteTime.dwHighDateTime,
        found.ftLastWriteTime.dwLowDateTime,
    );
    Ok(Facts {
        kind,
        identity: (
            found.dwVolumeSerialNumber.into(),
            pair(found.nFileIndexHigh, found.nFileIndexLow),
        ),
        nbytes: pair(found.nFileSizeHigh, found.nFileSizeLow),
        modified: (modified.cast_signed(), 0),
        names: if is_deleted(file)? {
            0
        } else {
            found.nNumberOfLinks.into()
        },
        mode: attributes,
        owner: (0, 0),
    })
}

/// Return the facts of the file to which a path leads.
pub(crate) fn facts_at(path: &Path) -> io::Result<Facts> {
    facts(&looked_at(path, 0)?)
}

/// Return the facts of the file named `path`; of a symbolic link the facts of the link.
pub(crate) fn facts_of_name(path: &Path) -> io::Result<Facts> {
    facts(&looked_at(path, FILE_FLAG_OPEN_REPARSE_POINT)?)
}

/// Open a handle for queries only. It works while other processes have the file.
pub(super) fn looked_at(path: &Path, flags: u32) -> io::Result<File> {
    File::options()
        .access_mode(FILE_READ_ATTRIBUTES)
        // Without this flag, opening a directory fails.
        .custom_flags(FILE_FLAG_BACKUP_SEMANTICS | flags)
        .open(path)
}

/// Windows has no numbers for types of file systems.
pub(crate) fn file_system(_: &File) -> Option<u32> {
    None
}

/// As [`file_system`].
pub(crate) fn remote_file_system(_: &File) -> Option<&'static str> {
    None
}

pub(crate) fn read_at(file: &File, into: &mut [u8], position: u64) -> io::Result<usize> {
    file.seek_read(into, position)
}

pub(crate) fn write_at(file: &File, bytes: &[u8], position: u64) -> io::Result<usize> {
    file.seek_write(bytes, position)
}

/// On Windows, files are always written through the page cache.
pub(crate) fn open_direct(_: &File, _: bool) -> Option<File> {
    None
}

pub(crate) fn refuses_direct(_: &io::Error) -> bool {
    false
}

pub(crate) fn write_all_at(file: &File, mut bytes: &[u8], mut position: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.seek_write(bytes, position) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = &bytes[count..];
                position += to_u64(count);
            }
            Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
            Err(fault) => return Err(fault),
        }
    }
    Ok(())
}

/// Append to a journal to which other processes append, one after another. Return the position of the end of the bytes.
pub(crate) fn append(notes: &File, bytes: &[u8]) -> io::Result<u64> {
    calls::lock(notes, APPENDING, LOCKFILE_EXCLUSIVE_LOCK)?;
    let appended = || -> io::Result<u64> {
        let position = information(notes)
            .map(|found| u64::from(found.nFileSizeHigh) << 32 | u64::from(found.nFileSizeLow))?;
        write_all_at(notes, bytes, position)?;
        Ok(position + to_u64(bytes.len()))
    };
    let appended = appended();
    calls::unlock(notes, APPENDING)?;
    appended
}

/// Open a file that others may replace, rename or delete while it is open.
pub(crate) fn open_for_reading(path: &Path) -> io::Result<File> {
    opened(path, File::options().read(true))
}

/// The same, for reading and writing.
pub(crate) fn open_both_ways(path: &Path) -> io::Result<File> {
    opened(path, File::options().read(true).write(true))
}

/// The standard library shares the files that it opens: others may read, write, rename and delete them.
fn opened(path: &Path, options: &std::fs::OpenOptions) -> io::Result<File> {
    match patiently(is_shared_by_nobody, || options.open(path)) {
        // The system's error for a directory.
        Err(fault) if has_number(&fault, ERROR_ACCESS_DENIED) && path.is_dir() => Err(is_a_directory()),
        outcome => outcome,
    }
}

/// Lock a file until it is closed, however its process ends, or unlocked. Return false if another process holds a lock that
/// excludes this one.
pub(crate) fn try_lock(file: &File, lock: Lock) -> io::Result<bool> {
    let flags = match lock {
        Lock::Exclusive => LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY,
        Lock::Shared => LOCKFILE_FAIL_IMMEDIATELY,
    };
    match calls::lock(file, LOCKED, flags) {
        Ok(()) => Ok(true),
        Err(fault) if is_locked(&fault) => Ok(false),
        Err(fault) => Err(fault),
    }
}

fn is_locked(fault: &io::Error) -> bool {
    use windows_sys::Win32::Foundation::{ERROR_IO_PENDING, ERROR_LOCK_VIOLATION};
    has_number(fault, ERROR_LOCK_VIOLATION) || has_number(fault, ERROR_IO_PENDING)
}

/// Make an exclusive lock of this file a shared one.
pub(crate) fn share_lock(file: &File) -> io::Result<()> {
    // The holder of an exclusive lock may also take a shared one. Unlocking releases the exclusive lock first.
    if try_lock(file, Lock::Shared)? {
        unlock(file)?;
    }
    Ok(())
}

/// Windows does not report the process that has locked a file.
pub(crate) fn lock_holder(_: &File) -> Option<u32> {
    None
}

pub(crate) fn unlock(file: &File) -> io::Result<()> {
    calls::unlock(file, LOCKED)
}

/// Reserve `count` bytes from `position` on. Return false if the file system cannot reserve.
pub(crate) fn reserve(file: &File, position: u64, count: u64, size: Size) -> io::Result<bool> {
    let end = position + count;
    let Ok(room) = i64::try_from(end) else {
        return Ok(false);
    };
    // A smaller allocation than the file's size would truncate the file.
    let is_there = size == Size::Kept
        && information(file)
            .is_ok_and(|found| end <= u64::from(found.nFileSizeHigh) << 32 | u64::from(found.nFileSizeLow));
    if is_there {
        return Ok(true);
    }
    let full = [ERROR_DISK_FULL, ERROR_HANDLE_DISK_FULL, ERROR_FILE_TOO_LARGE];
    match calls::allocate(file, room) {
        Ok(()) => {}
        Err(fault) if full.iter().any(|&number| has_number(&fault, number)) => return Err(fault),
        Err(_) => return Ok(false),
    }
    match size {
        Size::Kept => {}
        Size::Set | Size::Sparse => file.set_len(end)?,
        Size::Scattered => {
            // Only checks that there is space, and frees it again: the system fills the gap before a byte that is written far
            // after
            // the end with zeros, except in sparse files.
            calls::allocate(file, 0)?;
            let _ = set_sparse(file);
            file.set_len(end)?;
        }
    }
    Ok(true)
}

/// Not needed: the reservation checks the space at once.
#[allow(clippy::unnecessary_wraps, reason = "elsewhere it is asked")]
pub(crate) fn check_room(_: &File, _: u64) -> io::Result<()> {
    Ok(())
}

/// The system does not report it.
#[allow(clippy::unnecessary_wraps, reason = "elsewhere it does")]
pub(crate) fn check_extent(_: &File, _: u64) -> io::Result<()> {
    Ok(())
}

/// There is no such limit.
#[allow(clippy::unnecessary_wraps, reason = "elsewhere there is one")]
pub(crate) fn check_size_limit(_: u64) -> io::Result<()> {
    Ok(())
}

/// Files that this process may have open.
pub(crate) fn descriptors_allowed() -> usize {
    usize::MAX
}

/// Wait before a pipe is written to again.
pub(crate) fn wait_writable(_: &File, most: Duration) {
    thread::sleep(most);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn room_is_the_size_but_where_that_is_kept() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = || fs::read(file.path()).unwrap();
        write_all_at(file.as_file(), b"abc", 0).unwrap();
        for count in [2, 3, 10] {
            let reserved = reserve(file.as_file(), 0, count, Size::Kept).unwrap();
            assert!(reserved || count > 3, "they are there");
            assert_eq!(found(), b"abc", "{count} bytes reserved");
        }
        // wine 8 does not reserve space, and reports that.
        for (end, size) in [(4, Size::Set), (5, Size::Sparse), (6, Size::Scattered)] {
            let before = to_u64(found().len());
            let reserved = reserve(file.as_file(), 0, end, size).unwrap();
            assert_eq!(to_u64(found().len()), if reserved { end } else { before });
            assert!(found().starts_with(b"abc"));
        }
    }

    #[test]
    fn a_lock_is_of_one_or_of_all_and_keeps_nobody_from_the_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        write_all_at(file.as_file(), b"abc", 0).unwrap();
        let [one, two] = [0, 1].map(|_| open_both_ways(file.path()).unwrap());
        assert!(try_lock(&one, Lock::Exclusive).unwrap());
        assert!(!try_lock(&two, Lock::Exclusive).unwrap());
        assert!(!try_lock(&two, Lock::Shared).unwrap());
        let mut bytes = [0; 3];
        assert_eq!(read_at(&two, &mut bytes, 0).unwrap(), 3);
        write_all_at(&two, b"x", 1).unwrap();
        share_lock(&one).unwrap();
        assert!(try_lock(&two, Lock::Shared).unwrap());
        unlock(&two).unwrap();
        assert!(!try_lock(&two, Lock::Exclusive).unwrap());
        drop(one);
        assert!(try_lock(&two, Lock::Exclusive).unwrap());
        assert_eq!(fs::read(file.path()).unwrap(), b"axc");
    }

    #[test]
    fn what_several_append_is_all_there_and_in_one_piece() {
        let file = tempfile::NamedTempFile::new().unwrap();
        thread::scope(|scope| {
            for letter in b'a'..b'e' {
                let notes = open_both_ways(file.path()).unwrap();
                scope.spawn(move || {
                    for _ in 0..25 {
                        append(&notes, &[letter; 100]).unwrap();
                    }
                });
            }
        });
        let found = fs::read(file.path()).unwrap();
        assert_eq!(found.len(), 4 * 25 * 100);
        let is_whole = |piece: &[u8]| piece.iter().all(|letter| *letter == piece[0]);
        assert!(found.chunks(100).all(is_whole));
    }

    #[test]
    fn files_directories_and_devices_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, b"abc").unwrap();
        assert_eq!(facts_at(folder.path()).unwrap().kind, Kind::Directory);
        let device = File::options().read(true).open("NUL").unwrap();
        assert_eq!(facts(&device).unwrap().kind, Kind::Other);
        assert!(
            open_for_reading(folder.path()).is_err_and(|fault| fault.kind() == io::ErrorKind::IsADirectory)
        );
        let file = open_for_reading(&path).unwrap();
        let before = facts(&file).unwrap();
        assert_eq!((before.kind, before.nbytes, before.names), (Kind::File, 3, 1));
        assert_eq!(facts_at(&path).unwrap().identity, before.identity);
    }

    #[cfg(feature = "remote")]
    #[test]
    fn a_file_of_one_name_is_ours_and_a_device_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let device = File::options().read(true).open("NUL").unwrap();
        assert!(is_ours(&facts_at(file.path()).unwrap()) && !is_ours(&facts(&device).unwrap()));
    }
}
