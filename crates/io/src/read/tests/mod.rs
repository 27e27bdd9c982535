//! Plans compared with a naive read, which reads, converts and stores each element by itself.
use std::io::{self, Cursor, IoSliceMut, Read};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use crate::convert::convert;
use crate::error::Failure;
use crate::file::{Archive, MemorySource, OpenSource, Origin, ReadAt};
use crate::memory::Dest;
use crate::options::{Backend, OpenOptions, ReadOptions};
use crate::read::input::Witness;
use crate::read::job::{Job, Target};
use crate::read::plan::FileRun;
use crate::read::run::{looking, show};
use crate::read::{fill, read};
use crate::watch::Unwatched;
use ingot_format::{Dtype, Format, Index, Spec, StopFlag, layout, locked, nbytes, to_u64, to_usize};
use proptest::prelude::*;
use proptest::sample::Index as Pick;

/// The kinds of sources.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Mapped,
    File,
    Memory,
    /// Reads fewer bytes than requested, and into several places at once.
    Short,
    /// Reads in long streams over gaps of this many bytes, as a source behind a URL does.
    Stream(u64),
}

const KINDS: [Kind; 6] = [
    Kind::Mapped,
    Kind::File,
    Kind::Memory,
    Kind::Short,
    Kind::Stream(1),
    Kind::Stream(4096),
];

#[derive(Debug)]
struct Odd {
    bytes: Vec<u8>,
    gap_nbytes: u64,
}

impl Odd {
    fn from(&self, position: u64) -> &[u8] {
        &self.bytes[to_usize(position).unwrap().min(self.bytes.len())..]
    }
}

impl ReadAt for Odd {
    fn nbytes(&self) -> u64 {
        to_u64(self.bytes.len())
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let most = dest.len().min(5000);
        self.from(position).read(&mut dest[..most])
    }

    fn is_vectored(&self) -> bool {
        self.gap_nbytes == 0
    }

    fn read_vectored_at(&self, position: u64, dests: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.from(position).take(3000).read_vectored(dests)
    }

    fn gap_nbytes(&self) -> u64 {
        self.gap_nbytes
    }

    fn waits(&self) -> bool {
        self.gap_nbytes > 0
    }

    fn stream<'s>(&'s self, span: Range<u64>, _stop: StopFlag<'s>) -> Option<Box<dyn Read + 's>> {
        let bytes = &self.from(span.start)[..to_usize(span.end - span.start).unwrap()];
        (self.gap_nbytes > 0).then(|| Box::new(Cursor::new(bytes)) as _)
    }
}

fn archive(kind: Kind, path: &Path, bytes: &[u8]) -> Archive {
    let open = |backend| {
        std::fs::write(path, bytes).unwrap();
        let options = OpenOptions {
            backend,
            ..OpenOptions::default()
        };
        Archive::open(path, &options).unwrap()
    };
    let of = |reader: Box<dyn ReadAt>| {
        Archive::of(Origin::Other(reader), None, &OpenOptions::default(), None).unwrap()
    };
    let odd = |gap_nbytes| {
        let bytes = bytes.to_vec();
        of(Box::new(Odd { bytes, gap_nbytes }))
    };
    match kind {
        Kind::Mapped => open(Backend::Mmap),
        Kind::File => open(Backend::Pread),
        Kind::Memory => of(Box::new(OpenSource::new(MemorySource::new(bytes.to_vec())))),
        Kind::Short => odd(0),
        Kind::Stream(gap_nbytes) => odd(gap_nbytes),
    }
}

const DTYPES: [Dtype; 6] = [
    Dtype::U8,
    Dtype::BF16,
    Dtype::F16,
    Dtype::F32,
    Dtype::F64,
    Dtype::F8_E4M3,
];

/// A matrix of a file.
#[derive(Clone, Debug)]
struct Matrix {
    dtype: Dtype,
    rows: u64,
    columns: u64,
}

fn matrices() -> impl Strategy<Value = Vec<Matrix>> {
    let sizes = prop_oneof![
        8 => (0_u64..6, 0_u64..40),
        2 => (1_u64..200, 1_u64..1500),
        1 => (1_u64..4, 200_000_u64..900_000),
    ];
    let matrix = (prop::sample::select(DTYPES.to_vec()), sizes).prop_map(|(dtype, (rows, columns))| Matrix {
        dtype,
        rows,
        columns,
    });
    prop::collection::vec(matrix, 1..12)
}

