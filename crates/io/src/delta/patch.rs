//! An open patch, and the new file that it makes.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::path::{Component, Path};
use std::thread::available_parallelism;

use ingot_format::{
    DELTA_KEY, DeltaError, DeltaRecord, Dtype, Entry, Header, Limits, Quoted, StopFlag, to_u64,
};

use super::changes::{Codec, width};
use super::gaps::{Gaps, put};
use super::numbers::{Bytes, Numbers, in_memory};
use super::version::{Found, covers_data, id, version_id};
use crate::checkpoint::Checkpoint;
use crate::edit::held::Guard;
use crate::error::{Error, Failure, PatchFault, size};
use crate::file::{Archive, Tensor};
use crate::options::{ReadOptions, SaveOptions};
use crate::payload::{Gather, Payload};
use crate::save::{Pieces, save_pieces};
use crate::verify::verify_files;
use crate::watch::{Unwatched, Watch};
use crate::workers::{Reading, in_parallel};

/// Bytes of a window of a tensor. [`Sparse`] stores where the changes in each window begin.
pub(super) const WINDOW_NBYTES: u64 = 256 << 10;

/// A file that describes the changes from one version of a checkpoint to another.
#[derive(Debug)]
pub struct Patch {
    checkpoint: Checkpoint,
    record: DeltaRecord,
    pub(super) files: Vec<NewFile>,
    index: Option<Vec<u8>>,
    pub(super) changes: BTreeMap<String, Change>,
    is_proven: bool,
}

/// A file of the result.
#[derive(Debug)]
pub(super) struct NewFile {
    /// The bytes before the data.
    pub(super) head: Vec<u8>,
    pub(super) header: Header,
}

/// The new bytes of a tensor.
#[derive(Debug)]
pub(super) enum Change {
    /// All, as the tensor with this number.
    Whole(usize),
    /// Those of some elements.
    Sparse(Sparse),
}

/// A description of a changed tensor.
#[derive(Clone, Copy, Debug)]
pub struct Changed<'a> {
    /// Name, dtype and shape in the result.
    pub entry: Entry<'a>,
    /// `whole`, `gaps` or `runs`.
    pub codec: &'static str,
    /// The number of elements whose values the patch has. Elements of packed dtypes are counted in bytes.
    pub elements: u64,
    /// Bytes in the patch.
    pub nbytes: u64,
}

/// Positions and new values of some elements of a tensor.
#[derive(Debug)]
pub(super) struct Sparse {
    /// The numbers of the two tensors in the patch.
    pub(super) positions: usize,
    pub(super) values: usize,
    pub(super) codec: Codec,
    bits: u32,
    /// Bytes of an element.
    pub(super) width: u64,
    elements: u64,
    pub(super) count: u64,
    /// Where the changes in the windows of the tensor begin; empty until the positions are checked.
    starts: Vec<Start>,
}

/// A place between two runs.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    /// The bit at which the next number begins.
    position: u64,
    /// The first element after the last run.
    next: u64,
    /// The number of values before.
    index: u64,
}

/// The place of the first change in some windows: those before `until` that no earlier start covers. Windows without
/// changes share a start, so there are at most as many starts as runs, even if the header claims a huge tensor.
#[derive(Clone, Copy, Debug)]
struct Start {
    until: u64,
    mark: Mark,
}

/// Changed elements without a gap.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChangedRun {
    pub(super) begin: u64,
    pub(super) end: u64,
    /// The number of values before.
    pub(super) index: u64,
}

/// Decodes runs, one by one.
#[derive(Debug)]
pub(super) struct Walk<'a> {
    numbers: Numbers<'a>,
    codec: Codec,
    elements: u64,
    count: u64,
    at: Mark,
}

