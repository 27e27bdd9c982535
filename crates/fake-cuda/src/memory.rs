//! Memory of the devices, and pinned memory of the host.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::pages;

/// What stands in memory that a copy under way writes to.
pub(crate) const POISON: u8 = 0xDB;
/// What stands in memory that was freed.
pub(crate) const FREED: u8 = 0xEE;

/// Allocations are aligned as the real ones are.
const ALIGNMENT: usize = 512;
/// Pinned memory is aligned as that of pages is.
const PAGE: usize = 4096;

/// The memory of one device. Its addresses are reserved, and whoever touches them ends with a fault; what stands there is
/// elsewhere, where only the simulator finds it.
#[derive(Debug)]
pub(crate) struct Arena {
    start: usize,
    nbytes: usize,
    /// What stands at the addresses that were ever handed out, which are the first.
    bytes: Vec<u8>,
    /// What is allocated: address and size.
    live: BTreeMap<usize, usize>,
    /// What was freed, by its size, to be handed out again first.
    freed: Vec<(usize, usize)>,
}

impl Arena {
    pub(crate) fn new(nbytes: usize) -> Arena {
        let mut reserved = reserved();
        let kept = reserved.iter().position(|&(_, size)| size == nbytes);
        let start = kept.map(|rank| reserved.swap_remove(rank).0);
        Arena {
            start: start.unwrap_or_else(|| pages::reserve(nbytes)),
            nbytes,
            bytes: Vec::new(),
            live: BTreeMap::new(),
            freed: Vec::new(),
        }
    }

    /// Memory that was freed, if there is some of this size: what an allocator hands out may have had another owner.
    pub(crate) fn allocate(&mut self, nbytes: usize) -> Option<usize> {
        let nbytes = nbytes.max(1).next_multiple_of(ALIGNMENT);
        if let Some(rank) = self.freed.iter().position(|&(_, size)| size == nbytes) {
            let (address, _) = self.freed.swap_remove(rank);
            self.live.insert(address, nbytes);
            return Some(address);
        }
        let begin = self.bytes.len();
        (self.start != 0 && begin + nbytes <= self.nbytes).then(|| {
            self.bytes.resize(begin + nbytes, 0);
            self.live.insert(self.start + begin, nbytes);
            self.start + begin
        })
    }

    /// Whether there was such memory. It is overwritten, as its next owner may do at once.
    pub(crate) fn free(&mut self, address: usize) -> bool {
        let Some(nbytes) = self.live.remove(&address) else {
            return false;
        };
        self.fill(address, nbytes, FREED);
        self.freed.push((address, nbytes));
        true
    }

    /// Frees all that is allocated.
    pub(crate) fn clear(&mut self) {
        let live: Vec<usize> = self.live.keys().copied().collect();
        for address in live {
            self.free(address);
        }
    }

    pub(crate) fn has(&self, address: usize, nbytes: usize) -> bool {
        is_within(&self.live, address, nbytes)
    }

    pub(crate) fn is_ours(&self, address: usize) -> bool {
        (self.start..self.start + self.nbytes).contains(&address)
    }

    pub(crate) fn fill(&mut self, address: usize, nbytes: usize, byte: u8) {
        self.at(address, nbytes).fill(byte);
    }

    pub(crate) fn write(&mut self, address: usize, bytes: &[u8]) {
        self.at(address, bytes.len()).copy_from_slice(bytes);
    }

    pub(crate) fn read(&mut self, address: usize, into: &mut [u8]) {
        into.copy_from_slice(self.at(address, into.len()));
    }

    /// These bytes of the device, which were handed out.
    fn at(&mut self, address: usize, nbytes: usize) -> &mut [u8] {
        let begin = address - self.start;
        &mut self.bytes[begin..begin + nbytes]
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.start != 0 {
            reserved().push((self.start, self.nbytes));
        }
    }
}

/// Addresses that no device has just now, and how many. They are kept, since some systems take long to reserve so many.
fn reserved() -> MutexGuard<'static, Vec<(usize, usize)>> {
    static RESERVED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());
    RESERVED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pinned memory of the host. What was freed is kept until the reset, so that a copy which reads it late reads other bytes.
#[derive(Debug, Default)]
pub(crate) struct Pinned {
    live: BTreeMap<usize, usize>,
    /// The device in whose context each was allocated.
    owners: BTreeMap<usize, usize>,
    kept: Vec<Box<[u8]>>,
}

impl Pinned {
    pub(crate) fn allocate(&mut self, nbytes: usize, ordinal: usize) -> usize {
        // Of this alignment, so that reads past the page cache work as they do with real ones.
        let memory = vec![0; nbytes + PAGE].into_boxed_slice();
        let address = memory.as_ptr().expose_provenance().next_multiple_of(PAGE);
        self.kept.push(memory);
        self.live.insert(address, nbytes);
        self.owners.insert(address, ordinal);
        address
    }

    /// The device in whose context it was allocated.
    pub(crate) fn owner(&self, address: usize) -> Option<usize> {
        self.live
            .get(&address)
            .and_then(|_| self.owners.get(&address))
            .copied()
    }

    /// What was allocated in the context of a device.
    pub(crate) fn of(&self, ordinal: usize) -> Vec<usize> {
        let all = self.live.keys().copied();
        all.filter(|address| self.owners.get(address) == Some(&ordinal))
            .collect()
    }

    /// How many bytes were freed, if there were any.
    pub(crate) fn free(&mut self, address: usize) -> Option<usize> {
        let nbytes = self.live.remove(&address)?;
        let first: *mut u8 = ptr::with_exposed_provenance_mut(address);
        // SAFETY: asks for bytes that can be written: they are in a box of `kept`.
        unsafe { ptr::write_bytes(first, FREED, nbytes) };
        Some(nbytes)
    }

    pub(crate) fn has(&self, address: usize, nbytes: usize) -> bool {
        is_within(&self.live, address, nbytes)
    }
}

/// Whether these bytes are in one of the allocations.
fn is_within(live: &BTreeMap<usize, usize>, address: usize, nbytes: usize) -> bool {
    let before = live.range(..=address).next_back();
    before.is_some_and(|(&start, &size)| address + nbytes <= start + size)
}

/// The bytes of the host from `address` on, which a caller of the driver promised.
pub(crate) fn bytes_of(address: usize, nbytes: usize) -> Vec<u8> {
    let first: *const u8 = ptr::with_exposed_provenance(address);
    // SAFETY: asks for bytes that can be read: callers of `cuMemcpyHtoDAsync` promise them, and pinned memory stays mapped.
    unsafe { std::slice::from_raw_parts(first, nbytes) }.to_vec()
}

/// Writes to the host, where a caller of the driver promised as many bytes.
pub(crate) fn write_host(address: usize, bytes: &[u8]) {
    let first: *mut u8 = ptr::with_exposed_provenance_mut(address);
    // SAFETY: asks for bytes that can be written: callers of `cuMemcpyDtoHAsync` promise them.
    unsafe { ptr::copy(bytes.as_ptr(), first, bytes.len()) };
}
