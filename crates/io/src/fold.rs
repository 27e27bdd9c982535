//! Folding the bytes of tensors into one result for each: statistics of single tensors, distances of pairs.
//!
//! The tensors of a group are read side by side, a window at a time, into memory that stays in a core's cache, by the plans
//! that read all tensors. The bytes are discarded.

mod ordered;

use std::borrow::Cow;
use std::iter;
use std::ops::Range;

use ingot_format::{Dtype, StopFlag, saturating_usize, to_u64};

use self::ordered::Ordered;

use crate::checkpoint::copied::copied;
use crate::error::{Error, InFile};
use crate::file::{Archive, Files, ReadAt, Tensor, TensorId};
use crate::memory::Dest;
use crate::options::ReadOptions;
use crate::read::buffer::Destination;
use crate::read::input::level;
use crate::read::plan::{FileRun, Piece, Plan};
use crate::read::run::{check_sizes, execute, looking};
use crate::watch::{Asked, Watch};
use crate::workers::{Reading, share};

/// The size of a chunk: the bytes of the widest tensor of a group that one thread adds to one result. Results of chunks
/// are joined.
const CHUNK_NBYTES: u64 = 2 << 20;

/// The number of bytes of all tensors that a thread processes between two progress reports.
const TASK_NBYTES: u64 = 4 << 20;

/// The number of bytes of all tensors that are in memory at once, small enough to stay in a core's cache.
const WINDOW_NBYTES: u64 = 256 << 10;

/// The same if each read waits for a network: enough to outweigh the cost of a request.
const WAITING_WINDOW_NBYTES: u64 = 2 << 20;

/// Parts of a tensor end at multiples of this many elements, however the tensor is read.
const STEP: u64 = 2048;

/// A computation over groups of `N` tensors of one shape.
pub trait Fold<const N: usize>: Sync {
    /// The result for a group, or for a part of it.
    type Result: Clone + Send + Sync;

    /// Return the result of no elements of this group.
    fn empty(&self, group: usize) -> Self::Result;

    /// Add the bytes of the same elements of each tensor of this group. All parts but the last of a tensor have a multiple
    /// of 2048 elements, and are the same however the tensor is read.
    fn add(&self, group: usize, result: &mut Self::Result, bytes: [&[u8]; N]);

    /// Join the results of two neighbouring parts, the earlier one first.
    fn join(earlier: Self::Result, later: Self::Result) -> Self::Result;

    /// Return whether the rest of this group need not be read.
    fn is_done(&self, _group: usize) -> bool {
        false
    }
}

