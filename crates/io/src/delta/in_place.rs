//! Applying a patch to existing files.
//!
//! A mark replaces the beginning of each file, so that no reader accepts the files while their bytes change. It names the
//! patch, which has all new bytes at fixed positions and the new headers. So the next call with this patch finishes what a
//! killed process has begun.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::available_parallelism;

use ingot_format::{Entry, Header, Quoted, StopFlag, saturating_usize, to_u64};

use super::mark::{FACTS_NBYTES, Mark, base_of, short};
use super::numbers::in_memory;
use super::patch::{Change, NewFile, Patch, WINDOW_NBYTES, intact, stored, unusable};
use super::version::{DataDigests, Found, covers_data, head};
use crate::checkpoint::Checkpoint;
use crate::disk::write_all_at;
use crate::edit::held::Held;
use crate::error::{Error, PatchFault, Step, step, unopened};
use crate::file::{Archive, LocalFile, Origin};
use crate::options::{Backend, CheckpointOptions, OpenOptions, ReadOptions, SaveOptions};
use crate::payload::FileRange;
use crate::watch::{Asked, Watch};
use crate::workers::{Reading, share, watched};

/// Pages are written as a whole by every system.
const PAGE: u64 = 4096;

/// Bytes that one thread changes before it takes the next task.
const TASK_NBYTES: u64 = 4 << 20;

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
    // The progress is that of the changes.
    let asked = Asked(watch);
    let paths = paths(path, patch);
    if path.exists() && !paths.iter().all(|path| path.is_file()) {
        let reason = "the new version has files with other names";
        return Err(PatchFault::NotInPlace(reason).about(Some(path)));
    }
    let held = paths.iter().map(|path| Held::open(path, &asked));
    let held = held.collect::<Result<Vec<_>, _>>()?;
    let id = short(&patch.id()?);
    let (mut targets, mut marks) = (Vec::with_capacity(paths.len()), Vec::with_capacity(paths.len()));
    for ((path, held), new) in paths.iter().zip(&held).zip(&patch.files) {
        let file = held.file();
        if held.is_shared {
            let reason = "it has other names, such as hard links or a blob of a cache";
            return Err(PatchFault::NotInPlace(reason).about(Some(path)));
        }
        marks.push(Mark::of(path, file, id)?);
        targets.push(Target { path, file, new });
    }
    let found = if marks.iter().any(Option::is_some) {
        Some(resumed(path, patch, &targets, &marks, read, &asked)?)
    } else {
        begun(path, patch, &targets, id, verify, read, &asked)?
    };
    let Some(begun) = found else {
        return Ok(false);
    };
    let mut mark_nbytes = 0;
    for (target, mark) in &begun {
        let mark = mark.render(patch.path());
        target.mark(&mark, &asked)?;
        mark_nbytes = mark.len();
    }
    let files = || begun.iter().map(|(target, _)| *target);
    change(files(), patch, read, watch)?;
    files().try_for_each(|file| file.write_rest(mark_nbytes, &asked))?;
    if marks.iter().any(Option::is_some) {
        check_result(path, &targets, patch, read, &asked)?;
    }
    files().try_for_each(|file| file.finish(mark_nbytes, options.durable, &asked))?;
    held.into_iter().for_each(Held::release);
    Ok(true)
}

/// A file that is changed, and what its mark records.
type Begun<'t> = (&'t Target<'t>, Mark);

/// Return the marks of all files, which have none; `None` if they are the result already.
///
/// # Errors
/// They are another version, or the result has another layout.
fn begun<'t>(
    path: &Path,
    patch: &Patch,
    targets: &'t [Target<'t>],
    id: u128,
    verify: bool,
    read: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Option<Vec<Begun<'t>>>, Error> {
    let Some(files) = files_of_base(path, patch, verify, read, watch)? else {
        return Ok(None);
    };
    for target in targets {
        if target.nbytes()? != target.new.header.file_nbytes() {
            let reason = "the file has another size than the result";
            return Err(PatchFault::NotInPlace(reason).about(Some(target.path)));
        }
    }
    let files: Vec<u128> = files.iter().map(|id| short(id)).collect();
    Ok(Some(of_all(targets, id, &files)))
}

