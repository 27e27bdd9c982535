//! Attributes of a file besides its bytes and its name: mode, owner, extended attributes.

use std::ffi::OsStr;
use std::fs::File;
use std::io;

use rustix::fs::{self, Gid, Mode, Uid};
use rustix::io::Errno;

use super::directory::Directory;
use crate::disk::Facts;

/// The attributes that a new file inherits from the file that it replaces.
pub(crate) struct Attributes {
    mode: Mode,
    owner: Uid,
    group: Gid,
    extended: Extended,
}

impl Attributes {
    pub(crate) fn of(directory: &Directory, name: &OsStr, facts: &Facts) -> io::Result<Attributes> {
        Ok(Attributes {
            mode: Mode::from_raw_mode(facts.mode as rustix::fs::RawMode),
            owner: Uid::from_raw(facts.owner.0),
            group: Gid::from_raw(facts.owner.1),
            extended: Extended::of(directory, name)?,
        })
    }

    /// Keep other users out of the new `file`. It was created that way.
    #[allow(
        clippy::unused_self,
        clippy::unnecessary_wraps,
        reason = "Windows does it here"
    )]
    pub(crate) fn begin(&self, _: &File) -> io::Result<()> {
        Ok(())
    }

    /// Keep other users out of `file`, which an earlier call may have made, until it is complete and gets these attributes.
    #[cfg(feature = "remote")]
    #[allow(clippy::unused_self, reason = "Windows needs the access list")]
    pub(crate) fn confine(&self, file: &File) -> io::Result<()> {
        Ok(fs::fchmod(file, Mode::RUSR | Mode::WUSR)?)
    }

    /// Apply the attributes that this process may set. Only the owner of `file` can read it until then. No step gives
    /// access to a user who had none to the old file.
    pub(crate) fn apply(&self, file: &File) -> io::Result<()> {
        let (owner_kept, group_kept) = self.give(file)?;
        // An access list refers to owner and group, so its meaning changes with them.
        let list_kept = self.extended.apply(file, owner_kept && group_kept)?;
        let mut mode = self.mode;
        if !(owner_kept && group_kept) {
            mode = mode.difference(Mode::SUID | Mode::SGID);
        }
        if !(group_kept && list_kept) {
            // Another group gets at most the permissions of all users.
            let others = Mode::from_raw_mode((mode & Mode::RWXO).as_raw_mode() << 3);
            mode = mode.difference(Mode::RWXG.difference(others));
        }
        permitted(fs::fchmod(file, mode)).map(|_| ())
    }

    /// Return whether `file` now has the owner and the group.
    fn give(&self, file: &File) -> io::Result<(bool, bool)> {
        let now = fs::fstat(file)?;
        let (owner, group) = (Uid::from_raw(now.st_uid), Gid::from_raw(now.st_gid));
        if (owner, group) == (self.owner, self.group)
            || permitted(fs::fchown(file, Some(self.owner), Some(self.group)))?
        {
            return Ok((true, true));
        }
        // Only root may change the owner, but every user may choose among their own groups.
        let group_kept = group == self.group || permitted(fs::fchown(file, None, Some(self.group)))?;
        Ok((owner == self.owner, group_kept))
    }
}

/// Return true on success, and false if this process may not, or this system cannot, make the change. Other errors are
/// returned.
fn permitted(result: rustix::io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        // EINVAL: an owner that this user namespace does not know.
        Err(Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(false),
        Err(fault) => Err(fault.into()),
    }
}

#[cfg(target_os = "linux")]
use linux::Extended;

#[cfg(not(target_os = "linux"))]
struct Extended;

#[cfg(not(target_os = "linux"))]
impl Extended {
    fn of(_: &Directory, _: &OsStr) -> io::Result<Extended> {
        Ok(Extended)
    }

    fn apply(&self, _: &File, _: bool) -> io::Result<bool> {
        Ok(true)
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::ffi::{CStr, CString, OsStr};
    use std::fs::File;
    use std::io;

    use rustix::fs::{self, Mode, OFlags, XattrFlags};
    use rustix::io::Errno;

    use super::{Directory, permitted};

    const ACCESS_LIST: &CStr = c"system.posix_acl_access";
    /// Attributes of the old bytes: a signature of them, or privileges of a program.
    const NOT_COPIED: [&CStr; 3] = [c"security.ima", c"security.evm", c"security.capability"];
    /// The kernel's limit for a value, and for the list of names.
    const LARGEST: usize = 65536;

    /// The extended attributes; `None` if this process may not read them.
    pub(super) struct Extended(Option<Vec<(CString, Vec<u8>)>>);

    impl Extended {
        pub(super) fn of(directory: &Directory, name: &OsStr) -> io::Result<Extended> {
            match read(directory, name) {
                Ok(pairs) => Ok(Extended(Some(pairs))),
                // The attribute was removed a moment ago.
                Err(Errno::ACCESS | Errno::PERM | Errno::NOENT) => Ok(Extended(None)),
                Err(fault) => Err(fault.into()),
            }
        }

        /// Set all attributes on `file`, the access list only if `owner_kept`. Return whether `file` has the access
        /// list of the old file, or neither has one.
        pub(super) fn apply(&self, file: &File, owner_kept: bool) -> io::Result<bool> {
            let mut has_list = false;
            let mut list_kept = self.0.is_some();
            for (name, value) in self.0.iter().flatten() {
                let is_list = name.as_c_str() == ACCESS_LIST;
                has_list |= is_list;
                let kept = (owner_kept || !is_list)
                    && permitted(fs::fsetxattr(file, name, value, XattrFlags::empty()))?;
                list_kept &= kept || !is_list;
            }
            if !(has_list && list_kept) {
                // The directory may have given the new file a list of its own, which the mode would activate.
                match fs::fremovexattr(file, ACCESS_LIST) {
                    Ok(()) | Err(Errno::NODATA) => {}
                    result => drop(permitted(result)?),
                }
            }
            Ok(list_kept)
        }
    }

    fn read(directory: &Directory, name: &OsStr) -> rustix::io::Result<Vec<(CString, Vec<u8>)>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = directory.open_file(name, flags, Mode::empty())?;
        let mut buffer = vec![0; LARGEST];
        let len = match fs::flistxattr(&file, &mut buffer[..]) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(Vec::new()),
            listed => listed?,
        };
        let names: Vec<CString> = buffer[..len]
            .split_inclusive(|&byte| byte == 0)
            .filter_map(|name| CStr::from_bytes_with_nul(name).ok())
            .filter(|name| !NOT_COPIED.contains(name))
            .map(CStr::to_owned)
            .collect();
        let mut pairs = Vec::with_capacity(names.len());
        for name in names {
            match fs::fgetxattr(&file, &name, &mut buffer[..]) {
                Ok(len) => pairs.push((name, buffer[..len].to_vec())),
                // Removed a moment ago.
                Err(Errno::NODATA) => {}
                // This process may not read it. A file with an unknown access list does not count as one without a
                // list.
                Err(Errno::ACCESS | Errno::PERM | Errno::OPNOTSUPP) if name.as_c_str() != ACCESS_LIST => {}
                Err(fault) => return Err(fault),
            }
        }
        Ok(pairs)
    }
}
