//! Saving from a device, on the simulated driver.

use std::fs;
use std::path::Path;
use std::slice;

use fake_cuda::control::Counters;
use ingot_format::{Dtype, Format, Layout, Spec, StopFlag, layout, to_u64, to_usize};

use super::super::Device;
use super::super::bytes::DeviceBytes;
use super::super::fake::{Fake, MISTAKES, SMALL_CHUNK_NBYTES, pattern};
use super::super::memory::DeviceRegion;
use super::super::ring::CHUNK_NBYTES;
use super::super::{DeviceFault, DeviceStream};
use super::{Dice, seeds};
use crate::error::{Error, Failure};
use crate::options::SaveOptions;
use crate::payload::Payload;
use crate::save::{Pieces, Snapshot, save};
use crate::watch::Unwatched;

/// The size of a piece of a file.
const PIECE_NBYTES: usize = 4 * CHUNK_NBYTES;

/// The layout of U8 tensors of these sizes, in this order in the file.
pub(super) fn laid_out(sizes: &[usize]) -> Layout {
    let names: Vec<String> = (0..sizes.len()).map(|number| format!("{number:05}")).collect();
    let shapes: Vec<[u64; 1]> = sizes.iter().map(|&size| [to_u64(size)]).collect();
    let specs = names.iter().zip(&shapes).map(|(name, shape)| Spec {
        name,
        dtype: Dtype::U8,
        shape,
    });
    layout(&specs.collect::<Vec<_>>(), None, Format::Safetensors).unwrap()
}

pub(super) fn options() -> SaveOptions {
    SaveOptions {
        durable: false,
        ..SaveOptions::default()
    }
}

/// Tensors of a training step that is still under way: some have their values, what others will have is queued.
struct Step {
    /// The device of each, and its memory; `None` for the host.
    blocks: Vec<Option<(usize, DeviceRegion)>>,
    expected: Vec<Vec<u8>>,
}

impl Step {
    fn begin(fake: &Fake, devices: &[Device], dice: &mut Dice, sizes: &[usize]) -> Step {
        let (mut blocks, mut expected) = (Vec::new(), Vec::new());
        for (number, &size) in sizes.iter().enumerate() {
            let mut bytes = pattern(to_u64(number), size);
            let home = dice.roll(to_u64(devices.len()) * 3 + 1) / 3;
            let block = devices.get(home).map(|device| {
                let block = fake.block_of(device, &bytes);
                if dice.roll(2) == 0 && size > 0 {
                    let byte = 1 + u8::try_from(number % 200).unwrap();
                    fake.queue_fill(device, &block, byte);
                    bytes.fill(byte);
                }
                (home, block)
            });
            blocks.push(block);
            expected.push(bytes);
        }
        Step { blocks, expected }
    }

    /// The payloads of those that are on a device.
    fn on_devices(&self, devices: &[Device]) -> Vec<Option<DeviceBytes>> {
        let bytes = |(home, block): &(usize, DeviceRegion)| Fake::bytes(&devices[*home], block);
        self.blocks
            .iter()
            .map(|block| block.as_ref().map(bytes))
            .collect()
    }

    fn payloads<'a>(&'a self, bytes: &'a [Option<DeviceBytes>]) -> Vec<Payload<'a>> {
        let payload = |(bytes, host): (&'a Option<DeviceBytes>, &'a Vec<u8>)| match bytes {
            Some(bytes) => Payload::Device(bytes),
            None => Payload::from(&host[..]),
        };
        bytes.iter().zip(&self.expected).map(payload).collect()
    }
}

pub(super) fn begin(devices: &[Device]) -> Result<(), DeviceFault> {
    devices
        .iter()
        .try_for_each(|device| Fake::outgoing(device).begin())
}

fn sizes(dice: &mut Dice) -> Vec<usize> {
    let size = |dice: &mut Dice| match dice.roll(4) {
        0 => dice.roll(60_000),
        1 => SMALL_CHUNK_NBYTES - 50 + dice.roll(100),
        _ => dice.roll(600),
    };
    (0..1 + dice.roll(12)).map(|_| size(dice)).collect()
}

