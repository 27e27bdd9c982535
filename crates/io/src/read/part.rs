//! Parts of tensors, read and converted on the way.

use std::ops::Range;
use std::sync::Arc;

use ingot_format::{Dtype, Index, Selection, to_u64, to_usize};

use crate::archive::Tensor;
use crate::block::Block;
use crate::convert::{convert, converts, is_float};
use crate::dest::Dest;
use crate::error::{Error, Misfit};
use crate::failure::{Failure, size};
use crate::files::Files;
use crate::payload::{Footprint, overlapping};
use crate::read::execute::{ReadOptions, Reading};
use crate::read::gather::{Cursor, PAGE_NBYTES, gather, level};
use crate::read::plan::{ALIGNMENT, OWN_BLOCK_NBYTES, SHARED_BLOCK_NBYTES, alignment, level_place};
use crate::region::Region;
use crate::source::{Memory, Source};
use crate::strided_dest::StridedDest;
use crate::watch::{After, Watch, tell_all};
use crate::workers::share;

/// What is wanted of a tensor, and as what. Proven to be possible.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    tensor: Tensor<'a>,
    selection: Selection,
    dtype: Dtype,
}

/// Bytes of a tensor that one thread takes at once. A huge page, so that no two threads find memory for one.
const CHUNK_NBYTES: usize = 2 << 20;

/// Bytes that wait between the file and the conversion or the scattering. Few, so that they never leave the cache.
const STAGE_NBYTES: usize = 64 << 10;

impl<'a> Part<'a> {
    /// What `index` takes of `tensor`; an empty index takes all. Floats are converted to `dtype`, if there is one. What
    /// is no float stays what it is.
    ///
    /// # Errors
    /// [`Error::Slice`] when the index does not fit; [`Error::Conversion`] between dtypes that are not converted.
    pub fn new(tensor: Tensor<'a>, index: &[Index], dtype: Option<Dtype>) -> Result<Part<'a>, Error> {
        let selection = tensor.selection(index)?;
        let stored = tensor.entry().dtype;
        let dtype = dtype.filter(|_| is_float(stored)).unwrap_or(stored);
        if !converts(stored, dtype) {
            return Err(Error::Conversion {
                path: tensor.archive().path().map(ToOwned::to_owned),
                tensor: tensor.entry().name.to_owned(),
                stored,
                wanted: dtype,
            });
        }
        Ok(Part {
            tensor,
            selection,
            dtype,
        })
    }

    /// The tensor.
    #[must_use]
    pub fn tensor(&self) -> &Tensor<'a> {
        &self.tensor
    }

    /// The shape of the result.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        self.selection.shape()
    }

    /// The dtype of the result.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn refuse(&self, misfit: Misfit) -> Error {
        Error::Destination {
            path: self.tensor.archive().path().map(ToOwned::to_owned),
            tensor: self.tensor.entry().name.to_owned(),
            misfit,
        }
    }

    /// Adds path and tensor to what went wrong below.
    fn explain(&self, failure: Failure) -> Error {
        self.tensor.archive().explain(failure)
    }

    /// Where its first byte is in the file.
    fn begin(&self) -> u64 {
        self.tensor.start() + Cursor::new(&self.selection).begin()
    }

    fn stored(&self) -> Dtype {
        self.tensor.entry().dtype
    }

    /// The bytes of the result.
    ///
    /// Only dtypes of whole bytes are converted; for others both widths are one.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        let stored = self.selection.nbytes();
        if self.dtype == self.stored() {
            return stored;
        }
        let elements = stored / width(self.stored());
        elements.saturating_mul(width(self.dtype))
    }

    fn len(&self) -> Result<usize, Failure> {
        size(self.nbytes())
    }

    /// Where the part lies in the mapping, if it does so as it is wanted.
    fn view(&self) -> Option<Region> {
        let is_as_stored = self.dtype == self.stored();
        if is_as_stored {
            self.tensor.view(&self.selection)
        } else {
            None
        }
    }
}

/// Bytes of an element that is converted.
fn width(dtype: Dtype) -> u64 {
    dtype.bits().div_ceil(8)
}

