//! The only reader of tensors: whole tensors and parts of them, converted or not, into fresh memory or the caller's; and of
//! bytes that are hashed or folded and then discarded.
//!
//! ```text
//! Job ─piece─► Piece ─Plan─► Chunk ─join─► task ─gather, input─► Buffer
//! run of bytes ─show──────► Chunk ─join─► task ─gather, input─► Witness
//! ```
//!
//! - A [`Job`] names a tensor or a part of it, a dtype, and a device or the host. A job is proven to be possible.
//! - A [`plan::Piece`] is the same in numbers: bytes of a file, a place in a block of memory, a conversion. Nothing below
//!   knows of tensors.
//! - A [`plan::Plan`] places each piece in a block. Pieces that are neighbours in the file and in memory become one.
//! - [`chunk`] cuts the pieces into chunks of a few MiB, in the order of the files, and joins those that follow one another
//!   into tasks. In [`run`] threads share the tasks while the caller watches.
//! - [`gather`] reads a task. It takes the next thousand runs of its chunks, and [`input`] reads them straight to their memory,
//!   or into a stage that stays in a core's cache, from which they are converted or scattered. Chunks for a device go through
//!   a pinned slot ([`relay`]).
//! - A [`Buffer`] is the result, on the host or on a device.
//!
//! Column slices of a file in the page cache are read by rows of blocks, not by runs: [`input::Input::read_rows`] copies the
//! blocks of a row from the mapping of the file, or reads the row in stretches of 256 KiB and copies the blocks from there.
//!
//! [`input`] reads all other runs that are close together at once, which depends on the source. A source behind a network
//! returns one long read, over gaps of 128 KiB. From a file, neighbours with less than a page between them are one `preadv`,
//! and runs of a few bytes are read with the bytes between them and copied.
//!
//! A new kind of memory is a new [`buffer::Destination`], and code that has to see all bytes on their way is an
//! [`input::Witness`]: neither is another way of reading.

pub(crate) mod buffer;
mod chunk;
mod gather;
pub(crate) mod input;
pub(crate) mod job;
pub(crate) mod plan;
pub(crate) mod prefetch;
mod relay;
pub(crate) mod run;
#[cfg(test)]
mod tests;

use std::borrow::Borrow;
use std::ptr;

use ingot_format::{Index, Strides, to_u64};

use self::buffer::{Buffer, Copies, Destination, allocate};
use self::input::Witness;
use self::job::{Job, Target};
use self::plan::{FileRun, Piece, Plan, joined};
use self::run::{execute, nbytes, reading, show};
use crate::device::{DeviceRegion, Onto};
use crate::error::{Error, Failure, InFile, Misfit};
use crate::file::{Archive, Files, Tensor, TensorId};
use crate::memory::{Footprint, Region, alignment, overlapping};
use crate::options::ReadOptions;
use crate::pages::HUGE_PAGE_NBYTES;
use crate::watch::{After, Unwatched, Watch};
use crate::workers::Reading;

