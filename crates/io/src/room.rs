//! Memory that files are read into where nobody asked for that.
#![cfg(target_os = "linux")]

use std::fs::read_to_string;
use std::sync::atomic::{AtomicU64, Ordering};

/// The part of free memory that is taken: an eighth, so that a process for each of the eight devices of a machine may
/// read the same file.
const PART: u64 = 8;

/// Bytes of all claims of this process.
static CLAIMED: AtomicU64 = AtomicU64::new(0);

/// Room for a file that is open and may be read at any time.
#[derive(Debug)]
pub(crate) struct Claim {
    nbytes: u64,
}

impl Claim {
    /// `None` where there is not as much room beside all other claims, or the system does not say.
    pub(crate) fn of(nbytes: u64) -> Option<Claim> {
        Claim::within(nbytes, available()? / PART)
    }

    fn within(nbytes: u64, room: u64) -> Option<Claim> {
        let more = |claimed: u64| claimed.checked_add(nbytes).filter(|&all| all <= room);
        CLAIMED
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()
            .map(|_| Claim { nbytes })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        CLAIMED.fetch_sub(self.nbytes, Ordering::Relaxed);
    }
}

/// Bytes that can be had without taking them from anyone, by the system and by the limit of a container.
fn available() -> Option<u64> {
    let system = mem_available(&read_to_string("/proc/meminfo").ok()?)?;
    let number = |name| {
        read_to_string(format!("/sys/fs/cgroup/{name}"))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    match (number("memory.max"), number("memory.current")) {
        (Some(most), Some(taken)) => Some(system.min(most.saturating_sub(taken))),
        _ => Some(system),
    }
}

/// What /proc/meminfo says, in bytes.
fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_share_the_room_and_give_it_back() {
        // Nothing else in these tests takes more than this, and nobody has so much.
        let much = 1 << 60;
        let first = Claim::within(much, 2 * much).unwrap();
        assert!(Claim::within(much + 1, 2 * much).is_none());
        drop(first);
        assert!(Claim::within(2 * much, u64::MAX).is_some());
        assert!(Claim::within(u64::MAX, u64::MAX - 1).is_none());
        assert!(Claim::of(1 << 60).is_none());
    }

    #[test]
    fn what_is_available_stands_in_meminfo() {
        let text = "MemTotal:       24576000 kB\nMemAvailable:   22528000 kB\n";
        assert_eq!(mem_available(text), Some(22_528_000 * 1024));
        assert_eq!(mem_available("MemTotal: 1 kB\n"), None);
        assert!(available().is_none_or(|nbytes| nbytes > 0));
    }
}