/// Whether the file has the values that the tensors had when the save was called.
fn outcome(seed: u64, mistake: usize) -> bool {
    let mut dice = Dice(seed);
    // Slots for a whole piece of the file, and smaller ones.
    let chunk_nbytes = [PIECE_NBYTES, SMALL_CHUNK_NBYTES][dice.roll(2)];
    let fake = Fake::with_chunks(seed, 2, 2 + dice.roll(4), chunk_nbytes);
    let devices = [fake.device(0), fake.device(1)];
    let mut sizes = sizes(&mut dice);
    // At least one tensor is not small, is on a device, and has many kernels to wait for.
    sizes.insert(0, 5000);
    let mut step = Step::begin(&fake, &devices, &mut dice, &sizes);
    let first = fake.block_of(&devices[0], &[0; 5000]);
    (0..32).for_each(|byte| fake.queue_fill(&devices[0], &first, byte));
    step.blocks[0] = Some((0, first));
    step.expected[0] = vec![31; 5000];
    fake.make_mistake(mistake);
    begin(&devices).unwrap();
    let (layout, bytes) = (laid_out(&sizes), step.on_devices(&devices));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    if dice.roll(3) == 0 {
        let snapshot = Snapshot::take(&layout, &step.payloads(&bytes), &path, &Unwatched).unwrap();
        // The next step.
        for (home, block) in step.blocks.iter().flatten().filter(|(_, block)| block.len() > 0) {
            fake.queue_fill(&devices[*home], block, 0x11);
        }
        snapshot
            .save(&path, &layout.clone().into(), &options(), &Unwatched)
            .unwrap();
    } else {
        save(&path, &layout, &step.payloads(&bytes), &options(), &Unwatched).unwrap();
    }
    let counters = fake.counters();
    assert_eq!(counters.pageable, 0);
    assert_eq!(counters.without_context, 0);
    assert_eq!(counters.deadlocks, 0);
    let on_device = step.blocks.iter().flatten().map(|(_, block)| block.len()).sum();
    assert_eq!(counters.bytes_out, to_u64(on_device));
    fs::read(&path).unwrap() == [layout.head, step.expected.concat()].concat()
}

#[test]
fn a_file_has_the_bytes_of_the_last_step_in_every_order_of_the_streams() {
    for seed in 0..seeds(1_000) {
        assert!(outcome(seed, 0), "seed {seed}");
    }
}

#[test]
fn every_wait_that_a_save_leaves_out_is_found() {
    // Mistake 3 is left out: in a save, the calling thread and not the caller's stream waits for copies.
    for (mistake, what) in MISTAKES.into_iter().filter(|(number, _)| *number != 3) {
        let seeds = 100;
        let found = (0..seeds).filter(|&seed| !outcome(seed, mistake)).count();
        assert!(
            found * 10 >= usize::try_from(seeds).unwrap() * 9,
            "{what}: found in {found} of {seeds}"
        );
    }
}

const MIXED: [usize; 8] = [9000, 1, 0, 257, 70_000, 3000, 12, 5000];

/// Save over a file with the driver set up by `prepare`. Return the outcome, the file, the expected bytes, and the counters
/// of the devices.
fn attempt(prepare: impl FnOnce(&Fake)) -> (Result<(), Error>, Vec<u8>, Vec<u8>, Counters) {
    let fake = Fake::with_chunks(1, 1, 2, PIECE_NBYTES);
    let layout = laid_out(&MIXED);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, b"old").unwrap();
    // The framework's memory is freed before the counters are read, so they count only the save's objects.
    let owners: Vec<DeviceRegion> = {
        let device = fake.device(0);
        let block = |(number, &size): (usize, &usize)| fake.block_of(&device, &pattern(to_u64(number), size));
        MIXED.iter().enumerate().map(block).collect()
    };
    prepare(&fake);
    let device = Device::open(&fake.driver, 0, &fake.ring);
    let saved = device.clone().map_err(Error::from).and_then(|device| {
        let stream = Fake::stream(&device).outgoing()?;
        stream.begin()?;
        let bytes: Vec<DeviceBytes> = owners
            .iter()
            .map(|block| Fake::bytes_on(&stream, block))
            .collect();
        let payloads: Vec<Payload<'_>> = bytes.iter().map(Payload::Device).collect();
        save(&path, &layout, &payloads, &options(), &Unwatched)
    });
    fake.fail(0, 0);
    // Copies that still run keep their slot.
    fake.settle();
    fake.ring.give_back();
    drop(device);
    let expected: Vec<u8> = MIXED
        .iter()
        .enumerate()
        .flat_map(|(number, &size)| pattern(to_u64(number), size))
        .collect();
    let found = fs::read(&path).unwrap();
    assert_eq!(entries(folder.path()), 1, "nothing is left beside the file");
    (saved, found, [layout.head, expected].concat(), fake.counters())
}

