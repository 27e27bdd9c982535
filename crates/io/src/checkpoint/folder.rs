//! The directory of a checkpoint's files, and the index that names them.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ingot_format::{IndexReader, ShardIndex, StopFlag, to_u64};

use super::shards::{Shards, Store};
use crate::disk::{Beneath, Facts, Refusal};
use crate::error::{CheckpointFault, Error, Failure, unopened};
use crate::file::{Archive, LocalFile, Origin, Place, check_unchanged, is_in_its_place, most_open};
use crate::options::{OpenOptions, Reach, ShardHeaders};
use crate::workers::{Reading, of_directory};

/// A directory, and whether its files must be in it.
#[derive(Debug)]
pub(super) struct Folder {
    /// As the caller spells it.
    path: PathBuf,
    /// The absolute path: the process may change its directory before a file is opened.
    at: PathBuf,
    /// Set if files are confined to it.
    confined: Option<Arc<Beneath>>,
}

impl Folder {
    /// Return the directory at `path`. A link to the directory itself is followed, since the caller named it.
    pub(super) fn new(path: &Path, reach: Reach) -> Result<Folder, Error> {
        // The parent of a bare file name.
        let directory = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        let confined = match reach {
            Reach::FollowLinks => None,
            Reach::Confined => Some(Arc::new(Beneath::of(directory).map_err(unopened(directory))?)),
        };
        Ok(Folder {
            path: path.to_owned(),
            at: std::path::absolute(directory).unwrap_or_else(|_| path.to_owned()),
            confined,
        })
    }

    pub(super) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    /// Return the place of a file in it, by a name that rule I6 allows.
    fn place(&self, name: impl AsRef<OsStr>) -> Place {
        match &self.confined {
            None => Place::Path(self.at.join(name.as_ref())),
            Some(directory) => Place::Beneath(Arc::clone(directory), name.as_ref().to_owned()),
        }
    }

    /// Return the facts of a file in it. Only a confined file is opened for that.
    fn facts(&self, name: impl AsRef<OsStr>) -> Result<Facts, Error> {
        let facts = self.place(&name).facts();
        facts.map_err(|refusal| self.refused(name.as_ref(), refusal))
    }

    /// Open a file in it.
    pub(super) fn open(&self, name: impl AsRef<OsStr>) -> Result<File, Error> {
        let file = self.place(&name).open();
        file.map_err(|refusal| self.refused(name.as_ref(), refusal))
    }

    fn refused(&self, name: &OsStr, refusal: Refusal) -> Error {
        match refusal {
            Refusal::System(source) => unopened(&self.path(name))(source),
            Refusal::Elsewhere(reason) => {
                let shard = name.to_string_lossy().into_owned();
                CheckpointFault::NotConfined { shard, reason }.about(&self.path)
            }
        }
    }

    /// Return shard `name` as it is now. It is opened now if `is_open`, and otherwise when it is read.
    fn shard(&self, name: &str, is_open: bool) -> Result<Arc<LocalFile>, Error> {
        let place = self.place(name);
        if !is_open {
            let facts = self.facts(name)?;
            return Ok(Arc::new(LocalFile::unopened(place, facts)));
        }
        let file = LocalFile::one_of_many(place).map(Arc::new);
        file.map_err(|refusal| self.refused(name.as_ref(), refusal))
    }
}

fn is_missing(fault: &Error) -> bool {
    matches!(fault.failure(), Failure::Open(source) if source.kind() == io::ErrorKind::NotFound)
}

/// The directory of an index, and the shards in it as they were when the index was read.
#[derive(Debug)]
pub(super) struct Beside {
    folder: Folder,
    /// The index as it was read; `None` if another process read it.
    index: Option<Listed>,
    shards: Vec<Arc<LocalFile>>,
    options: OpenOptions,
    /// Headers that another process read.
    headers: ShardHeaders,
}

impl Beside {
    /// Read the index `name`, unless another process read it, and check that all its shards exist.
    pub(super) fn index(
        folder: Folder,
        name: &OsStr,
        options: &OpenOptions,
        headers: ShardHeaders,
    ) -> Result<Shards, Error> {
        let path = folder.path(name);
        let (index, listed) = match headers.index.as_deref() {
            Some(given) => (index_of(given, to_u64(given.len()), &path)?, None),
            None => {
                let (index, file) = index_in(&folder, name)?;
                (index, Some(file))
            }
        };
        let names = index.shards();
        let is_open = names.len() <= most_open();
        let found: Vec<_> = names.iter().map(|shard| folder.shard(shard, is_open)).collect();
        // A save replaces the index before and after it replaces the shards. So if the index is still the same file, the shards
        // that were found belong to it. The open file prevents reuse of its inode number.
        let listed = listed
            .map(|file| Listed::proven(name, &file, &folder))
            .transpose()?;
        refuse_missing(&index, &found).map_err(|fault| fault.about(&path))?;
        let beside = Beside {
            shards: found.into_iter().collect::<Result<_, Error>>()?,
            folder,
            index: listed,
            options: *options,
            headers,
        };
        Ok(Shards::new(path, index, Box::new(beside)))
    }
}

