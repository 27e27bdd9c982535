//! Applying a patch to existing files.
//!
//! A mark replaces the beginning of each file, so that no reader accepts the files while their bytes change. It names the
//! patch, which has all new bytes at fixed positions and the new headers. So the next call with this patch finishes what a
//! killed process has begun.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::thread::available_parallelism;

use ingot_format::{Entry, Header, StopFlag, UNFINISHED_PATCH, saturating_usize, to_u64};

use super::numbers::in_memory;
use super::patch::{Change, NewFile, Patch, WINDOW_NBYTES, stored, unusable};
use super::version::{Found, head};
use crate::checkpoint::Checkpoint;
use crate::disk::write_all_at;
use crate::edit::held::Held;
use crate::error::{Error, PatchFault, Step, step, unopened};
use crate::file::Archive;
use crate::options::{Backend, CheckpointOptions, ReadOptions, SaveOptions};
use crate::payload::FileRange;
use crate::watch::Watch;
use crate::workers::{Reading, share, watched};

/// Pages are written as a whole by every system.
const PAGE: u64 = 4096;

/// Bytes that one thread changes before it takes the next task.
const TASK_NBYTES: u64 = 4 << 20;

/// The most bytes of a mark: a sector, which disks write as a whole.
const MARK_NBYTES: usize = 512;

/// Digits of the id of the patch in a mark.
const ID_DIGITS: usize = 48;

/// Apply `patch` to the file at `path`, or to the shards of the index or directory at `path`. Return false if the files
/// were the result already.
///
/// Files that a killed process has begun to change are finished. Other processes must not read the files meanwhile.
///
/// # Errors
/// [`Failure::Patch`](crate::Failure::Patch) if the files are another version, if another patch was begun and not
/// finished, if the patch was not proven, or if it changes the layout of the files; nothing is changed then.
/// [`Failure::Write`](crate::Failure::Write) and [`Failure::Interrupted`](crate::Failure::Interrupted): the files cannot be
/// opened until a call finishes the patch.
pub fn apply_in_place(
    path: &Path,
    patch: &Patch,
    verify: bool,
    read: &ReadOptions,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<bool, Error> {
    patch.check_proven()?;
    let paths = paths(path, patch)?;
    if path.exists() && !paths.iter().all(|path| path.is_file()) {
        let reason = "the new version has files with other names";
        return Err(PatchFault::NotInPlace(reason).about(Some(path)));
    }
    let held = paths.iter().map(|path| Held::open(path, watch));
    let held = held.collect::<Result<Vec<_>, _>>()?;
    let id = patch.id()?;
    let mut is_begun = false;
    for (path, held) in paths.iter().zip(&held) {
        if held.is_shared {
            let reason = "it has other names, such as hard links or a blob of a cache";
            return Err(PatchFault::NotInPlace(reason).about(Some(path)));
        }
        is_begun |= is_marked(path, held.file(), &id)?;
    }
    if !is_begun && !is_base(path, patch, verify, read, watch)? {
        return Ok(false);
    }
    let mut files = Vec::with_capacity(paths.len());
    for ((path, held), new) in paths.iter().zip(&held).zip(&patch.files) {
        let target = Target {
            path,
            file: held.file(),
            new,
        };
        target.check()?;
        files.push(target);
    }
    let mark = mark(&id, patch.path());
    files
        .iter()
        .try_for_each(|file| file.mark(&mark, options, watch))?;
    change(&files, patch, read, watch)?;
    files.iter().try_for_each(|file| file.flush(options, watch))?;
    files
        .iter()
        .try_for_each(|file| file.finish(mark.len(), options, watch))?;
    held.into_iter().for_each(Held::release);
    Ok(true)
}

/// Return the paths of the files.
fn paths(path: &Path, patch: &Patch) -> Result<Vec<PathBuf>, Error> {
    if patch.record().index.is_none() {
        return Ok(vec![path.to_owned()]);
    }
    let folder = if path.is_dir() { Some(path) } else { path.parent() };
    let folder = folder.unwrap_or(Path::new(""));
    let names = patch.record().files.iter();
    let mut paths = Vec::with_capacity(names.len());
    for name in names {
        let mut parts = Path::new(name).components();
        let is_name = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        if !is_name || name.contains(['/', '\\', ':', '\0']) {
            return Err(patch.invalid(format!(
                "a file of the result has the name {}",
                ingot_format::Quoted(name)
            )));
        }
        paths.push(folder.join(name));
    }
    Ok(paths)
}

/// Return the mark for the patch with this id.
fn mark(id: &str, path: Option<&Path>) -> Vec<u8> {
    let mut mark = UNFINISHED_PATCH.to_vec();
    mark.extend_from_slice(&id.as_bytes()[..ID_DIGITS]);
    // For the error only.
    if let Some(path) = path {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        mark.extend_from_slice(path.to_string_lossy().as_bytes());
    }
    mark.push(0);
    mark.truncate(MARK_NBYTES);
    mark
}

/// Return whether the file has the mark of the patch with this id.
///
/// # Errors
/// It has the mark of another patch.
fn is_marked(path: &Path, file: &File, id: &str) -> Result<bool, Error> {
    let nbytes = file.metadata().map_err(unopened(path))?.len();
    let mut start = vec![0; MARK_NBYTES.min(saturating_usize(nbytes))];
    FileRange::new(file, 0, to_u64(start.len()))
        .read(0, &mut start)
        .map_err(unopened(path))?;
    let Some(mark) = start.strip_prefix(UNFINISHED_PATCH) else {
        return Ok(false);
    };
    let (digits, rest) = mark.split_at(ID_DIGITS.min(mark.len()));
    if id.as_bytes().starts_with(digits) && digits.len() == ID_DIGITS {
        return Ok(true);
    }
    let path_of_patch = rest.split(|byte| *byte == 0).next().unwrap_or_default();
    let unfinished = PatchFault::Unfinished {
        patch: String::from_utf8_lossy(&digits[..16.min(digits.len())]).into_owned(),
        path: String::from_utf8_lossy(path_of_patch).into_owned(),
    };
    Err(unfinished.about(Some(path)))
}

/// Return whether the files are the base of the patch, false if they are its result.
///
/// # Errors
/// They are another version, or the result has another layout.
fn is_base(
    path: &Path,
    patch: &Patch,
    verify: bool,
    read: &ReadOptions,
    watch: &dyn Watch,
) -> Result<bool, Error> {
    let mut options = CheckpointOptions::new();
    options.open.backend = Backend::Pread;
    let checkpoint = Checkpoint::open(path, &options)?;
    let (base, result) = (&patch.record().base, &patch.record().result);
    let found = Found::of(&checkpoint, verify, read, watch)?;
    let is_result = found.is(result);
    if !is_result && !found.is(base) {
        return Err(found.mismatch(base).about(Some(path)));
    }
    // The tensors of two versions may be equal, and the metadata of their indices not.
    let reason = check_layout(&checkpoint, patch)?;
    reason.map_or(Ok(!is_result), |reason| {
        Err(PatchFault::NotInPlace(reason).about(Some(path)))
    })
}

/// Return why the files of the result do not have the layout of the files of `checkpoint`.
fn check_layout(checkpoint: &Checkpoint, patch: &Patch) -> Result<Option<&'static str>, Error> {
    let (files, new) = (checkpoint.all_files()?, &patch.files);
    let names = checkpoint.file_names();
    let is_indexed = patch.record().index.is_some();
    if files.len() != new.len()
        || checkpoint.index().is_some() != is_indexed
        || is_indexed && !names.eq(patch.record().files.iter().map(String::as_str))
    {
        return Ok(Some("the result has other files"));
    }
    let index = checkpoint
        .index()
        .and_then(|_| checkpoint.path())
        .map(std::fs::read)
        .transpose();
    if index
        .map_err(|fault| unopened(checkpoint.path().unwrap_or(Path::new("")))(fault))?
        .as_deref()
        != patch.index()
    {
        return Ok(Some("the result has another index"));
    }
    for (file, new) in files.iter().zip(new) {
        if !is_alike(file.header(), &new.header) {
            return Ok(Some(
                "tensors of the result have other positions, or its header has another size",
            ));
        }
        if new.head.len() < UNFINISHED_PATCH.len() + ID_DIGITS + 1 || head(file)?.len() != new.head.len() {
            return Ok(Some("its header is too short"));
        }
    }
    Ok(None)
}

