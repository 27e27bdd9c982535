//! Calls on open files and on paths.

use std::fs::File;
use std::io;
use std::io::{Seek, Write};
#[cfg(feature = "remote")]
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use ingot_format::to_usize;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, FlockOperation, OFlags, Stat, flock, fstat, lstat, stat};
use rustix::io::{Errno, retry_on_intr};
#[cfg(feature = "remote")]
use rustix::process::geteuid;
use rustix::process::{Resource, getrlimit};

use crate::disk::{Facts, Kind, Lock};

/// Return the facts of an open file.
pub(crate) fn facts(file: &File) -> io::Result<Facts> {
    Ok(of_stat(&fstat(file)?))
}

/// Return whether this user owns a regular file with one name. In a directory that others may write to, it may be a
/// pipe, or another user's file.
#[cfg(feature = "remote")]
pub(crate) fn is_ours(facts: &Facts) -> bool {
    facts.kind == Kind::File && facts.owner.0 == geteuid().as_raw() && facts.names <= 1
}

/// Create a directory that only its owner can use, with its parents, unless there is one.
#[cfg(feature = "remote")]
pub(crate) fn create_private_directory(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
}

/// Return whether a directory belongs to this user or to the system, and no other user can write to it.
#[cfg(feature = "remote")]
pub(crate) fn is_private_directory(facts: &Facts) -> bool {
    let is_trusted = [0, geteuid().as_raw()].contains(&facts.owner.0);
    facts.kind == Kind::Directory && is_trusted && facts.mode & 0o022 == 0
}

/// Return the facts of the file to which a path leads.
pub(crate) fn facts_at(path: &Path) -> io::Result<Facts> {
    Ok(of_stat(&stat(path)?))
}

/// Return the facts of the file named `path`; of a symbolic link the facts of the link.
pub(crate) fn facts_of_name(path: &Path) -> io::Result<Facts> {
    Ok(of_stat(&lstat(path)?))
}

#[allow(
    clippy::unnecessary_cast,
    clippy::useless_conversion,
    clippy::cast_lossless,
    clippy::cast_sign_loss,
    reason = "the fields of `stat` have other types on other systems, and are compared only"
)]
pub(super) fn of_stat(stat: &Stat) -> Facts {
    Facts {
        kind: kind_of(stat),
        identity: (stat.st_dev as u64, stat.st_ino as u64),
        nbytes: stat.st_size.try_into().unwrap_or(0),
        modified: (stat.st_mtime as i64, stat.st_mtime_nsec.try_into().unwrap_or(0)),
        names: stat.st_nlink as u64,
        mode: stat.st_mode as u32,
        owner: (stat.st_uid, stat.st_gid),
    }
}

pub(super) fn kind_of(stat: &Stat) -> Kind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Link,
        _ => Kind::Other,
    }
}

/// Return the number of the file system of `file`.
#[cfg(target_os = "linux")]
pub(crate) fn file_system(file: &File) -> Option<u32> {
    // The kernel's numbers have 32 bits. The field is as wide as a word of the machine, and keeps their sign.
    let [a, b, c, d, ..] = rustix::fs::fstatfs(file).ok()?.f_type.to_le_bytes();
    Some(u32::from_le_bytes([a, b, c, d]))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn file_system(_file: &File) -> Option<u32> {
    None
}

/// File systems whose pages come over a network or through a process, by the number that `statfs` reports (linux/magic.h,
/// and the sources of those outside the kernel). Mapping a file there fetches it page by page, 30 to 50 times slower than
/// reading it, and an error on the way is a SIGBUS.
const REMOTE_FILE_SYSTEMS: &[(u32, &str)] = &[
    (0x6969, "NFS"),
    (0xFF53_4D42, "CIFS"),
    (0xFE53_4D42, "SMB2"),
    (0x517B, "SMB"),
    (0x6573_5546, "FUSE"),
    (0x0102_1997, "9p"),
    (0x0BD0_0BD0, "Lustre"),
    (0x00C3_6400, "Ceph"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x5346_414F, "AFS"),
    (0x7375_7245, "Coda"),
    (0x0116_1970, "GFS2"),
    (0x7461_636F, "OCFS2"),
    (0x2003_0528, "OrangeFS"),
    (0x786F_4256, "vboxsf"),
    (0xBACB_ACBC, "vmhgfs"),
    (0x7C7C_6673, "prl_fs"),
    (0x6B41_4653, "kAFS"),
    (0xBEEF_DEAD, "StorNext"),
    (0xAAD7_AAEA, "PanFS"),
    (0x0131_11A8, "IBRIX"),
];

/// Return the name of the file system of `file` if it is one of [`REMOTE_FILE_SYSTEMS`].
pub(crate) fn remote_file_system(file: &File) -> Option<&'static str> {
    file_system(file).and_then(remote_name)
}

