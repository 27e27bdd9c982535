//! Functions of Windows that the standard library does not have: named pipes and access lists.
#![allow(unsafe_code)]

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::windows::ffi::OsStrExt;
use std::os::windows::io::FromRawHandle;
use std::path::Path;
use std::ptr;

use windows_sys::Win32::Foundation::{INVALID_HANDLE_VALUE, LocalFree};
use windows_sys::Win32::Security::Authorization::{
    ConvertSecurityDescriptorToStringSecurityDescriptorW,
    ConvertStringSecurityDescriptorToSecurityDescriptorW, SDDL_REVISION_1,
};
use windows_sys::Win32::Security::{
    DACL_SECURITY_INFORMATION, GetFileSecurityW, OBJECT_SECURITY_INFORMATION, OWNER_SECURITY_INFORMATION,
    PSECURITY_DESCRIPTOR, SetFileSecurityW,
};
use windows_sys::Win32::Storage::FileSystem::PIPE_ACCESS_INBOUND;
use windows_sys::Win32::System::Pipes::{CreateNamedPipeW, PIPE_TYPE_BYTE, PIPE_WAIT};
use windows_sys::core::BOOL;

/// Capacity of a pipe in bytes.
const HELD_NBYTES: u32 = 4096;

fn wide(text: &OsStr) -> Vec<u16> {
    text.encode_wide().chain([0]).collect()
}

#[track_caller]
fn assert_done(answer: BOOL) {
    assert_ne!(answer, 0, "{}", io::Error::last_os_error());
}

/// Returns the read end of a pipe. A writer opens the pipe by its name.
pub(super) fn pipe(name: &Path) -> File {
    let name = wide(name.as_os_str());
    // SAFETY: `CreateNamedPipeW` requires a string that ends in a null, which `wide` returns, and attributes that are null or
    // readable: they are null.
    let pipe = unsafe {
        CreateNamedPipeW(
            name.as_ptr(),
            PIPE_ACCESS_INBOUND,
            PIPE_TYPE_BYTE | PIPE_WAIT,
            1,
            0,
            HELD_NBYTES,
            0,
            ptr::null(),
        )
    };
    assert_ne!(pipe, INVALID_HANDLE_VALUE, "{}", io::Error::last_os_error());
    // SAFETY: `from_raw_handle` requires an open handle with no other owner: the call above made it.
    unsafe { File::from_raw_handle(pipe) }
}

/// Returns part of a file's security descriptor as text.
fn described(path: &Path, what: OBJECT_SECURITY_INFORMATION) -> String {
    let path = wide(path.as_os_str());
    let mut descriptor = [0_u64; 512];
    let mut needed = 0;
    let nbytes = u32::try_from(size_of_val(&descriptor)).unwrap();
    // SAFETY: `GetFileSecurityW` requires a string that ends in a null, a writable buffer of the stated size, and a writable
    // number: `path`, `descriptor` and `needed`, which no other code uses.
    let answer = unsafe {
        GetFileSecurityW(
            path.as_ptr(),
            what,
            descriptor.as_mut_ptr().cast(),
            nbytes,
            &raw mut needed,
        )
    };
    assert_done(answer);
    let (mut text, mut len) = (ptr::null_mut(), 0);
    // SAFETY: the call requires a descriptor, which the call above wrote, and a writable pointer and number.
    let answer = unsafe {
        ConvertSecurityDescriptorToStringSecurityDescriptorW(
            descriptor.as_mut_ptr().cast(),
            SDDL_REVISION_1,
            what,
            &raw mut text,
            &raw mut len,
        )
    };
    assert_done(answer);
    // SAFETY: `from_raw_parts` requires `len` readable characters: the call above allocated as many, with the null.
    let letters = unsafe { std::slice::from_raw_parts(text, usize::try_from(len).unwrap()) };
    let described = String::from_utf16_lossy(letters);
    // SAFETY: `LocalFree` requires memory that the call above allocated and that is not used any more: the text is a copy.
    unsafe { LocalFree(text.cast()) };
    described.trim_end_matches('\0').to_owned()
}

/// Returns the access list of a file.
pub(super) fn access_list(path: &Path) -> String {
    described(path, DACL_SECURITY_INFORMATION)
}

/// Returns the owner of a file.
pub(super) fn owner(path: &Path) -> String {
    let described = described(path, OWNER_SECURITY_INFORMATION);
    described.strip_prefix("O:").unwrap().to_owned()
}

pub(super) fn set_access_list(path: &Path, list: &str) {
    let (path, list) = (wide(path.as_os_str()), wide(list.as_ref()));
    let mut descriptor: PSECURITY_DESCRIPTOR = ptr::null_mut();
    // SAFETY: the call requires a string that ends in a null, and a writable pointer.
    let answer = unsafe {
        ConvertStringSecurityDescriptorToSecurityDescriptorW(
            list.as_ptr(),
            SDDL_REVISION_1,
            &raw mut descriptor,
            ptr::null_mut(),
        )
    };
    assert_done(answer);
    // SAFETY: `SetFileSecurityW` requires a string that ends in a null, and a descriptor, which the call above made.
    let answer = unsafe { SetFileSecurityW(path.as_ptr(), DACL_SECURITY_INFORMATION, descriptor) };
    assert_done(answer);
    // SAFETY: `LocalFree` requires memory that the first call allocated and that is not used any more.
    unsafe { LocalFree(descriptor) };
}