fn entries(folder: &Path) -> usize {
    fs::read_dir(folder).unwrap().count()
}

#[test]
fn a_call_that_fails_is_named_and_the_old_file_stays() {
    let mut before = 0;
    let (saved, found, expected, counters) = attempt(|fake| before = fake.counters().calls);
    saved.unwrap();
    assert!(found == expected);
    // Small tensors are fetched together: one wait for each piece, and there is one piece.
    assert_eq!(
        counters.copies,
        to_u64(MIXED.iter().filter(|size| **size > 0).count())
    );
    let calls = counters.calls - before;
    assert!(calls > 15, "{calls}");
    for code in [1, 2, 999, 700, 719] {
        let mut failed = 0;
        for number in 1..=calls {
            let (saved, found, expected, left) = attempt(|fake| fake.fail(number, code));
            let what = format!("call {number} with {code}");
            match saved {
                // Some failures do no harm: pinning is optional, and freeing comes last.
                Ok(()) => assert!(found == expected, "{what}"),
                Err(error) => {
                    let Failure::Device(DeviceFault::Call { code: found_code, .. }) = *error.failure() else {
                        panic!("{what}: {error}");
                    };
                    failed += 1;
                    assert_eq!((found_code, &found[..]), (code, &b"old"[..]), "{what}");
                    // An error of opening the device names no file.
                    assert!(error.path().is_none_or(|path| path.ends_with("file")), "{what}");
                }
            }
            assert_eq!(left.stray, 0, "{what}");
            if !(700..=719).contains(&code) {
                let most = u64::from(left.pinned > 0) + left.streams + left.events + left.contexts;
                assert!(most <= 1, "{what}: {left:?}");
            }
        }
        assert!(failed * 2 > calls, "{failed} of {calls} calls were told of");
    }
}

#[test]
fn each_piece_with_bytes_of_a_device_is_one_wait_and_others_are_none() {
    let fake = Fake::with_chunks(6, 2, 2, PIECE_NBYTES);
    let devices = [fake.device(0), fake.device(1)];
    let block = |size: usize| fake.block_of(&devices[0], &pattern(6, size));
    let owners: Vec<DeviceRegion> = [1000, 0, 1, 600, 77, 0, 5].map(block).into();
    let other = fake.block_of(&devices[1], &pattern(7, 1000));
    begin(&devices).unwrap();
    let on_device = |block: &DeviceRegion| Fake::bytes(&devices[0], block);
    let bytes: Vec<DeviceBytes> = owners.iter().map(on_device).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    // One event is waited for after the copies of a piece.
    let waits = |payloads: &[Payload<'_>]| {
        let sizes: Vec<usize> = payloads
            .iter()
            .map(|payload| to_usize(payload.nbytes()).unwrap())
            .collect();
        let before = fake.counters();
        save(&path, &laid_out(&sizes), payloads, &options(), &Unwatched).unwrap();
        let after = fake.counters();
        after.records - before.records
    };
    let payloads: Vec<Payload<'_>> = bytes.iter().map(Payload::Device).collect();
    assert_eq!(waits(&payloads[..1]), 1);
    assert_eq!(waits(&payloads), 1);
    assert_eq!(waits(&payloads[1..2]), 0);
    let other = Fake::bytes(&devices[1], &other);
    let both = [payloads[0].clone(), Payload::Device(&other), payloads[2].clone()];
    assert_eq!((waits(&both), waits(&both[..2])), (2, 2));

    // Bytes on the host are written from their memory: in pieces 0, 1, 3 and 4.
    let host = vec![7; 2 * PIECE_NBYTES];
    let mixed = [&host[..], &host[..], &host[..10]].map(Payload::from);
    let [first, second, third] = mixed;
    let payloads = [first, payloads[0].clone(), second, payloads[1].clone(), third];
    let layout = laid_out(&[host.len(), 1000, host.len(), 0, 10]);
    let pieces = Pieces::of(&layout, &payloads).unwrap();
    for piece in 0..pieces.count() {
        assert_eq!(pieces.are_on_device(piece..piece + 1), piece == 2, "{piece}");
        let is_fetched = pieces.each_slot(piece, StopFlag::never(), |_, _| Ok(())).unwrap();
        assert_eq!(is_fetched, piece == 2, "{piece}");
    }
    assert!(pieces.are_on_device(0..5) && pieces.are_on_device(2..4));
}

