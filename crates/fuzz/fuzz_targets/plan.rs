//! Reading any parts of files, from any source and in any shape and dtype, returns the same bytes as a naive copy. If
//! the source fails, reading returns these bytes or an error.
#![no_main]

mod selected;

use std::io::{self, Cursor, IoSliceMut, Read};
use std::num::NonZeroUsize;
use std::ops::Range;

use ingot_format::{Dtype, Format, Spec, layout, nbytes};
use ingot_io::fuzzing::strided;
use ingot_io::binding::{Origin, ReadAt, StopFlag, Target, convert, fill, is_float};
use ingot_io::{Archive, Error, MemorySource, Job, OpenOptions, ReadOptions, Unwatched, read};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use selected::{naive, part};

fuzz_target!(|input: &[u8]| {
    // Inputs that end too early are ignored.
    let _ = check(&mut Unstructured::new(input));
});

/// Largest size of a tensor in bytes. Larger ones only make a run slower.
const MOST: u64 = 1 << 15;

#[derive(Debug)]
struct Stored {
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

/// A source that returns at most `most` bytes per read, and fails from `fails_from` on.
#[derive(Debug)]
struct Odd {
    bytes: Vec<u8>,
    most: usize,
    is_vectored: bool,
    gap_nbytes: u64,
    fails_from: Option<usize>,
}

impl Odd {
    fn from(&self, position: u64) -> io::Result<&[u8]> {
        let at = usize::try_from(position).map_or(self.bytes.len(), |at| at.min(self.bytes.len()));
        match self.fails_from {
            Some(end) if at >= end => Err(io::Error::other("it fails from here on")),
            end => Ok(&self.bytes[at..end.unwrap_or(self.bytes.len())]),
        }
    }
}

impl ReadAt for Odd {
    fn nbytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let most = dest.len().min(self.most);
        self.from(position)?.read(&mut dest[..most])
    }

    fn is_vectored(&self) -> bool {
        self.is_vectored
    }

    fn read_vectored_at(&self, position: u64, dests: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.from(position)?.take(self.most as u64).read_vectored(dests)
    }

    fn gap_nbytes(&self) -> u64 {
        self.gap_nbytes
    }

    fn waits(&self) -> bool {
        self.gap_nbytes > 0
    }

    fn stream<'s>(&'s self, span: Range<u64>, _stop: StopFlag<'s>) -> Option<Box<dyn Read + 's>> {
        if self.gap_nbytes == 0 {
            return None;
        }
        let bytes = self.from(span.start).unwrap_or_default();
        let most = bytes.len().min((span.end - span.start) as usize);
        Some(Box::new(Cursor::new(&bytes[..most])))
    }
}

fn check(input: &mut Unstructured<'_>) -> Result<()> {
    let mut fails = false;
    let mut files = Vec::new();
    for seed in 0..input.int_in_range(1..=2)? {
        let stored = tensors(input, seed)?;
        let (opened, may_fail) = open(input, file(&stored))?;
        fails |= may_fail;
        let archive = match opened {
            Ok(archive) => archive,
            Err(_) if may_fail => return Ok(()),
            Err(fault) => panic!("{fault}"),
        };
        files.push((archive, stored));
    }
    let threads = if input.ratio(1, 16)? { 3 } else { 1 };
    let options = ReadOptions::new().threads(NonZeroUsize::new(threads));
    let (mut parts, mut expected) = (Vec::new(), Vec::new());
    for _ in 0..input.int_in_range(0..=8)? {
        if let Some((part, bytes)) = wanted(input, &files)? {
            parts.push(part);
            expected.push(bytes);
        }
    }
    match read(&parts, &options, &Unwatched) {
        Ok(regions) => assert!(
            regions
                .iter()
                .map(|region| region.to_vec())
                .eq(expected.iter().cloned())
        ),
        Err(fault) => assert!(fails, "{fault}"),
    }
    into_memory(input, &parts, &expected, &options, fails)
}