fn remote_name(number: u32) -> Option<&'static str> {
    REMOTE_FILE_SYSTEMS
        .iter()
        .find(|row| row.0 == number)
        .map(|row| row.1)
}

pub(crate) fn read_at(file: &File, into: &mut [u8], position: u64) -> io::Result<usize> {
    file.read_at(into, position)
}

pub(crate) fn write_at(file: &File, bytes: &[u8], position: u64) -> io::Result<usize> {
    file.write_at(bytes, position)
}

/// Open `file` again without the page cache: by its descriptor, since its name may lead to another file by now. `None` if the
/// system refuses.
#[cfg(target_os = "linux")]
pub(crate) fn open_direct(file: &File, for_writing: bool) -> Option<File> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options()
        .read(!for_writing)
        .write(for_writing)
        .custom_flags(OFlags::DIRECT.bits().cast_signed())
        .open(path)
        .ok()
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn open_direct(_: &File, _: bool) -> Option<File> {
    None
}

/// Return whether `fault` means that the file, or this position or size, takes no direct reads or writes.
pub(crate) fn refuses_direct(fault: &io::Error) -> bool {
    let refusals = [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOSYS, Errno::NOTBLK];
    Errno::from_io_error(fault).is_some_and(|fault| refusals.contains(&fault))
}

pub(crate) fn write_all_at(file: &File, bytes: &[u8], position: u64) -> io::Result<()> {
    // The standard library continues after short writes and signals.
    file.write_all_at(bytes, position)
}

/// Append to a journal to which other processes append, in one call, which local file systems order. Return the position of
/// the end of the bytes.
pub(crate) fn append(mut notes: &File, bytes: &[u8]) -> io::Result<u64> {
    // On a full disk, only a part of the bytes may fit. The next write then reports the error.
    notes.write_all(bytes)?;
    notes.stream_position()
}

/// Open without waiting: a FIFO without a writer would otherwise hang the program. Callers check the kind of the open file,
/// so that no other file can take its place between the check and the opening.
pub(crate) fn open_for_reading(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(nonblock()).open(path)
}

/// The same, for reading and writing.
pub(crate) fn open_both_ways(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .custom_flags(nonblock())
        .open(path)
}

fn nonblock() -> i32 {
    OFlags::NONBLOCK.bits().cast_signed()
}

/// Lock a file until it is closed, however its process ends, or unlocked. Return false if another process holds a lock that
/// excludes this one.
pub(crate) fn try_lock(file: &File, lock: Lock) -> io::Result<bool> {
    let operation = match lock {
        Lock::Exclusive => FlockOperation::NonBlockingLockExclusive,
        Lock::Shared => FlockOperation::NonBlockingLockShared,
    };
    match retry_on_intr(|| flock(file, operation)) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(fault) => Err(fault.into()),
    }
}

/// The process that has locked `file`, or one of several. `None` if the system does not report it.
#[cfg(target_os = "linux")]
pub(crate) fn lock_holder(file: &File) -> Option<u32> {
    let stat = fstat(file).ok()?;
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let place = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    // `1: FLOCK  ADVISORY  WRITE 17684 fe:00:10011042 0 EOF`. Lines of waiting processes have `->` before `FLOCK`.
    let holder = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let is_lock = words.next() == Some("FLOCK");
        let (process, at) = (words.nth(2)?, words.next()?);
        (is_lock && at == place).then(|| process.parse().ok())?
    };
    std::fs::read_to_string("/proc/locks")
        .ok()?
        .lines()
        .find_map(holder)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn lock_holder(_: &File) -> Option<u32> {
    None
}

/// Make an exclusive lock of this file a shared one.
pub(crate) fn share_lock(file: &File) -> io::Result<()> {
    try_lock(file, Lock::Shared).map(|_| ())
}

