//! Reads of parts of tensors return the right bytes, and read few other bytes.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ingot_format::{Dtype, Format, Index, Spec, layout, to_u64};
use ingot_io::binding::convert;
use ingot_io::{
    Archive, Backend, Failure, Job, MemorySource, OpenOptions, ReadOptions, Region, Source, Unwatched,
};
use proptest::prelude::*;

/// A source that counts the bytes that are read.
#[derive(Debug)]
struct Counting {
    bytes: MemorySource<Vec<u8>>,
    read: Arc<AtomicU64>,
}

impl Source for Counting {
    fn nbytes(&self) -> u64 {
        self.bytes.nbytes()
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let count = self.bytes.read_at(position, dest)?;
        self.read.fetch_add(to_u64(count), Ordering::Relaxed);
        Ok(count)
    }
}

/// Returns a file with these tensors, whose bytes count up in odd steps.
fn file(tensors: &[(&str, Dtype, &[u64])]) -> Vec<u8> {
    let specs: Vec<Spec<'_>> = tensors
        .iter()
        .map(|&(name, dtype, shape)| Spec { name, dtype, shape })
        .collect();
    let layout = layout(&specs, None, Format::Safetensors).unwrap();
    let mut file = layout.head;
    let data = layout.header.data_nbytes();
    file.extend((0..data).map(|at| (at * 7 + (at >> 8) * 3).to_le_bytes()[0]));
    file
}

fn span(start: i64, stop: i64, step: i64) -> Index {
    Index::Span {
        start: Some(start),
        stop: Some(stop),
        step: Some(step),
    }
}

/// Reads all parts in one call, with `threads` threads.
fn read(archive: &Archive, parts: &[(&str, Vec<Index>, Option<Dtype>)], threads: usize) -> Vec<Region> {
    let parts: Vec<Job<'_>> = parts
        .iter()
        .map(|(name, index, dtype)| Job::new(archive.find(name).unwrap(), index, *dtype).unwrap())
        .collect();
    let options = ReadOptions::new().threads(std::num::NonZeroUsize::new(threads));
    ingot_io::read(&parts, &options, &Unwatched).unwrap()
}

/// Returns part of a matrix, copied element by element.
fn naive(bytes: &[u8], columns: usize, size: usize, rows: &[usize], wanted: &[usize]) -> Vec<u8> {
    let element = |row: &usize, column: &usize| {
        let at = (row * columns + column) * size;
        bytes[at..at + size].to_vec()
    };
    rows.iter()
        .flat_map(|row| wanted.iter().flat_map(move |column| element(row, column)))
        .collect()
}