impl Walk<'_> {
    /// Return the next run; `None` after the last.
    ///
    /// # Errors
    /// A run is not behind the one before or beyond the tensor, or the numbers end early.
    pub(super) fn next(&mut self) -> io::Result<Option<ChangedRun>> {
        if self.at.index == self.count {
            return Ok(None);
        }
        let gap = self.numbers.next()?.ok_or_else(|| broken("end early"))?;
        let len = match self.codec {
            Codec::Gaps => Some(1),
            Codec::Runs if gap == 0 && self.at.index > 0 => {
                return Err(broken("have two runs without a gap"));
            }
            Codec::Runs => self.numbers.next()?.and_then(|len| len.checked_add(1)),
        };
        let index = self.at.index;
        let begin = self.at.next.checked_add(gap);
        let end = len.zip(begin).and_then(|(len, begin)| begin.checked_add(len));
        let (Some(begin), Some(end)) = (begin, end.filter(|&end| end <= self.elements)) else {
            return Err(broken("are beyond the last element"));
        };
        if end - begin > self.count - index {
            return Err(broken("are more than the values"));
        }
        self.at = Mark {
            position: self.numbers.position(),
            next: end,
            index: index + (end - begin),
        };
        Ok(Some(ChangedRun { begin, end, index }))
    }
}

fn broken(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the positions {reason}"))
}

impl Sparse {
    fn walk<'a>(&self, archive: &'a Archive, from: Mark, stop: StopFlag<'a>) -> io::Result<Walk<'a>> {
        let positions = stored(archive, self.positions);
        Ok(Walk {
            numbers: Numbers::new(positions, self.bits, from.position, stop)?,
            codec: self.codec,
            elements: self.elements,
            count: self.count,
            at: from,
        })
    }

    /// Return all runs.
    pub(super) fn runs<'a>(&self, archive: &'a Archive, stop: StopFlag<'a>) -> io::Result<Walk<'a>> {
        self.walk(archive, Mark::default(), stop)
    }

    /// Check all positions, and return the starts.
    fn starts(&self, archive: &Archive, stop: StopFlag<'_>) -> io::Result<Vec<Start>> {
        if self.codec == Codec::Gaps {
            return self.starts_of_gaps(archive, stop);
        }
        let window = WINDOW_NBYTES / self.width;
        let (mut walk, mut starts) = (self.runs(archive, stop)?, Vec::<Start>::new());
        let mut mark = walk.at;
        while let Some(run) = walk.next()? {
            let until = run.end.div_ceil(window);
            if starts.last().is_none_or(|last| last.until < until) {
                starts.push(Start { until, mark });
            }
            mark = walk.at;
        }
        if !walk.numbers.is_at_end()? {
            return Err(broken("go on after the last value"));
        }
        Ok(starts)
    }

    fn gaps<'a>(&self, archive: &'a Archive, from: Mark, stop: StopFlag<'a>) -> Gaps<'a> {
        let positions = stored(archive, self.positions);
        Gaps::new(positions, self.bits, from.position, from.next, stop)
    }

    fn starts_of_gaps(&self, archive: &Archive, stop: StopFlag<'_>) -> io::Result<Vec<Start>> {
        let window = WINDOW_NBYTES / self.width;
        let mut gaps = self.gaps(archive, Mark::default(), stop);
        let (mut index, mut starts) = (0, Vec::new());
        while index < self.count {
            let (position, next) = gaps.place();
            let element = gaps.element(self.elements)?.ok_or_else(|| broken("end early"))?;
            let until = element / window + 1;
            let mark = Mark {
                position,
                next,
                index,
            };
            starts.push(Start { until, mark });
            index += 1;
            index += gaps.skip(
                until.saturating_mul(window).min(self.elements),
                self.count - index,
            )?;
        }
        if !gaps.is_at_end()? {
            return Err(broken("go on after the last value"));
        }
        Ok(starts)
    }

    /// Return where the values from this window on begin; after the last value if there are none.
    fn start(&self, window: u64) -> io::Result<Mark> {
        if self.starts.is_empty() && self.count > 0 {
            return Err(broken("are not checked"));
        }
        let later = self.starts.partition_point(|start| start.until <= window);
        let end = Mark {
            index: self.count,
            ..Mark::default()
        };
        Ok(self.starts.get(later).map_or(end, |start| start.mark))
    }

