//! Room for a file, asked for before the first byte is written.

use std::fs::File;
use std::io;

use crate::error::Stop;
use crate::watch::Watch;

/// What happens to the size of the file meanwhile.
#[derive(Clone, Copy)]
pub(super) enum Size {
    /// It becomes what is reserved: for a file that is thrown away on failure. Writing is then a fifth faster, since
    /// no write has to move the end (1 GiB, ext4, 2 threads: 0.26 s against 0.30 s at best, November 2026).
    Set,
    /// It becomes what is reserved, but nothing is: the blocks will be those of another file.
    Sparse,
    /// It stays: a file that is to be overwritten must not grow when this fails.
    Kept,
}

/// Reserves `nbytes` for `file`, so that a full disk is found before the time to write is spent, and so that threads
/// can write side by side (8.6 GB/s with two after this, against 5 with one, ext4, November 2026). Renaming over a file
/// is cheaper too: ext4 then flushes what has no place on the disk yet, which took seconds, and here is nothing.
#[cfg(target_os = "linux")]
pub(super) fn reserve(file: &File, nbytes: u64, size: Size, watch: &dyn Watch) -> Result<(), Stop> {
    use super::release;
    use crate::error::{Step, step};
    use rustix::fs::{FallocateFlags, fallocate};
    use rustix::io::Errno;

    /// Bytes reserved in one call. Where that means to fill pages (tmpfs), it takes about 0.1 s.
    const STRIDE: u64 = 1 << 30;
    /// Signals that may break off one call. A file system can undo it each time, so that a timer which ticks fast
    /// enough would keep it from ever ending.
    const SIGNALS: u32 = 16;

    check_limit(nbytes).step(step::RESERVE)?;
    let flags = match size {
        Size::Sparse => return file.set_len(nbytes).step(step::RESERVE),
        Size::Set => FallocateFlags::empty(),
        Size::Kept => FallocateFlags::KEEP_SIZE,
    };
    let mut position = 0;
    let mut signals = 0;
    let mut released = release::done();
    while position < nbytes {
        if watch.interrupted() {
            return Err(Stop::Interrupted);
        }
        let count = STRIDE.min(nbytes - position);
        match fallocate(file, flags, position, count) {
            Ok(()) => position += count,
            Err(Errno::INTR) if signals < SIGNALS => signals += 1,
            Err(Errno::NOSPC | Errno::DQUOT) if release::more_than(released, watch) => {
                released = release::done()
            }
            Err(fault @ (Errno::NOSPC | Errno::FBIG | Errno::DQUOT | Errno::IO | Errno::ROFS)) => {
                return Err(fault).step(step::RESERVE);
            }
            // The file system cannot reserve. Writing finds out then, and does not ask twice: what is being given back
            // has to be there.
            Err(_) => {
                release::settle(watch);
                return Ok(());
            }
        }
    }
    Ok(())
}

#[cfg(all(unix, not(target_os = "linux")))]
pub(super) fn reserve(_: &File, nbytes: u64, _: Size, _: &dyn Watch) -> Result<(), Stop> {
    use crate::error::{Step, step};
    check_limit(nbytes).step(step::RESERVE)
}

/// Fails when the process may not write files this large (`ulimit -f`). Writing would find out by a signal, which
/// ends the process unless it is ignored.
#[cfg(unix)]
fn check_limit(nbytes: u64) -> io::Result<()> {
    use rustix::process::{Resource, getrlimit};
    match getrlimit(Resource::Fsize).current {
        Some(limit) if nbytes > limit => Err(rustix::io::Errno::FBIG.into()),
        _ => Ok(()),
    }
}
