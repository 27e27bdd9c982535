//! Reading onto a device, on the simulated driver. Saving is beside it.

mod direct;
mod neighbours;
mod saving;
mod streams;
mod waits;

use std::collections::BTreeSet;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use fake_cuda::control::Counters;
use ingot_format::{Dtype, Format, Index, Spec, StopFlag, layout, to_u64, to_usize};

use super::Device;
use super::fake::{Fake, MISTAKES, SMALL_SLOT_NBYTES, pattern};
use super::{DeviceFault, DeviceRegion};
use crate::error::{Error, Failure};
use crate::file::Archive;
use crate::file::{MemorySource, Source};
use crate::options::{OpenOptions, ReadOptions};
use crate::read::buffer::Buffer;
use crate::read::job::Job;
use crate::read::read_to;
use crate::sync::in_every_order;
use crate::watch::Unwatched;

/// A file of tensors of these sizes, which are named by their numbers.
fn file(seed: u64, sizes: &[usize]) -> Archive {
    let source = MemorySource::new(bytes_of(seed, sizes));
    Archive::from_source(Box::new(source), &OpenOptions::default()).unwrap()
}

fn bytes_of(seed: u64, sizes: &[usize]) -> Vec<u8> {
    let names: Vec<String> = (0..sizes.len()).map(|number| format!("{number:05}")).collect();
    let shapes: Vec<[u64; 1]> = sizes.iter().map(|&size| [to_u64(size)]).collect();
    let specs = names.iter().zip(&shapes).map(|(name, shape)| Spec {
        name,
        dtype: Dtype::U8,
        shape,
    });
    let specs: Vec<Spec<'_>> = specs.collect();
    let made = layout(&specs, None, Format::Safetensors).unwrap();
    let mut bytes = made.head;
    let data: usize = sizes.iter().sum();
    bytes.extend(pattern(seed, data));
    bytes
}

/// A file that ends earlier than it did when it was opened.
#[derive(Debug)]
struct CutShort {
    bytes: Vec<u8>,
    end: Arc<AtomicUsize>,
}

impl Source for CutShort {
    fn nbytes(&self) -> u64 {
        to_u64(self.bytes.len())
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let end = self.end.load(Ordering::Relaxed);
        MemorySource::new(&self.bytes[..end]).read_at(position, dest)
    }
}

