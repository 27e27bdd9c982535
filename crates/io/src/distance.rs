//! How far apart the values of two tensors are.
//!
//! A first look finds the tensors whose bytes differ, and leaves each of them at the first byte that does; only those are
//! looked at again and folded. Both sides of a pair are read by the plans that read whatever is read, a window at a time,
//! into memory that stays in a core's cache: nothing of a tensor is kept.

mod apart;

use std::iter;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use ingot_format::{Dtype, StopFlag, to_usize};

use self::apart::{Apart, STEP};
use crate::error::{Error, InFile};
use crate::file::ReadAt;
use crate::file::{Files, Tensor, TensorId};
use crate::memory::Dest;
use crate::options::ReadOptions;
use crate::read::execute::execute;
use crate::read::gather::Destination;
use crate::read::input::level;
use crate::read::ordered::Ordered;
use crate::read::plan::{Piece, Plan};
use crate::read::show::{FileRun, check_sizes, looking};
use crate::values::{Number, has_values};
use crate::watch::{After, Watch};
use crate::workers::{Reading, share};

/// Bytes that one thread looks at before it tells how far it is, of the wider side. The sums of as many are kept.
const CHUNK_NBYTES: u64 = 2 << 20;

/// Bytes of both sides that are in memory at once: little enough to stay in a core's cache.
const WINDOW_NBYTES: u64 = 256 << 10;

/// The same where each read waits: so many that what it takes to begin one hardly matters.
const WAITING_WINDOW_NBYTES: u64 = 2 << 20;

/// How far apart two tensors are whose values are not all equal. A NaN equals every other, and an infinity one of its sign;
/// such pairs count for nothing.
///
/// `None` in all fields says that there is nothing to compare: of tensors of different shapes, and of those that differ in
/// bytes whose values are not known ([`has_values`]).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Distance {
    /// Values that are not equal: elements, and two for each of a complex dtype.
    pub different: Option<u64>,
    /// The greatest absolute difference, exact where both dtypes are of integers. NaN where a value is NaN in one tensor
    /// only.
    pub max_abs: Option<Number>,
    /// The norm of the difference over that of the first tensor; `None` where that is zero. NaN where the values that differ
    /// are not all finite.
    pub relative_l2: Option<f64>,
    /// Of the angle between the two; `None` where one is zero. NaN where the values that differ are not all finite.
    pub cosine: Option<f64>,
}

impl Distance {
    /// `None` where all values are equal.
    fn of(apart: Apart) -> Option<Distance> {
        let Apart {
            squares,
            ours,
            theirs,
            products,
            ..
        } = apart;
        let norms = ours.sqrt() * theirs.sqrt();
        let of_any = |value: f64, of: f64| (of != 0.0).then_some(value);
        (apart.different > 0).then_some(Distance {
            different: Some(apart.different),
            max_abs: Some(apart.largest),
            relative_l2: of_any(squares.sqrt() / ours.sqrt(), ours),
            // Rounding may have led out of the range; a NaN stays one.
            cosine: of_any((products / norms).clamp(-1.0, 1.0), norms),
        })
    }
}