/// Return the mark of each file. `files` are their short ids.
fn of_all<'t>(targets: &'t [Target<'t>], patch: u128, files: &[u128]) -> Vec<Begun<'t>> {
    let base = base_of(files);
    let marks = (0..).zip(files).map(|(number, &file)| Mark {
        number,
        patch,
        file,
        base,
    });
    targets.iter().zip(marks).collect()
}

/// Return the unfinished files. Some have marks.
///
/// # Errors
/// [`PatchFault::Replaced`] if a file is not the file of the base or of the result that it should be; nothing is changed
/// then.
fn resumed<'t>(
    path: &Path,
    patch: &Patch,
    targets: &'t [Target<'t>],
    marks: &[Option<Mark>],
    read: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Begun<'t>>, Error> {
    check_index(path, patch)?;
    let Some(first) = marks.iter().flatten().next() else {
        return Ok(Vec::new());
    };
    let (mut files, mut others) = (Vec::with_capacity(targets.len()), Vec::new());
    for ((target, mark), number) in targets.iter().zip(marks).zip(0..) {
        target.check_size()?;
        if let Some(mark) = mark {
            let [expected, found] = [Mark { number, ..*first }, *mark].map(|mark| mark.origin());
            if expected != found {
                return Err(replaced(expected, found).about(Some(target.path)));
            }
            files.push(mark.file);
            continue;
        }
        let archive = target.archive()?;
        check_entries(&archive, &target.new.header)?;
        files.push(short(&Found::of(&[&archive], false, read, watch)?.id));
        // Files are finished in their order.
        let is_late = marks.iter().zip(0..number).any(|(mark, _)| mark.is_some());
        if is_late || head(&archive)? != target.new.head {
            others.push(target);
        }
    }
    // A file without a mark is not begun if it is the base's, and finished if it is the result's.
    if base_of(&files) == first.base {
        return Ok(of_all(targets, first.patch, &files));
    }
    if others.is_empty() {
        let marked = targets.iter().zip(marks);
        return Ok(marked
            .filter_map(|(target, mark)| Some((target, (*mark)?)))
            .collect());
    }
    let [expected, found] = [first.base, base_of(&files)].map(|base| format!("the version {base:032x}"));
    if let [target] = others[..] {
        return Err(replaced(expected, found).about(Some(target.path)));
    }
    let fault = PatchFault::Replaced {
        files: others.into_iter().map(Target::name).collect(),
        expected,
        found,
    };
    Err(fault.about(Some(path)))
}

fn replaced(expected: String, found: String) -> PatchFault {
    PatchFault::Replaced {
        files: Vec::new(),
        expected,
        found,
    }
}

/// Fail if the index is not the one of the base and of the result.
fn check_index(path: &Path, patch: &Patch) -> Result<(), Error> {
    let Some(expected) = patch.index() else {
        return Ok(());
    };
    let found = Checkpoint::index_path(path)?;
    let path = found.as_deref().unwrap_or(path);
    if std::fs::read(path).map_err(unopened(path))? == expected {
        return Ok(());
    }
    let [expected, found] = ["the index of the base", "another index"].map(str::to_owned);
    Err(replaced(expected, found).about(Some(path)))
}

/// Fail if a file has other tensors than the file of the result, or other positions.
fn check_entries(archive: &Archive, new: &Header) -> Result<(), Error> {
    if is_alike(archive.header(), new) {
        return Ok(());
    }
    let entries = |header: &'_ Header| -> Vec<String> {
        let entries = header.entries().map(|entry| {
            let Entry {
                name,
                dtype,
                shape,
                begin,
                ..
            } = entry;
            let name = Quoted(name);
            format!("the tensor {name} of {dtype} {shape:?} at byte {begin} of the data")
        });
        entries
            .chain([format!("a header of {} bytes", header.data_start())])
            .collect()
    };
    let mut pairs = entries(new).into_iter().zip(entries(archive.header()));
    let (expected, found) = pairs
        .find(|(expected, found)| expected != found)
        .unwrap_or_default();
    Err(replaced(expected, found).about(archive.path()))
}

