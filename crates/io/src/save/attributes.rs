//! What a file has besides its bytes and its name: mode, owner, extended attributes.

use std::fs::File;
use std::io;

use rustix::fs::{self, Gid, Mode, Stat, Uid};
use rustix::io::Errno;

use super::resolved::DirectoryEntry;

/// What the file that is replaced passes on to the new one.
pub(super) struct Attributes {
    mode: Mode,
    owner: Uid,
    group: Gid,
    extended: Extended,
}

impl Attributes {
    fn of(entry: &DirectoryEntry, stat: &Stat) -> io::Result<Attributes> {
        Ok(Attributes {
            mode: Mode::from_raw_mode(stat.st_mode),
            owner: Uid::from_raw(stat.st_uid),
            group: Gid::from_raw(stat.st_gid),
            extended: Extended::of(entry)?,
        })
    }

    /// Gives `file`, which its owner alone may read as yet, the attributes, as far as this process may. No step lets
    /// anybody in whom the old file kept out.
    pub(super) fn apply(&self, file: &File) -> io::Result<()> {
        let (owner_kept, group_kept) = self.give(file)?;
        // An access list speaks of owner and group, so it means another thing when they are others.
        let list_kept = self.extended.apply(file, owner_kept && group_kept)?;
        let mut mode = self.mode;
        if !(owner_kept && group_kept) {
            mode = mode.difference(Mode::SUID | Mode::SGID);
        }
        if !(group_kept && list_kept) {
            // Another group gets no more than everybody.
            let others = Mode::from_raw_mode((mode & Mode::RWXO).as_raw_mode() << 3);
            mode = mode.difference(Mode::RWXG.difference(others));
        }
        permitted(fs::fchmod(file, mode)).map(|_| ())
    }

    /// Says whether `file` now has the owner and the group.
    fn give(&self, file: &File) -> io::Result<(bool, bool)> {
        let now = fs::fstat(file)?;
        let (owner, group) = (Uid::from_raw(now.st_uid), Gid::from_raw(now.st_gid));
        if (owner, group) == (self.owner, self.group)
            || permitted(fs::fchown(file, Some(self.owner), Some(self.group)))?
        {
            return Ok((true, true));
        }
        // Only root gives files away, but everybody may choose among their own groups.
        let group_kept = group == self.group || permitted(fs::fchown(file, None, Some(self.group)))?;
        Ok((owner == self.owner, group_kept))
    }
}

/// What the new file at `entry` gets from the one that is there, and the mode it has until then: what replaces a private
/// file is private from the first byte on.
pub(super) fn inherited(entry: &DirectoryEntry) -> io::Result<(Option<Attributes>, Mode)> {
    let existing = entry.existing.as_ref();
    let attributes = existing.map(|stat| Attributes::of(entry, stat)).transpose()?;
    let mode = if attributes.is_some() { 0o600 } else { 0o666 };
    Ok((attributes, Mode::from_raw_mode(mode)))
}

/// Whether it worked; an error only when the reason is another than that it may not, or cannot, be done here.
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
    fn of(_: &DirectoryEntry) -> io::Result<Extended> {
        Ok(Extended)
    }

    fn apply(&self, _: &File, _: bool) -> io::Result<bool> {
        Ok(true)
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::ffi::{CStr, CString};
    use std::fs::File;
    use std::io;

    use rustix::fs::{self, Mode, OFlags, XattrFlags};
    use rustix::io::Errno;

    use super::{DirectoryEntry, permitted};

    const ACCESS_LIST: &CStr = c"system.posix_acl_access";
    /// What belongs to the old bytes: a signature of them, or the right of a program to act with privileges.
    const NOT_COPIED: [&CStr; 3] = [c"security.ima", c"security.evm", c"security.capability"];
    /// The kernel's limit for a value, and for the list of names.
    const LARGEST: usize = 65536;

    /// Extended attributes; `None` when this process may not read them.
    pub(super) struct Extended(Option<Vec<(CString, Vec<u8>)>>);

    impl Extended {
        pub(super) fn of(entry: &DirectoryEntry) -> io::Result<Extended> {
            match read(entry) {
                Ok(pairs) => Ok(Extended(Some(pairs))),
                // Not found: removed a moment ago.
                Err(Errno::ACCESS | Errno::PERM | Errno::NOENT) => Ok(Extended(None)),
                Err(fault) => Err(fault.into()),
            }
        }

        /// Sets all on `file`, the access list only when `owner_kept`. Says whether `file` has the access list of the
        /// old file, or none as that one.
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
                // The directory may have given the new file a list of its own, which the mode would bring to life.
                match fs::fremovexattr(file, ACCESS_LIST) {
                    Ok(()) | Err(Errno::NODATA) => {}
                    result => drop(permitted(result)?),
                }
            }
            Ok(list_kept)
        }
    }

    fn read(entry: &DirectoryEntry) -> rustix::io::Result<Vec<(CString, Vec<u8>)>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = entry.directory.file(&entry.name, flags, Mode::empty())?;
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
                // Not ours to see. But a file whose access list is unknown is not one that has none.
                Err(Errno::ACCESS | Errno::PERM | Errno::OPNOTSUPP) if name.as_c_str() != ACCESS_LIST => {}
                Err(fault) => return Err(fault),
            }
        }
        Ok(pairs)
    }
}
