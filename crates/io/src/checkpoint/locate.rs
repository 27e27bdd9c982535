//! Which file, or which index, is meant by a path.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use ingot_format::{Foreign, FormatError, Header, ShardIndex};

use super::folder::{Beside, Folder};
use super::parallel::of_directory;
use crate::archive::open_file;
use crate::error::{CheckpointFault, Error};
use crate::options::Reach;
use crate::watch::Unwatched;

/// What a path leads to.
pub(super) enum Located<T> {
    /// What was made of the only file.
    File(T),
    Index {
        folder: Folder,
        name: OsString,
    },
}

/// The index, and the file, that everybody looks for first.
const USUAL_INDEX: &str = "model.safetensors.index.json";
const USUAL_FILE: &str = "model.safetensors";

/// What files of tensors are called, and what stands between that and `json` in the name of an index.
const EXTENSIONS: [&str; 2] = [".safetensors", ".bt"];

/// Finds the index or the file. `open` makes of a file what is wanted of it, and fails with what is wrong with it.
pub(super) fn locate<T>(
    path: &Path,
    reach: Reach,
    open: impl Fn(File, PathBuf) -> Result<T, Error>,
) -> Result<Located<T>, Error> {
    if path.extension().is_some_and(|extension| extension == "json") && !path.is_dir() {
        return index_at(path, reach);
    }
    match open_one(path, reach, &open) {
        Err(Error::Open { source, .. }) if source.kind() == io::ErrorKind::IsADirectory => {
            in_directory(path, reach, &open)
        }
        Err(Error::Header {
            fault:
                FormatError::Foreign {
                    kind: Foreign::IndexJson,
                    ..
                },
            ..
        }) => index_at(path, reach),
        other => other.map(Located::File),
    }
}

/// All files that `path` leads to: the only one, or the shards of an index, which are held against that. `open` makes of
/// each what is wanted of it, of which `header` says what it holds. With the path of the file, or of the index.
pub(crate) fn open_files<T: Send + Sync>(
    path: &Path,
    open: impl Fn(File, PathBuf) -> Result<T, Error> + Sync,
    header: impl Fn(&T) -> &Header + Sync,
) -> Result<(PathBuf, Vec<T>, Option<ShardIndex>), Error> {
    match locate(path, Reach::FollowLinks, |file, path| {
        Ok((open(file, path.clone())?, path))
    })? {
        Located::File((file, path)) => Ok((path, vec![file], None)),
        Located::Index { folder, name } => {
            let (shards, beside) = Beside::index(folder, &name)?;
            let open = |number| {
                let (file, path) = beside.open(&shards, number)?;
                open(file, path)
            };
            let holds = |number, tensor: &str| beside.holds(&shards, number, tensor);
            let numbers: Vec<usize> = (0..shards.len()).collect();
            let files = shards.open(&numbers, of_directory(), open, header, holds, &Unwatched)?;
            Ok((shards.path().to_owned(), files, Some(shards.into_index())))
        }
    }
}

fn open_one<T>(
    path: &Path,
    reach: Reach,
    open: impl Fn(File, PathBuf) -> Result<T, Error>,
) -> Result<T, Error> {
    if reach == Reach::FollowLinks {
        let file = open_file(path).map_err(|source| Error::Open {
            path: path.to_owned(),
            source,
        })?;
        return open(file, path.to_owned());
    }
    if path.is_dir() {
        return Err(Error::Open {
            path: path.to_owned(),
            source: io::ErrorKind::IsADirectory.into(),
        });
    }
    let (folder, name) = parted(path, reach)?;
    open(folder.open(&name)?, path.to_owned())
}

fn index_at<T>(path: &Path, reach: Reach) -> Result<Located<T>, Error> {
    let (folder, name) = parted(path, reach)?;
    Ok(Located::Index { folder, name })
}

fn parted(path: &Path, reach: Reach) -> Result<(Folder, OsString), Error> {
    let folder = Folder::new(path.parent().unwrap_or(Path::new("")), reach)?;
    Ok((folder, path.file_name().unwrap_or_default().to_owned()))
}

/// An index before files, because files beside an index are its shards: first the usual one, then the only one. Then
/// files, likewise.
fn in_directory<T>(
    path: &Path,
    reach: Reach,
    open: impl Fn(File, PathBuf) -> Result<T, Error>,
) -> Result<Located<T>, Error> {
    let open_fault = |source| Error::Open {
        path: path.to_owned(),
        source,
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(open_fault)? {
        names.push(entry.map_err(open_fault)?.file_name());
    }
    // The order in which a file system lists names says nothing.
    names.sort();
    let indexes: Vec<&OsString> = names.iter().filter(|name| is_index(name)).collect();
    let files: Vec<&OsString> = names.iter().filter(|name| is_file_of_tensors(name)).collect();
    let fault = if let Some(name) = the_one(&indexes, USUAL_INDEX) {
        let folder = Folder::new(path, reach)?;
        return Ok(Located::Index { folder, name });
    } else if !indexes.is_empty() {
        ambiguous(&indexes)
    } else if let Some(name) = the_one(&files, USUAL_FILE) {
        let file = Folder::new(path, reach)?.open(&name)?;
        return open(file, path.join(name)).map(Located::File);
    } else if !files.is_empty() {
        ambiguous(&files)
    } else {
        CheckpointFault::NoCheckpoint
    };
    Err(Error::Checkpoint {
        path: path.to_owned(),
        fault,
    })
}

/// The usual one of these names, else the only one.
fn the_one(names: &[&OsString], usual: &str) -> Option<OsString> {
    let only = if names.len() == 1 { names.first() } else { None };
    let found = names.iter().find(|name| ***name == usual).or(only);
    found.map(|name| (*name).clone())
}

fn ambiguous(names: &[&OsString]) -> CheckpointFault {
    CheckpointFault::Ambiguous {
        found: names
            .iter()
            .map(|name| name.to_string_lossy().into_owned())
            .collect(),
    }
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