/// The bytes of parts of tensors, of any files, in their order, read in parallel. Views of a mapping where a part lies in
/// it as it is wanted, else in memory of their own.
///
/// # Errors
/// As [`read_tensors`](crate::read_tensors).
pub fn read_parts(
    parts: &[Part<'_>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Region>, Error> {
    let (files, _) = Files::of(parts.iter().map(Part::tensor));
    files.check_unchanged()?;
    let mut regions: Vec<Option<Region>> = parts.iter().map(Part::view).collect();
    let missing: Vec<usize> = (0..parts.len()).filter(|&rank| regions[rank].is_none()).collect();
    let views = regions.iter().flatten().map(|view| to_u64(view.len())).sum();
    let total = missing
        .iter()
        .fold(views, |sum, &rank| sum + parts[rank].nbytes());
    let watch = &After {
        watch,
        before: views,
        total,
    };
    if missing.is_empty() {
        tell_all(watch, 0)?;
    } else {
        let wanted: Vec<&Part<'_>> = missing.iter().map(|&rank| &parts[rank]).collect();
        let read = read_owned(&files, &wanted, options, watch)?;
        for (rank, region) in missing.into_iter().zip(read) {
            regions[rank] = Some(region);
        }
        files.check_unchanged()?;
    }
    Ok(regions.into_iter().flatten().collect())
}

/// Reads parts of tensors, of any files, in parallel, into memory of others.
///
/// # Errors
/// [`Error::Destination`] where a target does not fit its part, or shares memory with another target, before anything
/// is read; then as [`read_tensors`](crate::read_tensors). What has been read by then stays in the targets.
pub fn fill_parts(
    parts: &[Part<'_>],
    targets: Vec<Target<'_>>,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    for (part, target) in parts.iter().zip(&targets) {
        if let Some(misfit) = target.misfit(part) {
            return Err(part.refuse(misfit));
        }
    }
    let footprints: Vec<Footprint> = targets.iter().map(|target| target.memory.footprint()).collect();
    if let Some((one, other)) = overlapping(&footprints) {
        let other = parts[other].tensor.entry().name.to_owned();
        return Err(parts[one].refuse(Misfit::Overlap { other }));
    }
    let mut jobs = Vec::new();
    for (part, target) in parts.iter().zip(targets) {
        let place = match target.memory.into_dest() {
            Ok(dest) => Place::Together(dest),
            Err(strided) => Place::Apart(strided),
        };
        cut(part, place, &mut jobs);
    }
    let (files, _) = Files::of(parts.iter().map(Part::tensor));
    files.check_unchanged()?;
    work(jobs, options, watch)?;
    files.check_unchanged()
}

/// Memory of others for one part.
#[derive(Debug)]
pub struct Target<'d> {
    /// What its elements are.
    pub dtype: Dtype,
    /// How many there are, along each dimension.
    pub shape: Vec<u64>,
    /// Where they lie. Of as many bytes as dtype and shape say.
    pub memory: StridedDest<'d>,
}

impl Target<'_> {
    fn misfit(&self, part: &Part<'_>) -> Option<Misfit> {
        if self.dtype != part.dtype {
            return Some(Misfit::Dtype {
                expected: part.dtype,
                found: self.dtype,
            });
        }
        let fits = self.shape == part.shape() && part.len().is_ok_and(|nbytes| nbytes == self.memory.len());
        (!fits).then(|| Misfit::Shape {
            expected: part.shape().to_owned(),
            found: self.shape.clone(),
        })
    }
}

