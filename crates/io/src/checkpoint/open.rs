//! Opening a checkpoint: finding the file or the index that a path leads to, and trying again if a save replaces them
//! meanwhile.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use ingot_format::{Foreign, FormatError, ShardIndex, StopFlag};

use super::folder::{Beside, Folder, read_index};
use super::{Checkpoint, Contents};
use crate::error::{CheckpointFault, Error, Failure, unopened};
use crate::file::{Archive, LocalFile, Origin};
use crate::options::{CheckpointOptions, Reach, ShardHeader, ShardHeaders};
use crate::watch::Watch;
use crate::workers::{Reading, in_parallel};

impl Checkpoint {
    /// Opens a file, the shards of an index, or the file or index in a directory. The contents of a file decide whether it is
    /// an index, except that a name that ends in `.json` is always the name of an index.
    ///
    /// # Errors
    /// As [`Archive::open`]; [`Failure::Index`] with the rule that the index breaks; [`Failure::Checkpoint`] if the index, the
    /// shards and the directory do
    /// not match.
    pub fn open(path: &Path, options: &CheckpointOptions) -> Result<Checkpoint, Error> {
        match open_once(path, options) {
            Err(fault) if may_pass(&fault, path) => open_again(path, options, fault),
            opened => opened,
        }
    }

    /// Reads the index at `path`, or the index of the directory `path`, and opens none of its shards. `None` if `path` leads
    /// to a single file.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn index_at(path: &Path) -> Result<Option<ShardIndex>, Error> {
        let path = Checkpoint::index_path(path)?;
        path.map(|path| read_index(&path)).transpose()
    }

    /// Return the path of the index at `path`, or of the index of the directory `path`. `None` if `path` leads to a single
    /// file.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub(crate) fn index_path(path: &Path) -> Result<Option<PathBuf>, Error> {
        Ok(match find(path, &CheckpointOptions::default())? {
            Found::File(_) => None,
            Found::Index(folder, name) => Some(folder.path(name)),
        })
    }

    /// Return the headers and the index, for other processes that open the same files. `None` if they read the headers as
    /// fast themselves (from a disk, from memory, from an object), or cannot check that they have the same files.
    ///
    /// # Errors
    /// As [`Checkpoint::file`]; [`Failure::Read`]; [`Failure::Interrupted`].
    #[doc(hidden)]
    pub fn shard_headers(&self, watch: &dyn Watch) -> Result<Option<ShardHeaders>, Error> {
        if self.files() == 0 || self.file(0)?.source().version().is_none() {
            return Ok(None);
        }
        let (files, numbers) = (self.all_files()?, (0..self.files()).collect::<Vec<_>>());
        let reading = match &self.files {
            Contents::File(_) => Reading::on(1).waiting(true),
            Contents::Shards(shards) => shards.store.reading(),
        };
        let header = |number: usize, stop: StopFlag<'_>| files[number].shard_header(stop);
        let headers = in_parallel(reading, &numbers, header, watch)?.into_iter();
        let files = headers.collect::<Option<Vec<ShardHeader>>>();
        let index = self.index().map(ShardIndex::render);
        Ok(files.map(|files| ShardHeaders { index, files }))
    }
}

fn open_once(path: &Path, options: &CheckpointOptions) -> Result<Checkpoint, Error> {
    match find(path, options)? {
        Found::File(archive) => Ok((*archive).into()),
        Found::Index(folder, name) => {
            let shards = Beside::index(folder, &name, &options.open, options.headers.clone())?;
            let checkpoint = Checkpoint::of_shards(shards);
            // Callers need the backend of every checkpoint, and only here is a failure retried.
            checkpoint.backend()?;
            Ok(checkpoint)
        }
    }
}

/// What a path leads to.
enum Found {
    /// The only file.
    File(Box<Archive>),
    /// The index of this name in a directory.
    Index(Folder, OsString),
}

/// The names that are looked for first in a directory.
const USUAL_INDEX: &str = "model.safetensors.index.json";
const USUAL_FILE: &str = "model.safetensors";