pub(crate) fn unlock(file: &File) -> io::Result<()> {
    Ok(retry_on_intr(|| flock(file, FlockOperation::Unlock))?)
}

/// Bytes that are reserved in one call. On tmpfs, which fills pages for that, a call takes about 0.1 s.
pub(crate) const RESERVED_AT_ONCE: u64 = 1 << 30;

/// Reserve `count` bytes from `position` on. Return false if the file system cannot reserve. After a signal, the error
/// has the kind [`io::ErrorKind::Interrupted`].
#[cfg(target_os = "linux")]
pub(crate) fn reserve(file: &File, position: u64, count: u64, size: crate::disk::Size) -> io::Result<bool> {
    use crate::disk::Size;
    use rustix::fs::{FallocateFlags, fallocate};
    let flags = match size {
        Size::Sparse => return file.set_len(position + count).map(|()| true),
        Size::Set | Size::Scattered => FallocateFlags::empty(),
        Size::Kept => FallocateFlags::KEEP_SIZE,
    };
    match fallocate(file, flags, position, count) {
        Ok(()) => Ok(true),
        Err(fault @ (Errno::INTR | Errno::NOSPC | Errno::FBIG | Errno::DQUOT | Errno::IO | Errno::ROFS)) => {
            Err(fault.into())
        }
        Err(_) => Ok(false),
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn reserve(_: &File, _: u64, _: u64, _: crate::disk::Size) -> io::Result<bool> {
    Ok(false)
}

/// Fail if the system reports less free space than a file of `nbytes` needs. Space that is reserved for root counts as
/// free, and so do the blocks of the file: no file that fits is refused.
#[cfg(target_os = "linux")]
pub(crate) fn check_room(file: &File, nbytes: u64) -> io::Result<()> {
    use rustix::fs::{fstatvfs, syncfs};
    let is_short = || {
        let (Ok(space), Ok(stat)) = (fstatvfs(file), fstat(file)) else {
            return false;
        };
        let there = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
        // A file system that reports no size does not know its free space.
        space.f_blocks > 0 && nbytes.saturating_sub(there) > space.f_bfree.saturating_mul(space.f_frsize)
    };
    // On btrfs, the blocks of deleted files are free only after `syncfs`.
    if is_short() && syncfs(file).is_ok() && is_short() {
        return Err(Errno::NOSPC.into());
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn check_room(_: &File, _: u64) -> io::Result<()> {
    Ok(())
}

/// Fail when a file of `nbytes` is larger than its file system: most of it is a hole.
#[cfg(target_os = "linux")]
pub(crate) fn check_extent(file: &File, nbytes: u64) -> io::Result<()> {
    let Ok(space) = rustix::fs::fstatvfs(file) else {
        return Ok(());
    };
    let most = space.f_blocks.saturating_mul(space.f_frsize);
    if most > 0 && nbytes > most {
        let why =
            format!("the file is sparse: its file system holds {most} bytes at most, and it claims {nbytes}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn check_extent(_: &File, _: u64) -> io::Result<()> {
    Ok(())
}

/// Fail when the process may not write files this large (`ulimit -f`). The first write past the limit would raise a
/// signal, which ends the process unless it is ignored.
pub(crate) fn check_size_limit(nbytes: u64) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if nbytes > limit => Err(Errno::FBIG.into()),
        _ => Ok(()),
    }
}

/// Files that this process may have open.
pub(crate) fn descriptors_allowed() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.and_then(to_usize).unwrap_or(usize::MAX)
}

/// Wait until the reader of a pipe has made room in it, or until the time is over.
pub(crate) fn wait_writable(file: &File, most: Duration) {
    let timeout = Timespec::try_from(most).ok();
    // The next write reports errors better than poll does.
    let _ = poll(&mut [PollFd::new(file, PollFlags::OUT)], timeout.as_ref());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_each_file_system_once() {
        for (number, name) in REMOTE_FILE_SYSTEMS {
            assert_eq!(remote_name(*number), Some(*name), "two rows with one number");
            let rows = REMOTE_FILE_SYSTEMS.iter().filter(|row| row.1 == *name).count();
            assert_eq!(rows, 1, "{name}");
        }
        let ext4 = 0xEF53;
        assert_eq!(remote_name(ext4), None);
    }
}