/// Elements of four bits may begin and end within a byte.
#[test]
fn ranges_of_bytes_read_only_these() {
    let bytes = file(&[("a", Dtype::U8, &[5]), ("x", Dtype::F4, &[1000, 3])]);
    let read = Arc::new(AtomicU64::new(0));
    let source = Counting {
        bytes: MemorySource::new(bytes.clone()),
        read: Arc::clone(&read),
    };
    let archive = Archive::from_source(Box::new(source), &OpenOptions::default()).unwrap();
    let data = &bytes[bytes.len() - 1500..];
    for range in [0..1500, 0..1, 1..2, 700..1501, 1499..1500, 40..40, 2000..3000] {
        read.store(0, Ordering::Relaxed);
        let part = Job::bytes(archive.find("x").unwrap(), range.clone()).unwrap();
        let found = ingot_io::read([&part], &ReadOptions::default(), &Unwatched).unwrap();
        let clipped = |at: i64| usize::try_from(at).unwrap().min(1500);
        let expected = &data[clipped(range.start)..clipped(range.end)];
        assert_eq!(found[0].to_vec(), expected);
        assert_eq!(read.load(Ordering::Relaxed), to_u64(expected.len()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn parts_of_every_source_equal_the_naive_loop(
        (rows, columns) in prop_oneof![(1_usize..40, 1_usize..40), (1_usize..400, 300_usize..3000)],
        ((from, to, step), (left, right, stride)) in ((0_usize..50, 0_usize..400, 1_usize..4), (0_usize..300, 0_usize..3000, 1_usize..5)),
        dtype in prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::U8]),
        convert_to in prop::sample::select(vec![None, Some(Dtype::BF16), Some(Dtype::F64)]),
        threads in 1_usize..4,
    ) {
        let convert_to = convert_to.filter(|_| dtype != Dtype::U8);
        let shape = [to_u64(rows), to_u64(columns)];
        let bytes = file(&[("m", dtype, &shape), ("z", Dtype::F32, &[3])]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, &bytes).unwrap();
        let open = |backend| Archive::open(&path, &OpenOptions::new().backend(backend)).unwrap();
        let memory = Archive::from_source(Box::new(MemorySource::new(bytes.clone())), &OpenOptions::default()).unwrap();
        let places = |from: usize, to: usize, step: usize, size: usize| -> Vec<usize> { (from.min(size)..to.min(size)).step_by(step).collect() };
        let entry = *memory.find("m").unwrap().entry();
        let start = usize::try_from(memory.header().data_start() + entry.begin).unwrap();
        let size = usize::try_from(dtype.bits() / 8).unwrap();
        let picked = naive(&bytes[start..], columns, size, &places(from, to, step, rows), &places(left, right, stride, columns));
        let expected = match convert_to {
            None => picked,
            Some(wanted) => {
                let mut converted = vec![0; picked.len() / size * usize::try_from(wanted.bits() / 8).unwrap()];
                convert(dtype, wanted, &picked, &mut converted);
                converted
            }
        };
        let number = |size: usize| i64::try_from(size).unwrap();
        let index = vec![span(number(from), number(to), number(step)), span(number(left), number(right), number(stride))];
        let parts = [("z", Vec::new(), None), ("m", index, convert_to)];
        for archive in [memory, open(Backend::Mmap), open(Backend::Pread)] {
            let regions = read(&archive, &parts, threads);
            prop_assert_eq!(regions[0].len(), 12);
            prop_assert!(regions[1].to_vec() == expected, "{}", archive.backend());
        }
    }
}

#[test]
fn little_more_is_read_than_what_is_needed() {
    // Rows as in models, of at least 2 KiB.
    for (dtype, columns) in [
        (Dtype::BF16, 4096),
        (Dtype::F32, 1024),
        (Dtype::F32, 11_008),
        (Dtype::F32, 768),
    ] {
        let shape = [512, columns];
        let bytes = file(&[("m", dtype, &shape)]);
        let counter = Arc::new(AtomicU64::new(0));
        let source = Counting {
            bytes: MemorySource::new(bytes),
            read: Arc::clone(&counter),
        };
        let archive = Archive::from_source(Box::new(source), &OpenOptions::default()).unwrap();
        let ratio = |index: Vec<Index>| {
            counter.store(0, Ordering::Relaxed);
            let region = &read(&archive, &[("m", index, None)], 2)[0];
            (counter.load(Ordering::Relaxed), to_u64(region.len()))
        };
        let eighth = i64::try_from(columns / 8).unwrap();
        let (read, needed) = ratio(vec![Index::WHOLE, span(eighth, 2 * eighth, 1)]);
        assert!(2 * read <= 3 * needed, "columns: {read} bytes read for {needed}");
        let (read, needed) = ratio(vec![span(64, 128, 1)]);
        assert_eq!(read, needed, "rows");
        let (read, needed) = ratio(vec![Index::from(vec![3, 100, 5, 5])]);
        assert_eq!(read, needed, "picked rows");
    }
}

#[test]
fn runs_side_by_side_are_read_at_once() {
    let bytes = file(&[("m", Dtype::F32, &[10_000, 16])]);
    let nbytes = to_u64(bytes.len());
    let counter = Arc::new(AtomicU64::new(0));
    let source = Counting {
        bytes: MemorySource::new(bytes),
        read: Arc::clone(&counter),
    };
    let archive = Archive::from_source(Box::new(source), &OpenOptions::default()).unwrap();
    counter.store(0, Ordering::Relaxed);
    // 10,000 reads of four bytes would take a hundred times as long as one read of everything.
    read(&archive, &[("m", vec![Index::WHOLE, Index::At(3)], None)], 1);
    assert!(counter.load(Ordering::Relaxed) > nbytes / 2);
}

#[test]
fn a_conversion_that_is_not_known_is_refused_with_both_dtypes() {
    let bytes = file(&[("m", Dtype::F32, &[4]), ("n", Dtype::I32, &[4])]);
    let archive = Archive::from_source(Box::new(MemorySource::new(bytes)), &OpenOptions::default()).unwrap();
    let integers = Job::new(archive.find("n").unwrap(), &[], Some(Dtype::F16)).unwrap();
    assert_eq!(integers.dtype(), Dtype::I32);
    let refused = Job::new(archive.find("m").unwrap(), &[], Some(Dtype::I32)).unwrap_err();
    assert!(matches!(refused.failure(), Failure::Conversion { .. }));
    assert_eq!(refused.code(), "no-conversion");
    assert_eq!(refused.to_string(), "tensor `m`: F32 is not converted to I32");
}

#[test]
fn a_file_that_shrinks_is_an_error_and_no_crash() {
    // Windows cannot shorten a mapped file.
    let backend = if cfg!(windows) {
        Backend::Pread
    } else {
        Backend::Mmap
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    std::fs::write(&path, file(&[("m", Dtype::F32, &[2048, 4096])])).unwrap();
    let archive = Archive::open(&path, &OpenOptions::new().backend(backend)).unwrap();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let part = Job::new(archive.find("m").unwrap(), &[Index::WHOLE, span(0, 64, 1)], None).unwrap();
    let refused = ingot_io::read(&[part], &ReadOptions::default(), &Unwatched).unwrap_err();
    assert!(matches!(refused.failure(), Failure::Changed { .. }), "{refused}");
}
