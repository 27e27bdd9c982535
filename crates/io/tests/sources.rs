//! One suite that every source must pass.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ingot_format::{Dtype, Format, Header, Index, Spec, layout, to_u64};
use ingot_io::binding::{LocalFile, Origin, Prefetch, ReadAt, Request, TensorId, warm_tensors};
use ingot_io::{
    Archive, Backend, Error, Failure, Job, MemorySource, OpenOptions, ReadOptions, Source, Tensor, Unwatched,
    Watch,
};

/// A source that returns few bytes at a time and is sometimes interrupted, as a network file system may be.
#[derive(Debug)]
struct Stuttering {
    bytes: Vec<u8>,
    calls: AtomicUsize,
}

/// Opens a file in memory.
fn in_memory(bytes: Vec<u8>) -> Archive {
    Archive::from_source(MemorySource::new(bytes), &OpenOptions::default()).unwrap()
}

/// Opens a file that this reader reads.
fn from_reader(reader: Box<dyn ReadAt>) -> Archive {
    Archive::of(Origin::Other(reader), None, &OpenOptions::default(), None).unwrap()
}

impl Source for Stuttering {
    fn nbytes(&self) -> u64 {
        to_u64(self.bytes.len())
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if call % 3 == 1 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let rest = &self.bytes[usize::try_from(position).unwrap().min(self.bytes.len())..];
        let count = dest.len().min(rest.len()).min(1 + call % 1000);
        dest[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}

/// Sizes of tensors that are read in different ways: empty, small and adjacent, and large enough for a block, for a chunk and
/// for a thread of their own.
const SIZES: &[u64] = &[
    0,
    1,
    3,
    64,
    100,
    4096,
    70_000,
    (1 << 20) - 1,
    1 << 20,
    (9 << 20) + 5,
    0,
    7,
];

/// Returns a file with a tensor of each size. The bytes of each count up from a different start.
fn file() -> (Vec<u8>, Vec<(String, Vec<u8>)>) {
    let tensors: Vec<(String, Vec<u8>)> = SIZES
        .iter()
        .enumerate()
        .map(|(number, &size)| {
            (
                format!("t{number:02}"),
                (0..size)
                    .map(|at| (at * 31 + to_u64(number)).to_le_bytes()[0])
                    .collect(),
            )
        })
        .collect();
    let shapes: Vec<[u64; 1]> = SIZES.iter().map(|&size| [size]).collect();
    let specs: Vec<Spec<'_>> = tensors
        .iter()
        .zip(&shapes)
        .map(|((name, _), shape)| Spec {
            name,
            dtype: Dtype::U8,
            shape,
        })
        .collect();
    let new = layout(&specs, None, Format::Safetensors).unwrap();
    let mut bytes = new.head;
    for number in new.order {
        bytes.extend_from_slice(&tensors[number].1);
    }
    (bytes, tensors)
}

/// Returns reads of the tensors with these numbers, in the order of the data.
fn parts<'a>(archive: &'a Archive, numbers: &[usize]) -> Vec<Job<'a>> {
    some(archive, numbers).into_iter().map(Job::from).collect()
}

fn some<'a>(archive: &'a Archive, numbers: &[usize]) -> Vec<Tensor<'a>> {
    numbers
        .iter()
        .map(|&number| archive.tensor(number).unwrap())
        .collect()
}

