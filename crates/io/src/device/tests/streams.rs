//! Loads onto streams that have nothing to do with each other, on one device and on several.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use super::super::fake::{Fake, Neighbour, SMALL_SLOT_NBYTES};
use super::super::gpu::{MOST_HELD_UP, MOST_LANES, Way};
use super::*;
use crate::watch::Watch;

/// The kernel ends after this time. A load that waits for it fails the test then, instead of hanging.
const LATE: Duration = Duration::from_secs(30);

/// Stops when the flag is set.
struct Flag<'a>(&'a AtomicBool);

impl Watch for Flag<'_> {
    fn interrupted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Load the file onto a stream, and check the bytes.
fn load_beside(fake: &Fake, device: &Device, stream: Neighbour, archive: &Archive, watch: &dyn Watch) {
    let (parts, onto) = (whole(archive), fake.onto_on(device, stream));
    let jobs: Vec<_> = parts.iter().map(|part| part.clone().onto(Some(&onto))).collect();
    let options = ReadOptions {
        threads: NonZeroUsize::new(4),
    };
    let Ok(buffers) = read_to(&jobs, &options, watch) else {
        return;
    };
    for (part, buffer) in parts.iter().zip(buffers) {
        let region = on_device(buffer);
        let found = fake.seen_on(device, stream, region.address(), region.len());
        assert!(found == expected(part));
    }
}

/// Load onto the default stream of the first device, on which an endless kernel runs, and check that `work` ends meanwhile.
fn beside_a_busy_stream(fake: &Fake, devices: &[Device], work: impl FnOnce(&Archive) + Send) {
    let archive = file(1, &[9000; 30]);
    let is_over = AtomicBool::new(false);
    fake.busy(true);
    thread::scope(|scope| {
        let (archive, is_over) = (&archive, &is_over);
        scope.spawn(move || load_beside(fake, &devices[0], Neighbour::DEFAULT, archive, &Flag(is_over)));
        while fake.counters().copies < to_u64(MOST_HELD_UP) {
            thread::yield_now();
        }
        let (tell, told) = channel();
        scope.spawn(move || {
            work(archive);
            tell.send(()).unwrap();
        });
        let is_soon = told.recv_timeout(LATE).is_ok();
        let copies = fake.counters().copies;
        // The kernel ends, and so does the first load.
        is_over.store(!is_soon, Ordering::Relaxed);
        fake.busy(false);
        assert!(
            is_soon,
            "the load waits for the stream of another, after {copies} copies"
        );
    });
    let counters = fake.counters();
    assert_eq!((counters.stray, counters.deadlocks, counters.pageable), (0, 0, 0));
}

#[test]
fn a_load_does_not_wait_for_another_stream_of_its_device() {
    // Slots for the busy load, and one or more for the other.
    for slots in [MOST_HELD_UP + 1, 16] {
        let fake = Fake::new(1, 1, slots);
        let devices = [fake.device(0)];
        let idle = fake.neighbour(&devices[0]);
        beside_a_busy_stream(&fake, &devices, |archive| {
            load_beside(&fake, &devices[0], idle, archive, &Unwatched);
        });
    }
}

#[test]
fn a_load_does_not_wait_for_another_device() {
    for slots in [MOST_HELD_UP + 1, 16] {
        let fake = Fake::new(1, 2, slots);
        let devices = [fake.device(0), fake.device(1)];
        beside_a_busy_stream(&fake, &devices, |archive| {
            load_beside(&fake, &devices[1], Neighbour::DEFAULT, archive, &Unwatched);
        });
    }
}

#[test]
fn a_save_does_not_wait_for_a_load_onto_a_busy_stream() {
    let fake = Fake::new(1, 1, MOST_HELD_UP + 2);
    let devices = [fake.device(0)];
    let idle = fake.neighbour(&devices[0]);
    let bytes = super::super::fake::pattern(3, 30_000);
    let block = fake.block_of(&devices[0], &bytes);
    beside_a_busy_stream(&fake, &devices, |_| {
        let stream = Fake::stream_on(&devices[0], idle, Way::Out);
        stream.begin().unwrap();
        let saved = Fake::bytes_on(&stream, &block);
        let mut found = Vec::new();
        let take = |some: &[u8]| {
            found.extend_from_slice(some);
            Ok::<(), DeviceFault>(())
        };
        saved.each(0..bytes.len(), StopFlag::never(), take).unwrap();
        assert!(found == bytes);
    });
}

#[test]
fn a_load_that_cannot_copy_yet_holds_a_few_slots() {
    let fake = Fake::new(1, 1, 16);
    let devices = [fake.device(0)];
    let idle = fake.neighbour(&devices[0]);
    beside_a_busy_stream(&fake, &devices, |_| {
        assert_eq!(fake.counters().pins, to_u64(MOST_HELD_UP));
        let slot = Fake::stream_on(&devices[0], idle, Way::In).lend(StopFlag::never());
        drop(slot.unwrap());
    });
}

#[test]
fn streams_of_callers_share_a_few_streams_of_copies_and_the_least_recently_used_one_first() {
    let fake = Fake::new(1, 1, 4);
    let device = fake.device(0);
    let callers: Vec<Neighbour> = (0..=MOST_LANES).map(|_| fake.neighbour(&device)).collect();
    let of = |caller: Neighbour| Fake::stream_on(&device, caller, Way::In);
    let created = fake.counters().streams;
    let lanes: Vec<_> = callers[..MOST_LANES].iter().map(|&caller| of(caller)).collect();
    // The first was there when the device was opened.
    assert_eq!(fake.counters().streams, created + to_u64(MOST_LANES) - 1);
    for (rank, lane) in lanes.iter().enumerate() {
        assert!(lanes[..rank].iter().all(|other| !lane.is(other)));
        assert!(of(callers[rank]).is(lane));
    }
    of(callers[0]);
    assert!(of(callers[MOST_LANES]).is(&lanes[1]));
    assert!(of(callers[0]).is(&lanes[0]));
    assert_eq!(fake.counters().streams, created + to_u64(MOST_LANES) - 1);
    let outgoing = of(callers[0]).outgoing().unwrap();
    assert!(lanes.iter().all(|lane| !outgoing.is(lane)));
}

#[test]
fn no_more_slots_are_pinned_than_readers_need_if_copies_are_fast() {
    for threads in [1, 4, 16] {
        let fake = Fake::new(1, 1, 31);
        fake.instant();
        let archive = file(1, &[9000; 200]);
        let device = fake.device(0);
        let parts = whole(&archive);
        let loaded = load_on(threads, &fake, &device, &parts).unwrap();
        assert!(is_right(&fake, &device, &parts, &loaded));
        let pins = fake.counters().pins;
        assert!(pins <= to_u64(threads + 4), "{pins} slots for {threads} readers");
        assert!(fake.counters().pinned_most <= to_u64(31 * SMALL_SLOT_NBYTES));
    }
}