    /// Write the new bytes of the tensor from `begin` on into its memory.
    pub(super) fn write(
        &self,
        archive: &Archive,
        begin: u64,
        into: &mut [u8],
        stop: StopFlag<'_>,
    ) -> io::Result<()> {
        let bytes = begin..begin + to_u64(into.len());
        if self.codec == Codec::Gaps {
            return self.write_gaps(archive, bytes, into, stop);
        }
        self.each(archive, bytes, stop, |part, values| {
            let part = in_memory(part.start - begin)?..in_memory(part.end - begin)?;
            values.copy(&mut into[part])
        })
    }

    fn write_gaps(
        &self,
        archive: &Archive,
        bytes: Range<u64>,
        into: &mut [u8],
        stop: StopFlag<'_>,
    ) -> io::Result<()> {
        let first = self.start(bytes.start / WINDOW_NBYTES)?;
        let count = self.start(bytes.end.div_ceil(WINDOW_NBYTES))?.index - first.index;
        let mut values = vec![0; in_memory(count * self.width)?];
        stored(archive, self.values).read(first.index * self.width, &mut values, stop)?;
        let (mut gaps, mut done) = (self.gaps(archive, first, stop), 0);
        while done < count {
            let batch = gaps.batch(count - done, self.elements)?;
            let elements = batch.ok_or_else(|| broken("end early"))?;
            let values = &values[in_memory(done * self.width)?..];
            match self.width {
                1 => put::<1>(elements, values, bytes.start, into),
                2 => put::<2>(elements, values, bytes.start, into),
                4 => put::<4>(elements, values, bytes.start, into),
                _ => put::<8>(elements, values, bytes.start, into),
            }
            done += to_u64(elements.len());
        }
        Ok(())
    }

    /// Call `changed` with each range of bytes in `begin..end` that changes, and a reader that is at their values.
    pub(super) fn each<'a>(
        &self,
        archive: &'a Archive,
        bytes: Range<u64>,
        stop: StopFlag<'a>,
        mut changed: impl FnMut(Range<u64>, &mut Bytes<'a>) -> io::Result<()>,
    ) -> io::Result<()> {
        let start = self.start(bytes.start / WINDOW_NBYTES)?;
        if start.index == self.count {
            return Ok(());
        }
        let (mut walk, mut values) = (self.walk(archive, start, stop)?, None);
        while let Some(run) = walk.next()? {
            let whole = run.begin * self.width..run.end * self.width;
            if whole.start >= bytes.end {
                break;
            }
            let part = whole.start.max(bytes.start)..whole.end.min(bytes.end);
            if part.is_empty() {
                continue;
            }
            let position = run.index * self.width + (part.start - whole.start);
            let values =
                values.get_or_insert_with(|| Bytes::new(stored(archive, self.values), position, stop));
            changed(part, values)?;
        }
        Ok(())
    }
}

/// Return the bytes of the tensor with this number.
pub(super) fn stored(archive: &Archive, number: usize) -> Payload<'_> {
    let (begin, end) = archive
        .header()
        .entry(number)
        .map_or((0, 0), |entry| (entry.begin, entry.end));
    archive.payload(begin, end)
}

/// Changes of some elements, and the patch that has them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer<'a> {
    pub(super) archive: &'a Archive,
    pub(super) sparse: &'a Sparse,
}

/// A tensor with the changes of one or more patches, the earliest first.
#[derive(Debug)]
pub(super) struct Patched<'a> {
    pub(super) base: Payload<'a>,
    pub(super) layers: Vec<Layer<'a>>,
}

impl Gather for Patched<'_> {
    fn nbytes(&self) -> u64 {
        self.base.nbytes()
    }

    fn waits(&self) -> bool {
        self.base.waits() || self.layers.iter().any(|layer| layer.archive.source().waits())
    }

    fn read(&self, begin: u64, into: &mut [u8], stop: StopFlag<'_>) -> io::Result<()> {
        self.base.read(begin, into, stop)?;
        let bytes = begin..begin + to_u64(into.len());
        self.layers.iter().try_for_each(|Layer { archive, sparse }| {
            sparse.each(archive, bytes.clone(), stop, |part, values| {
                let part = in_memory(part.start - begin)?..in_memory(part.end - begin)?;
                values.copy(&mut into[part])
            })
        })
    }
}