/// Checks the reads that every source must support.
fn suite(archive: &Archive, tensors: &[(String, Vec<u8>)]) {
    for (name, bytes) in tensors {
        assert_eq!(&archive.read(name).unwrap().to_vec(), bytes, "{name} alone");
    }
    let all: Vec<usize> = (0..tensors.len()).collect();
    let backwards: Vec<usize> = all.iter().rev().copied().collect();
    let some_twice = vec![3, 9, 3, 0, 9];
    for numbers in [all, backwards, some_twice, Vec::new()] {
        let regions = ingot_io::read(parts(archive, &numbers), &ReadOptions::default(), &Unwatched).unwrap();
        assert_eq!(regions.len(), numbers.len());
        for (number, region) in numbers.iter().zip(regions) {
            let name = archive.header().entry(*number).unwrap().name;
            let bytes = &tensors.iter().find(|tensor| tensor.0 == name).unwrap().1;
            assert_eq!(&region.to_vec(), bytes, "{name} among {numbers:?}");
        }
    }
    let (name, bytes) = &tensors[9];
    for (step, start) in [(1, 5), (2, 0), (1000, 17), (50_000, 3), (3_000_000, 1)] {
        let index = [Index::Span {
            start: Some(start),
            stop: None,
            step: Some(step),
        }];
        let (shape, region) = archive.find(name).unwrap().select(&index, &Unwatched).unwrap();
        let expected: Vec<u8> = bytes[size(start)..].iter().step_by(size(step)).copied().collect();
        assert_eq!(shape, [to_u64(expected.len())]);
        assert_eq!(region.to_vec(), expected, "every {step}th from {start}");
    }
    let none = [Index::Span {
        start: Some(5),
        stop: Some(5),
        step: None,
    }];
    assert!(
        archive
            .find(name)
            .unwrap()
            .select(&none, &Unwatched)
            .unwrap()
            .1
            .is_empty()
    );
}

/// Converts `n` to a size.
fn size(n: i64) -> usize {
    usize::try_from(n).unwrap()
}

fn open(path: &Path, backend: Backend) -> Archive {
    Archive::open(path, &OpenOptions::new().backend(backend)).unwrap()
}

#[test]
fn every_source_gives_the_same_bytes() {
    let (bytes, tensors) = file();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("all.safetensors");
    std::fs::write(&path, &bytes).unwrap();
    for (backend, name) in [
        (Backend::Mmap, "mmap"),
        (Backend::Pread, "pread"),
        (Backend::Auto, if cfg!(windows) { "pread" } else { "mmap" }),
    ] {
        let archive = open(&path, backend);
        assert_eq!(archive.backend(), name, "{}", archive.why());
        suite(&archive, &tensors);
    }
    let file = Box::new(LocalFile::of(File::open(&path).unwrap()).unwrap());
    suite(&from_reader(file), &tensors);
    let sources: [Box<dyn Source>; 2] = [
        Box::new(MemorySource::new(bytes.clone())),
        Box::new(Stuttering {
            bytes,
            calls: AtomicUsize::new(0),
        }),
    ];
    for source in sources {
        suite(
            &Archive::from_source(source, &OpenOptions::default()).unwrap(),
            &tensors,
        );
    }
}

#[test]
fn unaligned_elements_are_copied_to_where_they_are_aligned() {
    let json = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[2],"data_offsets":[1,17]}}"#;
    let mut bytes = to_u64(json.len()).to_le_bytes().to_vec();
    bytes.extend_from_slice(json);
    bytes.extend(0..17);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("odd.safetensors");
    std::fs::write(&path, &bytes).unwrap();
    for backend in [Backend::Mmap, Backend::Pread] {
        let archive = open(&path, backend);
        let region = archive.read("b").unwrap();
        assert_eq!(region.as_ptr().addr() % 8, 0, "{backend}");
        assert_eq!(region.to_vec(), (1..17).collect::<Vec<u8>>());
        let (_, second) = archive
            .find("b")
            .unwrap()
            .select(&[Index::At(1)], &Unwatched)
            .unwrap();
        assert_eq!(
            (second.as_ptr().addr() % 8, second.to_vec()),
            (0, (9..17).collect::<Vec<u8>>())
        );
    }
}

#[test]
fn a_file_that_shrank_or_was_written_to_is_noticed() {
    let (bytes, _) = file();
    let folder = tempfile::tempdir().unwrap();
    for backend in [Backend::Mmap, Backend::Pread] {
        if cfg!(windows) && backend == Backend::Mmap {
            // Windows cannot shorten a mapped file.
            continue;
        }
        let path = folder.path().join(format!("{backend}.safetensors"));
        std::fs::write(&path, &bytes).unwrap();
        let archive = open(&path, backend);
        let shorter = to_u64(bytes.len()) - 10;
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(shorter)
            .unwrap();
        let fault = archive.read("t11").unwrap_err();
        assert_eq!(fault.code(), "changed", "{fault}");
        assert_eq!(fault.expected_found(), Some((to_u64(bytes.len()), shorter)));

        std::fs::write(&path, &bytes).unwrap();
        let archive = open(&path, backend);
        let file = File::options().write(true).open(&path).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        assert!(
            archive
                .read("t03")
                .unwrap_err()
                .to_string()
                .contains("was written to")
        );
    }
}