/// Compare the data of all files with the digest of the result, before the headers are restored.
fn check_result(
    path: &Path,
    targets: &[Target<'_>],
    patch: &Patch,
    read: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let archives = targets.iter().map(Target::of_result);
    let archives = archives.collect::<Result<Vec<_>, _>>()?;
    let files: Vec<&Archive> = archives.iter().collect();
    let found = DataDigests::of(&files, read, watch)?.all;
    let expected = &patch.record().result.digest;
    if found == *expected {
        return Ok(());
    }
    // Digests in the headers show which file differs.
    if covers_data(files.iter().map(|file| file.header())) {
        intact(files, watch)?;
    }
    let several: Vec<String> = targets.iter().map(Target::name).collect();
    let fault = PatchFault::Replaced {
        files: if several.len() == 1 { Vec::new() } else { several },
        expected: format!("the data {expected}"),
        found: format!("the data {found}"),
    };
    Err(fault.about(Some(path)))
}

/// Return the paths of the files.
fn paths(path: &Path, patch: &Patch) -> Vec<PathBuf> {
    if patch.record().index.is_none() {
        return vec![path.to_owned()];
    }
    let folder = if path.is_dir() { Some(path) } else { path.parent() };
    let folder = folder.unwrap_or(Path::new(""));
    let names = patch.record().files.iter();
    names.map(|name| folder.join(name)).collect()
}

/// Return the ids of the files if they are the base of the patch, `None` if they are its result.
///
/// # Errors
/// They are another version, or the result has another layout.
fn files_of_base(
    path: &Path,
    patch: &Patch,
    verify: bool,
    read: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Option<Vec<String>>, Error> {
    let mut options = CheckpointOptions::new();
    options.open.backend = Backend::Pread;
    let checkpoint = Checkpoint::open(path, &options)?;
    let (base, result) = (&patch.record().base, &patch.record().result);
    let found = Found::of(&checkpoint.all_files()?, verify, read, watch)?;
    let is_result = found.is(result);
    if !is_result && !found.is(base) {
        return Err(found.mismatch(base).about(Some(path)));
    }
    // The tensors of two versions may be equal, and the metadata of their indices not.
    if let Some(reason) = check_layout(&checkpoint, patch)? {
        return Err(PatchFault::NotInPlace(reason).about(Some(path)));
    }
    Ok((!is_result).then_some(found.files))
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
        if new.head.len() < FACTS_NBYTES || head(file)?.len() != new.head.len() {
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
    fn nbytes(&self) -> Result<u64, Error> {
        Ok(self.file.metadata().map_err(unopened(self.path))?.len())
    }

    fn name(&self) -> String {
        self.path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    /// Fail if the file, which was begun, has another size than the result.
    fn check_size(&self) -> Result<(), Error> {
        let sizes = [self.new.header.file_nbytes(), self.nbytes()?];
        if sizes[0] == sizes[1] {
            return Ok(());
        }
        let [expected, found] = sizes.map(|nbytes| format!("{nbytes} bytes"));
        Err(replaced(expected, found).about(Some(self.path)))
    }

    fn origin(&self) -> Result<Origin, Error> {
        let file = self.file.try_clone().and_then(LocalFile::of);
        Ok(Origin::Local(Arc::new(file.map_err(unopened(self.path))?)))
    }

    /// Return the file, which has no mark.
    fn archive(&self) -> Result<Archive, Error> {
        let options = OpenOptions {
            backend: Backend::Pread,
            ..OpenOptions::default()
        };
        Archive::of(self.origin()?, Some(self.path), &options, None)
    }

    /// Return the file under the header of the result.
    fn of_result(&self) -> Result<Archive, Error> {
        Ok(Archive::of_header(
            self.origin()?,
            Some(self.path),
            self.new.header.clone(),
        ))
    }

    /// Make the header unreadable. The mark is on the disk before other bytes change.
    fn mark(&self, mark: &[u8], watch: &dyn Watch) -> Result<(), Error> {
        let mark = &mark[..mark.len().min(self.new.head.len())];
        self.write(mark, 0)?;
        self.flush(watch)
    }

    /// Return the part of the new header that the mark covers, and the rest of it.
    fn around(&self, mark_nbytes: usize) -> (&[u8], &[u8]) {
        self.new.head.split_at(mark_nbytes.min(self.new.head.len()))
    }

    /// Write the new header behind the mark. It and the tensors are on the disk before the mark goes.
    fn write_rest(&self, mark_nbytes: usize, watch: &dyn Watch) -> Result<(), Error> {
        let (first, rest) = self.around(mark_nbytes);
        self.write(rest, to_u64(first.len()))?;
        self.flush(watch)
    }

    /// Replace the mark by the new header.
    fn finish(&self, mark_nbytes: usize, durable: bool, watch: &dyn Watch) -> Result<(), Error> {
        let (first, _) = self.around(mark_nbytes);
        self.write(first, 0)?;
        if durable { self.flush(watch) } else { Ok(()) }
    }

    fn write(&self, bytes: &[u8], position: u64) -> Result<(), Error> {
        let written = write_all_at(self.file, bytes, position).step(step::PATCH);
        written.map_err(|fault| fault.in_save(self.path, 0))
    }

    fn flush(&self, watch: &dyn Watch) -> Result<(), Error> {
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

fn change<'t>(
    files: impl Iterator<Item = &'t Target<'t>>,
    patch: &'t Patch,
    read: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let archive = patch.archive()?;
    let whole = files.flat_map(|target| {
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