/// Return whether two files have all tensors at the same positions.
fn is_alike(one: &Header, two: &Header) -> bool {
    let sizes = |header: &Header| (header.data_start(), header.file_nbytes(), header.len());
    let facts = |entry: Entry<'_>| (entry.dtype, entry.begin, entry.end);
    let mut pairs = one.entries().zip(two.entries());
    sizes(one) == sizes(two)
        && pairs.all(|(one, two)| (one.name, one.shape, facts(one)) == (two.name, two.shape, facts(two)))
}

/// A file that is changed.
struct Target<'a> {
    path: &'a Path,
    file: &'a File,
    new: &'a NewFile,
}

impl Target<'_> {
    /// Fail if the file has another size than the result.
    fn check(&self) -> Result<(), Error> {
        let nbytes = self.file.metadata().map_err(unopened(self.path))?.len();
        if nbytes == self.new.header.file_nbytes() {
            return Ok(());
        }
        let reason = "the file has another size than the result";
        Err(PatchFault::NotInPlace(reason).about(Some(self.path)))
    }

    /// Make the header unreadable.
    fn mark(&self, mark: &[u8], options: &SaveOptions, watch: &dyn Watch) -> Result<(), Error> {
        let mark = &mark[..mark.len().min(self.new.head.len())];
        self.write(mark, 0)?;
        self.flush(options, watch)
    }

    /// Write the new header, the part that the mark covers last.
    fn finish(&self, mark_nbytes: usize, options: &SaveOptions, watch: &dyn Watch) -> Result<(), Error> {
        let (first, rest) = self.new.head.split_at(mark_nbytes.min(self.new.head.len()));
        self.write(rest, to_u64(first.len()))?;
        self.flush(options, watch)?;
        self.write(first, 0)?;
        self.flush(options, watch)
    }

    fn write(&self, bytes: &[u8], position: u64) -> Result<(), Error> {
        let written = write_all_at(self.file, bytes, position).step(step::PATCH);
        written.map_err(|fault| fault.in_save(self.path, 0))
    }

    fn flush(&self, options: &SaveOptions, watch: &dyn Watch) -> Result<(), Error> {
        if !options.durable {
            return Ok(());
        }
        // The flush itself cannot be stopped, so an interruption is noticed after it.
        let flushed = watched(true, |_| self.file.sync_data(), watch)?;
        flushed
            .step(step::FLUSH)
            .map_err(|fault| fault.in_save(self.path, 0))
    }
}