/// How far apart the tensors of each pair are, in their order; `None` where all their values are equal.
///
/// ```
/// use ingot_io::binding::{Number, distances};
/// use ingot_io::{Archive, Dtype, OpenOptions, ReadOptions, TensorView, Unwatched, serialize_to_file};
///
/// let folder = tempfile::tempdir()?;
/// let saved = |name: &str, value: i32| {
///     let path = folder.path().join(name);
///     let bytes = value.to_le_bytes();
///     serialize_to_file([("step", &TensorView::new(Dtype::I32, vec![1], &bytes)?)], None, &path)?;
///     Ok::<_, Box<dyn std::error::Error>>(Archive::open(&path, &OpenOptions::default())?)
/// };
/// let (one, two) = (saved("one.safetensors", 3)?, saved("two.safetensors", 5)?);
/// let pairs = [(one.find("step")?, two.find("step")?), (one.find("step")?, one.find("step")?)];
/// let found = distances(&pairs, &ReadOptions::default(), &Unwatched)?;
/// assert_eq!(found[0].as_ref().and_then(|apart| apart.max_abs), Some(Number::Integer(2)));
/// assert_eq!(found[1], None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`read`](fn@crate::read).
pub fn distances(
    pairs: &[(Tensor<'_>, Tensor<'_>)],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Option<Distance>>, Error> {
    let (files, ids) = Files::of(pairs.iter().flat_map(|&(one, two)| [one, two]));
    let (ids, _) = ids.as_chunks::<2>();
    let sources = files.sources();
    let work = Work::of(pairs, ids, &sources, options);
    let found = work.distances(pairs.len(), watch);
    let mut found = found.map_err(|fault| files.explain(fault))?;
    files.check_unchanged()?;
    for (found, &(one, two)) in found.iter_mut().zip(pairs) {
        if !are_comparable(one, two) {
            *found = Some(Distance::default());
        }
    }
    Ok(found)
}

fn are_comparable(one: Tensor<'_>, two: Tensor<'_>) -> bool {
    let (one, two) = (one.entry(), two.entry());
    one.shape == two.shape && (one.dtype == two.dtype || has_values(one.dtype) && has_values(two.dtype))
}

/// As many elements of two tensors.
#[derive(Clone)]
struct Pair {
    /// Which of the pairs that are asked for.
    rank: usize,
    /// Which of the chunks of the whole pair.
    chunk: u64,
    /// Whether these are the last elements of the pair before it was cut.
    is_last: bool,
    elements: u64,
    sides: [Side; 2],
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

    /// The bytes of these of the elements.
    fn run(&self, elements: Range<u64>) -> FileRun {
        let bits = self.dtype.bits();
        let [begin, end] = [elements.start, elements.end].map(|at| self.position + at * bits / 8);
        (self.file, begin..end)
    }
}

impl Pair {
    fn runs(&self) -> [FileRun; 2] {
        self.sides.each_ref().map(|side| side.run(0..self.elements))
    }

    /// Bytes of both sides.
    fn nbytes(&self) -> u64 {
        let nbytes = self.runs().map(|(_, run)| run.end - run.start);
        nbytes[0].saturating_add(nbytes[1])
    }

    fn dtypes(&self) -> [Dtype; 2] {
        self.sides.each_ref().map(|side| side.dtype)
    }

    /// In parts, of which the wider side takes so many bytes at most. They end where a step of the sums does, so that
    /// these are the same however the tensors are read.
    fn cut(self, nbytes: u64) -> impl Iterator<Item = Pair> {
        let bits = self.dtypes().map(Dtype::bits).into_iter().max().unwrap_or(8);
        let most = (nbytes * 8 / bits / STEP).max(1) * STEP;
        let parts = self.elements.div_ceil(most);
        (0..parts).map(move |part| {
            let elements = part * most..self.elements.min((part + 1) * most);
            let side = |side: &Side| Side {
                position: side.run(elements.clone()).1.start,
                ..side.clone()
            };
            Pair {
                elements: elements.end - elements.start,
                is_last: part + 1 == parts,
                sides: self.sides.each_ref().map(side),
                ..self
            }
        })
    }

    /// In chunks, with their numbers.
    fn chunks(self) -> impl Iterator<Item = Pair> {
        let numbered = |(chunk, pair)| Pair { chunk, ..pair };
        (0..).zip(self.cut(CHUNK_NBYTES)).map(numbered)
    }
}

/// Pairs that follow one another, together where they have so many bytes at most.
fn grouped(pairs: impl Iterator<Item = Pair>, most: u64) -> impl Iterator<Item = Vec<Pair>> {
    let mut pairs = pairs.peekable();
    iter::from_fn(move || {
        let first = pairs.next()?;
        let mut nbytes = first.nbytes();
        let mut group = vec![first];
        while let Some(pair) = pairs.next_if(|pair| nbytes + pair.nbytes() <= most) {
            nbytes += pair.nbytes();
            group.push(pair);
        }
        Some(group)
    })
}

/// All that has to be read.
struct Work<'a> {
    sources: &'a [&'a dyn ReadAt],
    reading: Reading,
    /// In the order of the first files.
    pairs: Vec<Pair>,
}