impl Patch {
    /// Open the patch in the only file of `checkpoint`. If `prove`, compare its tensors with their digests, and check that
    /// all positions are sorted, unique and in bounds; [`apply`] and [`compose`](crate::compose) need this.
    ///
    /// # Errors
    /// [`Failure::Patch`] if the file is no patch; [`Failure::Digest`] if its bytes have changed; errors of reading;
    /// [`Failure::Interrupted`].
    pub fn open(checkpoint: Checkpoint, prove: bool, watch: &dyn Watch) -> Result<Patch, Error> {
        let archive = checkpoint.one_file()?;
        let path = archive.path();
        let invalid = |reason: &str| PatchFault::Invalid(reason.to_owned()).about(path);
        let text = archive
            .header()
            .metadata()
            .and_then(|metadata| metadata.get(DELTA_KEY));
        let text =
            text.ok_or_else(|| invalid("not a patch: expected ingot.delta in the metadata, found none"))?;
        let record = DeltaRecord::parse(text).map_err(|fault| match fault {
            DeltaError::Later(found) => PatchFault::Later { found }.about(path),
            fault => invalid(&fault.to_string()),
        })?;
        if prove {
            intact(vec![archive], watch)?;
        }
        check_names(&record).map_err(|reason| invalid(&reason))?;
        let files = files(archive, &record)?;
        let index = match &record.index {
            Some(_) => Some(bytes(
                archive
                    .find("index")
                    .map_err(|_| invalid("the index is missing"))?,
            )?),
            None => None,
        };
        let changes = changes(archive, &files)?;
        let mut patch = Patch {
            record,
            files,
            index,
            changes,
            is_proven: prove,
            checkpoint,
        };
        if prove {
            patch.prove(watch)?;
        }
        Ok(patch)
    }