#[test]
fn a_file_replaced_by_rename_is_read_on_as_it_was() {
    let (bytes, tensors) = file();
    let folder = tempfile::tempdir().unwrap();
    for backend in [Backend::Mmap, Backend::Pread] {
        let path = folder.path().join("old.safetensors");
        std::fs::write(&path, &bytes).unwrap();
        let archive = open(&path, backend);
        let other = folder.path().join("new.safetensors");
        std::fs::write(&other, b"\x02\0\0\0\0\0\0\0{}").unwrap();
        if cfg!(windows) {
            // Windows does not replace a mapped file, but renames it.
            std::fs::rename(&path, folder.path().join(format!("{backend}"))).unwrap();
        }
        std::fs::rename(&other, &path).unwrap();
        suite(&archive, &tensors);
    }
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let open = |path: &Path| Archive::open(path, &OpenOptions::default()).unwrap_err();
    assert_eq!(
        open(folder.path()).system().unwrap().kind(),
        io::ErrorKind::IsADirectory
    );
    assert_eq!(
        open(&folder.path().join("none")).system().unwrap().kind(),
        io::ErrorKind::NotFound
    );
    #[cfg(unix)]
    {
        let fifo = folder.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(
            open(&fifo).to_string(),
            format!("{}: not a regular file", fifo.display())
        );
    }
    let device = if cfg!(windows) { "NUL" } else { "/dev/zero" };
    assert!(
        open(Path::new(device))
            .to_string()
            .ends_with("not a regular file")
    );
}

#[test]
fn a_missing_tensor_is_named_with_the_likeliest_one() {
    let (bytes, _) = file();
    let archive = in_memory(bytes);
    let fault = archive.read("T_03").unwrap_err();
    assert_eq!(
        fault.to_string(),
        "tensor `T_03`: the file has no such tensor — did you mean `t03`?"
    );
    assert!(
        !archive
            .read("zebra")
            .unwrap_err()
            .to_string()
            .contains("did you mean")
    );
}

#[test]
fn a_large_header_is_read_whole() {
    let names: Vec<String> = (0..5000)
        .map(|number| format!("tensor.number.{number:08}"))
        .collect();
    let specs: Vec<Spec<'_>> = names
        .iter()
        .map(|name| Spec {
            name,
            dtype: Dtype::F32,
            shape: &[0],
        })
        .collect();
    let new = layout(&specs, Some(&[("k", "v")]), Format::Bintensors).unwrap();
    assert!(new.head.len() > 64 << 10, "longer than the first read");
    let archive = in_memory(new.head);
    let header: &Header = archive.header();
    assert_eq!(
        (header.len(), header.metadata().unwrap().get("k")),
        (5000, Some("v"))
    );
}

/// A source that waits before each read, as a network does, and fails at one byte.
#[derive(Debug)]
struct Distant {
    bytes: Vec<u8>,
    /// Reads of this byte fail.
    broken: Option<u64>,
    /// Reads wait until so many are under way, for a minute at most.
    together: Arc<AtomicUsize>,
    calls: Arc<AtomicUsize>,
    under_way: AtomicUsize,
    most_under_way: Arc<AtomicUsize>,
}

impl Distant {
    fn new(bytes: Vec<u8>, broken: Option<u64>) -> Distant {
        Distant {
            bytes,
            broken,
            together: Arc::default(),
            calls: Arc::default(),
            under_way: AtomicUsize::new(0),
            most_under_way: Arc::default(),
        }
    }
}

