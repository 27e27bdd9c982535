//! Which file, or which index, is meant by a path.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::Path;

use ingot_format::{Foreign, FormatError};

use super::folder::Folder;
use crate::error::{CheckpointFault, Error, unopened};
use crate::file::{Archive, LocalFile, ShardHeaders};
use crate::options::{CheckpointOptions, OpenOptions, Reach};

/// What a path leads to.
pub(super) enum Located {
    /// The only file.
    File(Box<Archive>),
    Index {
        folder: Folder,
        name: OsString,
    },
}

/// How a checkpoint is opened, besides its options.
#[derive(Clone, Debug, Default)]
pub struct OpenWith {
    /// Headers that another process read to open the same files ([`Checkpoint::shard_headers`](crate::Checkpoint::shard_headers)). The
    /// headers of files that have the same size and time of modification here are not read again.
    pub headers: ShardHeaders,
    /// Whether a single file may be closed and opened again between reads, as shards are: the caller opens many.
    pub is_one_of_many: bool,
}

impl OpenWith {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Archive, Error> {
        let file = if self.is_one_of_many {
            LocalFile::open_one_of_many(path)?
        } else {
            LocalFile::open(path)?
        };
        Archive::of_file(file, path, options, self.headers.of_file())
    }
}

/// The index, and the file, that everybody looks for first.
const USUAL_INDEX: &str = "model.safetensors.index.json";
const USUAL_FILE: &str = "model.safetensors";

/// What files of tensors are called, and what stands between that and `json` in the name of an index.
const EXTENSIONS: [&str; 2] = [".safetensors", ".bt"];

/// Finds the index, or the file and opens it.
pub(super) fn locate(path: &Path, options: &CheckpointOptions, open: &OpenWith) -> Result<Located, Error> {
    if path.extension().is_some_and(|extension| extension == "json") && !path.is_dir() {
        return index_at(path, options.reach);
    }
    match open_one(path, options, open) {
        Err(Error::Open { source, .. }) if source.kind() == io::ErrorKind::IsADirectory => {
            in_directory(path, options, open)
        }
        Err(Error::Header {
            fault:
                FormatError::Foreign {
                    kind: Foreign::IndexJson,
                    ..
                },
            ..
        }) => index_at(path, options.reach),
        other => other.map(|archive| Located::File(Box::new(archive))),
    }
}

fn open_one(path: &Path, options: &CheckpointOptions, open: &OpenWith) -> Result<Archive, Error> {
    if options.reach == Reach::FollowLinks {
        return open.open(path, &options.open);
    }
    if path.is_dir() {
        return Err(unopened(path)(io::ErrorKind::IsADirectory.into()));
    }
    let (folder, name) = parted(path, options.reach)?;
    confined(&folder, &name, path, &options.open)
}

fn confined(folder: &Folder, name: &OsStr, path: &Path, options: &OpenOptions) -> Result<Archive, Error> {
    let file = LocalFile::of(folder.open(name)?).map_err(unopened(path))?;
    Archive::of_file(file, path, options, None)
}

fn index_at(path: &Path, reach: Reach) -> Result<Located, Error> {
    let (folder, name) = parted(path, reach)?;
    Ok(Located::Index { folder, name })
}

fn parted(path: &Path, reach: Reach) -> Result<(Folder, OsString), Error> {
    let folder = Folder::new(path.parent().unwrap_or(Path::new("")), reach)?;
    Ok((folder, path.file_name().unwrap_or_default().to_owned()))
}

/// An index before files, because files beside an index are its shards: first the usual one, then the only one. Then
/// files, likewise.
fn in_directory(path: &Path, options: &CheckpointOptions, open: &OpenWith) -> Result<Located, Error> {
    let open_fault = unopened(path);
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(open_fault)? {
        names.push(entry.map_err(open_fault)?.file_name());
    }
    // The order in which a file system lists names says nothing.
    names.sort();
    let indexes: Vec<&OsString> = names.iter().filter(|name| is_index(name)).collect();
    let files: Vec<&OsString> = names.iter().filter(|name| is_file_of_tensors(name)).collect();
    let fault = if let Some(name) = the_one(&indexes, USUAL_INDEX) {
        let folder = Folder::new(path, options.reach)?;
        return Ok(Located::Index { folder, name });
    } else if !indexes.is_empty() {
        ambiguous(&indexes)
    } else if !files.is_empty() && files.iter().all(|name| is_part(name)) {
        CheckpointFault::MissingIndex { found: texts(&files) }
    } else if let Some(name) = the_one(&files, USUAL_FILE) {
        let file = path.join(&name);
        let archive = match options.reach {
            Reach::FollowLinks => open.open(&file, &options.open),
            Reach::Confined => confined(&Folder::new(path, options.reach)?, &name, &file, &options.open),
        };
        return archive.map(|archive| Located::File(Box::new(archive)));
    } else if !files.is_empty() {
        ambiguous(&files)
    } else {
        CheckpointFault::NoCheckpoint
    };
    Err(fault.about(path))
}

/// The usual one of these names, else the only one.
fn the_one(names: &[&OsString], usual: &str) -> Option<OsString> {
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

/// Whether a file is a shard by its name, such as `model-00001-of-00004.safetensors`.
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

/// Hidden files are those of an interrupted save, or of the file manager of a Mac.
fn is_shown(name: &str) -> bool {
    !name.starts_with('.')
}