    fn prove(&mut self, watch: &dyn Watch) -> Result<(), Error> {
        let archive = self.checkpoint.one_file()?;
        let mut sparse: Vec<(&str, &mut Sparse)> = Vec::new();
        for (name, change) in &mut self.changes {
            if let Change::Sparse(changes) = change {
                sparse.push((name, changes));
            }
        }
        let numbers: Vec<usize> = (0..sparse.len()).collect();
        let threads = available_parallelism().map_or(1, usize::from);
        let reading = Reading::on(threads).waiting(archive.source().waits());
        let work = |number: usize, stop: StopFlag<'_>| {
            let (name, changes) = &sparse[number];
            let found = changes.starts(archive, stop);
            found.map_err(|fault| unusable(archive, name, fault))
        };
        let starts = in_parallel(reading, &numbers, work, watch)?;
        for ((_, sparse), starts) in sparse.into_iter().zip(starts) {
            sparse.starts = starts;
        }
        Ok(())
    }

    /// Return the versions before and after the patch, and the files of the result.
    #[must_use]
    pub fn record(&self) -> &DeltaRecord {
        &self.record
    }

    /// Return the id of the patch. A patch of a good writer has digests of all its data in its header, so the id is a
    /// digest of the header.
    ///
    /// # Errors
    /// As [`version_id`].
    pub fn id(&self) -> Result<String, Error> {
        version_id(&self.checkpoint, &ReadOptions::new(), &Unwatched)
    }

    /// Return the path of the patch.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.checkpoint.path()
    }

    /// Return the text of the index of the result; `None` if the result is one file without an index.
    #[must_use]
    pub fn index(&self) -> Option<&[u8]> {
        self.index.as_deref()
    }

    /// Return the changed tensors by name.
    pub fn changed(&self) -> impl Iterator<Item = Changed<'_>> {
        self.changes.iter().filter_map(|(name, change)| {
            let archive = self.archive().ok()?;
            let nbytes = |number| stored(archive, number).nbytes();
            let entry = self.entry(name)?;
            let (codec, elements, nbytes) = match change {
                Change::Whole(number) => {
                    let nbytes = nbytes(*number);
                    ("whole", nbytes / width(entry.dtype), nbytes)
                }
                Change::Sparse(sparse) => {
                    let codec = match sparse.codec {
                        Codec::Gaps => "gaps",
                        Codec::Runs => "runs",
                    };
                    (
                        codec,
                        sparse.count,
                        nbytes(sparse.positions) + nbytes(sparse.values),
                    )
                }
            };
            Some(Changed {
                entry,
                codec,
                elements,
                nbytes,
            })
        })
    }

    /// Return the positions and the new bytes of elements of the tensor `name` that change, among the elements `begin` to
    /// `end`. Elements of packed dtypes are counted in bytes. If the patch has the whole tensor, all are returned, without
    /// positions.
    ///
    /// # Errors
    /// [`Failure::UnknownTensor`] if the tensor does not change; errors of reading.
    pub fn elements(&self, name: &str, elements: Range<u64>) -> Result<(Vec<u64>, Vec<u8>), Error> {
        let archive = self.archive()?;
        let unknown = || Failure::UnknownTensor { nearest: None }.about(archive.path(), Some(name));
        let (change, entry) = self.changes.get(name).zip(self.entry(name)).ok_or_else(unknown)?;
        let width = width(entry.dtype);
        let end = elements.end.min(entry.nbytes() / width);
        let begin = elements.start.min(end);
        let (mut positions, mut values) = (Vec::new(), Vec::new());
        let read = match change {
            Change::Whole(number) => {
                values.resize(size((end - begin) * width)?, 0);
                stored(archive, *number).read(begin * width, &mut values, StopFlag::never())
            }
            Change::Sparse(sparse) => {
                let bytes = begin * width..end * width;
                sparse.each(archive, bytes, StopFlag::never(), |part, new| {
                    positions.extend(part.start / width..part.end / width);
                    let filled = values.len();
                    values.resize(filled + in_memory(part.end - part.start)?, 0);
                    new.copy(&mut values[filled..])
                })
            }
        };
        read.map_err(|fault| unusable(archive, name, fault))?;
        Ok((positions, values))
    }

    pub(super) fn archive(&self) -> Result<&Archive, Error> {
        self.checkpoint.one_file()
    }

    /// Return the tensor of the result with this name.
    pub(super) fn entry(&self, name: &str) -> Option<Entry<'_>> {
        self.files.iter().find_map(|file| file.header.get(name))
    }

    /// Return the error about this patch.
    pub(super) fn invalid(&self, reason: String) -> Error {
        PatchFault::Invalid(reason).about(self.path())
    }

    /// Fail if the patch was opened without the proof.
    pub(super) fn check_proven(&self) -> Result<(), Error> {
        if self.is_proven {
            return Ok(());
        }
        Err(self.invalid("the positions are not checked".to_owned()))
    }

    /// Fail if `base` is not the version that the patch is for. The ids are compared, and the digests of the data too if
    /// `verify`.
    ///
    /// # Errors
    /// [`Failure::Patch`]; errors of reading; [`Failure::Interrupted`].
    pub fn check_base(
        &self,
        base: &Checkpoint,
        verify: bool,
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        self.check_proven()?;
        let found = Found::of(&base.all_files()?, verify, options, watch)?;
        if found.is(&self.record.base) {
            return Ok(());
        }
        Err(found.mismatch(&self.record.base).about(base.path()))
    }
}

/// Return the error for a fault of the tensor `name` of a patch.
pub(super) fn unusable(archive: &Archive, name: &str, fault: io::Error) -> Error {
    if fault.kind() == io::ErrorKind::InvalidData {
        return Failure::Patch(PatchFault::Invalid(fault.to_string())).about(archive.path(), Some(name));
    }
    fault
        .downcast::<Error>()
        .unwrap_or_else(|fault| Failure::Open(fault).about(archive.path(), Some(name)))
}