/// The extensions of files of tensors. The name of an index has `.index.` and `.json` after one of them.
const EXTENSIONS: [&str; 2] = [".safetensors", ".bt"];

/// Find the index, or find the file and open it.
fn find(path: &Path, options: &CheckpointOptions) -> Result<Found, Error> {
    if path.extension().is_some_and(|extension| extension == "json") && !path.is_dir() {
        return index_at(path, options.reach);
    }
    if options.reach == Reach::Confined && path.is_dir() {
        return in_directory(path, options);
    }
    let fault = match open_path(path, options) {
        Err(fault) => fault,
        opened => return opened,
    };
    match fault.failure() {
        Failure::Open(source) if source.kind() == io::ErrorKind::IsADirectory => in_directory(path, options),
        Failure::Header(FormatError::Foreign {
            kind: Foreign::IndexJson,
            ..
        }) => index_at(path, options.reach),
        _ => Err(fault),
    }
}

fn open_path(path: &Path, options: &CheckpointOptions) -> Result<Found, Error> {
    // A path without a file name, such as an empty one, is not a file. The system's error has the reason.
    let archive = if options.reach == Reach::Confined && path.file_name().is_some() {
        open_confined(path, options)
    } else {
        open_file(path, options)
    };
    archive.map(|archive| Found::File(Box::new(archive)))
}

fn open_file(path: &Path, options: &CheckpointOptions) -> Result<Archive, Error> {
    let file = if options.is_one_of_many {
        LocalFile::open_one_of_many(path)?
    } else {
        LocalFile::open(path)?
    };
    let file = Origin::Local(Arc::new(file));
    Archive::of(file, Some(path), &options.open, options.headers.of_file())
}

fn open_confined(path: &Path, options: &CheckpointOptions) -> Result<Archive, Error> {
    let (folder, name) = split(path, options.reach)?;
    let file = LocalFile::of(folder.open(name)?).map_err(unopened(path))?;
    Archive::of(Origin::Local(Arc::new(file)), Some(path), &options.open, None)
}

fn index_at(path: &Path, reach: Reach) -> Result<Found, Error> {
    let (folder, name) = split(path, reach)?;
    Ok(Found::Index(folder, name))
}

fn split(path: &Path, reach: Reach) -> Result<(Folder, OsString), Error> {
    let folder = Folder::new(path.parent().unwrap_or(Path::new("")), reach)?;
    Ok((folder, path.file_name().unwrap_or_default().to_owned()))
}

/// Find the checkpoint of a directory: the usual index or the only index, and then the usual file or the only file. An index
/// comes first, since the files beside it are its shards.
fn in_directory(path: &Path, options: &CheckpointOptions) -> Result<Found, Error> {
    let open_fault = unopened(path);
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(open_fault)? {
        names.push(entry.map_err(open_fault)?.file_name());
    }
    // File systems list names in any order.
    names.sort();
    let indexes: Vec<&OsString> = names.iter().filter(|name| is_index(name)).collect();
    let files: Vec<&OsString> = names.iter().filter(|name| is_file_of_tensors(name)).collect();
    let fault = if let Some(name) = usual_or_only(&indexes, USUAL_INDEX) {
        return Ok(Found::Index(Folder::new(path, options.reach)?, name));
    } else if !indexes.is_empty() {
        ambiguous(&indexes)
    } else if !files.is_empty() && files.iter().all(|name| is_part(name)) {
        CheckpointFault::MissingIndex { found: texts(&files) }
    } else if let Some(name) = usual_or_only(&files, USUAL_FILE) {
        return open_path(&path.join(name), options);
    } else if !files.is_empty() {
        ambiguous(&files)
    } else {
        CheckpointFault::NoCheckpoint
    };
    Err(fault.about(path))
}

/// Return the usual one of these names, or else the only one.
fn usual_or_only(names: &[&OsString], usual: &str) -> Option<OsString> {
    let only = if names.len() == 1 { names.first() } else { None };
    let found = names.iter().find(|name| ***name == usual).or(only);
    found.map(|name| (*name).clone())
}