/// Bytes of a tensor that one thread changes.
struct Task<'a> {
    target: &'a Target<'a>,
    name: &'a str,
    change: &'a Change,
    /// The position of the tensor in the file.
    position: u64,
    bytes: Range<u64>,
}

fn change(files: &[Target<'_>], patch: &Patch, read: &ReadOptions, watch: &dyn Watch) -> Result<(), Error> {
    let archive = patch.archive()?;
    let whole = files.iter().flat_map(|target| {
        target.new.header.entries().filter_map(move |entry| {
            Some(Task {
                target,
                name: entry.name,
                change: patch.changes.get(entry.name)?,
                position: target.new.header.data_start() + entry.begin,
                bytes: 0..entry.nbytes(),
            })
        })
    });
    let whole: Vec<Task<'_>> = whole.collect();
    let total = whole
        .iter()
        .map(|task| task.bytes.end)
        .fold(0, u64::saturating_add);
    let tasks = whole.iter().flat_map(|task| {
        (0..task.bytes.end.div_ceil(TASK_NBYTES)).map(move |number| Task {
            bytes: number * TASK_NBYTES..task.bytes.end.min((number + 1) * TASK_NBYTES),
            ..*task
        })
    });
    let cores = || available_parallelism().map_or(1, usize::from);
    let threads = read.threads.map_or_else(cores, std::num::NonZeroUsize::get);
    let reading = Reading::on(threads).waiting(archive.source().waits());
    share(reading, tasks, total, |task, stop| task.run(archive, stop), watch)
}

impl Task<'_> {
    fn run(&self, archive: &Archive, stop: StopFlag<'_>) -> Result<usize, Error> {
        let mut buffer = Vec::new();
        match self.change {
            Change::Whole(number) => {
                buffer.resize(saturating_usize(self.bytes.end - self.bytes.start), 0);
                let read = stored(archive, *number).read(self.bytes.start, &mut buffer, stop);
                read.map_err(|fault| unusable(archive, self.name, fault))?;
                self.target.write(&buffer, self.position + self.bytes.start)?;
            }
            Change::Sparse(_) => {
                let mut begin = self.bytes.start;
                while begin < self.bytes.end {
                    let end = self.bytes.end.min(begin + WINDOW_NBYTES);
                    self.window(archive, begin..end, &mut buffer, stop)?;
                    begin = end;
                }
            }
        }
        Ok(saturating_usize(self.bytes.end - self.bytes.start))
    }

    /// Read these bytes, change some, and write the pages that changed.
    fn window(
        &self,
        archive: &Archive,
        bytes: Range<u64>,
        buffer: &mut Vec<u8>,
        stop: StopFlag<'_>,
    ) -> Result<(), Error> {
        let Change::Sparse(sparse) = self.change else {
            return Ok(());
        };
        let first = self.position + bytes.start;
        let old = FileRange::new(self.target.file, first, bytes.end - bytes.start);
        let mut spans: Vec<Range<usize>> = Vec::new();
        let changed = sparse.each(archive, bytes.clone(), stop, |part, values| {
            if spans.is_empty() {
                buffer.resize(in_memory(bytes.end - bytes.start)?, 0);
                old.read(0, buffer)?;
            }
            let part = part.start - bytes.start..part.end - bytes.start;
            values.copy(&mut buffer[in_memory(part.start)?..in_memory(part.end)?])?;
            // In positions of the file, whose pages the system writes.
            let begin = ((first + part.start) / PAGE * PAGE).max(first) - first;
            let end = (first + part.end).next_multiple_of(PAGE) - first;
            let pages = in_memory(begin)?..in_memory(end)?.min(buffer.len());
            match spans.last_mut() {
                Some(last) if pages.start <= last.end => last.end = last.end.max(pages.end),
                _ => spans.push(pages),
            }
            Ok(())
        });
        changed.map_err(|fault: io::Error| unusable(archive, self.name, fault))?;
        spans.into_iter().try_for_each(|span| {
            let position = first + to_u64(span.start);
            self.target.write(&buffer[span], position)
        })
    }
}