/// Compare all tensors of `files` with their digests, which they must have.
pub(super) fn intact(files: Vec<&Archive>, watch: &dyn Watch) -> Result<(), Error> {
    let reports = verify_files(files.clone(), None, watch)?;
    for (file, report) in files.into_iter().zip(reports) {
        let path = file.path();
        if let Some(bad) = report.bad.first() {
            let algorithm = report.algorithm.unwrap_or_default();
            let unequal = crate::digest::Unequal {
                algorithm,
                expected: bad.expected,
                found: bad.found,
            };
            return Err(Failure::Digest(unequal).about(path, Some(&bad.tensor)));
        }
        if let Some(tensor) = report.unchecked.first() {
            return Err(Failure::NoDigest.about(path, Some(tensor)));
        }
    }
    Ok(())
}

fn bytes(tensor: Tensor<'_>) -> Result<Vec<u8>, Error> {
    let (archive, entry) = (tensor.archive(), tensor.entry());
    let mut bytes = vec![0; size(entry.nbytes())?];
    let read = stored(archive, tensor.number()).read(0, &mut bytes, StopFlag::never());
    read.map_err(|fault| unusable(archive, entry.name, fault))?;
    Ok(bytes)
}

/// Fail if the files of the result and its index do not have names of their own in one directory.
fn check_names(record: &DeltaRecord) -> Result<(), String> {
    let mut names = HashSet::new();
    for name in record.files.iter().chain(&record.index) {
        let mut parts = Path::new(name).components();
        let is_name = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        if !is_name || name.contains(['/', '\\', ':', '\0']) {
            return Err(format!("a file of the result has the name {}", Quoted(name)));
        }
        if !names.insert(name) {
            return Err(format!("two files of the result have the name {}", Quoted(name)));
        }
    }
    Ok(())
}

/// Return the files of the result.
fn files(archive: &Archive, record: &DeltaRecord) -> Result<Vec<NewFile>, Error> {
    let mut files = Vec::with_capacity(record.nbytes.len());
    for (number, &nbytes) in record.nbytes.iter().enumerate() {
        let name = format!("header/{number}");
        let invalid = |reason: String| PatchFault::Invalid(reason).about(archive.path()).of(&name);
        let head = bytes(archive.find(&name)?)?;
        let header = Header::parse(&head, nbytes, &Limits::default());
        let header = header.map_err(|fault| invalid(fault.to_string()))?;
        if header.data_start() != to_u64(head.len()) {
            return Err(invalid("not the header of a file".to_owned()));
        }
        files.push(NewFile { head, header });
    }
    let heads: Vec<Vec<u8>> = files.iter().map(|file| file.head.clone()).collect();
    let covers = covers_data(files.iter().map(|file| &file.header));
    if id(&heads, (!covers).then_some(&*record.result.digest)) != record.result.id {
        let reason = "the id of the result is not the id of its headers".to_owned();
        return Err(PatchFault::Invalid(reason).about(archive.path()));
    }
    Ok(files)
}

/// Return the changes by the names of their tensors.
fn changes(archive: &Archive, files: &[NewFile]) -> Result<BTreeMap<String, Change>, Error> {
    let mut results: BTreeMap<&str, Entry<'_>> = BTreeMap::new();
    for entry in files.iter().flat_map(|file| file.header.entries()) {
        if results.insert(entry.name, entry).is_some() {
            return Err(invalid(archive, entry.name, "two files of the result have it"));
        }
    }
    let mut found = BTreeMap::new();
    for tensor in archive.tensors() {
        let (part, name) = tensor
            .entry()
            .name
            .split_once('/')
            .unwrap_or((tensor.entry().name, ""));
        let change = match part {
            "header" | "index" | "values" => continue,
            "whole" | "gaps" | "runs" => results.get(name),
            _ => None,
        };
        let entry = change.ok_or_else(|| invalid(archive, tensor.entry().name, "unexpected"))?;
        let change = match part {
            "whole" => whole(tensor, entry)?,
            "gaps" => Change::Sparse(sparse(tensor, entry, Codec::Gaps)?),
            _ => Change::Sparse(sparse(tensor, entry, Codec::Runs)?),
        };
        if found.insert(name.to_owned(), change).is_some() {
            return Err(invalid(archive, name, "changed twice"));
        }
    }
    for tensor in archive.tensors() {
        let of = tensor.entry().name.strip_prefix("values/");
        if let Some(name) = of
            && !matches!(found.get(name), Some(Change::Sparse(_)))
        {
            return Err(invalid(archive, tensor.entry().name, "values without positions"));
        }
    }
    Ok(found)
}