fn tensors(input: &mut Unstructured<'_>, seed: u64) -> Result<Vec<Stored>> {
    let mut tensors = Vec::new();
    for number in 0..input.int_in_range(0..=5)? {
        let dtype = *input.choose(Dtype::ALL)?;
        let mut shape = Vec::new();
        for _ in 0..input.int_in_range(0..=3)? {
            shape.push(match input.ratio(15, 16)? {
                true => input.int_in_range(0..=6)?,
                false => input.int_in_range(0..=3000)?,
            });
        }
        // The naive loops iterate over the other dimensions even if one of them is 0.
        let is_small = shape.iter().map(|&size| size.max(1)).product::<u64>() <= MOST;
        if is_small
            && let Ok(count) = nbytes(dtype, &shape)
            && count <= MOST
        {
            let values = (0..count).map(|at| (at * 7 + (at >> 8) * 3 + seed * 5 + number) as u8);
            tensors.push(Stored {
                dtype,
                shape,
                bytes: values.collect(),
            });
        }
    }
    Ok(tensors)
}

/// Returns a file of these tensors, named by their numbers.
fn file(tensors: &[Stored]) -> Vec<u8> {
    let names: Vec<String> = (0..tensors.len()).map(|number| number.to_string()).collect();
    let spec = |(name, tensor): (&'_ String, &'_ Stored)| (name.clone(), tensor.dtype, tensor.shape.clone());
    let specs: Vec<_> = names.iter().zip(tensors).map(spec).collect();
    let specs: Vec<Spec<'_>> = specs
        .iter()
        .map(|(name, dtype, shape)| Spec {
            name,
            dtype: *dtype,
            shape,
        })
        .collect();
    let layout = match layout(&specs, None, Format::Safetensors) {
        Ok(layout) => layout,
        Err(fault) => panic!("{fault}"),
    };
    let mut bytes = layout.head;
    for number in layout.order {
        bytes.extend_from_slice(&tensors[number].bytes);
    }
    bytes
}

/// The result of opening the file.
type Opened = std::result::Result<Archive, Error>;

/// Opens the file with one of the kinds of sources. Returns whether opening or reading may fail.
fn open(input: &mut Unstructured<'_>, bytes: Vec<u8>) -> Result<(Opened, bool)> {
    if input.ratio(1, 4)? {
        return Ok((Archive::from_source(MemorySource::new(bytes), &OpenOptions::default()), false));
    }
    let fails_from = match input.ratio(1, 8)? {
        true => Some(input.int_in_range(0..=bytes.len())?),
        false => None,
    };
    let odd = Odd {
        most: *input.choose(&[1, 7, 100, 5000, usize::MAX])?,
        is_vectored: input.arbitrary()?,
        gap_nbytes: *input.choose(&[0, 0, 1, 64, 4096])?,
        fails_from,
        bytes,
    };
    let most = if odd.bytes.len() > 1 << 14 {
        odd.most.max(100)
    } else {
        odd.most
    };
    let reader = Box::new(Odd { most, ..odd });
    let opened = Archive::of(Origin::Other(reader), None, &OpenOptions::default(), None);
    Ok((opened, fails_from.is_some()))
}

/// Returns a random job on one of the files and its expected bytes, or `None` if the index is invalid.
fn wanted<'a>(
    input: &mut Unstructured<'_>,
    files: &'a [(Archive, Vec<Stored>)],
) -> Result<Option<(Job<'a>, Vec<u8>)>> {
    let (archive, stored) = &files[input.choose_index(files.len())?];
    let Ok(number) = input.choose_index(stored.len()) else {
        return Ok(None);
    };
    let stored = &stored[number];
    let mut index = Vec::new();
    for _ in 0..input.int_in_range(0..=4)? {
        index.push(part(input)?);
    }
    let floats: Vec<Dtype> = Dtype::ALL
        .iter()
        .copied()
        .filter(|&dtype| is_float(dtype))
        .collect();
    let dtype = if input.ratio(1, 3)? {
        Some(*input.choose(&floats)?)
    } else {
        None
    };
    let tensor = match archive.find(&number.to_string()) {
        Ok(tensor) => tensor,
        Err(fault) => panic!("{fault}"),
    };
    let Ok(part) = Job::new(tensor, &index, dtype) else {
        return Ok(None);
    };
    let naive = naive(stored.dtype, &stored.shape, &index);
    assert_eq!(part.shape(), naive.shape);
    let mut bytes = Vec::new();
    for (begin, end) in naive.bits {
        bytes.extend_from_slice(&stored.bytes[begin as usize / 8..end as usize / 8]);
    }
    if part.dtype() != stored.dtype {
        bytes = bytes
            .chunks(width(stored.dtype))
            .flat_map(|element| {
                let mut one = vec![0; width(part.dtype())];
                convert(stored.dtype, part.dtype(), element, &mut one);
                one
            })
            .collect();
    }
    assert_eq!(part.nbytes(), bytes.len() as u64);
    Ok(Some((part, bytes)))
}

