//! The places of bytes in slots and on the device.

use std::sync::Mutex;

use super::super::fake::Fake;
use super::super::ring::CHUNK_NBYTES;
use super::*;

/// A source that records the position, the address and the length of each read.
#[derive(Debug)]
struct Recorded {
    bytes: Vec<u8>,
    reads: Mutex<Vec<(u64, usize, usize)>>,
}

impl Source for Arc<Recorded> {
    fn nbytes(&self) -> u64 {
        to_u64(self.bytes.len())
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let read = (position, dest.as_ptr().addr(), dest.len());
        self.reads.lock().unwrap().push(read);
        MemorySource::new(&self.bytes[..]).read_at(position, dest)
    }
}

#[test]
fn whole_pages_of_a_file_become_whole_pages_of_a_slot() {
    let fake = Fake::with_chunks(1, 1, 8, CHUNK_NBYTES);
    // Large tensors, some that share a slot, and small ones between them.
    let sizes = [3 << 20, 100_000, 70_001, 12, 900, (1 << 20) + 1, 200_000, 5 << 20];
    let source = Arc::new(Recorded {
        bytes: bytes_of(1, &sizes),
        reads: Mutex::default(),
    });
    let archive = Archive::from_source(Box::new(Arc::clone(&source)), &OpenOptions::default()).unwrap();
    source.reads.lock().unwrap().clear();
    let device = fake.device(0);
    let parts = whole(&archive);
    let loaded = load_on(2, &fake, &device, &parts).unwrap();
    let reads = std::mem::take(&mut *source.reads.lock().unwrap());
    assert!(is_right(&fake, &device, &parts, &loaded));
    let large: Vec<_> = reads.iter().filter(|(.., nbytes)| *nbytes >= 4096).collect();
    assert!(large.len() >= 10);
    for (position, address, nbytes) in large {
        assert_eq!(position % 4096, to_u64(address % 4096), "{nbytes} bytes");
    }
    // Nearly all bytes are in reads of whole chunks at pages, which go past the page cache.
    let whole = reads
        .iter()
        .filter(|(position, _, nbytes)| *nbytes == CHUNK_NBYTES && position.is_multiple_of(4096));
    assert!(whole.count() >= 2 + 4);
}

#[test]
fn gaps_between_tensors_of_a_block_are_zero() {
    for seed in 0..50 {
        let fake = Fake::new(seed, 1, 3);
        let device = fake.device(0);
        let full = file(seed, &[4000; 20]);
        drop(load(&fake, &device, &whole(&full)).unwrap());
        // More than a slot holds, so that a gap may be between two copies.
        let sizes: Vec<usize> = (0..90).map(|number| 1 + number * 37 % 400).collect();
        let archive = file(seed, &sizes);
        let parts = whole(&archive);
        let loaded = load_on(2, &fake, &device, &parts).unwrap();
        assert!(is_right(&fake, &device, &parts, &loaded));
        let mut gaps = 0;
        for pair in loaded.windows(2) {
            let end = pair[0].address() + to_u64(pair[0].len());
            if !Arc::ptr_eq(pair[0].owner(), pair[1].owner()) || pair[1].address() == end {
                continue;
            }
            let gap = to_usize(pair[1].address() - end).unwrap();
            let found = fake.seen_by_caller(&device, end, gap);
            assert!(found.iter().all(|&byte| byte == 0), "seed {seed}");
            gaps += 1;
        }
        assert!(gaps > 50);
    }
}

#[test]
fn tensors_of_the_caller_are_filled_directly() {
    for seed in 0..100 {
        let fake = Fake::new(seed, 1, 4);
        let device = fake.device(0);
        let sizes = [9000, 1, 0, 257, 70_000, 3000];
        let archive = file(seed, &sizes);
        let parts = whole(&archive);
        let onto = fake.onto(&device);
        let blocks = |sizes: &[usize]| -> Vec<DeviceRegion> {
            sizes
                .iter()
                .map(|&size| fake.block_of(&device, &vec![7; size]))
                .collect()
        };
        let mut regions = blocks(&sizes);
        let options = ReadOptions {
            threads: NonZeroUsize::new(2),
        };
        let filled = crate::read::fill_on(&onto, &parts, &mut regions, &options, &Unwatched);
        filled.unwrap();
        assert!(is_right(&fake, &device, &parts, &regions));
        assert_eq!(fake.counters().bytes_in, to_u64(sizes.iter().sum::<usize>()));
        let mut other = blocks(&[9000, 1, 0, 256, 70_000, 3000]);
        let refused = crate::read::fill_on(&onto, &parts, &mut other, &options, &Unwatched);
        assert_eq!(refused.unwrap_err().code(), "destination-shape");
    }
}
