//! Reading tensors and parts of them, of one file or of many.

use std::borrow::Borrow;
use std::slice;
use std::sync::Arc;

use ingot_format::{Index, Strides, to_u64};

use super::execute::{execute, reading};
use super::gather::Destination;
use super::home::{Found, Home, Pools};
use super::input::Witness;
use super::part::{Part, Target};
use super::plan::{Piece, Plan};
use super::show::{FileRun, joined, nbytes, show};
use crate::error::{Error, Failure, InFile, Misfit, size};
use crate::file::{Archive, Files, Tensor, TensorId};
use crate::memory::{Footprint, Region, overlapping};
use crate::options::ReadOptions;
use crate::watch::{After, Unwatched, Watch, tell_all};
use crate::workers::Reading;

/// The bytes of parts of tensors, of any files; the regions come in their order.
///
/// Where a file is mapped and a part lies in it as it is wanted, these are views of the mapping, and nothing is read.
/// Everything else is read at once, from all files in parallel, into memory of its own.
///
/// The parts are gone through more than once, so that those of many tensors need not be kept: a list of 20,000 takes
/// longer to write than it takes to find their views.
///
/// ```
/// use ingot_format::Index;
/// use ingot_io::{
///     Archive, Dtype, OpenOptions, Part, ReadOptions, TensorView, Unwatched, read, serialize_to_file,
/// };
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let values: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
/// serialize_to_file([("weight", &TensorView::new(Dtype::F32, vec![2, 2], &values)?)], None, &path)?;
///
/// let archive = Archive::open(&path, &OpenOptions::default())?;
/// let weight = archive.find("weight")?;
/// let row = Part::new(weight, &[Index::At(1)], None)?;
/// let half = Part::new(weight, &[], Some(Dtype::BF16))?;
/// let found = read([&row, &half], &ReadOptions::default(), &Unwatched)?;
/// assert_eq!(found[0].to_vec(), &values[8..]);
/// assert_eq!((half.shape(), found[1].len()), (&[2, 2][..], 8));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Read`] and [`Error::Changed`] when the bytes cannot be had, [`Error::OutOfMemory`], [`Error::Interrupted`].
pub fn read<'a, P: Borrow<Part<'a>>>(
    parts: impl IntoIterator<Item = P, IntoIter: Clone>,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Region>, Error> {
    let parts = parts.into_iter();
    let found = read_to(parts.clone(), &[], options, watch)?;
    let found = parts.zip(found.into_iter().filter_map(Found::host));
    Ok(found
        .map(|(part, region)| region.of(part.borrow().dtype()))
        .collect())
}

/// The same where each part has a home, or all have that of the host where `homes` is empty: those of the host are views or
/// in memory of ours, those of a device are read onto it, whatever their file is. All are read at once. What the callers queue on their streams from then on finds them there.
///
/// # Errors
/// As [`read()`]; [`Error::Device`] and [`Error::Refused`]. Then nothing is under way on any device.
pub fn read_to<'a, P: Borrow<Part<'a>>>(
    parts: impl IntoIterator<Item = P, IntoIter: Clone>,
    homes: &[Home<'_>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Found>, Error> {
    let parts = parts.into_iter();
    let (files, ids) = Files::of(parts.clone().map(|part| *part.borrow().tensor()));
    // Before anything is handed out, because touching what is no longer there is fatal.
    files.check_unchanged()?;
    let home = |rank: usize| homes.get(rank).copied().unwrap_or_default();
    let view = |(rank, part): (usize, P)| match home(rank) {
        Home::Host => part.borrow().view().map(Found::Host),
        Home::Device(_) => None,
    };
    let mut found: Vec<Option<Found>> = parts.clone().enumerate().map(view).collect();
    let views = found.iter().flatten().map(|view| to_u64(view.len())).sum();
    let missing: Vec<(usize, P)> = parts
        .enumerate()
        .filter(|(rank, _)| found[*rank].is_none())
        .collect();
    let total = missing.iter().fold(views, |sum: u64, (_, part)| {
        sum.saturating_add(part.borrow().nbytes())
    });
    if missing.is_empty() {
        tell_all(watch, total)?;
    } else {
        let watch = &After {
            watch,
            before: views,
            total,
        };
        let wanted = missing
            .iter()
            .map(|(rank, part)| (part.borrow(), ids[*rank].file));
        let homes: Vec<Home<'_>> = match homes {
            [] => Vec::new(),
            _ => missing.iter().map(|(rank, _)| home(*rank)).collect(),
        };
        let read = read_owned(&files, &[], wanted, &homes, options, watch)?;
        for ((rank, _), one) in missing.into_iter().zip(read) {
            found[rank] = Some(one);
        }
        files.check_unchanged()?;
    }
    Ok(found.into_iter().flatten().collect())
}

/// The bytes of these parts, each with the number of its file, in memory of their own: that of `homes`, one for each, or all
/// on the host. There may be a witness for each file.
pub(crate) fn read_owned<'p, 'a: 'p>(
    files: &Files<'_>,
    witnesses: &[&dyn Witness],
    parts: impl Iterator<Item = (&'p Part<'a>, usize)> + Clone,
    homes: &[Home<'_>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Found>, Error> {
    let pools = Pools::of(homes);
    let pieces = pieces(files, parts.clone())?;
    let (plan, places, pool_of) = pools.plan(&pieces);
    let allocated = pools.allocate(&plan, &places, &pool_of, parts.map(|(part, _)| part));
    let mut blocks = allocated.map_err(|failure| files.explain(failure))?;
    let sources = files.sources();
    let reading = reading(&plan, &sources, options).within(pools.chunk_nbytes());
    let explain = |fault| files.explain(Failure::from(fault));
    // Dropped before the blocks are.
    let copying = pools.begin().map_err(explain)?;
    let outcome = execute(
        &plan,
        &sources,
        witnesses,
        pools.dests(&mut blocks, &pool_of),
        reading,
        watch,
    );
    outcome.map_err(|fault| files.explain(fault))?;
    copying.end().map_err(explain)?;
    if pools.is_integrated() {
        // What the system read ahead of a thread, and keeps in groups of pages, more than a thread gave up.
        for (file, span) in plan.stretches() {
            sources[file].forget(span);
        }
    }
    Ok(pools.found(blocks, &places, &pool_of))
}

/// Reads parts of tensors, of any files, in parallel, into memory of others.
///
/// # Errors
/// [`Error::Destination`] where a target does not fit its part, or shares memory with another target, before anything
/// is read; then as [`read`]. What has been read by then stays in the targets.
pub fn fill(
    parts: &[Part<'_>],
    targets: Vec<Target<'_>>,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    fill_within(parts, targets, options, watch, |_, _, read| read(&[]))
}

/// Fills the targets as [`fill`] does, by the closure that `within` receives with the files and the tensors. The closure
/// takes a witness for each file, or none.
pub(crate) fn fill_within(
    parts: &[Part<'_>],
    targets: Vec<Target<'_>>,
    options: &ReadOptions,
    watch: &dyn Watch,
    within: impl FnOnce(
        &Files<'_>,
        &[TensorId],
        &mut dyn FnMut(&[&dyn Witness]) -> Result<(), Error>,
    ) -> Result<(), Error>,
) -> Result<(), Error> {
    for (part, target) in parts.iter().zip(&targets) {
        if let Some(misfit) = target.misfit(part) {
            return Err(part.refuse(misfit));
        }
    }
    let footprints: Vec<Footprint> = targets.iter().map(|target| target.memory.footprint()).collect();
    if let Some((one, other)) = overlapping(&footprints) {
        let other = parts[other].tensor().entry().name.to_owned();
        return Err(parts[one].refuse(Misfit::Overlap { other }));
    }
    let (files, ids) = Files::of(parts.iter().map(|part| *part.tensor()));
    let pieces = pieces(&files, parts.iter().zip(ids.iter().map(|id| id.file)))?;
    let (plan, sources) = (Plan::into_each(pieces), files.sources());
    let dests = targets.into_iter().map(|target| match target.memory.into_dest() {
        Ok(dest) => Destination::Together(dest),
        Err(strided) => Destination::Apart(Box::new(strided)),
    });
    files.check_unchanged()?;
    let reading = reading(&plan, &sources, options);
    // Taken by the one call that reads.
    let mut dests = Some(dests);
    within(&files, &ids, &mut |witnesses| {
        let dests = dests.take().into_iter().flatten();
        execute(&plan, &sources, witnesses, dests, reading, watch).map_err(|fault| files.explain(fault))?;
        files.check_unchanged()
    })
}

/// What is to be read for these parts, each given with the number of its file.
fn pieces<'p, 'a: 'p>(
    files: &Files<'_>,
    parts: impl Iterator<Item = (&'p Part<'a>, usize)>,
) -> Result<Vec<Piece<'p>>, Error> {
    // Not collected: a vector of results grows step by step, which takes longer than all else here.
    let mut pieces = Vec::with_capacity(parts.size_hint().0);
    for (part, file) in parts {
        let explain = |failure| {
            let file = Some(file);
            files.explain(InFile { file, failure })
        };
        pieces.push(part.piece(file).map_err(explain)?);
    }
    Ok(pieces)
}

/// Brings the bytes of tensors into the system's cache, and keeps none: what is read or touched next is there. Gives
/// their number.
///
/// Reading is what brings pages into the cache on every file system, and it ends when they are there; advice to the system
/// does neither.
///
/// # Errors
/// As [`read`].
pub fn warm_tensors(tensors: &[Tensor<'_>], options: &ReadOptions, watch: &dyn Watch) -> Result<u64, Error> {
    let (files, mut ids) = Files::of(tensors.iter().copied());
    ids.sort_unstable();
    ids.dedup();
    let (runs, sources) = (runs(&files, &ids), files.sources());
    // As if it were in the cache: filling that is what takes time, and more threads than cores only get in each other's
    // way.
    let spans: Vec<_> = sources.iter().map(|&source| (source, 0..0)).collect();
    let reading = Reading::of(nbytes(&runs), &spans, options);
    show(&sources, &[], &runs, reading, watch).map_err(|fault| files.explain(fault))?;
    files.check_unchanged()?;
    Ok(nbytes(&runs))
}

/// As [`warm_tensors`] for those whose file is mapped. Others have memory of their own, and warming it would be reading
/// it twice.
pub(crate) fn warm_behind_mappings(
    tensors: &[Tensor<'_>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let is_mapped = |tensor: &&Tensor<'_>| tensor.archive().source().memory().is_some();
    let mapped: Vec<Tensor<'_>> = tensors.iter().filter(is_mapped).copied().collect();
    if mapped.is_empty() {
        return Ok(());
    }
    warm_tensors(&mapped, options, watch).map(drop)
}

/// Where the bytes of these tensors are, which come in their order: neighbours as one.
fn runs(files: &Files<'_>, tensors: &[TensorId]) -> Vec<FileRun> {
    let headers = files.headers();
    let run = |&TensorId { file, number }: &TensorId| {
        let (start, entry) = (headers[file].data_start(), headers[file].entry(number)?);
        Some((file, start + entry.begin..start + entry.end))
    };
    joined(tensors.iter().filter_map(run))
}

impl Archive {
    /// The bytes of the tensor `name`.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`], and what [`Tensor::read`] says.
    pub fn read(&self, name: &str) -> Result<Region, Error> {
        self.find(name)?.read(&ReadOptions::default(), &Unwatched)
    }
}

impl Tensor<'_> {
    /// Its bytes: a view where the file is mapped, else read into memory of their own.
    ///
    /// # Errors
    /// As [`read`].
    pub fn read(&self, options: &ReadOptions, watch: &dyn Watch) -> Result<Region, Error> {
        // Most reads of one tensor are these, and there may be many.
        if self.archive().source().memory().is_some() {
            self.archive().check_unchanged()?;
            if let Some(view) = self.mapped() {
                return Ok(view.of(self.entry().dtype));
            }
        }
        on_host(&Part::from(*self), options, watch)
    }

    /// What `index` takes of it as a view of the mapping. `None` where the file is not mapped, or the elements are not
    /// aligned or fill no bytes; where `index` has a list, or takes nothing: those are for [`Tensor::select`].
    ///
    /// # Errors
    /// [`Error::Slice`] when the index does not fit, and [`Error::Changed`].
    #[doc(hidden)]
    pub fn strided(&self, index: &[Index]) -> Result<Option<StridedView>, Error> {
        let entry = self.entry();
        let width = entry.dtype.bits() / 8;
        let Some(whole) = self.mapped().filter(|_| entry.dtype.bits().is_multiple_of(8)) else {
            return Ok(None);
        };
        let taken = Strides::new(entry.shape, index).map_err(|fault| self.misindexed(fault))?;
        let Some(taken) = taken else {
            return Ok(None);
        };
        // Before anything is handed out, because touching what is no longer there is fatal.
        self.archive().check_unchanged()?;
        let (begin, end) = (size(taken.begin * width)?, size((taken.end + 1) * width)?);
        Ok(Some(StridedView {
            region: Region::new(Arc::clone(whole.memory()), whole.at() + begin, end - begin),
            shape: taken.shape,
            strides: taken.strides,
        }))
    }

    /// What `index` takes of it: its shape, and its bytes in C order. A view of the mapping where the bytes lie
    /// together in it and the index has no list, else a copy; only the bytes needed are read, or little more.
    ///
    /// # Errors
    /// [`Error::Slice`] when the index does not fit, and what [`read`] says.
    pub fn select(&self, index: &[Index], watch: &dyn Watch) -> Result<(Vec<u64>, Region), Error> {
        let part = Part::new(*self, index, None)?;
        let region = on_host(&part, &ReadOptions::default(), watch)?;
        Ok((part.shape().to_owned(), region))
    }
}

/// Where elements of a tensor lie in a mapping.
#[derive(Clone, Debug)]
pub struct StridedView {
    /// From the first of them to the last.
    pub region: Region,
    /// How many there are along each dimension.
    pub shape: Vec<u64>,
    /// How many elements of the tensor from one to the next, along each dimension.
    pub strides: Vec<u64>,
}

/// The bytes of one part on the host.
fn on_host(part: &Part<'_>, options: &ReadOptions, watch: &dyn Watch) -> Result<Region, Error> {
    let read = read([part], options, watch);
    // One part gives one region.
    exactly(part, read.map(|mut regions| regions.swap_remove(0)))
}

/// The bytes of one part.
pub(super) fn only(
    part: &Part<'_>,
    home: Home<'_>,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Found, Error> {
    let read = read_to(slice::from_ref(part), &[home], options, watch);
    // One part gives one.
    exactly(part, read.map(|mut found| found.swap_remove(0)))
}

/// What reading one part gave.
fn exactly<T>(part: &Part<'_>, read: Result<T, Error>) -> Result<T, Error> {
    read.map_err(|error| match error {
        // Its block may have a little more.
        Error::OutOfMemory { path, source, .. } => Error::OutOfMemory {
            path,
            nbytes: part.nbytes(),
            source,
        },
        other => other,
    })
}
