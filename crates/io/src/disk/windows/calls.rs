//! The calls of the system that the standard library has no function for.
//!
//! One of the files in which `unsafe` is allowed, because a call of the system is. Each function here makes one call, of
//! borrowed files and of memory that it has itself, and turns its answer into a result.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::windows::ffi::OsStrExt;
use std::os::windows::io::AsRawHandle;
use std::path::Path;
use std::ptr;

use windows_sys::Win32::Foundation::{ERROR_INSUFFICIENT_BUFFER, HANDLE};
use windows_sys::Win32::Security::{
    DACL_SECURITY_INFORMATION, GetKernelObjectSecurity, SetKernelObjectSecurity,
};
use windows_sys::Win32::Storage::FileSystem::{
    BY_HANDLE_FILE_INFORMATION, FILE_ALLOCATION_INFO, FILE_BASIC_INFO, FILE_INFO_BY_HANDLE_CLASS,
    FILE_STANDARD_INFO, FileAllocationInfo, FileBasicInfo, FileStandardInfo, GetFileInformationByHandle,
    GetFileInformationByHandleEx, LOCK_FILE_FLAGS, LockFileEx, MOVE_FILE_FLAGS, MoveFileExW,
    SetFileInformationByHandle, UnlockFileEx,
};
use windows_sys::Win32::System::IO::{DeviceIoControl, OVERLAPPED, OVERLAPPED_0, OVERLAPPED_0_0};
use windows_sys::Win32::System::Ioctl::FSCTL_SET_SPARSE;
use windows_sys::core::BOOL;

use super::fault::has_number;

/// What the handle of `file` is; open as long as `file` is borrowed.
fn handle(file: &File) -> HANDLE {
    file.as_raw_handle()
}

fn checked(answer: BOOL) -> io::Result<()> {
    match answer {
        0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// What is known of an open file.
pub(super) fn information(file: &File) -> io::Result<BY_HANDLE_FILE_INFORMATION> {
    let mut information = BY_HANDLE_FILE_INFORMATION::default();
    // SAFETY: `GetFileInformationByHandle` asks for
    // - an open handle: `file` is borrowed until the call returns;
    // - memory for the structure that may be written: `information` is one, and no other code has it.
    let answer = unsafe { GetFileInformationByHandle(handle(file), &raw mut information) };
    checked(answer).map(|()| information)
}

/// Return whether an open file is removed when it is closed.
pub(super) fn is_deleted(file: &File) -> io::Result<bool> {
    let mut standard = FILE_STANDARD_INFO::default();
    let nbytes = size_of_u32::<FILE_STANDARD_INFO>();
    // SAFETY: `GetFileInformationByHandleEx` asks for
    // - an open handle: `file` is borrowed until the call returns;
    // - as many writable bytes as `nbytes` says, for the structure of that class: `standard` is that structure, `nbytes`
    //   its size, and no other code has it. The system writes 0 or 1 into the field that is declared as `bool`.
    let answer = unsafe {
        GetFileInformationByHandleEx(handle(file), FileStandardInfo, (&raw mut standard).cast(), nbytes)
    };
    checked(answer).map(|()| standard.DeletePending)
}

/// The structures are a few bytes long.
#[allow(
    clippy::cast_possible_truncation,
    reason = "no structure of the system is as long as that"
)]
const fn size_of_u32<T>() -> u32 {
    size_of::<T>() as u32
}

fn set<T: Copy>(file: &File, class: FILE_INFO_BY_HANDLE_CLASS, what: &T) -> io::Result<()> {
    // SAFETY: `SetFileInformationByHandle` asks for
    // - an open handle: `file` is borrowed until the call returns;
    // - as many readable bytes as the last argument says, of the structure of that class: `what` is borrowed until the call
    //   returns, and both callers below pass the structure of the class.
    let answer = unsafe {
        SetFileInformationByHandle(
            handle(file),
            class,
            ptr::from_ref(what).cast(),
            size_of_u32::<T>(),
        )
    };
    checked(answer)
}

/// Allocate room on the disk for a file. If the file has more, it is cut.
pub(super) fn allocate(file: &File, nbytes: i64) -> io::Result<()> {
    let room = FILE_ALLOCATION_INFO {
        AllocationSize: nbytes,
    };
    set(file, FileAllocationInfo, &room)
}

/// Sets what Windows calls attributes, such as that it is read-only.
pub(super) fn set_attributes(file: &File, attributes: u32) -> io::Result<()> {
    // A time of 0 stays as it is.
    let basic = FILE_BASIC_INFO {
        FileAttributes: attributes,
        ..FILE_BASIC_INFO::default()
    };
    set(file, FileBasicInfo, &basic)
}