/// The file, and the bytes of each matrix.
fn file(seed: u64, matrices: &[Matrix]) -> (Vec<u8>, Vec<Vec<u8>>) {
    let names: Vec<String> = (0..matrices.len()).map(|number| format!("{number:02}")).collect();
    let shapes: Vec<[u64; 2]> = matrices
        .iter()
        .map(|matrix| [matrix.rows, matrix.columns])
        .collect();
    let specs: Vec<Spec<'_>> = (0..matrices.len())
        .map(|number| Spec {
            name: &names[number],
            dtype: matrices[number].dtype,
            shape: &shapes[number],
        })
        .collect();
    let layout = layout(&specs, None, Format::Safetensors).unwrap();
    let mut bytes = layout.head;
    let mut data = vec![Vec::new(); matrices.len()];
    for number in layout.order {
        let count = nbytes(matrices[number].dtype, &shapes[number]).unwrap();
        let values = (0..count).map(|at| (at * 7 + (at >> 8) * 3 + seed + to_u64(number)).to_le_bytes()[0]);
        data[number] = values.collect();
        bytes.extend_from_slice(&data[number]);
    }
    (bytes, data)
}

/// A request for a part of one of the matrices.
#[derive(Clone, Debug)]
struct Wanted {
    file: Pick,
    matrix: Pick,
    rows: Along,
    columns: Along,
    dtype: Option<Dtype>,
    /// The existing memory to read into, if any: the number of elements between two of its elements, and whether it is
    /// transposed.
    stretch: usize,
    is_turned: bool,
}

#[derive(Clone, Debug)]
enum Along {
    Whole,
    Span(Pick, Pick, u64),
    Places(Vec<Pick>),
}

impl Along {
    fn index(&self, size: u64) -> Index {
        let limit = to_usize(size).unwrap() + 1;
        let number = |pick: &Pick, limit: usize| i64::try_from(pick.index(limit)).unwrap();
        match self {
            Along::Places(picks) if size > 0 => Index::from(
                picks
                    .iter()
                    .map(|pick| number(pick, limit - 1))
                    .collect::<Vec<_>>(),
            ),
            Along::Whole | Along::Places(_) => Index::WHOLE,
            Along::Span(start, stop, step) => Index::Span {
                start: Some(number(start, limit)),
                stop: Some(number(stop, limit)),
                step: Some(i64::try_from(*step).unwrap()),
            },
        }
    }

    fn places(&self, size: u64) -> Vec<usize> {
        let limit = to_usize(size).unwrap() + 1;
        match self {
            Along::Places(picks) if size > 0 => picks.iter().map(|pick| pick.index(limit - 1)).collect(),
            Along::Whole | Along::Places(_) => (0..limit - 1).collect(),
            Along::Span(start, stop, step) => (start.index(limit)..stop.index(limit))
                .step_by(to_usize(*step).unwrap())
                .collect(),
        }
    }
}

fn wanted() -> impl Strategy<Value = Vec<Wanted>> {
    let span =
        || (any::<Pick>(), any::<Pick>(), 1_u64..4).prop_map(|(one, two, step)| Along::Span(one, two, step));
    let picks = prop::collection::vec(any::<Pick>(), 0..20).prop_map(Along::Places);
    let along = prop_oneof![
        (Just(Along::Whole), Just(Along::Whole)),
        (span(), Just(Along::Whole)),
        (Just(Along::Whole), span()),
        (span(), span()),
        (picks, span()),
    ];
    let dtype = prop::option::of(prop::sample::select(vec![Dtype::F32, Dtype::BF16, Dtype::F64]));
    let one = (
        any::<Pick>(),
        any::<Pick>(),
        along,
        dtype,
        1_usize..3,
        any::<bool>(),
    );
    let one = one.prop_map(
        |(file, matrix, (rows, columns), dtype, stretch, is_turned)| Wanted {
            file,
            matrix,
            rows,
            columns,
            dtype,
            stretch,
            is_turned,
        },
    );
    prop::collection::vec(one, 0..40)
}

