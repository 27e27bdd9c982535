//! Device memory, and pinned host memory.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::pages;

/// The contents of memory that a pending copy will write to.
pub(crate) const POISON: u8 = 0xDB;
/// The contents of freed memory.
pub(crate) const FREED: u8 = 0xEE;

/// The alignment of allocations, as in the real driver.
const ALIGNMENT: usize = 512;
/// The alignment of pinned memory: a page.
const PAGE: usize = 4096;

/// The memory of one device. Its addresses are reserved, and any access to them faults. The contents are stored
/// elsewhere, where only the simulator finds them.
#[derive(Debug)]
pub(crate) struct Arena {
    start: usize,
    nbytes: usize,
    /// The contents of all addresses that were ever allocated, from the lowest on.
    bytes: Vec<u8>,
    /// Current allocations: address and size.
    live: BTreeMap<usize, usize>,
    /// Freed allocations by size, which are reused first.
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

    /// Returns freed memory of this size, as real allocators do, else new memory; `None` if the device is full.
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

    /// Returns addresses without contents: of freed memory of this size, or new ones.
    pub(crate) fn reserve(&mut self, nbytes: usize) -> Option<usize> {
        let nbytes = nbytes.max(1).next_multiple_of(ALIGNMENT);
        let freed = self.freed.iter().position(|&(_, size)| size == nbytes);
        let address = match freed {
            Some(rank) => self.freed.swap_remove(rank).0,
            None => self
                .live
                .last_key_value()
                .map_or(self.start, |(start, size)| start + size),
        };
        let is_there = self.start != 0 && address + nbytes <= self.start + self.nbytes;
        is_there.then(|| {
            self.live.insert(address, nbytes);
            address
        })
    }

    /// Frees memory. Returns whether it was allocated. It is overwritten at once, as its next owner may do.
    pub(crate) fn free(&mut self, address: usize) -> bool {
        let Some(nbytes) = self.live.remove(&address) else {
            return false;
        };
        // Reserved addresses have no contents.
        if address + nbytes <= self.start + self.bytes.len() {
            self.fill(address, nbytes, FREED);
        }
        self.freed.push((address, nbytes));
        true
    }

    /// Frees all allocations.
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

    /// Returns these bytes of the device, which must be allocated.
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

/// Reserved addresses that no device uses, and their number. They are kept for reuse, since reserving them takes long
/// on some systems.
fn reserved() -> MutexGuard<'static, Vec<(usize, usize)>> {
    static RESERVED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());
    RESERVED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pinned host memory: of the driver, or of the caller. The driver's is kept until the reset.
#[derive(Debug, Default)]
pub(crate) struct Pinned {
    live: BTreeMap<usize, usize>,
    /// The device in whose context each block was allocated.
    owners: BTreeMap<usize, usize>,
    kept: Vec<Box<[u8]>>,
    /// Blocks of the caller.
    registered: BTreeSet<usize>,
}

impl Pinned {
    /// Adds memory of the caller.
    pub(crate) fn register(&mut self, address: usize, nbytes: usize, ordinal: usize) {
        self.live.insert(address, nbytes);
        self.owners.insert(address, ordinal);
        self.registered.insert(address);
    }

    /// Returns whether some of these bytes are pinned already.
    pub(crate) fn meets(&self, address: usize, nbytes: usize) -> bool {
        let before = self.live.range(..address + nbytes).next_back();
        before.is_some_and(|(&start, &size)| address < start + size)
    }

    pub(crate) fn allocate(&mut self, nbytes: usize, ordinal: usize) -> usize {
        // The alignment that direct reads need, so that they work as with real pinned memory.
        let memory = vec![0; nbytes + PAGE].into_boxed_slice();
        let address = memory.as_ptr().expose_provenance().next_multiple_of(PAGE);
        self.kept.push(memory);
        self.live.insert(address, nbytes);
        self.owners.insert(address, ordinal);
        address
    }

    /// Returns the device in whose context the block was allocated.
    pub(crate) fn owner(&self, address: usize) -> Option<usize> {
        self.live
            .get(&address)
            .and_then(|_| self.owners.get(&address))
            .copied()
    }

    /// Returns the blocks that were allocated in the context of a device.
    pub(crate) fn of(&self, ordinal: usize) -> Vec<usize> {
        let all = self.live.keys().copied();
        all.filter(|address| self.owners.get(address) == Some(&ordinal))
            .collect()
    }

    /// Frees a block. Returns its size, or `None` if there is no such block.
    pub(crate) fn free(&mut self, address: usize) -> Option<usize> {
        let nbytes = self.live.remove(&address)?;
        if !self.registered.remove(&address) {
            let first: *mut u8 = ptr::with_exposed_provenance_mut(address);
            // SAFETY: requires writable bytes: they are in a box of `kept`.
            unsafe { ptr::write_bytes(first, FREED, nbytes) };
        }
        Some(nbytes)
    }

    pub(crate) fn has(&self, address: usize, nbytes: usize) -> bool {
        is_within(&self.live, address, nbytes)
    }
}

/// Returns whether these bytes are inside one allocation.
fn is_within(live: &BTreeMap<usize, usize>, address: usize, nbytes: usize) -> bool {
    let before = live.range(..=address).next_back();
    before.is_some_and(|(&start, &size)| address + nbytes <= start + size)
}

/// Returns the host bytes from `address` on, which the caller of the driver guarantees to be readable.
pub(crate) fn bytes_of(address: usize, nbytes: usize) -> Vec<u8> {
    let first: *const u8 = ptr::with_exposed_provenance(address);
    // SAFETY: requires readable bytes: callers of `cuMemcpyHtoDAsync` guarantee them, and pinned memory stays mapped.
    unsafe { std::slice::from_raw_parts(first, nbytes) }.to_vec()
}

/// Writes to host memory, which the caller of the driver guarantees to be writable.
pub(crate) fn write_host(address: usize, bytes: &[u8]) {
    let first: *mut u8 = ptr::with_exposed_provenance_mut(address);
    // SAFETY: requires writable bytes: callers of `cuMemcpyDtoHAsync` guarantee them.
    unsafe { ptr::copy(bytes.as_ptr(), first, bytes.len()) };
}
