//! Waits for a device end when the caller stops or a reader panics, and no copy uses memory that is given up then.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::slice;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ingot_format::{Dtype, Format, Index, LayoutOptions, Spec};

use super::super::Device;
use super::super::Lent;
use super::super::fake::{Fake, pattern};
use super::saving::{begin, laid_out, options};
use super::*;
use crate::payload::Payload;
use crate::save::{Snapshot, save};
use crate::watch::Watch;
use crate::writer::Writer;

/// Longer than an interrupted call takes on a busy machine.
const SOON: Duration = Duration::from_secs(10);
/// The kernel ends after this time. A call that waits for it fails the test then, instead of hanging.
const LATE: Duration = Duration::from_secs(30);

/// Stops after some milliseconds.
struct Impatient(Instant);

impl Watch for Impatient {
    fn interrupted(&self) -> bool {
        self.0.elapsed() > Duration::from_millis(100)
    }
}

/// Calls `work` while an endless kernel runs on the caller's stream, and checks that it ends soon after the watch stops
/// it. The kernel then ends, and the slots in `held` are returned.
fn stops_beside_a_kernel(
    fake: &Fake,
    what: &str,
    held: Vec<Lent>,
    work: impl FnOnce(&dyn Watch) -> Result<(), Error> + Send,
) {
    fake.busy(true);
    let (tell, told) = channel();
    let begun = Instant::now();
    let outcome = thread::scope(|scope| {
        let working = scope.spawn(|| {
            let outcome = work(&Impatient(begun));
            tell.send(()).unwrap();
            outcome
        });
        let is_soon = told.recv_timeout(LATE).is_ok();
        fake.busy(false);
        drop(held);
        assert!(is_soon && begun.elapsed() < SOON, "{what}: waits for the kernel");
        working.join().unwrap()
    });
    assert!(outcome.as_ref().is_err_and(Error::is_interrupted), "{what}");
    // Queued copies still run, and their memory must exist.
    fake.settle();
    assert_eq!(
        (fake.counters().stray, fake.counters().deadlocks),
        (0, 0),
        "{what}"
    );
}

#[test]
fn a_load_is_interrupted_while_the_stream_of_its_caller_is_busy() {
    for threads in [1, 4] {
        // Bytes for more than all slots, for part of the slots, and for more than one slot.
        for sizes in [&[9000; 8][..], &[3000; 3], &[70_000]] {
            let fake = Fake::new(1, 1, 2);
            let archive = file(1, sizes);
            let parts = whole(&archive);
            let device = fake.device(0);
            let onto = fake.onto(&device);
            let jobs: Vec<_> = parts.iter().map(|part| part.clone().onto(Some(&onto))).collect();
            let options = ReadOptions {
                threads: NonZeroUsize::new(threads),
            };
            // Repeated loads fill the slots with copies that wait for the kernel.
            let read = |watch: &dyn Watch| -> Result<(), Error> {
                loop {
                    read_to(&jobs, &options, watch)?;
                }
            };
            stops_beside_a_kernel(&fake, &format!("{threads} threads, {sizes:?}"), Vec::new(), read);
            assert!(load(&fake, &device, &parts).is_ok());
        }
    }
}

#[test]
fn a_load_that_waits_for_a_slot_of_others_is_interrupted() {
    for threads in [1, 4] {
        let fake = Fake::new(1, 1, 2);
        let archive = mixed();
        let parts = whole(&archive);
        let device = fake.device(0);
        let (onto, never) = (fake.onto(&device), crate::watch::Unwatched);
        let jobs: Vec<_> = parts.iter().map(|part| part.clone().onto(Some(&onto))).collect();
        let options = ReadOptions {
            threads: NonZeroUsize::new(threads),
        };
        let lent = [(); 2].map(|()| Fake::stream(&device).lend(StopFlag::never()).unwrap());
        let read = |watch: &dyn Watch| read_to(&jobs, &options, watch).map(drop);
        stops_beside_a_kernel(&fake, "slots that are filled", lent.into(), read);
        read_to(&jobs, &options, &never).unwrap();
    }
}