#[test]
fn where_memory_cannot_be_pinned_the_file_is_the_same() {
    for limit in [PIECE_NBYTES, 0] {
        let (saved, found, expected, _) = attempt(|fake| fake.pin_limit(limit));
        saved.unwrap();
        assert!(found == expected, "{limit}");
    }
}

#[test]
fn threads_that_write_a_large_tensor_take_turns_at_two_slots() {
    let fake = Fake::with_chunks(3, 1, 2, PIECE_NBYTES);
    let device = fake.device(0);
    let size = 40 << 20;
    let bytes: Vec<u8> = (0..251).cycle().take(size).collect();
    let block = fake.block_of(&device, &bytes);
    begin(slice::from_ref(&device)).unwrap();
    let (layout, on_device) = (laid_out(&[size, 3]), Fake::bytes(&device, &block));
    let payloads = [Payload::Device(&on_device), Payload::from(&b"end"[..])];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    for options in [SaveOptions::default(), options()] {
        save(&path, &layout, &payloads, &options, &Unwatched).unwrap();
        assert!(fs::read(&path).unwrap() == [&layout.head[..], &bytes, b"end"].concat());
    }
    assert!(fake.counters().pinned_most <= to_u64(2 * (PIECE_NBYTES + 4096)));
}

#[test]
fn parts_of_a_file_are_written_from_a_device() {
    use crate::file::Archive;
    use crate::options::OpenOptions;
    use crate::writer::{Appender, Writer};
    use ingot_format::{Index, LayoutOptions};
    let fake = Fake::new(4, 1, 2);
    let device = fake.device(0);
    let bytes = pattern(4, 30_000);
    let block = fake.block_of(&device, &bytes);
    begin(slice::from_ref(&device)).unwrap();
    let on_device = Fake::bytes(&device, &block);
    let payload = Payload::Device(&on_device);
    let folder = tempfile::tempdir().unwrap();
    let (written, appended) = (folder.path().join("written"), folder.path().join("appended"));
    let spec = Spec {
        name: "twice",
        dtype: Dtype::U8,
        shape: &[2, 30_000],
    };
    let (form, room) = (Format::Safetensors, LayoutOptions::default());
    let writer = Writer::create(&written, &[spec], None, form, &room, &options(), &Unwatched).unwrap();
    for row in [1, 0] {
        let row = [Index::At(row)];
        writer
            .write("twice", &row, Dtype::U8, &[30_000], &payload, &Unwatched)
            .unwrap();
    }
    writer.commit(&Unwatched).unwrap();
    let mut appender = Appender::create(&appended, 4096, None, &options(), &Unwatched).unwrap();
    for name in ["one", "two"] {
        appender
            .append(name, Dtype::U8, &[30_000], &payload, &Unwatched)
            .unwrap();
    }
    appender.commit(&Unwatched).unwrap();
    for path in [written, appended] {
        let archive = Archive::open(&path, &OpenOptions::default()).unwrap();
        let start = usize::try_from(archive.header().data_start()).unwrap();
        assert!(fs::read(&path).unwrap()[start..] == [&bytes[..], &bytes].concat());
    }
}

#[test]
fn a_stream_that_is_captured_is_told_of_before_a_wait_breaks_it() {
    let fake = Fake::new(5, 1, 2);
    let device = fake.device(0);
    let stream: DeviceStream = Fake::stream(&device);
    fake.capture(true);
    assert_eq!(stream.refuse_capture(), Err(DeviceFault::Capturing));
    fake.capture(false);
    stream.refuse_capture().unwrap();
    assert_eq!(fake.counters().captured, 0);
}