/// Reads parts onto a device.
fn load(fake: &Fake, device: &Device, parts: &[Job<'_>]) -> Result<Vec<DeviceRegion>, Error> {
    load_on(1, fake, device, parts)
}

/// The same on this many threads.
fn load_on(
    threads: usize,
    fake: &Fake,
    device: &Device,
    parts: &[Job<'_>],
) -> Result<Vec<DeviceRegion>, Error> {
    let onto = fake.onto(device);
    let options = ReadOptions {
        threads: NonZeroUsize::new(threads),
    };
    let jobs = parts.iter().map(|part| part.clone().onto(Some(&onto)));
    let buffers = read_to(jobs, &options, &Unwatched)?;
    Ok(buffers.into_iter().map(on_device).collect())
}

fn on_device(buffer: Buffer) -> DeviceRegion {
    match buffer {
        Buffer::Device(region) => region,
        Buffer::Host(_) => panic!("its job names the device"),
    }
}

/// The bytes of a part, read to the host.
fn expected(part: &Job<'_>) -> Vec<u8> {
    crate::read(std::iter::once(part), &ReadOptions::default(), &Unwatched).unwrap()[0].to_vec()
}

/// Return whether every part is on the device as it is in the file, for code in the order of the caller's stream.
fn is_right(fake: &Fake, device: &Device, parts: &[Job<'_>], loaded: &[DeviceRegion]) -> bool {
    parts
        .iter()
        .zip(loaded)
        .all(|(part, region)| fake.seen_by_caller(device, region.address(), region.len()) == expected(part))
}

/// Small numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        to_usize((self.0 >> 33) % sides).unwrap()
    }
}

/// Load by a plan from a seed: tensors of all sizes, some of them in parts.
fn outcome(seed: u64, mistake: usize) -> bool {
    let mut dice = Dice(seed);
    let fake = Fake::new(seed, 1, 2 + dice.roll(4));
    let sizes: Vec<usize> = (0..1 + dice.roll(12))
        .map(|_| match dice.roll(4) {
            0 => dice.roll(20_000),
            1 => 3000 + dice.roll(200),
            _ => dice.roll(600),
        })
        .collect();
    let archive = file(seed, &sizes);
    let parts: Vec<Job<'_>> = archive
        .tensors()
        .map(|tensor| match dice.roll(4) {
            0 => {
                let step = Some(i64::try_from(1 + dice.roll(3)).unwrap());
                let index = [Index::Span {
                    start: Some(1),
                    stop: None,
                    step,
                }];
                Job::new(tensor, &index, None).unwrap()
            }
            _ => Job::from(tensor),
        })
        .collect();
    let device = fake.device(0);
    fake.make_mistake(mistake);
    let loaded = load(&fake, &device, &parts).unwrap();
    if mistake == 1 {
        // Memory that is freed too early shows the mistake too.
        fake.ring.give_back();
    }
    let is_right = is_right(&fake, &device, &parts, &loaded);
    let counters = fake.counters();
    assert_eq!(counters.pageable, 0);
    assert_eq!(counters.without_context, 0);
    assert_eq!(counters.deadlocks, 0);
    is_right
}

/// The number of seeds of a test: `INGOT_SEEDS`, or `usual`.
fn seeds(usual: u64) -> u64 {
    std::env::var("INGOT_SEEDS").map_or(usual, |seeds| seeds.parse().unwrap())
}

#[test]
fn every_byte_is_right_in_every_order_of_the_streams() {
    for seed in 0..seeds(2_000) {
        assert!(outcome(seed, 0), "seed {seed}");
    }
}

#[test]
fn every_wait_that_is_left_out_is_found() {
    for (mistake, what) in MISTAKES {
        let seeds = 200;
        let found = (0..seeds).filter(|&seed| !outcome(seed, mistake)).count();
        assert!(
            found * 10 >= usize::try_from(seeds).unwrap() * 9,
            "{what}: found in {found} of {seeds}"
        );
    }
}

/// A file whose tensors need a few slots, and some that share blocks.
fn mixed() -> Archive {
    file(7, &[9000, 1, 0, 255, 256, 257, 3000, 70_000, 12, 5000])
}

fn whole(archive: &Archive) -> Vec<Job<'_>> {
    archive.tensors().map(Job::from).collect()
}

/// Load once with the driver set up by `prepare`. Return the outcome, and the counters after everything was freed.
fn attempt(threads: usize, prepare: impl FnOnce(&Fake)) -> (Result<bool, Error>, Counters) {
    // Two slots: if there are more threads, some wait for others.
    let fake = Fake::new(1, 1, 2);
    let archive = mixed();
    let parts = whole(&archive);
    prepare(&fake);
    let opened = Device::open(&fake.driver, 0, &fake.ring);
    let outcome = opened
        .map_err(|fault| Failure::from(fault).into())
        .and_then(|device| {
            let loaded = load_on(threads, &fake, &device, &parts)?;
            fake.fail(0, 0);
            Ok(is_right(&fake, &device, &parts, &loaded))
        });
    fake.fail(0, 0);
    // Copies that still run keep their slot.
    fake.settle();
    fake.ring.give_back();
    (outcome, fake.counters())
}

#[test]
fn a_call_that_fails_is_named_and_leaves_nothing_behind() {
    fail_each_call(1);
}

#[test]
fn the_other_threads_of_a_load_whose_call_fails_wait_for_nobody() {
    fail_each_call(4);
}