/// Memory of the device with these bytes, whose copies wait for a kernel once it is busy.
fn on_device(fake: &Fake, device: &Device, bytes: &[u8]) -> crate::device::DeviceRegion {
    let block = fake.block_of(device, bytes);
    fake.settle();
    block
}

#[test]
fn saves_snapshots_and_writers_are_interrupted_while_the_stream_of_their_caller_is_busy() {
    // For one thread, and for several.
    for size in [30_000, 40 << 20] {
        let fake = Fake::with_chunks(2, 1, 2, 4 << 20);
        let device = fake.device(0);
        let bytes = pattern(2, size);
        let block = on_device(&fake, &device, &bytes);
        let on_device = Fake::bytes(&device, &block);
        let payload = Payload::Device(&on_device);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let layout = laid_out(&[size]);
        stops_beside_a_kernel(&fake, "a save", Vec::new(), |watch| {
            begin(slice::from_ref(&device))?;
            save(&path, &layout, slice::from_ref(&payload), &options(), watch)
        });
        stops_beside_a_kernel(&fake, "a snapshot", Vec::new(), |watch| {
            begin(slice::from_ref(&device))?;
            Snapshot::take(&layout, slice::from_ref(&payload), &path, watch).map(drop)
        });
        let spec = Spec {
            name: "a",
            dtype: Dtype::U8,
            shape: &[to_u64(size)],
        };
        let room = LayoutOptions::default();
        let writer = Writer::create(
            &path,
            &[spec],
            None,
            Format::Safetensors,
            &room,
            &options(),
            &Unwatched,
        );
        let writer = writer.unwrap();
        stops_beside_a_kernel(&fake, "a writer", Vec::new(), |watch| {
            begin(slice::from_ref(&device))?;
            let all: [Index; 0] = [];
            writer.write("a", &all, Dtype::U8, &[to_u64(size)], &payload, watch)
        });
        drop(writer);
        assert!(!Path::exists(&path));
        begin(slice::from_ref(&device)).unwrap();
        save(&path, &layout, &[payload], &options(), &Unwatched).unwrap();
        assert!(fs_ends_with(&path, &bytes));
    }
}

fn fs_ends_with(path: &Path, bytes: &[u8]) -> bool {
    std::fs::read(path).unwrap().ends_with(bytes)
}

/// A source whose read panics from some byte on.
#[derive(Debug)]
struct Panics {
    bytes: Vec<u8>,
    from: AtomicUsize,
}

impl Source for Arc<Panics> {
    fn nbytes(&self) -> u64 {
        to_u64(self.bytes.len())
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let end = position + to_u64(dest.len());
        assert!(end <= to_u64(self.from.load(Ordering::Relaxed)), "planted");
        MemorySource::new(&self.bytes[..]).read_at(position, dest)
    }
}

#[test]
fn a_reader_that_panics_frees_nothing_that_copies_still_use() {
    for seed in 0..50 {
        for threads in [1, 3] {
            let fake = Fake::new(seed, 1, 3);
            let bytes = bytes_of(seed, &[9000; 6]);
            let nbytes = bytes.len();
            let source = Arc::new(Panics {
                bytes,
                from: AtomicUsize::new(usize::MAX),
            });
            let archive =
                Archive::from_source(Box::new(Arc::clone(&source)), &OpenOptions::default()).unwrap();
            source.from.store(nbytes - 10_000, Ordering::Relaxed);
            let device = fake.device(0);
            let parts = whole(&archive);
            let read = || load_on(threads, &fake, &device, &parts);
            assert!(catch_unwind(AssertUnwindSafe(read)).is_err());
            assert!(fake.counters().copies > 0);
            // In some order, with what the caller queues next.
            fake.settle();
            assert_eq!(fake.counters().stray, 0, "seed {seed}");
            source.from.store(usize::MAX, Ordering::Relaxed);
            let loaded = load_on(threads, &fake, &device, &parts).unwrap();
            assert!(is_right(&fake, &device, &parts, &loaded));
        }
    }
}