impl ReadAt for Distant {
    fn nbytes(&self) -> u64 {
        to_u64(self.bytes.len())
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let under_way = self.under_way.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_under_way.fetch_max(under_way, Ordering::Relaxed);
        let begun = Instant::now();
        std::thread::sleep(Duration::from_millis(5));
        while self.most_under_way.load(Ordering::Relaxed) < self.together.load(Ordering::Relaxed)
            && begun.elapsed().as_secs() < 60
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.under_way.fetch_sub(1, Ordering::Relaxed);
        let end = position + to_u64(dest.len());
        if self
            .broken
            .is_some_and(|broken| position <= broken && broken < end)
        {
            return Err(io::Error::from_raw_os_error(5));
        }
        let rest = &self.bytes[usize::try_from(position).unwrap()..];
        let count = dest.len().min(rest.len());
        dest[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn waits(&self) -> bool {
        true
    }
}

#[test]
fn many_reads_are_under_way_at_once_where_each_of_them_waits() {
    let (bytes, tensors) = file();
    let cores = std::thread::available_parallelism().unwrap().get();
    let source = Distant::new(bytes, None);
    let (most, together) = (Arc::clone(&source.most_under_way), Arc::clone(&source.together));
    let archive = from_reader(Box::new(source));
    // After the header, which is read alone.
    together.store(cores.min(9) + 1, Ordering::Relaxed);
    let all: Vec<usize> = (0..tensors.len()).collect();
    ingot_io::read(parts(&archive, &all), &ReadOptions::default(), &Unwatched).unwrap();
    assert!(most.load(Ordering::Relaxed) > cores.min(9), "{most:?}");
}

#[test]
fn a_failing_device_is_named_with_the_tensor_and_the_bytes() {
    let (bytes, tensors) = file();
    let (name, _) = &tensors[9];
    let archive = in_memory(bytes.clone());
    let entry = archive.header().get(name).unwrap();
    let broken = archive.header().data_start() + entry.begin + 3_000_000;
    let archive = from_reader(Box::new(Distant::new(bytes, Some(broken))));
    let fault = archive.read(name).unwrap_err();
    let (begin, end) = fault.range().unwrap();
    assert_eq!((fault.code(), fault.tensor()), ("read", Some(&**name)));
    assert!((begin..end).contains(&broken), "{fault}");
    assert_eq!(fault.system().unwrap().raw_os_error(), Some(5));
    assert!(archive.read("t03").is_ok(), "the others can be read");
}

/// Returns a [`Prefetch`] of all tensors of a file, and their names.
fn prefetched(archive: Archive, ahead: u64) -> (Prefetch, Vec<String>) {
    let names = archive.header().names().map(ToOwned::to_owned).collect();
    let requests = (0..archive.header().len())
        .map(|number| Request {
            tensor: TensorId { file: 0, number },
            index: None,
            onto: None,
        })
        .collect();
    (
        Prefetch::new(Arc::new(archive.into()), requests, ahead, ReadOptions::default()),
        names,
    )
}

#[test]
fn what_is_read_ahead_comes_in_order_whatever_the_room() {
    let (bytes, tensors) = file();
    for ahead in [0, 100_000, 4 << 20, u64::MAX] {
        let (prefetch, names) = prefetched(in_memory(bytes.clone()), ahead);
        for (rank, name) in names.iter().enumerate() {
            let (found, part) = prefetch.next(&Unwatched).unwrap().unwrap();
            let expected = &tensors.iter().find(|tensor| tensor.0 == *name).unwrap().1;
            assert_eq!(
                (found, &part.buffer.host().unwrap().to_vec()),
                (rank, expected),
                "{name}, {ahead}"
            );
        }
        assert!(prefetch.next(&Unwatched).unwrap().is_none());
    }
}

#[test]
fn one_that_is_taken_out_of_turn_does_not_wait_for_room() {
    let (bytes, tensors) = file();
    let (prefetch, names) = prefetched(in_memory(bytes), 0);
    for rank in (0..names.len()).rev() {
        let part = prefetch.take(rank, &Unwatched).unwrap().unwrap();
        let expected = &tensors.iter().find(|tensor| tensor.0 == names[rank]).unwrap().1;
        assert_eq!(&part.buffer.host().unwrap().to_vec(), expected);
        assert!(
            prefetch.take(rank, &Unwatched).unwrap().is_none(),
            "handed out twice"
        );
    }
}

#[test]
fn a_tensor_that_cannot_be_read_ahead_fails_alone_and_in_its_turn() {
    let (bytes, _) = file();
    let broken = to_u64(bytes.len()) - 20;
    let (prefetch, names) = prefetched(from_reader(Box::new(Distant::new(bytes, Some(broken)))), u64::MAX);
    let outcomes: Vec<_> = names.iter().map(|_| prefetch.next(&Unwatched)).collect();
    let failed: Vec<_> = outcomes
        .iter()
        .filter_map(|outcome| outcome.as_ref().err())
        .collect();
    assert_eq!(failed.len(), 1, "{outcomes:?}");
    assert_eq!(failed[0].code(), "read");
    assert!(prefetch.next(&Unwatched).unwrap().is_none());
}

#[test]
fn closing_half_way_stops_reading() {
    let (bytes, _) = file();
    let source = Distant::new(bytes, None);
    let calls = Arc::clone(&source.calls);
    let (prefetch, _) = prefetched(from_reader(Box::new(source)), u64::MAX);
    prefetch.next(&Unwatched).unwrap();
    prefetch.close();
    let after = calls.load(Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(calls.load(Ordering::Relaxed), after, "a thread goes on");
    assert_eq!(prefetch.next(&Unwatched).unwrap_err().code(), "closed");
}

/// Stops a call at its first check.
struct Stopped;

impl Watch for Stopped {
    fn interrupted(&self) -> bool {
        true
    }
}

#[test]
fn what_was_waited_for_when_it_was_interrupted_can_be_had_later() {
    let (bytes, _) = file();
    let (prefetch, names) = prefetched(from_reader(Box::new(Distant::new(bytes, None))), 0);
    let last = names.len() - 3;
    assert!(
        prefetch
            .take(last, &Stopped)
            .as_ref()
            .is_err_and(Error::is_interrupted)
    );
    assert!(prefetch.take(last, &Unwatched).unwrap().is_some());
    match prefetch.next(&Stopped) {
        Ok(next) => assert!(next.is_some()),
        Err(fault) => assert!(fault.is_interrupted()),
    }
}

#[test]
fn warming_reads_just_the_bytes_of_the_tensors() {
    let (bytes, tensors) = file();
    let archive = in_memory(bytes);
    let warmed = warm_tensors(&some(&archive, &[3, 9, 3]), &ReadOptions::default(), &Unwatched).unwrap();
    let nbytes = |number: usize| archive.header().entry(number).unwrap().nbytes();
    assert_eq!(warmed, nbytes(3) + nbytes(9));
    assert!(tensors.len() > 9);
}

/// A source whose bytes have a version.
struct Versioned {
    bytes: Vec<u8>,
    version: Arc<AtomicUsize>,
}

impl Source for Versioned {
    fn nbytes(&self) -> u64 {
        to_u64(self.bytes.len())
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let rest = &self.bytes[usize::try_from(position).unwrap()..];
        let count = dest.len().min(rest.len());
        dest[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn version(&self) -> Option<String> {
        Some(self.version.load(Ordering::Relaxed).to_string())
    }
}

#[test]
fn a_source_of_another_version_is_not_read() {
    let (bytes, tensors) = file();
    let version = Arc::new(AtomicUsize::new(1));
    let source = Versioned {
        bytes,
        version: Arc::clone(&version),
    };
    let archive = Archive::from_source(source, &OpenOptions::default()).unwrap();
    suite(&archive, &tensors);
    version.store(2, Ordering::Relaxed);
    let fault = archive.read("t03").unwrap_err();
    assert!(
        matches!(fault.failure(), Failure::Changed { nbytes_now: None, .. }),
        "{fault}"
    );
    version.store(1, Ordering::Relaxed);
    assert_eq!(archive.read("t03").unwrap().as_slice().unwrap(), tensors[3].1);
}

/// A source that reports more bytes than the destination can hold.
struct Boasting(Vec<u8>);

impl Source for Boasting {
    fn nbytes(&self) -> u64 {
        to_u64(self.0.len())
    }

    fn read_at(&self, _: u64, dest: &mut [u8]) -> io::Result<usize> {
        Ok(dest.len() + 1)
    }
}

#[test]
fn a_source_that_reports_more_bytes_than_it_was_given_room_for_is_an_error() {
    let fault = Archive::from_source(Boasting(file().0), &OpenOptions::default()).unwrap_err();
    assert_eq!(fault.code(), "read");
    assert!(fault.to_string().contains("expected at most"), "{fault}");
}