fn invalid(archive: &Archive, name: &str, reason: &str) -> Error {
    PatchFault::Invalid(reason.to_owned())
        .about(archive.path())
        .of(name)
}

fn whole(tensor: Tensor<'_>, entry: &Entry<'_>) -> Result<Change, Error> {
    let found = tensor.entry();
    if (found.dtype, found.shape) != (entry.dtype, entry.shape) {
        let reason = "another dtype or shape than in the result";
        return Err(invalid(tensor.archive(), found.name, reason));
    }
    Ok(Change::Whole(tensor.number()))
}

fn sparse(positions: Tensor<'_>, entry: &Entry<'_>, codec: Codec) -> Result<Sparse, Error> {
    let archive = positions.archive();
    let invalid = |reason: &str| invalid(archive, positions.entry().name, reason);
    let values = archive
        .find(&format!("values/{}", entry.name))
        .map_err(|_| invalid("positions without values"))?;
    let width = width(entry.dtype);
    let (of_values, [count]) = (values_dtype(entry.dtype), values.entry().shape) else {
        return Err(invalid("values that are not a list"));
    };
    if values.entry().dtype != of_values || *count == 0 {
        return Err(invalid("values of another dtype than the tensor"));
    }
    if positions.entry().dtype != Dtype::U8 || positions.entry().shape.len() != 1 {
        return Err(invalid("positions that are not a list of U8"));
    }
    let bits = super::numbers::width(&stored(archive, positions.number()), StopFlag::never());
    let bits = bits
        .map_err(|fault| unusable(archive, entry.name, fault))?
        .ok_or_else(|| invalid("the width of a unit is not from 1 to 32 bits"))?;
    Ok(Sparse {
        positions: positions.number(),
        values: values.number(),
        codec,
        bits,
        width,
        elements: entry.nbytes() / width,
        count: *count,
        starts: Vec::new(),
    })
}

/// Return the dtype of the values in a patch: packed elements are stored as bytes.
pub(super) fn values_dtype(dtype: Dtype) -> Dtype {
    if dtype.bits().is_multiple_of(8) {
        dtype
    } else {
        Dtype::U8
    }
}

/// Write file `number` of the result at `path`: `base` with the changes of `patch`.
///
/// # Errors
/// [`Failure::Patch`] if `base` is another version than the patch is for, or the patch was not proven; as
/// [`save()`](crate::save()). Nothing is changed then.
pub fn apply(
    base: &Checkpoint,
    patch: &Patch,
    number: usize,
    path: &Path,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    patch.check_proven()?;
    let archive = patch.archive()?;
    let Some(file) = patch.files.get(number) else {
        return Err(patch.invalid(format!("the result has no file {number}")));
    };
    let patched = file.header.entries().map(|entry| {
        let layers = match patch.changes.get(entry.name) {
            Some(Change::Sparse(sparse)) => vec![Layer { archive, sparse }],
            _ => Vec::new(),
        };
        let base = old(base, patch, &entry)?;
        Ok(Patched { base, layers })
    });
    let patched = patched.collect::<Result<Vec<_>, Error>>()?;
    let payloads = patched.iter().map(|patched| match patched.layers[..] {
        [] => patched.base.clone(),
        _ => Payload::Gathered(patched),
    });
    let payloads: Vec<Payload<'_>> = payloads.collect();
    let pieces = Pieces::of_data(&file.head, file.header.data_nbytes(), &payloads);
    let files = base.all_files()?;
    let check = || {
        files.iter().try_for_each(|file| file.check_unchanged())?;
        archive.check_unchanged()
    };
    let guard = Guard::new(watch, &check);
    let saved = save_pieces(path, pieces, options, &guard);
    guard.outcome(saved)
}