/// An index file, and the version of it that was read.
#[derive(Debug)]
struct Listed {
    name: OsString,
    facts: Facts,
    waits: bool,
}

impl Listed {
    /// Fail if `name` no longer leads to `file`, or if `file` was written to.
    fn proven(name: &OsStr, file: &LocalFile, folder: &Folder) -> Result<Listed, Error> {
        let listed = Listed {
            name: name.to_owned(),
            facts: *file.facts(),
            waits: file.remote().is_some(),
        };
        if listed.is_replaced(folder) {
            let failure = Failure::Changed {
                nbytes_at_open: listed.facts.nbytes,
                nbytes_now: None,
            };
            return Err(failure.about(Some(&folder.path(name)), None));
        }
        Ok(listed)
    }

    fn is_replaced(&self, folder: &Folder) -> bool {
        let now = folder.facts(&self.name);
        !now.is_ok_and(|now| is_in_its_place(&self.facts, &now, self.waits))
    }
}

impl Store for Beside {
    fn is_replaced(&self) -> bool {
        self.index
            .as_ref()
            .is_some_and(|index| index.is_replaced(&self.folder))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path(name)
    }

    fn open(&self, shards: &Shards, number: usize, _stop: StopFlag<'_>) -> Result<Archive, Error> {
        let path = self.folder.path(shards.name(number));
        let file = &self.shards[number];
        let known = self.headers.of_shard(number);
        let opened = file.ensure_open().map_err(unopened(&path));
        let archive = opened.and_then(|()| {
            let file = Origin::Local(Arc::clone(file));
            Archive::of(file, Some(&path), &self.options, known)
        });
        archive.map_err(|fault| match check_unchanged(&**file, Some(&path)) {
            // A save replaced the shard, which explains any fault.
            Err(changed) if changed.is_changed() => changed,
            _ => fault,
        })
    }

    fn reading(&self) -> Reading {
        of_directory()
    }

    fn backend(&self) -> Option<(&'static str, &'static str)> {
        self.shards.is_empty().then_some(("pread", "no file to read"))
    }
}

/// Fail if shards are missing, with all their names.
fn refuse_missing(
    index: &ShardIndex,
    found: &[Result<Arc<LocalFile>, Error>],
) -> Result<(), CheckpointFault> {
    let missing: Vec<String> = found
        .iter()
        .zip(index.shards())
        .filter(|pair| pair.0.as_ref().is_err_and(is_missing))
        .map(|pair| pair.1.clone())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(CheckpointFault::MissingShards {
        shards: missing,
        of: found.len(),
    })
}

/// Read an index, and none of its shards.
///
/// # Errors
/// [`Failure::Open`]; [`Failure::Index`] with the rule that the index breaks.
pub(crate) fn read_index(path: &Path) -> Result<ShardIndex, Error> {
    let folder = Folder::new(path.parent().unwrap_or(Path::new("")), Reach::FollowLinks)?;
    let (index, _) = index_in(&folder, path.file_name().unwrap_or_default())?;
    Ok(index)
}

/// Read the index `name` of a directory, and return it with its open file.
fn index_in(folder: &Folder, name: &OsStr) -> Result<(ShardIndex, LocalFile), Error> {
    let path = folder.path(name);
    let file = LocalFile::of(folder.open(name)?).map_err(unopened(&path))?;
    let index = file.with(|bytes| Ok(index_of(bytes, file.facts().nbytes, &path)));
    Ok((index.map_err(unopened(&path))??, file))
}

/// Read an index of `nbytes` through a window, so that an index of 60 MB needs no more memory than its names. `path` is for
/// the errors.
pub(crate) fn index_of(mut bytes: impl Read, nbytes: u64, path: &Path) -> Result<ShardIndex, Error> {
    const WINDOW_NBYTES: usize = 128 << 10;
    let index_fault = |fault| Failure::Index(fault).about(Some(path), None);
    let mut reader = IndexReader::new(nbytes).map_err(index_fault)?;
    let mut window = vec![0; WINDOW_NBYTES];
    let (mut position, mut filled) = (0, 0);
    while position < nbytes {
        let found = bytes.read(&mut window[filled..]).map_err(unopened(path))?;
        if found == 0 {
            let failure = Failure::Changed {
                nbytes_at_open: nbytes,
                nbytes_now: Some(position),
            };
            return Err(failure.about(Some(path), None));
        }
        position += to_u64(found);
        filled += found;
        let taken = reader.feed(&window[..filled]).map_err(index_fault)?;
        window.copy_within(taken..filled, 0);
        filled -= taken;
        if filled == window.len() {
            // One item is longer than the window. Rule I3 and the size of the index limit the growth.
            window.resize(2 * filled, 0);
        }
    }
    reader.finish().map_err(index_fault)
}