/// Load on this many threads, once for each call and each code with which it may fail.
fn fail_each_call(threads: usize) {
    let (outcome, counters) = attempt(threads, |_| ());
    assert!(outcome.unwrap());
    let calls = counters.calls;
    assert!(calls > 20, "{calls}");
    for code in [1, 2, 999, 700, 719] {
        let mut failed = 0;
        for number in 1..=calls {
            let (outcome, left) = attempt(threads, |fake| fake.fail(number, code));
            let what = format!("call {number} with {code}");
            match outcome {
                // Some failures do no harm: pinning is optional, and freeing comes last.
                Ok(is_right) => assert!(is_right, "{what}"),
                Err(error) => {
                    let Failure::Device(DeviceFault::Call {
                        code: found, name, ..
                    }) = error.failure()
                    else {
                        panic!("{what}: {error}");
                    };
                    failed += 1;
                    assert_eq!(*found, code, "{what}");
                    assert!(name.starts_with("CUDA_ERROR_"), "{what}: {name}");
                }
            }
            assert_eq!(left.stray, 0, "{what}");
            // A lost device takes its memory along: no call frees it.
            if !(700..=719).contains(&code) {
                let kept = (left.pinned, left.streams, left.events, left.contexts);
                // Only the object of the failed call may be left.
                let most = u64::from(kept.0 > 0) + kept.1 + kept.2 + kept.3;
                assert!(most <= 1, "{what}: {kept:?}");
            }
        }
        assert!(failed * 2 > calls, "{failed} of {calls} calls were told of");
    }
}

#[test]
fn what_is_copied_is_what_the_tensors_have_in_as_few_copies_as_fit() {
    let fake = Fake::new(2, 1, 4);
    let archive = mixed();
    let parts = whole(&archive);
    let device = fake.device(0);
    let loaded = load(&fake, &device, &parts).unwrap();
    assert!(is_right(&fake, &device, &parts, &loaded));
    let counters = fake.counters();
    let nbytes: u64 = parts.iter().map(Job::nbytes).sum();
    let owner = |region: &DeviceRegion| Arc::as_ptr(region.owner()).addr();
    let blocks: BTreeSet<usize> = loaded.iter().map(owner).collect();
    // Gaps between small tensors are copied with them.
    assert!((nbytes..nbytes + 256 * to_u64(parts.len())).contains(&counters.bytes_in));
    let chunks = nbytes.div_ceil(to_u64(device.chunk_nbytes()));
    assert!(counters.copies <= chunks + to_u64(blocks.len()), "{counters:?}");
    assert_eq!(
        (counters.pageable, counters.overlapping, counters.stray),
        (0, 0, 0)
    );
    assert!(counters.pinned_most <= to_u64(4 * SMALL_SLOT_NBYTES));
    fake.ring.give_back();
    assert_eq!(fake.counters().pinned, 0);
}

#[test]
fn where_memory_cannot_be_pinned_pageable_memory_does_and_the_next_load_pins_again() {
    for slots in [3, 2, 1, 0] {
        let fake = Fake::new(3, 1, 16);
        let limit = slots * SMALL_SLOT_NBYTES;
        fake.pin_limit(limit);
        let archive = mixed();
        let parts = whole(&archive);
        let device = fake.device(0);
        let load = || {
            let loaded = load_on(4, &fake, &device, &parts).unwrap();
            assert!(is_right(&fake, &device, &parts, &loaded));
        };
        load();
        assert!(fake.counters().pinned_most <= to_u64(limit));
        let why = fake.ring.why_pageable();
        assert!(slots > 0 || why.is_some_and(|why| why.contains("cuMemHostAlloc")));
        // The memory is there again.
        fake.pin_limit(usize::MAX);
        fake.settle();
        fake.ring.give_back();
        load();
        let pageable = fake.counters().pageable;
        load();
        assert_eq!(
            (fake.counters().pageable, fake.ring.why_pageable()),
            (pageable, None)
        );
        assert!(fake.counters().pinned > 0);
    }
}

#[test]
fn memory_of_the_driver_is_used_where_none_can_be_registered() {
    for code in [1, 304, 801] {
        let fake = Fake::new(3, 1, 4);
        fake.register_code(code);
        let archive = mixed();
        let parts = whole(&archive);
        let device = fake.device(0);
        let loaded = load_on(2, &fake, &device, &parts).unwrap();
        assert!(is_right(&fake, &device, &parts, &loaded));
        assert_eq!((fake.counters().pageable, fake.ring.why_pageable()), (0, None));
        fake.settle();
        fake.ring.give_back();
        assert_eq!(fake.counters().pinned, 0);
    }
}

#[test]
fn a_stream_that_is_captured_is_refused_by_name_and_the_capture_goes_on() {
    let fake = Fake::new(4, 1, 4);
    let archive = mixed();
    let device = fake.device(0);
    fake.capture(true);
    let refused = load(&fake, &device, &whole(&archive)).unwrap_err();
    assert_eq!(refused.code(), "device-capturing");
    assert_eq!(fake.counters().captured, 0);
    fake.capture(false);
    assert!(load(&fake, &device, &whole(&archive)).is_ok());
}

