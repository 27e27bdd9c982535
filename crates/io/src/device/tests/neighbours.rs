//! Loads and saves beside other work on the same machine: captures of graphs, devices that are reset, devices that are lost.

use std::slice;
use std::thread;

use super::super::fake::{Fake, Neighbour, SMALL_SLOT_NBYTES, pattern};
use super::{file, is_right, load, load_on, mixed, whole};
use crate::error::Failure;
use crate::payload::Payload;
use crate::save::save;
use crate::watch::Unwatched;

/// Codes of a lost device: each later call for it returns the same one.
const LOST: [i32; 3] = [214, 700, 719];

/// Begin a capture on a stream of another library, do `work` on another thread, and check that the capture still ends well.
fn beside_a_capture(fake: &Fake, stream: Neighbour, what: &str, work: impl FnOnce() + Send) {
    assert_eq!(fake.capture_on(stream, true), 0);
    thread::scope(|scope| scope.spawn(work).join().unwrap());
    assert_eq!(fake.counters().captured, 0, "{what}: calls that break a capture");
    assert_eq!(fake.capture_on(stream, false), 0, "{what}");
}

#[test]
fn a_capture_on_another_thread_survives_loads_saves_and_an_idle_ring() {
    let fake = Fake::new(1, 2, 3);
    let device = fake.device(0);
    let stream = fake.neighbour(&device);
    let archive = mixed();
    let parts = whole(&archive);
    for threads in [1, 4] {
        beside_a_capture(&fake, stream, "a load", || {
            load_on(threads, &fake, &device, &parts).unwrap();
        });
    }
    let bytes = pattern(3, 30_000);
    let block = fake.block_of(&device, &bytes);
    let folder = tempfile::tempdir().unwrap();
    beside_a_capture(&fake, stream, "a save", || {
        super::saving::begin(slice::from_ref(&device)).unwrap();
        let on_device = Fake::bytes(&device, &block);
        let payloads = [Payload::Device(&on_device)];
        let layout = super::saving::laid_out(&[bytes.len()]);
        let path = folder.path().join("file");
        save(&path, &layout, &payloads, &super::saving::options(), &Unwatched).unwrap();
    });
    beside_a_capture(&fake, stream, "a device that is opened, and closed again", || {
        drop(fake.device(1));
    });
    load(&fake, &device, &parts).unwrap();
    assert!(fake.counters().pinned > 0);
    beside_a_capture(&fake, stream, "an idle ring", || fake.ring.give_back());
    Fake::finish(&device);
    beside_a_capture(&fake, stream, "an idle ring whose copies are done", || {
        fake.ring.give_back();
    });
    assert_eq!(fake.counters().pinned, 0);
}

#[test]
fn a_thread_keeps_its_capture_mode() {
    let fake = Fake::new(1, 1, 3);
    let archive = mixed();
    let parts = whole(&archive);
    for mode in [0, 1, 2] {
        let before = fake.exchange_mode(mode);
        let device = fake.device(0);
        load(&fake, &device, &parts).unwrap();
        fake.fail(9, 999);
        let _ = load(&fake, &device, &parts);
        fake.fail(0, 0);
        drop(device);
        fake.ring.give_back();
        assert_eq!(fake.exchange_mode(before), mode);
    }
}

#[test]
fn whatever_code_pinning_gives_the_load_goes_on_from_pageable_memory() {
    let archive = mixed();
    let parts = whole(&archive);
    for code in [1, 2, 3, 4, 201, 304, 709, 712, 801, 999] {
        // With these limits, no slot can be pinned, or only the first.
        for limit in [0, SMALL_SLOT_NBYTES] {
            let fake = Fake::new(3, 1, 4);
            fake.pin_limit(limit);
            fake.pin_code(code);
            let device = fake.device(0);
            let loaded = load_on(2, &fake, &device, &parts).unwrap();
            assert!(is_right(&fake, &device, &parts, &loaded), "{code}");
            let why = fake.ring.why_pageable().unwrap();
            assert!(why.contains(&format!("({code})")), "{why}");
        }
    }
}

#[test]
fn a_device_that_is_lost_while_it_pins_fails_the_load() {
    let archive = mixed();
    let parts = whole(&archive);
    for code in LOST {
        let fake = Fake::new(3, 1, 4);
        fake.pin_limit(0);
        fake.pin_code(code);
        let device = fake.device(0);
        let refused = load(&fake, &device, &parts).unwrap_err();
        assert!(matches!(refused.failure(), Failure::Device(_)), "{refused}");
    }
}

#[test]
fn a_device_that_is_lost_fails_its_own_loads_only() {
    let archive = file(3, &[9000; 8]);
    let parts = whole(&archive);
    for code in LOST {
        for threads in [1, 3] {
            let fake = Fake::new(5, 2, 3);
            let (lost, other) = (fake.device(0), fake.device(1));
            // Dropping this load returns slots whose copies may still run.
            let kept = load(&fake, &lost, &parts).unwrap();
            fake.lose(0, code);
            for _ in 0..3 {
                let loaded = load_on(threads, &fake, &other, &parts).unwrap();
                assert!(is_right(&fake, &other, &parts, &loaded), "{code}");
            }
            let refused = load(&fake, &lost, &parts).unwrap_err();
            assert!(refused.to_string().contains(&format!("({code})")), "{refused}");
            drop(kept);
        }
    }
}

#[test]
fn a_device_that_was_reset_takes_no_memory_of_others_along() {
    let archive = file(3, &[9000; 8]);
    let parts = whole(&archive);
    for seed in 0..20 {
        let fake = Fake::new(seed, 2, 4);
        let (reset, other) = (fake.device(0), fake.device(1));
        drop(load(&fake, &reset, &parts).unwrap());
        fake.reset_device(0);
        // The reset freed the slots that this device pinned, so this load pins new ones for the other device.
        let loaded = load(&fake, &other, &parts).unwrap();
        assert!(is_right(&fake, &other, &parts, &loaded));
        assert!(load(&fake, &reset, &parts).is_err());
        let again = fake.device(0);
        let loaded = load(&fake, &again, &parts).unwrap();
        assert!(is_right(&fake, &again, &parts, &loaded));
        assert_eq!(
            (fake.counters().stray, fake.counters().pageable),
            (0, 0),
            "{seed}"
        );
    }
}