fn width(dtype: Dtype) -> usize {
    dtype.bits() as usize / 8
}

/// Reads the same parts into strided memory, with any order of the dimensions and with gaps between elements.
fn into_memory(
    input: &mut Unstructured<'_>,
    parts: &[Job<'_>],
    expected: &[Vec<u8>],
    options: &ReadOptions,
    fails: bool,
) -> Result<()> {
    let places = parts
        .iter()
        .map(|part| Places::of(input, part))
        .collect::<Result<Vec<_>>>()?;
    let mut memories: Vec<Vec<u8>> = places.iter().map(|places| vec![0xA5; places.nbytes]).collect();
    let targets = parts
        .iter()
        .zip(&places)
        .zip(&mut memories)
        .map(|((part, places), memory)| Target {
            dtype: part.dtype(),
            shape: part.shape(),
            memory: match strided(memory, places.itemsize, &places.shape, &places.strides) {
                Some(memory) => memory,
                None => panic!("{places:?} must not overlap"),
            },
        });
    let targets = targets.collect();
    if let Err(fault) = fill(parts, targets, options, &Unwatched) {
        assert!(fails, "{fault}");
        return Ok(());
    }
    for ((places, memory), expected) in places.iter().zip(&mut memories).zip(expected) {
        for (element, at) in expected.chunks(places.itemsize).zip(places.each()) {
            let found = &mut memory[at..at + places.itemsize];
            assert_eq!(element, found);
            found.fill(0xA5);
        }
        assert!(
            memory.iter().all(|&byte| byte == 0xA5),
            "written between the elements"
        );
    }
    Ok(())
}

/// The positions of a tensor's elements in strided memory.
#[derive(Debug)]
struct Places {
    itemsize: usize,
    shape: Vec<usize>,
    strides: Vec<isize>,
    nbytes: usize,
}

impl Places {
    fn of(input: &mut Unstructured<'_>, part: &Job<'_>) -> Result<Places> {
        let is_whole = part.dtype().bits().is_multiple_of(8);
        // Elements smaller than a byte are contiguous.
        let (itemsize, shape) = match is_whole {
            true => (
                width(part.dtype()),
                part.shape().iter().map(|&size| size as usize).collect(),
            ),
            false => (1, vec![part.nbytes() as usize]),
        };
        let mut order: Vec<usize> = (0..shape.len()).collect();
        for at in 1..order.len() {
            order.swap(at, input.int_in_range(0..=at)?);
        }
        let mut strides = vec![0; shape.len()];
        let mut reach = itemsize;
        for dim in order {
            reach *= if is_whole { input.int_in_range(1..=2)? } else { 1 };
            strides[dim] = reach as isize;
            reach *= shape[dim].max(1);
        }
        Ok(Places {
            itemsize,
            shape,
            strides,
            nbytes: reach,
        })
    }

    /// The first byte of each element, in C order.
    fn each(&self) -> Vec<usize> {
        let mut places = vec![0];
        for (&count, &stride) in self.shape.iter().zip(&self.strides) {
            places = places
                .iter()
                .flat_map(|place| (0..count).map(move |at| place + at * stride as usize))
                .collect();
        }
        places
    }
}