/// Reads parts into memory of their own. Small ones share, because a block costs system calls and at least a page.
fn read_owned(
    files: &Files<'_>,
    parts: &[&Part<'_>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Region>, Error> {
    let mut sizes: Vec<usize> = Vec::new();
    let mut shared = None;
    let mut places = Vec::with_capacity(parts.len());
    for part in parts {
        let nbytes = part.len().map_err(|failure| part.explain(failure))?;
        let block = match shared {
            _ if nbytes >= OWN_BLOCK_NBYTES => None,
            Some(block) if sizes[block] + ALIGNMENT + nbytes <= SHARED_BLOCK_NBYTES => Some(block),
            _ => {
                shared = Some(sizes.len());
                None
            }
        };
        let block = block.unwrap_or_else(|| {
            sizes.push(0);
            sizes.len() - 1
        });
        let at = level_place(sizes[block], part.begin(), alignment(part.tensor.entry()));
        sizes[block] = at + nbytes;
        places.push((block, at, nbytes));
    }
    let blocks = sizes.into_iter().map(Block::allocate);
    let mut blocks = blocks
        .collect::<Result<Vec<_>, _>>()
        .map_err(|failure| files.explain(failure))?;
    let mut rests: Vec<(usize, Option<Dest<'_>>)> =
        blocks.iter_mut().map(|block| (0, Some(block.dest()))).collect();
    let mut jobs = Vec::new();
    for (part, &(block, at, nbytes)) in parts.iter().zip(&places) {
        let (from, rest) = &mut rests[block];
        if let Some(dest) = rest.take() {
            let (_, dest) = dest.split_at(at - *from);
            let (dest, after) = dest.split_at(nbytes);
            (*from, *rest) = (at + nbytes, Some(after));
            cut(part, Place::Together(dest), &mut jobs);
        }
    }
    work(jobs, options, watch)?;
    let memories: Vec<_> = blocks
        .into_iter()
        .map(|block| Arc::new(Memory::from(block)))
        .collect();
    let region =
        |(block, at, nbytes): (usize, usize, usize)| Region::new(Arc::clone(&memories[block]), at, nbytes);
    Ok(places.into_iter().map(region).collect())
}

/// Where the bytes of a part go.
enum Place<'d> {
    /// To memory that lies together.
    Together(Dest<'d>),
    /// To elements here and there.
    Apart(StridedDest<'d>),
}

impl<'d> Place<'d> {
    fn len(&self) -> usize {
        match self {
            Place::Together(dest) => dest.len(),
            Place::Apart(strided) => strided.len(),
        }
    }

    fn split_at(self, at: usize) -> (Place<'d>, Place<'d>) {
        match self {
            Place::Together(dest) => {
                let (first, rest) = dest.split_at(at);
                (Place::Together(first), Place::Together(rest))
            }
            Place::Apart(strided) => {
                let (first, rest) = strided.split_at(at);
                (Place::Apart(first), Place::Apart(rest))
            }
        }
    }
}

/// What one thread does at once.
struct Job<'p, 'd> {
    part: &'p Part<'p>,
    cursor: Cursor<'p>,
    place: Place<'d>,
}

/// Cuts a part into jobs.
fn cut<'p, 'd>(part: &'p Part<'p>, place: Place<'d>, jobs: &mut Vec<Job<'p, 'd>>) {
    let mut cursor = Cursor::new(&part.selection);
    let mut rest = place;
    // So many bytes of the place that neither they nor their source are more than a chunk.
    let (stored, wanted) = (width(part.stored()), width(part.dtype));
    let elements = to_u64(CHUNK_NBYTES) / stored.max(wanted);
    let most = to_usize(elements * wanted).unwrap_or(CHUNK_NBYTES);
    while rest.len() > 0 {
        let (place, after) = rest.split_at(most);
        let taken = to_u64(place.len()) / wanted * stored;
        jobs.push(Job {
            part,
            cursor: cursor.clone(),
            place,
        });
        cursor.skip(taken);
        rest = after;
    }
}

/// Does all jobs, on several threads where that pays.
fn work(jobs: Vec<Job<'_, '_>>, options: &ReadOptions, watch: &dyn Watch) -> Result<(), Error> {
    let total = jobs.iter().map(|job| to_u64(job.place.len())).sum();
    let reading = Reading::of(total, &spans(&jobs), options);
    share(
        reading,
        jobs,
        total,
        |job| {
            let part = job.part;
            job.run().map_err(|failure| part.explain(failure))
        },
        watch,
    )
}

/// Where in their files these jobs read, those of one file that follow one another as one.
fn spans<'p>(jobs: &[Job<'p, '_>]) -> Vec<(&'p dyn Source, Range<u64>)> {
    let mut last = None;
    let mut spans: Vec<(&dyn Source, Range<u64>)> = Vec::new();
    for job in jobs {
        let (archive, begin) = (job.part.tensor.archive(), job.begin());
        match spans.last_mut() {
            Some((_, span)) if last.is_some_and(|last| std::ptr::eq(last, archive)) => {
                *span = span.start.min(begin)..span.end.max(begin);
            }
            _ => spans.push((archive.source(), begin..begin)),
        }
        last = Some(archive);
    }
    spans
}

impl Job<'_, '_> {
    /// Where its first byte is in the file.
    fn begin(&self) -> u64 {
        self.part.tensor.start() + self.cursor.begin()
    }

    /// Gives the bytes that it filled.
    fn run(self) -> Result<usize, Failure> {
        let nbytes = self.place.len();
        let Job {
            part,
            mut cursor,
            mut place,
        } = self;
        let (source, start) = (part.tensor.archive().source(), part.tensor.start());
        let (from, to) = (part.stored(), part.dtype);
        if let Place::Together(dest) = &mut place {
            dest.populate();
            if from == to {
                dest.fill(|bytes| gather(source, start, &mut cursor, bytes))?;
                return Ok(nbytes);
            }
        }
        let (stored, wanted) = (size(width(from))?, size(width(to))?);
        let most = STAGE_NBYTES / stored.max(wanted);
        let mut stage = vec![0; most * stored + PAGE_NBYTES];
        let mut converted = vec![0; most * wanted];
        while place.len() > 0 {
            let (now, later) = place.split_at(most * wanted);
            let stage = level(&mut stage, start + cursor.begin(), now.len() / wanted * stored);
            gather(source, start, &mut cursor, stage)?;
            match now {
                Place::Together(mut dest) => dest.fill(|bytes| convert(from, to, stage, bytes)),
                Place::Apart(mut strided) if from == to => strided.fill(stage),
                Place::Apart(mut strided) => {
                    let converted = &mut converted[..strided.len()];
                    convert(from, to, stage, converted);
                    strided.fill(converted);
                }
            }
            place = later;
        }
        Ok(nbytes)
    }
}