#[test]
fn tensors_go_to_several_devices_and_to_the_host_in_one_pass() {
    for seed in 0..200 {
        let fake = Fake::new(seed, 2, 5);
        let archive = mixed();
        let parts = whole(&archive);
        let devices = [fake.device(0), fake.device(1)];
        let ontos = devices.each_ref().map(|device| fake.onto(device));
        let jobs = parts.iter().cloned().enumerate();
        let jobs = jobs.map(|(rank, part)| part.onto(ontos.get(rank % 3)));
        let buffers = read_to(jobs, &ReadOptions::default(), &Unwatched).unwrap();
        for (rank, (part, buffer)) in parts.iter().zip(buffers).enumerate() {
            let bytes = match buffer {
                Buffer::Host(region) => {
                    assert_eq!(rank % 3, 2);
                    region.to_vec()
                }
                Buffer::Device(region) => {
                    assert_eq!(usize::try_from(region.ordinal()).unwrap(), rank % 3);
                    fake.seen_by_caller(&devices[rank % 3], region.address(), region.len())
                }
            };
            assert_eq!(bytes, expected(part), "seed {seed}, tensor {rank}");
        }
    }
}

#[test]
fn a_file_that_is_cut_short_while_copies_run_is_told_of_and_the_memory_is_given_back() {
    let fake = Fake::new(5, 1, 3);
    let bytes = bytes_of(5, &[9000, 9000, 9000, 9000, 9000]);
    let nbytes = bytes.len();
    let end = Arc::new(AtomicUsize::new(nbytes));
    let source = CutShort {
        bytes,
        end: Arc::clone(&end),
    };
    let archive = Archive::from_source(Box::new(source), &OpenOptions::default()).unwrap();
    end.store(nbytes - 10_000, Ordering::Relaxed);
    let device = fake.device(0);
    let refused = load(&fake, &device, &whole(&archive)).unwrap_err();
    assert!(matches!(refused.failure(), Failure::Read { .. }), "{refused}");
    // Run the remaining copies: `stray` counts those whose memory was freed.
    fake.settle();
    assert!(fake.counters().copies > 0);
    assert_eq!(fake.counters().stray, 0);
}

#[test]
fn memory_that_is_given_back_while_a_load_wants_it_keeps_nobody_waiting() {
    let fake = Fake::new(6, 1, 2);
    let archive = mixed();
    let parts = whole(&archive);
    let device = fake.device(0);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                fake.ring.give_back();
            }
        });
        for _ in 0..200 {
            let loaded = load(&fake, &device, &parts).unwrap();
            assert!(is_right(&fake, &device, &parts, &loaded));
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn in_every_order_of_threads_they_share_the_slots_of_a_ring() {
    in_every_order(|| {
        let fake = Fake::new(1, 1, 2);
        let device = fake.device(0);
        let stream = Fake::stream(&device);
        let filled = crate::sync::Mutex::new(0);
        crate::sync::thread::scope(|scope| {
            for number in 0..3 {
                let (stream, filled) = (&stream, &filled);
                scope.spawn(move || {
                    let mut slot = stream.lend(StopFlag::never()).unwrap();
                    slot.bytes().fill(number);
                    *crate::sync::locked(filled) += 1;
                    assert!(slot.bytes().iter().all(|&byte| byte == number));
                });
            }
        });
        assert_eq!(*crate::sync::locked(&filled), 3);
        drop(device);
        assert!(fake.counters().pinned_most <= 2 * to_u64(SMALL_SLOT_NBYTES));
    });
}

#[test]
fn in_every_order_of_threads_a_slot_that_cannot_be_made_keeps_nobody_waiting() {
    in_every_order(|| {
        let fake = Fake::new(1, 1, 2);
        let device = fake.device(0);
        let stream = Fake::stream(&device);
        // Not for want of memory.
        fake.fail(1, 1);
        crate::sync::thread::scope(|scope| {
            let lend = || stream.lend(StopFlag::never()).is_ok();
            let lent: Vec<_> = (0..3).map(|_| scope.spawn(lend)).collect();
            for lent in lent {
                lent.join().unwrap();
            }
        });
    });
}