impl Work<'_> {
    /// For those of the pairs that can be compared.
    fn of<'a>(
        pairs: &[(Tensor<'_>, Tensor<'_>)],
        ids: &[[TensorId; 2]],
        sources: &'a [&'a dyn ReadAt],
        options: &ReadOptions,
    ) -> Work<'a> {
        let pair =
            |(rank, (&(one, two), &[our, their])): (usize, (&(Tensor<'_>, Tensor<'_>), &[TensorId; 2]))| {
                are_comparable(one, two).then(|| Pair {
                    rank,
                    chunk: 0,
                    is_last: true,
                    elements: one.entry().shape.iter().product(),
                    sides: [Side::of(one, our), Side::of(two, their)],
                })
            };
        let mut whole: Vec<Pair> = pairs.iter().zip(ids).enumerate().filter_map(pair).collect();
        whole.sort_by_key(|pair| (pair.sides[0].file, pair.sides[0].position));
        let mut runs: Vec<FileRun> = whole.iter().flat_map(Pair::runs).collect();
        runs.sort_by_key(|(file, run)| (*file, run.start));
        let reading = looking(sources, &runs, options);
        Work {
            sources,
            reading,
            pairs: whole,
        }
    }

    fn distances(&self, pairs: usize, watch: &dyn Watch) -> Result<Vec<Option<Distance>>, InFile> {
        check_sizes(self.sources)?;
        let differing: Vec<AtomicBool> = (0..pairs).map(|_| AtomicBool::new(false)).collect();
        let differs = |pair: &Pair| differing[pair.rank].load(Relaxed);
        let compare = |pair: &Pair, [ours, theirs]: [&[u8]; 2]| {
            if ours != theirs {
                differing[pair.rank].store(true, Relaxed);
            }
        };
        for pair in &self.pairs {
            let [one, two] = pair.dtypes();
            differing[pair.rank].store(one != two, Relaxed);
        }
        self.look(|pair| !differs(pair), compare, 0, watch)?;
        let apart: Vec<_> = (0..pairs)
            .map(|_| Ordered::new(Apart::NOTHING, Apart::joined))
            .collect();
        let fold = |pair: &Pair, bytes: [&[u8]; 2]| {
            apart[pair.rank].add(pair.chunk, pair.is_last, |apart| apart.add(pair.dtypes(), bytes));
        };
        let is_folded = |pair: &Pair| differs(pair) && pair.dtypes().into_iter().all(has_values);
        self.look(is_folded, fold, 1, watch)?;
        let mut found: Vec<Option<Distance>> = apart
            .into_iter()
            .map(|apart| Distance::of(apart.finish()))
            .collect();
        for pair in self.pairs.iter().filter(|pair| differs(pair) && !is_folded(pair)) {
            found[pair.rank] = Some(Distance::default());
        }
        Ok(found)
    }

    /// Shows the bytes of both sides of those pairs that are `wanted`, as long as they are, in parts that come in their
    /// order. It is one of two looks, this one after so many; what it passes over counts as done.
    fn look(
        &self,
        wanted: impl Fn(&Pair) -> bool + Sync,
        see: impl Fn(&Pair, [&[u8]; 2]) + Sync,
        before: u64,
        watch: &dyn Watch,
    ) -> Result<(), InFile> {
        let nbytes = |pairs: &[Pair]| pairs.iter().map(Pair::nbytes).fold(0, u64::saturating_add);
        let all = nbytes(&self.pairs);
        let pairs: Vec<Pair> = self.pairs.iter().filter(|pair| wanted(pair)).cloned().collect();
        let total = nbytes(&pairs);
        let watch = After {
            watch,
            before: (before * all).saturating_add(all - total),
            total: all.saturating_mul(2),
        };
        let window_nbytes = match self.reading.waits {
            true => WAITING_WINDOW_NBYTES,
            false => WINDOW_NBYTES,
        };
        let work = |task: Vec<Pair>, stop: StopFlag<'_>| {
            let done = nbytes(&task);
            let mut memory = Vec::new();
            let parts = task.into_iter().flat_map(|pair| pair.cut(window_nbytes / 2));
            for mut window in grouped(parts, window_nbytes) {
                window.retain(&wanted);
                self.read(&window, &mut memory, &see, stop)?;
            }
            Ok(to_usize(done).unwrap_or(usize::MAX))
        };
        let tasks = grouped(pairs.into_iter().flat_map(Pair::chunks), 2 * CHUNK_NBYTES);
        share(self.reading, tasks, total, work, &watch)
    }

    /// Reads these pairs into `memory`, which is used again, and shows them.
    fn read(
        &self,
        pairs: &[Pair],
        memory: &mut Vec<Vec<u8>>,
        see: impl Fn(&Pair, [&[u8]; 2]),
        stop: StopFlag<'_>,
    ) -> Result<(), InFile> {
        let runs = pairs.iter().flat_map(Pair::runs);
        let pieces = runs.map(|(file, run)| Piece::run(file, run));
        let (plan, places) = Plan::fresh(&pieces.collect::<Result<Vec<_>, _>>()?);
        memory.resize_with(plan.blocks().len().max(memory.len()), Vec::new);
        let blocks = memory.iter_mut().zip(plan.blocks());
        let mut blocks: Vec<&mut [u8]> = blocks.map(|(memory, &nbytes)| level(memory, 0, nbytes)).collect();
        let dests = blocks
            .iter_mut()
            .map(|block| Destination::Together(Dest::from(&mut **block)));
        // The other threads are at other pairs.
        let reading = match self.reading.waits {
            true => Reading::waiting(1),
            false => Reading::on(1),
        };
        execute(&plan, self.sources, &[], dests, reading, &stop)?;
        let (places, _) = places.as_chunks::<2>();
        for (pair, places) in pairs.iter().zip(places) {
            see(
                pair,
                places.map(|place| &blocks[place.block][place.at..place.at + place.nbytes]),
            );
        }
        Ok(())
    }
}