/// Read a request element by element.
fn naive(bytes: &[u8], matrix: &Matrix, wanted: &Wanted, dtype: Dtype) -> Vec<u8> {
    let size = |dtype: Dtype| to_usize(dtype.bits() / 8).unwrap();
    let (rows, columns) = (
        wanted.rows.places(matrix.rows),
        wanted.columns.places(matrix.columns),
    );
    let mut result = vec![0; rows.len() * columns.len() * size(dtype)];
    let mut elements = result.chunks_exact_mut(size(dtype));
    for row in rows {
        for column in &columns {
            let at = (row * to_usize(matrix.columns).unwrap() + column) * size(matrix.dtype);
            let element = elements.next().unwrap();
            convert(matrix.dtype, dtype, &bytes[at..at + size(matrix.dtype)], element);
        }
    }
    result
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_plan_delivers_what_the_naive_one_does(
        files in prop::collection::vec((matrices(), prop::sample::select(KINDS.to_vec())), 1..4),
        wanted in wanted(),
        threads in 1_usize..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let made: Vec<_> = (0..).zip(&files).map(|(seed, (matrices, _))| file(seed, matrices)).collect();
        let archives: Vec<Archive> = files.iter().zip(&made).enumerate()
            .map(|(number, ((_, kind), (bytes, _)))| archive(*kind, &folder.path().join(number.to_string()), bytes))
            .collect();
        let options = ReadOptions { threads: NonZeroUsize::new(threads) };
        let (mut parts, mut expected) = (Vec::new(), Vec::new());
        for wanted in &wanted {
            let file = wanted.file.index(files.len());
            let (matrices, _) = &files[file];
            let number = wanted.matrix.index(matrices.len());
            let matrix = &matrices[number];
            let tensor = archives[file].find(&format!("{number:02}")).unwrap();
            let index = match (&wanted.rows, &wanted.columns) {
                (Along::Whole, Along::Whole) => vec![],
                (rows, columns) => vec![rows.index(matrix.rows), columns.index(matrix.columns)],
            };
            let part = Job::new(tensor, &index, wanted.dtype).unwrap();
            expected.push(naive(&made[file].1[number], matrix, wanted, part.dtype()));
            parts.push(part);
        }
        for (region, expected) in read(&parts, &options, &Unwatched).unwrap().iter().zip(&expected) {
            prop_assert!(region.to_vec() == *expected);
        }

        // The same into existing memory, with all orders of dimensions.
        let dims: Vec<(usize, [usize; 2])> = parts.iter().map(|part| {
            let places = |size: u64| to_usize(size).unwrap();
            (places(part.dtype().bits() / 8), [places(part.shape()[0]), places(part.shape()[1])])
        }).collect();
        let strides: Vec<[usize; 2]> = dims.iter().zip(&wanted).map(|((size, [rows, columns]), wanted)| {
            let unit = size * wanted.stretch;
            if wanted.is_turned { [unit, unit * rows.max(&1)] } else { [unit * columns.max(&1), unit] }
        }).collect();
        let mut memories: Vec<Vec<u8>> = dims.iter().zip(&strides)
            .map(|((size, [rows, columns]), [down, along])| vec![0; rows * down + columns * along + size])
            .collect();
        let targets = parts.iter().zip(&mut memories).zip(dims.iter().zip(&strides)).map(|((part, memory), ((size, shape), strides))| {
            let strides = strides.map(|stride| isize::try_from(stride).unwrap());
            let memory = Dest::over(memory, *size, shape, &strides).unwrap();
            Target { dtype: part.dtype(), shape: part.shape(), memory }
        }).collect();
        fill(&parts, targets, &options, &Unwatched).unwrap();
        for ((memory, expected), ((size, [rows, columns]), [down, along])) in
            memories.iter().zip(&expected).zip(dims.iter().zip(&strides))
        {
            let mut elements = expected.chunks(*size);
            for row in 0..*rows {
                for column in 0..*columns {
                    let at = row * down + column * along;
                    prop_assert_eq!(&memory[at..at + size], elements.next().unwrap());
                }
            }
        }
    }
}

/// A witness that records its bytes and the ends of pieces. It processes this many bytes at once, split at multiples of
/// `unit`.
struct Notes {
    seen: Mutex<Vec<(u64, Vec<u8>)>>,
    step_nbytes: u64,
    unit: u64,
    ended: Mutex<bool>,
}

impl Notes {
    fn new(step_nbytes: u64, unit: u64) -> Notes {
        Notes {
            seen: Mutex::default(),
            step_nbytes,
            unit,
            ended: Mutex::default(),
        }
    }
}

