//! Calls of the Windows API for which the standard library has no function.
//!
//! `unsafe` is allowed in this file because calls of the system are unsafe. Each function makes one call, passes it
//! borrowed files and its own memory, and converts the answer to a result.
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

/// The handle of `file`, which is open as long as `file` is borrowed.
fn handle(file: &File) -> HANDLE {
    file.as_raw_handle()
}

fn checked(answer: BOOL) -> io::Result<()> {
    match answer {
        0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Return the attributes, size, times and identity of an open file.
pub(super) fn information(file: &File) -> io::Result<BY_HANDLE_FILE_INFORMATION> {
    let mut information = BY_HANDLE_FILE_INFORMATION::default();
    // SAFETY: `GetFileInformationByHandle` requires
    // - an open handle: `file` is borrowed until the call returns;
    // - writable memory for the structure: `information`, which no other code uses.
    let answer = unsafe { GetFileInformationByHandle(handle(file), &raw mut information) };
    checked(answer).map(|()| information)
}

/// Return whether an open file is removed when it is closed.
pub(super) fn is_deleted(file: &File) -> io::Result<bool> {
    let mut standard = FILE_STANDARD_INFO::default();
    let nbytes = size_of_u32::<FILE_STANDARD_INFO>();
    // SAFETY: `GetFileInformationByHandleEx` requires
    // - an open handle: `file` is borrowed until the call returns;
    // - `nbytes` writable bytes for the structure of that class: `standard` is that structure, `nbytes` is its size,
    // and no other code uses it. The system writes 0 or 1 into the field that is declared as `bool`.
    let answer = unsafe {
        GetFileInformationByHandleEx(handle(file), FileStandardInfo, (&raw mut standard).cast(), nbytes)
    };
    checked(answer).map(|()| standard.DeletePending)
}

/// The structures are a few bytes long.
#[allow(
    clippy::cast_possible_truncation,
    reason = "no structure of the system is that large"
)]
const fn size_of_u32<T>() -> u32 {
    size_of::<T>() as u32
}

fn set<T: Copy>(file: &File, class: FILE_INFO_BY_HANDLE_CLASS, what: &T) -> io::Result<()> {
    // SAFETY: `SetFileInformationByHandle` requires
    // - an open handle: `file` is borrowed until the call returns;
    // - as many readable bytes as the last argument specifies, of the structure of that class: `what` is borrowed until
    // the call returns, and both callers below pass the structure of the class.
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

/// Allocate disk space for a file. A file with more allocated space is truncated.
pub(super) fn allocate(file: &File, nbytes: i64) -> io::Result<()> {
    let room = FILE_ALLOCATION_INFO {
        AllocationSize: nbytes,
    };
    set(file, FileAllocationInfo, &room)
}

/// Set the attributes of a file in the sense of Windows, such as read-only.
pub(super) fn set_attributes(file: &File, attributes: u32) -> io::Result<()> {
    // A time of 0 leaves the file's time unchanged.
    let basic = FILE_BASIC_INFO {
        FileAttributes: attributes,
        ..FILE_BASIC_INFO::default()
    };
    set(file, FileBasicInfo, &basic)
}

/// Mark a file as sparse: unwritten ranges take no disk space.
pub(super) fn set_sparse(file: &File) -> io::Result<()> {
    let mut written = 0;
    // SAFETY: `DeviceIoControl` requires
    // - an open handle: `file` is borrowed until the call returns;
    // - buffers for input and output of the given lengths: there are no buffers, and both lengths are 0, as this code
    //   requires;
    // - a writable number: `written`, which no other code uses;
    // - no structure for overlapped I/O, since the standard library opens files without it.
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

/// Return the structure that describes the byte at `position` in calls for locks.
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

/// Lock the byte at `position` until the file is closed or the byte is unlocked.
pub(super) fn lock(file: &File, position: u64, flags: LOCK_FILE_FLAGS) -> io::Result<()> {
    let mut at = at(position);
    // SAFETY: `LockFileEx` requires
    // - an open handle: `file` is borrowed until the call returns;
    // - a structure with the position that stays in place until the file is locked: `at` lives until the call returns,
    // and the call returns only then, since the standard library opens files without overlapped I/O.
    let answer = unsafe { LockFileEx(handle(file), flags, 0, 1, 0, &raw mut at) };
    checked(answer)
}

/// Release one lock of the byte at `position`.
pub(super) fn unlock(file: &File, position: u64) -> io::Result<()> {
    let mut at = at(position);
    // SAFETY: as for `LockFileEx` above; `UnlockFileEx` requires the same.
    let answer = unsafe { UnlockFileEx(handle(file), 0, 1, 0, &raw mut at) };
    checked(answer)
}

/// Return a path as the system expects it: in UTF-16, with one null at the end and no other null.
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
    // SAFETY: `MoveFileExW` requires two strings that end in a null: `wide` returns such strings, and both live until
    // it returns.
    let answer = unsafe { MoveFileExW(from.as_ptr(), to.as_ptr(), flags) };
    checked(answer)
}

/// The permissions of a file in the system's own form. It consists of 64-bit words so that its parts are aligned.
#[derive(PartialEq, Eq)]
pub(super) struct AccessList(Vec<u64>);

/// Return the access list of an open file.
pub(super) fn access_list(file: &File) -> io::Result<AccessList> {
    let mut list: Vec<u64> = Vec::new();
    loop {
        let len = u32::try_from(8 * list.len()).map_err(io::Error::other)?;
        let mut needed = 0;
        // SAFETY: `GetKernelObjectSecurity` requires
        // - an open handle: `file` is borrowed until the call returns;
        // - `len` writable bytes: the bytes of `list`, which no other code uses;
        // - a writable number: `needed`.
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
    // SAFETY: `SetKernelObjectSecurity` requires
    // - an open handle: `file` is borrowed until the call returns;
    // - a security descriptor: `AccessList` contains exactly the bytes that `GetKernelObjectSecurity` wrote. The call
    // reads a copy of it.
    let answer = unsafe {
        SetKernelObjectSecurity(
            handle(file),
            DACL_SECURITY_INFORMATION,
            list.0.as_ptr().cast_mut().cast(),
        )
    };
    checked(answer)
}