/// Return the bytes of a tensor of the result, before the changes of single elements.
fn old<'a>(base: &'a Checkpoint, patch: &'a Patch, entry: &Entry<'_>) -> Result<Payload<'a>, Error> {
    if let Some(Change::Whole(number)) = patch.changes.get(entry.name) {
        return Ok(stored(patch.archive()?, *number));
    }
    let tensor = base.find(entry.name)?;
    let found = tensor.entry();
    if (found.dtype, found.shape) != (entry.dtype, entry.shape) || !tensor.is_stored() {
        return Err(patch
            .invalid("a tensor of the base has another dtype or shape".to_owned())
            .of(entry.name));
    }
    Ok(tensor.archive().payload(found.begin, found.end))
}

#[cfg(test)]
mod tests {
    use ingot_format::TensorView;

    use super::*;
    use crate::file::MemorySource;
    use crate::options::OpenOptions;

    fn sparse(elements: u64, gaps: &[u64]) -> (Archive, Sparse) {
        let mut positions = vec![32];
        for &gap in gaps {
            let escapes = gap / u64::from(u32::MAX);
            positions.extend((0..escapes).flat_map(|_| u32::MAX.to_le_bytes()));
            positions.extend(&(gap % u64::from(u32::MAX)).to_le_bytes()[..4]);
        }
        let values = vec![7; gaps.len()];
        let views = [("positions", &positions), ("values", &values)];
        let views =
            views.map(|(name, data)| (name, TensorView::new(Dtype::U8, vec![data.len()], data).unwrap()));
        let file = crate::serialize(views, None).unwrap();
        let archive = Archive::from_source(MemorySource::new(file), &OpenOptions::default()).unwrap();
        let number = |name| archive.find(name).unwrap().number();
        let sparse = Sparse {
            positions: number("positions"),
            values: number("values"),
            codec: Codec::Gaps,
            bits: 32,
            width: 1,
            elements,
            count: to_u64(gaps.len()),
            starts: Vec::new(),
        };
        (archive, sparse)
    }

    #[test]
    fn positions_in_a_tensor_of_any_size_take_little_memory() {
        let elements = 1 << 48;
        let (archive, mut sparse) = sparse(elements, &[3, elements / 2, elements / 2 - 6]);
        sparse.starts = sparse.starts(&archive, StopFlag::never()).unwrap();
        assert_eq!(sparse.starts.len(), 3);
        let found = |bytes: Range<u64>| {
            let mut found = Vec::new();
            let each = sparse.each(&archive, bytes, StopFlag::never(), |part, _| {
                found.push(part.start);
                Ok(())
            });
            each.map(|()| found).unwrap()
        };
        let at = |window: u64| window * WINDOW_NBYTES..(window + 1) * WINDOW_NBYTES;
        let second = 4 + elements / 2;
        assert_eq!(found(at(0)), [3]);
        assert!(found(at(1)).is_empty());
        assert_eq!(found(at(second / WINDOW_NBYTES)), [second]);
        assert_eq!(found(at(elements / WINDOW_NBYTES - 1)), [elements - 1]);
        assert_eq!(found(0..elements).len(), 3);
    }

    #[test]
    fn no_window_after_the_last_change_is_read() {
        let (archive, mut sparse) = sparse(4 * WINDOW_NBYTES, &[0, 0, WINDOW_NBYTES - 2]);
        sparse.starts = sparse.starts(&archive, StopFlag::never()).unwrap();
        let mut found = Vec::new();
        for window in 0..4 {
            let bytes = window * WINDOW_NBYTES..(window + 1) * WINDOW_NBYTES;
            let each = sparse.each(&archive, bytes, StopFlag::never(), |part, _| {
                found.push((window, part.start));
                Ok(())
            });
            each.unwrap();
        }
        assert_eq!(found, [(0, 0), (0, 1), (1, WINDOW_NBYTES)]);
    }
}