impl Witness for Notes {
    fn step_nbytes(&self) -> u64 {
        self.step_nbytes
    }

    fn cut(&self, position: u64, most: u64) -> u64 {
        let end = position + most;
        let cut = end - end % self.unit;
        if cut > position { cut } else { end }
    }

    fn see(&self, position: u64, bytes: &[u8]) {
        locked(&self.seen).push((position, bytes.to_vec()));
    }

    fn end(&self) {
        *locked(&self.ended) = true;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_is_shown_is_every_byte_that_is_wanted_once(
        files in prop::collection::vec((prop::sample::select(KINDS.to_vec()), 0_usize..4_000_000), 1..4),
        gaps in prop::collection::vec((prop_oneof![0_u64..40, 0_u64..600_000], prop_oneof![1_u64..300, 1_u64..2_000_000]), 0..30),
        step_nbytes in prop_oneof![Just(u64::MAX), 1_u64 << 12..1 << 20],
        unit in prop_oneof![Just(1_u64), Just(1 << 17)],
        threads in 1_usize..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let matrix = |len: usize| Matrix { dtype: Dtype::U8, rows: 1, columns: to_u64(len) };
        let made: Vec<_> = (0..).zip(&files).map(|(seed, (_, len))| file(seed, &[matrix(*len)]).0).collect();
        let archives: Vec<Archive> = files.iter().zip(&made).enumerate()
            .map(|(number, ((kind, _), bytes))| archive(*kind, &folder.path().join(number.to_string()), bytes))
            .collect();
        let sources: Vec<&dyn ReadAt> = archives.iter().map(Archive::source).collect();
        let mut runs: Vec<FileRun> = Vec::new();
        for (number, bytes) in made.iter().enumerate() {
            let mut at = 0;
            for (gap, nbytes) in &gaps {
                let end = (at + gap + nbytes).min(to_u64(bytes.len()));
                runs.extend((at + gap < end).then(|| (number, at + gap..end)));
                at = end;
            }
        }
        let notes: Vec<Notes> = files.iter().map(|_| Notes::new(step_nbytes, unit)).collect();
        let witnesses: Vec<&dyn Witness> = notes.iter().map(|notes| notes as _).collect();
        let options = ReadOptions { threads: NonZeroUsize::new(threads) };
        let reading = looking(&sources, &runs, &options);
        show(&sources, &witnesses, &runs, reading, &Unwatched).unwrap();
        for (number, (notes, bytes)) in notes.into_iter().zip(&made).enumerate() {
            let mut seen = notes.seen.into_inner().unwrap();
            seen.sort_by_key(|(position, _)| *position);
            let mut wanted = vec![false; bytes.len()];
            for (_, run) in runs.iter().filter(|(file, _)| *file == number) {
                wanted[to_usize(run.start).unwrap()..to_usize(run.end).unwrap()].fill(true);
            }
            for (position, shown) in seen {
                let at = to_usize(position).unwrap();
                prop_assert!(bytes[at..at + shown.len()] == shown[..]);
                prop_assert!(wanted[at..at + shown.len()].iter().all(|&wanted| wanted));
                wanted[at..at + shown.len()].fill(false);
            }
            prop_assert!(!wanted.contains(&true));
        }
    }
}

#[test]
fn who_looks_at_a_file_that_ends_early_is_told() {
    for kind in [Kind::Memory, Kind::Short] {
        let (bytes, _) = file(0, &[]);
        let archives = [0, 1].map(|_| archive(kind, Path::new(""), &bytes));
        let sources = archives.each_ref().map(Archive::source);
        let notes = [0, 1].map(|_| Notes::new(u64::MAX, 1));
        let witnesses = notes.each_ref().map(|notes| notes as &dyn Witness);
        let end = to_u64(bytes.len());
        let reading = looking(&sources, &[], &ReadOptions::default());
        let runs = [(0, 0..end), (1, 0..end + 1)];
        let fault = show(&sources, &witnesses, &runs, reading, &Unwatched).unwrap_err();
        assert_eq!(fault.file, Some(1));
        assert!(matches!(fault.failure, Failure::Read { .. }));
        assert_eq!(notes.map(|notes| *locked(&notes.ended)), [false, true]);
    }
}