/// Read these groups of tensors, and return the result for each. The tensors of a group have one shape.
///
/// ```
/// use ingot_io::binding::{Fold, fold};
/// use ingot_io::{Archive, Dtype, OpenOptions, ReadOptions, TensorView, Unwatched, serialize_to_file};
///
/// struct Sum;
///
/// impl Fold<1> for Sum {
///     type Result = u64;
///
///     fn empty(&self, _: usize) -> u64 {
///         0
///     }
///
///     fn add(&self, _: usize, sum: &mut u64, [bytes]: [&[u8]; 1]) {
///         *sum += bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
///     }
///
///     fn join(earlier: u64, later: u64) -> u64 {
///         earlier + later
///     }
/// }
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// serialize_to_file([("bias", &TensorView::new(Dtype::U8, vec![3], &[1, 2, 3])?)], None, &path)?;
/// let archive = Archive::open(&path, &OpenOptions::default())?;
/// let sums = fold(&[[archive.find("bias")?]], &Sum, &ReadOptions::default(), &Unwatched)?;
/// assert_eq!(sums, [6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`read`](fn@crate::read).
pub fn fold<F: Fold<N>, const N: usize>(
    groups: &[[Tensor<'_>; N]],
    computed: &F,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<F::Result>, Error> {
    let copies = copies(groups, options, watch)?;
    let mut groups = Cow::Borrowed(groups);
    for (group, side, copy) in &copies {
        if let Some(tensor) = copy.tensor(0) {
            groups.to_mut()[*group][*side] = tensor;
        }
    }
    let (files, ids) = Files::of(groups.iter().flatten().copied());
    let sources = files.sources();
    let parts = parts(&groups, &ids);
    let results = (0..groups.len()).map(|group| Ordered::new(computed.empty(group), F::join));
    let results: Vec<Ordered<F::Result>> = results.collect();
    let work = Work {
        reading: reading(&parts, &sources, options),
        sources: &sources,
        computed,
        results: &results,
    };
    work.run(parts, watch).map_err(|fault| files.explain(fault))?;
    files.check_unchanged()?;
    Ok(results.into_iter().map(Ordered::finish).collect())
}

/// Return a copy of each tensor whose elements are not contiguous in its file, with its position in the groups.
fn copies<const N: usize>(
    groups: &[[Tensor<'_>; N]],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<(usize, usize, Archive)>, Error> {
    let mut copies = Vec::new();
    for (group, tensors) in groups.iter().enumerate() {
        for (side, tensor) in tensors.iter().enumerate() {
            if tensor.strides().is_some() {
                let region = tensor.read(options, &Asked(watch))?;
                let copy = copied(&[*tensor], &[region], None, tensor.archive().path())?;
                copies.push((group, side, copy));
            }
        }
    }
    Ok(copies)
}

/// The same range of elements of each tensor of a group.
#[derive(Clone)]
struct Part<const N: usize> {
    group: usize,
    /// The number of the chunk in its group.
    chunk: u64,
    /// Whether these are the last elements of their chunk.
    is_last: bool,
    elements: u64,
    sides: [Side; N],
}

/// Where elements of a tensor begin.
#[derive(Clone)]
struct Side {
    file: usize,
    position: u64,
    dtype: Dtype,
}

impl Side {
    fn of(tensor: Tensor<'_>, id: TensorId) -> Side {
        Side {
            file: id.file,
            position: tensor.start(),
            dtype: tensor.entry().dtype,
        }
    }

    /// The bytes of these elements.
    fn run(&self, elements: Range<u64>) -> FileRun {
        let bits = self.dtype.bits();
        let [begin, end] = [elements.start, elements.end].map(|at| self.position + at * bits / 8);
        (self.file, begin..end)
    }
}

impl<const N: usize> Part<N> {
    fn runs(&self) -> [FileRun; N] {
        self.sides.each_ref().map(|side| side.run(0..self.elements))
    }

    /// Bytes of all sides.
    fn nbytes(&self) -> u64 {
        let nbytes = self.runs().into_iter().map(|(_, run)| run.end - run.start);
        nbytes.fold(0, u64::saturating_add)
    }

    /// Split into parts with at most this many bytes on the widest side.
    fn cut(self, nbytes: u64) -> impl Iterator<Item = Part<N>> {
        let bits = self.sides.iter().map(|side| side.dtype.bits()).max();
        let most = (nbytes * 8 / bits.unwrap_or(8) / STEP).max(1) * STEP;
        let parts = self.elements.div_ceil(most);
        (0..parts).map(move |part| {
            let elements = part * most..self.elements.min((part + 1) * most);
            let side = |side: &Side| Side {
                position: side.run(elements.clone()).1.start,
                ..side.clone()
            };
            Part {
                elements: elements.end - elements.start,
                is_last: part + 1 == parts,
                sides: self.sides.each_ref().map(side),
                ..self
            }
        })
    }

    /// Split into numbered chunks.
    fn chunks(self) -> impl Iterator<Item = Part<N>> {
        (0..)
            .zip(self.cut(CHUNK_NBYTES))
            .map(|(chunk, part)| Part { chunk, ..part })
    }
}

/// The groups as parts, in the order of the first files.
fn parts<const N: usize>(groups: &[[Tensor<'_>; N]], ids: &[TensorId]) -> Vec<Part<N>> {
    let (ids, _) = ids.as_chunks::<N>();
    let sides = |tensors: &[Tensor<'_>; N], ids: &[TensorId; N]| {
        std::array::from_fn(|side| Side::of(tensors[side], ids[side]))
    };
    let numbered = groups.iter().zip(ids).enumerate();
    let mut parts: Vec<Part<N>> = numbered
        .map(|(group, (tensors, ids))| Part {
            group,
            chunk: 0,
            is_last: true,
            elements: tensors[0].entry().shape.iter().product(),
            sides: sides(tensors, ids),
        })
        .collect();
    parts.sort_by_key(|part| (part.sides[0].file, part.sides[0].position));
    parts
}

fn reading<const N: usize>(parts: &[Part<N>], sources: &[&dyn ReadAt], options: &ReadOptions) -> Reading {
    let mut runs: Vec<FileRun> = parts.iter().flat_map(Part::runs).collect();
    runs.sort_by_key(|(file, run)| (*file, run.start));
    looking(sources, &runs, options)
}

/// Return consecutive parts, several together while they have at most this many bytes.
fn grouped<const N: usize>(
    parts: impl Iterator<Item = Part<N>>,
    most: u64,
) -> impl Iterator<Item = Vec<Part<N>>> {
    let mut parts = parts.peekable();
    iter::from_fn(move || {
        let first = parts.next()?;
        let mut nbytes = first.nbytes();
        let mut group = vec![first];
        while let Some(part) = parts.next_if(|part| nbytes + part.nbytes() <= most) {
            nbytes += part.nbytes();
            group.push(part);
        }
        Some(group)
    })
}

fn nbytes<const N: usize>(parts: &[Part<N>]) -> u64 {
    parts.iter().map(Part::nbytes).fold(0, u64::saturating_add)
}

/// The state that the threads share.
struct Work<'a, F: Fold<N>, const N: usize> {
    sources: &'a [&'a dyn ReadAt],
    reading: Reading,
    computed: &'a F,
    /// One for each group.
    results: &'a [Ordered<F::Result>],
}

impl<F: Fold<N>, const N: usize> Work<'_, F, N> {
    fn run(&self, parts: Vec<Part<N>>, watch: &dyn Watch) -> Result<(), InFile> {
        check_sizes(self.sources)?;
        let total = nbytes(&parts);
        let window_nbytes = if self.reading.waits {
            WAITING_WINDOW_NBYTES
        } else {
            WINDOW_NBYTES
        };
        let work = |task: Vec<Part<N>>, stop: StopFlag<'_>| {
            let done = nbytes(&task);
            let mut memory = Vec::new();
            let parts = task
                .into_iter()
                .flat_map(|part| part.cut(window_nbytes / to_u64(N)));
            for mut window in grouped(parts, window_nbytes) {
                window.retain(|part| !self.computed.is_done(part.group));
                self.add(&window, &mut memory, stop)?;
            }
            Ok(saturating_usize(done))
        };
        let tasks = grouped(parts.into_iter().flat_map(Part::chunks), TASK_NBYTES);
        share(self.reading, tasks, total, work, watch)
    }

    /// Read these parts into `memory`, which is reused, and add them to the results.
    fn add(&self, parts: &[Part<N>], memory: &mut Vec<Vec<u8>>, stop: StopFlag<'_>) -> Result<(), InFile> {
        let runs = parts.iter().flat_map(Part::runs);
        let pieces = runs.map(|(file, run)| Piece::run(file, run));
        let mut pieces = pieces.collect::<Result<Vec<_>, _>>()?;
        let plan = Plan::fresh(&mut pieces);
        memory.resize_with(plan.blocks().len().max(memory.len()), Vec::new);
        let blocks = memory.iter_mut().zip(plan.blocks());
        let mut blocks: Vec<&mut [u8]> = blocks
            .map(|(memory, block)| level(memory, 0, block.nbytes))
            .collect();
        let dests = blocks
            .iter_mut()
            .map(|block| Destination::Host(Dest::from(&mut **block)));
        // The other threads read other parts.
        let reading = Reading::on(1).waiting(self.reading.waits);
        execute(&plan, self.sources, &[], dests, reading, &stop)?;
        let (pieces, _) = pieces.as_chunks::<N>();
        for (part, pieces) in parts.iter().zip(pieces) {
            let bytes = pieces.map(|piece| &blocks[piece.block][piece.at..piece.at + piece.nbytes]);
            self.results[part.group].add(part.chunk, part.is_last, |result| {
                self.computed.add(part.group, result, bytes);
            });
        }
        Ok(())
    }
}
