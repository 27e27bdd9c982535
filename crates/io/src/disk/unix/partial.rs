//! A file that stays when filling it is interrupted, under a name that others can derive.

use std::ffi::OsStr;
use std::fs::File;
use std::io;

use rustix::fs::{Mode, OFlags, fchmod};
use rustix::process::geteuid;

use super::attributes::Attributes;
use super::directory::{Directory, mode};
use crate::disk::{Birth, Facts, Kind};

/// Open the file `name` both ways, made where nothing has the name.
pub(crate) fn open_or_make(directory: &Directory, name: &OsStr, birth: Birth) -> io::Result<File> {
    // In a directory that others may write to, the name may be a link or a pipe.
    let careful = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    Ok(directory.open_file(name, OFlags::RDWR | OFlags::CREATE | careful, mode(birth))?)
}

/// Return whether a file is this user's alone to change: in a directory that others may write to, it may be a pipe, or theirs.
pub(crate) fn is_ours(facts: &Facts) -> bool {
    facts.kind == Kind::File && facts.owner.0 == geteuid().as_raw() && facts.names <= 1
}

/// Keep other users out of `file`, which an earlier call may have made, until it is complete and gets these attributes.
pub(crate) fn confine(file: &File, _: &Attributes) -> io::Result<()> {
    Ok(fchmod(file, Mode::from_raw_mode(0o600))?)
}