fn ambiguous(names: &[&OsString]) -> CheckpointFault {
    CheckpointFault::Ambiguous { found: texts(names) }
}

fn texts(names: &[&OsString]) -> Vec<String> {
    names
        .iter()
        .map(|name| name.to_string_lossy().into_owned())
        .collect()
}

/// Return whether a file is a shard by its name, such as `model-00001-of-00004.safetensors`.
fn is_part(name: &OsStr) -> bool {
    let parsed = name.to_str().and_then(|name| {
        let (rest, count) = name.rsplit_once('.')?.0.rsplit_once("-of-")?;
        let number = rest.rsplit_once('-')?.1;
        number.parse::<u32>().ok()?;
        count.parse::<u32>().ok()
    });
    parsed.is_some_and(|count| count > 1)
}

/// `model.safetensors.index.json`, and with a variant `model.safetensors.index.fp16.json`.
fn is_index(name: &OsStr) -> bool {
    let Some(name) = name.to_str().filter(|name| is_shown(name)) else {
        return false;
    };
    name.ends_with(".json")
        && EXTENSIONS
            .iter()
            .any(|extension| name.contains(&format!("{extension}.index.")))
}

fn is_file_of_tensors(name: &OsStr) -> bool {
    name.to_str()
        .is_some_and(|name| is_shown(name) && EXTENSIONS.iter().any(|extension| name.ends_with(extension)))
}

/// Hidden files belong to an interrupted save, or to the file manager of a Mac.
fn is_shown(name: &str) -> bool {
    !name.starts_with('.')
}

/// How often a checkpoint is opened again. With the pauses that takes a quarter of a second at most.
const TRIES: usize = 100;
/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(2);
/// Clocks of file systems advance in steps, of 10 ms at most on Linux: changes within a step have one time.
const STEP: Duration = Duration::from_millis(20);

/// Open a checkpoint again after `fault`, as long as a save may be replacing it.
fn open_again(path: &Path, options: &CheckpointOptions, mut fault: Error) -> Result<Checkpoint, Error> {
    // The time of the directory before the failed try, if a later change has another one.
    let mut before = None;
    for _ in 0..TRIES {
        let now = modified(path);
        // A changed file proves a replacement. Otherwise the directory shows one. The first failure has no earlier time to
        // compare with, and is worth a second try.
        if !fault.is_changed() && before == Some(now) {
            break;
        }
        before = (!now.is_some_and(is_recent)).then_some(now);
        thread::sleep(PAUSE);
        match open_once(path, options) {
            Err(next) if may_pass(&next, path) => fault = next,
            opened => return opened,
        }
    }
    Err(fault)
}

/// Return whether opening `path` may succeed once a save that is replacing the checkpoint has ended.
fn may_pass(fault: &Error, path: &Path) -> bool {
    match fault.failure() {
        // A name in the index or the directory, and not the name that the caller passed.
        Failure::Open(source) => source.kind() == io::ErrorKind::NotFound && fault.path() != Some(path),
        Failure::Changed { .. }
        | Failure::Checkpoint(
            CheckpointFault::MissingShards { .. }
            | CheckpointFault::MissingIndex { .. }
            | CheckpointFault::Ambiguous { .. }
            | CheckpointFault::NoCheckpoint,
        ) => true,
        _ => false,
    }
}

/// Return when a name in the directory of the checkpoint was last changed.
fn modified(path: &Path) -> Option<SystemTime> {
    let directory = match path.parent() {
        Some(parent) if !path.is_dir() => parent,
        _ => path,
    };
    let directory = if directory.as_os_str().is_empty() {
        Path::new(".")
    } else {
        directory
    };
    fs::metadata(directory).and_then(|facts| facts.modified()).ok()
}

fn is_recent(time: SystemTime) -> bool {
    // The clock of a server may be ahead.
    time.elapsed().is_ok_and(|ago| ago < STEP)
}