/// Has a file take no room where nothing was written to it.
pub(super) fn set_sparse(file: &File) -> io::Result<()> {
    let mut written = 0;
    // SAFETY: `DeviceIoControl` asks for
    // - an open handle: `file` is borrowed until the call returns;
    // - buffers for input and output of the given lengths: there are no buffers, and both lengths are 0, as this code
    //   requires;
    // - a number that may be written: `written`, which no other code has;
    // - no structure for overlapped work, since the standard library opens files without that.
    let answer = unsafe {
        DeviceIoControl(
            handle(file),
            FSCTL_SET_SPARSE,
            ptr::null(),
            0,
            ptr::null_mut(),
            0,
            &raw mut written,
            ptr::null_mut(),
        )
    };
    checked(answer)
}

/// The one byte at `position`, as the calls for locks want it.
#[allow(clippy::cast_possible_truncation, reason = "the two halves of a number")]
fn at(position: u64) -> OVERLAPPED {
    OVERLAPPED {
        Anonymous: OVERLAPPED_0 {
            Anonymous: OVERLAPPED_0_0 {
                Offset: position as u32,
                OffsetHigh: (position >> 32) as u32,
            },
        },
        ..OVERLAPPED::default()
    }
}

/// Locks the byte at `position`, until the file is closed or the byte unlocked.
pub(super) fn lock(file: &File, position: u64, flags: LOCK_FILE_FLAGS) -> io::Result<()> {
    let mut at = at(position);
    // SAFETY: `LockFileEx` asks for
    // - an open handle: `file` is borrowed until the call returns;
    // - a structure with the position, which stays where it is until the lock is there: `at` does until the call returns,
    //   and that it does then only, since the standard library opens files without overlapped work.
    let answer = unsafe { LockFileEx(handle(file), flags, 0, 1, 0, &raw mut at) };
    checked(answer)
}

/// Undoes one lock of the byte at `position`.
pub(super) fn unlock(file: &File, position: u64) -> io::Result<()> {
    let mut at = at(position);
    // SAFETY: as for `LockFileEx` above, of `UnlockFileEx`.
    let answer = unsafe { UnlockFileEx(handle(file), 0, 1, 0, &raw mut at) };
    checked(answer)
}

/// A path in the form of the system: with a null at the end, and no other.
fn wide(path: &Path) -> io::Result<Vec<u16>> {
    let mut wide: Vec<u16> = path.as_os_str().encode_wide().collect();
    if wide.contains(&0) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the path has a null character",
        ));
    }
    wide.push(0);
    Ok(wide)
}

/// Rename the file at `from` to `to`.
pub(super) fn rename(from: &Path, to: &Path, flags: MOVE_FILE_FLAGS) -> io::Result<()> {
    let (from, to) = (wide(from)?, wide(to)?);
    // SAFETY: `MoveFileExW` asks for two strings that end in a null: `wide` makes such, and both live until it returns.
    let answer = unsafe { MoveFileExW(from.as_ptr(), to.as_ptr(), flags) };
    checked(answer)
}

/// Who may do what with a file, in the system's own form: words, so that its parts are aligned.
#[derive(PartialEq, Eq)]
pub(super) struct AccessList(Vec<u64>);

/// The access list of an open file.
pub(super) fn access_list(file: &File) -> io::Result<AccessList> {
    let mut list: Vec<u64> = Vec::new();
    loop {
        let len = u32::try_from(8 * list.len()).map_err(io::Error::other)?;
        let mut needed = 0;
        // SAFETY: `GetKernelObjectSecurity` asks for
        // - an open handle: `file` is borrowed until the call returns;
        // - `len` bytes that may be written: the bytes of `list`, which no other code has;
        // - a number that may be written: `needed`.
        let answer = unsafe {
            GetKernelObjectSecurity(
                handle(file),
                DACL_SECURITY_INFORMATION,
                list.as_mut_ptr().cast(),
                len,
                &raw mut needed,
            )
        };
        match checked(answer) {
            Ok(()) => return Ok(AccessList(list)),
            Err(fault) if has_number(&fault, ERROR_INSUFFICIENT_BUFFER) && needed > len => {
                list.resize(usize::try_from(needed.div_ceil(8)).map_err(io::Error::other)?, 0);
            }
            Err(fault) => return Err(fault),
        }
    }
}

/// Set the access list of a file.
pub(super) fn set_access_list(file: &File, list: &AccessList) -> io::Result<()> {
    // SAFETY: `SetKernelObjectSecurity` asks for
    // - an open handle: `file` is borrowed until the call returns;
    // - a security descriptor: `AccessList` is made only of what `GetKernelObjectSecurity` wrote, and is not changed. The
    //   call reads a copy of it.
    let answer = unsafe {
        SetKernelObjectSecurity(
            handle(file),
            DACL_SECURITY_INFORMATION,
            list.0.as_ptr().cast_mut().cast(),
        )
    };
    checked(answer)
}