/// Read jobs of any files to the host, and return a region for each.
///
/// A job whose result is in the mapping of its file, unchanged, returns a view of the mapping and reads nothing. All others
/// are read at once, from all files in parallel, into memory of their own.
///
/// ```
/// use ingot_format::Index;
/// use ingot_io::{
///     Archive, Dtype, Job, OpenOptions, ReadOptions, TensorView, Unwatched, read, serialize_to_file,
/// };
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let values: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
/// serialize_to_file([("weight", &TensorView::new(Dtype::F32, vec![2, 2], &values)?)], None, &path)?;
///
/// let archive = Archive::open(&path, &OpenOptions::default())?;
/// let weight = archive.find("weight")?;
/// let row = Job::new(weight, &[Index::At(1)], None)?;
/// let half = Job::new(weight, &[], Some(Dtype::BF16))?;
/// let regions = read([&row, &half], &ReadOptions::default(), &Unwatched)?;
/// assert_eq!(regions[0].to_vec(), &values[8..]);
/// assert_eq!((half.shape(), regions[1].len()), (&[2, 2][..], 8));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Failure::Read`] and [`Failure::Changed`] if the bytes cannot be read, [`Failure::OutOfMemory`],
/// [`Failure::Interrupted`].
pub fn read<'a, J: Borrow<Job<'a>>>(
    jobs: impl IntoIterator<Item = J>,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Region>, Error> {
    let buffers = read_to(jobs, options, watch)?;
    Ok(buffers.into_iter().filter_map(Buffer::host).collect())
}

/// Read jobs of any files, each to the host or to its device, and return a buffer for each. Work that the callers queue on their
/// streams afterwards runs after the copies.
///
/// # Errors
/// As [`read()`]; [`Failure::Device`] and [`Failure::Refused`]. No copy to a device is running then.
pub fn read_to<'a, J: Borrow<Job<'a>>>(
    jobs: impl IntoIterator<Item = J>,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Buffer>, Error> {
    let jobs = jobs.into_iter();
    let mut files = Files::default();
    let mut buffers = Vec::with_capacity(jobs.size_hint().0);
    let mut missing = Vec::new();
    let (mut before, mut total) = (0, 0_u64);
    for job in jobs {
        let file = files.number(job.borrow().tensor().archive());
        let view = job.borrow().view();
        if let Some(view) = &view {
            before += to_u64(view.len());
        } else {
            total = total.saturating_add(job.borrow().nbytes());
            missing.push((buffers.len(), file, job));
        }
        buffers.push(view.map(Buffer::Host));
    }
    total = total.saturating_add(before);
    // Checked before a view is returned: touching bytes that no longer exist kills the process.
    files.check_unchanged()?;
    if missing.is_empty() {
        watch.progressed(total, total);
        if watch.interrupted() {
            return Err(Failure::Interrupted.into());
        }
    } else {
        let watch = &After { watch, before, total };
        let wanted = missing.iter().map(|(_, file, job)| (*file, job.borrow()));
        let wanted: Vec<(usize, &Job<'_>)> = wanted.collect();
        let read = read_owned(&files, &[], &wanted, options, watch)?;
        for ((rank, ..), buffer) in missing.iter().zip(read) {
            buffers[*rank] = Some(buffer);
        }
        files.check_unchanged()?;
    }
    Ok(buffers.into_iter().flatten().collect())
}

/// Read jobs, each with the number of its file, into memory of their own, even if the file is mapped. There may be a witness
/// for each file.
pub(crate) fn read_owned(
    files: &Files<'_>,
    witnesses: &[&dyn Witness],
    jobs: &[(usize, &Job<'_>)],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Buffer>, Error> {
    let mut pieces = pieces(files, jobs.iter().copied())?;
    let devices = assign_pools(&mut pieces, jobs);
    let plan = Plan::fresh(&mut pieces);
    let mut blocks = allocate(&plan, jobs, &devices).map_err(|failure| files.explain(failure))?;
    let dests = blocks.iter_mut().enumerate();
    let dests = dests.map(|(number, block)| block.dest(number));
    read_plan(&plan, files, witnesses, &devices, dests, options, watch)?;
    if devices.iter().any(|onto| onto.at.device().is_integrated()) {
        // The system reads ahead, and drops a group of pages only as a whole: at most a huge page, also across the border of
        // two tensors.
        let (group, sources) = (to_u64(HUGE_PAGE_NBYTES), files.sources());
        for (file, span) in plan.stretches() {
            let end = span.end.next_multiple_of(group);
            sources[file].forget(span.start - span.start % group..end);
        }
    }
    let blocks: Vec<Buffer> = blocks.into_iter().map(Buffer::from).collect();
    let buffer = |(piece, (_, job)): (&Piece<'_>, &(usize, &Job<'_>))| {
        blocks[piece.block].part(piece.at, piece.nbytes, job.dtype())
    };
    Ok(pieces.iter().zip(jobs).map(buffer).collect())
}

/// Number the pool of each job's piece: 0 for the host, then the devices in the order in which jobs name them. Return the
/// devices.
fn assign_pools<'j>(pieces: &mut [Piece<'_>], jobs: &[(usize, &'j Job<'_>)]) -> Vec<&'j Onto> {
    let mut devices: Vec<&Onto> = Vec::new();
    for (piece, (_, job)) in pieces.iter_mut().zip(jobs) {
        if let Some(onto) = job.device() {
            let known = devices.iter().position(|known| ptr::eq(*known, onto));
            piece.pool = 1 + known.unwrap_or_else(|| {
                devices.push(onto);
                devices.len() - 1
            });
        }
    }
    devices
}

/// Read jobs of any files, in parallel, into the caller's memory.
///
/// # Errors
/// [`Failure::Destination`] if a target does not fit its job, or shares memory with another target; nothing has been read
/// then. Otherwise as [`read()`]; bytes that were read until then stay in the targets.
pub fn fill(
    jobs: &[Job<'_>],
    targets: Vec<Target<'_>>,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    check_targets(jobs, &targets)?;
    let (files, ids) = Files::of(jobs.iter().map(|job| *job.tensor()));
    fill_checked(&files, &ids, jobs, targets, &[], options, watch)
}

/// Check that each target fits its job, and that no two targets share memory.
pub(crate) fn check_targets(jobs: &[Job<'_>], targets: &[Target<'_>]) -> Result<(), Error> {
    for (job, target) in jobs.iter().zip(targets) {
        if let Some(misfit) = target.misfit(job) {
            return Err(job.refuse(misfit));
        }
    }
    let footprints: Vec<Footprint> = targets.iter().map(|target| target.memory.footprint()).collect();
    let Some((one, other)) = overlapping(&footprints) else {
        return Ok(());
    };
    let other = jobs[other].tensor().entry().name.to_owned();
    Err(jobs[one].refuse(Misfit::Overlap { other }))
}

/// Fill targets that [`check_targets`] accepts, with the tensors `ids` of `files`. There may be a witness for each file.
pub(crate) fn fill_checked(
    files: &Files<'_>,
    ids: &[TensorId],
    jobs: &[Job<'_>],
    targets: Vec<Target<'_>>,
    witnesses: &[&dyn Witness],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let plan = Plan::into_each(pieces(files, ids.iter().map(|id| id.file).zip(jobs))?);
    let dests = targets.into_iter().map(|target| Destination::Host(target.memory));
    files.check_unchanged()?;
    read_plan(&plan, files, witnesses, &[], dests, options, watch)?;
    files.check_unchanged()
}

/// Read jobs of any files, in parallel, into the caller's memory on the device of `onto`: one region for each job. What the
/// caller queues on its stream afterwards finds the bytes there.
///
/// # Errors
/// [`Failure::Destination`] if a region has another size than its job. Otherwise as [`read_to`]; bytes that were read until
/// then stay in the regions.
pub fn fill_on(
    onto: &Onto,
    jobs: &[Job<'_>],
    regions: &mut [DeviceRegion],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    for (job, region) in jobs.iter().zip(regions.iter()) {
        let found = to_u64(region.len());
        if found != job.nbytes() {
            let expected = job.shape().to_owned();
            let found = vec![found];
            return Err(job.refuse(Misfit::Shape { expected, found }));
        }
    }
    let (files, ids) = Files::of(jobs.iter().map(|job| *job.tensor()));
    let plan = Plan::into_each(pieces(&files, ids.iter().map(|id| id.file).zip(jobs))?);
    files.check_unchanged()?;
    let refused = onto.at.refuse_capture().map_err(Failure::from);
    refused.map_err(|failure| files.explain(failure))?;
    let dests = regions.iter_mut().enumerate();
    let dests = dests.map(|(number, region)| Destination::Device(Box::new(onto.dest(region, number))));
    read_plan(&plan, &files, &[], &[onto], dests, options, watch)?;
    files.check_unchanged()
}

/// Read the pieces of `plan` into `dests`, which has the memory of each block. When this returns, also with an error, the copies
/// to `devices` have ended or their memory is safe to free.
fn read_plan<'d>(
    plan: &Plan<'_>,
    files: &Files<'_>,
    witnesses: &[&dyn Witness],
    devices: &[&Onto],
    dests: impl IntoIterator<Item = Destination<'d>>,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let sources = files.sources();
    let reading = reading(plan, &sources, options).onto(devices.iter().map(|onto| onto.at.device()));
    let read = || -> Result<(), InFile> {
        let copies = Copies::begin(devices).map_err(Failure::from)?;
        execute(plan, &sources, witnesses, dests, reading, watch)?;
        Ok(copies.end().map_err(Failure::from)?)
    };
    read().map_err(|fault| files.explain(fault))
}

/// The pieces of these jobs, each given with the number of its file.
fn pieces<'j, 'a: 'j>(
    files: &Files<'_>,
    jobs: impl Iterator<Item = (usize, &'j Job<'a>)>,
) -> Result<Vec<Piece<'j>>, Error> {
    // A loop and not `collect` into a `Result`, which would reallocate the vector as it grows. That takes most of the time.
    let mut pieces = Vec::with_capacity(jobs.size_hint().0);
    for (file, job) in jobs {
        let explain = |failure| {
            let file = Some(file);
            files.explain(InFile { file, failure })
        };
        pieces.push(job.piece(file).map_err(explain)?);
    }
    Ok(pieces)
}

/// Read tensors into the system's page cache and keep nothing, so that later reads find them there. Return the number of
/// bytes.
///
/// Only reading brings pages into the cache on every file system and ends when they are there; advice to the system does
/// neither.
///
/// # Errors
/// As [`read()`].
pub fn warm_tensors(tensors: &[Tensor<'_>], options: &ReadOptions, watch: &dyn Watch) -> Result<u64, Error> {
    let (files, mut ids) = Files::of(tensors.iter().copied());
    ids.sort_unstable();
    ids.dedup();
    let (runs, sources) = (runs(&files, &ids), files.sources());
    // Threads as for cached bytes: filling the cache takes most of the time, and more threads than cores only slow it down.
    let spans: Vec<_> = sources.iter().map(|&source| (source, 0..0)).collect();
    let reading = Reading::of(nbytes(&runs), &spans, options);
    show(&sources, &[], &runs, reading, watch).map_err(|fault| files.explain(fault))?;
    files.check_unchanged()?;
    Ok(nbytes(&runs))
}

/// Read the tensors whose files are mapped into the page cache. Tensors of other files are read into private memory anyway.
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

/// The bytes of these tensors, which come in their order. Neighbours are one run.
fn runs(files: &Files<'_>, tensors: &[TensorId]) -> Vec<FileRun> {
    let headers = files.headers();
    let run = |&TensorId { file, number }: &TensorId| {
        let (start, entry) = (headers[file].data_start(), headers[file].entry(number)?);
        Some((file, start + entry.begin..start + entry.end))
    };
    joined(tensors.iter().filter_map(run))
}

impl Archive {
    /// Return the bytes of the tensor `name`.
    ///
    /// # Errors
    /// [`Failure::UnknownTensor`], and as [`Tensor::read`].
    pub fn read(&self, name: &str) -> Result<Region, Error> {
        self.find(name)?.read(&ReadOptions::default(), &Unwatched)
    }
}

impl Tensor<'_> {
    /// Return its bytes: a view if the file is mapped, else read into memory of their own.
    ///
    /// # Errors
    /// As [`read()`].
    pub fn read(&self, options: &ReadOptions, watch: &dyn Watch) -> Result<Region, Error> {
        // A fast path: most reads of a single tensor return a view of a mapping.
        if self.archive().source().memory().is_some() {
            self.archive().check_unchanged()?;
            if let Some(view) = self.mapped() {
                return Ok(view.of(self.entry().dtype));
            }
        }
        on_host(&Job::from(*self), options, watch)
    }

    /// Return what `index` selects as a view of the mapping. `None` if the file is not mapped, if the elements are not
    /// aligned or fill no bytes, and if `index` has a list or selects nothing: [`Tensor::select`] handles those.
    ///
    /// # Errors
    /// [`Failure::Slice`] if the index does not fit, and [`Failure::Changed`].
    #[doc(hidden)]
    pub fn strided(&self, index: &[Index]) -> Result<Option<Part>, Error> {
        let entry = self.entry();
        let width = entry.dtype.bits() / 8;
        if self.archive().source().memory().is_none() || !entry.dtype.bits().is_multiple_of(8) {
            return Ok(None);
        }
        let taken = Strides::of(entry.shape, self.strides(), index);
        let Some(taken) = taken.map_err(|fault| self.misindexed(fault))? else {
            return Ok(None);
        };
        let (begin, end) = (taken.begin * width, (taken.end + 1) * width);
        let view = self.archive().view(entry.begin + begin, entry.begin + end);
        let Some(region) = view.filter(|view| view.aligned_to(alignment(entry.dtype))) else {
            return Ok(None);
        };
        // Checked before the view is returned: touching bytes that no longer exist kills the process.
        self.archive().check_unchanged()?;
        Ok(Some(Part {
            buffer: Buffer::Host(region),
            shape: taken.shape,
            strides: Some(taken.strides),
        }))
    }

    /// Return the shape and the bytes of what `index` selects, in C order. The bytes are a view of the mapping if they
    /// are contiguous there and the index has no list, and otherwise a copy. Few bytes besides the selected ones are
    /// read.
    ///
    /// # Errors
    /// [`Failure::Slice`] if the index does not fit, and as [`read()`].
    pub fn select(&self, index: &[Index], watch: &dyn Watch) -> Result<(Vec<u64>, Region), Error> {
        let job = Job::new(*self, index, None)?;
        let region = on_host(&job, &ReadOptions::default(), watch)?;
        Ok((job.shape().to_owned(), region))
    }
}

/// A tensor or a part of it, which was read or is a view of a mapping.
#[derive(Clone, Debug)]
pub struct Part {
    /// The bytes from the first element to the last.
    pub buffer: Buffer,
    /// The number of elements along each dimension.
    pub shape: Vec<u64>,
    /// The distance between neighbours along each dimension, in elements. `None` if they are contiguous in C order.
    pub strides: Option<Vec<u64>>,
}

/// The region of one job on the host.
fn on_host(job: &Job<'_>, options: &ReadOptions, watch: &dyn Watch) -> Result<Region, Error> {
    // One job has one region.
    about(job, read([job], options, watch)).map(|mut regions| regions.swap_remove(0))
}

/// The result of reading one job. Its block may be a little larger than the job, which an error about memory names.
fn about<T>(job: &Job<'_>, read: Result<T, Error>) -> Result<T, Error> {
    read.map_err(|error| error.of_nbytes(job.nbytes()))
}
