//! The directory that a checkpoint's files lie in, and the index that names them.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ingot_format::{IndexReader, ShardIndex, StopFlag, to_u64};

use super::shards::{Backing, Shards, Store};
use crate::disk::{self, Beneath, Facts, Kind, Refusal};
use crate::error::{CheckpointFault, Error, unopened};
use crate::file::Heads;
use crate::file::{Archive, check_unchanged};
use crate::file::{FileSource, LocalFile, ReadAt, Reopen, Stamp, with_room};
use crate::options::{OpenOptions, Reach};
use crate::workers::{Reading, of_directory};

/// A directory, and how far its files may lie from it.
#[derive(Debug)]
pub(super) struct Folder {
    /// As the caller spells it.
    path: PathBuf,
    /// Where that is, wherever the process goes: files are opened long after the directory was named.
    at: PathBuf,
    /// Only where files are confined to it.
    confined: Option<Beneath>,
}

impl Folder {
    /// The directory at `path`. A link to it is followed: it is the caller's.
    pub(super) fn new(path: &Path, reach: Reach) -> Result<Folder, Error> {
        // The parent of a bare file name.
        let directory = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        let confined = match reach {
            Reach::FollowLinks => None,
            Reach::Confined => Some(Beneath::of(directory).map_err(unopened(directory))?),
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

    /// What the system says of a file in it, which is not opened for that where it need not be confined.
    fn facts(&self, name: impl AsRef<OsStr>) -> Result<Facts, Error> {
        let name = name.as_ref();
        let facts = match &self.confined {
            None => disk::facts_at(&self.at.join(name)),
            Some(_) => disk::facts(&self.open(name)?),
        };
        facts.map_err(unopened(&self.path(name)))
    }

    /// Opens a file in it, by a name that rule I6 allows.
    pub(super) fn open(&self, name: impl AsRef<OsStr>) -> Result<File, Error> {
        let name = name.as_ref();
        let open_fault = |source| unopened(&self.path(name))(source);
        let Some(beneath) = &self.confined else {
            return with_room(|| disk::open_for_reading(&self.at.join(name))).map_err(open_fault);
        };
        let refused = |reason| {
            let shard = name.to_string_lossy().into_owned();
            CheckpointFault::NotConfined { shard, reason }.about(&self.path)
        };
        let file = beneath.open(name).map_err(|fault| match fault {
            Refusal::Elsewhere(reason) => refused(reason),
            Refusal::System(source) => open_fault(source),
        })?;
        let facts = disk::facts(&file).map_err(open_fault)?;
        if facts.kind == Kind::File && facts.names != 1 {
            return Err(refused("it has a second name somewhere, which is a hard link"));
        }
        Ok(file)
    }

    /// The same, to be read by position.
    pub(super) fn source(&self, name: impl AsRef<OsStr>) -> Result<FileSource, Error> {
        let name = name.as_ref();
        FileSource::new(self.open(name)?).map_err(unopened(&self.path(name)))
    }
}

/// Fails when `file` was written to since it was looked `then` what has its path, or is another one.
fn check_unwritten(then: &Stamp, file: &FileSource, path: &Path) -> Result<(), Error> {
    let now = file.stamp();
    // Two saves within one tick of the system's clock give files of one time.
    if then.is_in_its_place(now, file.waits()) {
        return Ok(());
    }
    let is_told_by_size = now.nbytes() != then.nbytes();
    let nbytes_now = is_told_by_size.then_some(now.nbytes());
    Err(changed(then, nbytes_now, path.to_owned()))
}

fn changed(then: &Stamp, nbytes_now: Option<u64>, path: PathBuf) -> Error {
    Error::Changed {
        path: Some(path),
        nbytes_at_open: then.nbytes(),
        nbytes_now,
    }
}

fn is_missing(fault: &Error) -> bool {
    matches!(fault, Error::Open { source, .. } if source.kind() == io::ErrorKind::NotFound)
}

/// A file that is opened again by its name in a directory.
#[derive(Debug)]
struct ByName {
    folder: Arc<Folder>,
    name: OsString,
}

impl Reopen for ByName {
    fn reopen(&self) -> io::Result<File> {
        self.folder.open(&self.name).map_err(as_of_the_system)
    }

    fn look(&self) -> io::Result<Facts> {
        self.folder.facts(&self.name).map_err(as_of_the_system)
    }
}

fn as_of_the_system(error: Error) -> io::Error {
    match error {
        Error::Open { source, .. } => source,
        other => io::Error::other(other),
    }
}

/// A shard as it was when the index was read.
#[derive(Debug)]
enum Shard {
    /// It is read as it was then, also if another file has its name now.
    Open(LocalFile),
    /// One of more than may be open at once.
    Closed(Stamp),
}

/// The directory of an index, and what the shards in it were when that was read.
#[derive(Debug)]
pub(super) struct Beside {
    folder: Arc<Folder>,
    /// The index as it was read; `None` where another process has read it.
    index: Option<Listed>,
    seen: Vec<Shard>,
    options: OpenOptions,
    /// What another process has read of the same.
    heads: Heads,
}

impl Beside {
    /// Reads the index `name`, where another process has not, and looks whether all its shards are there.
    pub(super) fn index(
        folder: Folder,
        name: &OsStr,
        options: &OpenOptions,
        heads: Heads,
    ) -> Result<(Shards, Beside), Error> {
        let (path, folder) = (folder.path(name), Arc::new(folder));
        let (index, listed) = match heads.index.as_deref() {
            Some(given) => (index_of(given, to_u64(given.len()), &path)?, None),
            None => {
                let (index, file) = index_in(&folder, name)?;
                (index, Some(file))
            }
        };
        let shards = Shards::new(path, index);
        let names = shards.index().shards();
        let is_open = names.len() <= LocalFile::most_held();
        let looked: Vec<_> = names.iter().map(|shard| look(&folder, shard, is_open)).collect();
        // A save replaces the index before and after it replaces the shards. So an index that is still in its place was
        // there when the shards were looked at. The open file keeps its number from being reused.
        let index = listed
            .map(|file| Listed::proven(name, &file, &folder))
            .transpose()?;
        refuse_missing(&shards, &looked)?;
        let beside = Beside {
            seen: looked.into_iter().collect::<Result<_, Error>>()?,
            folder,
            index,
            options: *options,
            heads,
        };
        Ok((shards, beside))
    }
}

/// An index file, and the version of it that was read.
#[derive(Debug)]
struct Listed {
    name: OsString,
    stamp: Stamp,
    waits: bool,
}

impl Listed {
    /// Fails if `name` no longer leads to `file`, or if `file` was written to.
    fn proven(name: &OsStr, file: &FileSource, folder: &Folder) -> Result<Listed, Error> {
        let listed = Listed {
            name: name.to_owned(),
            stamp: *file.stamp(),
            waits: file.waits(),
        };
        if listed.is_replaced(folder) {
            return Err(changed(&listed.stamp, None, folder.path(name)));
        }
        Ok(listed)
    }

    fn is_replaced(&self, folder: &Folder) -> bool {
        let now = folder.facts(&self.name).map(|facts| Stamp::of(&facts));
        !now.is_ok_and(|now| self.stamp.is_in_its_place(&now, self.waits))
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
        let name = shards.name(number);
        let path = self.folder.path(name);
        let file = match &self.seen[number] {
            Shard::Open(file) => {
                check_unchanged(file, Some(&path))?;
                file.clone()
            }
            Shard::Closed(stamp) => {
                let file = match self.folder.source(name) {
                    Err(fault) if is_missing(&fault) => return Err(changed(stamp, None, path)),
                    file => file?,
                };
                check_unwritten(stamp, &file, &path)?;
                lent(file, &self.folder, name)
            }
        };
        let head = self.heads.of_shard(number);
        let archive = Archive::of_file(file.clone(), path.clone(), &self.options, head);
        archive.map_err(|fault| match check_unchanged(&file, Some(&path)) {
            // It was closed meanwhile, and a save replaced it.
            Err(changed @ Error::Changed { .. }) => changed,
            _ => fault,
        })
    }

    fn reading(&self) -> Reading {
        of_directory()
    }

    fn backing(&self, shards: &Shards) -> Option<Backing> {
        let is_empty = shards.len() == 0;
        is_empty.then(|| Backing {
            format: shards.format(),
            backend: "pread",
            why: "no file to read".to_owned(),
        })
    }
}

fn look(folder: &Arc<Folder>, name: &str, is_open: bool) -> Result<Shard, Error> {
    if is_open {
        let file = folder.source(name)?;
        return Ok(Shard::Open(lent(file, folder, name)));
    }
    folder.facts(name).map(|facts| Shard::Closed(Stamp::of(&facts)))
}

fn lent(file: FileSource, folder: &Arc<Folder>, name: &str) -> LocalFile {
    let again = ByName {
        folder: Arc::clone(folder),
        name: name.into(),
    };
    LocalFile::lent(file, Box::new(again))
}

/// Fails when shards are not there, with all their names.
fn refuse_missing(shards: &Shards, looked: &[Result<Shard, Error>]) -> Result<(), Error> {
    let missing: Vec<String> = looked
        .iter()
        .zip(shards.index().shards())
        .filter(|pair| pair.0.as_ref().is_err_and(is_missing))
        .map(|pair| pair.1.clone())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let missing = CheckpointFault::MissingShards {
        shards: missing,
        of: looked.len(),
    };
    Err(missing.about(shards.path()))
}

/// Reads an index, and none of its shards.
///
/// # Errors
/// [`Error::Open`], and [`Error::Index`] with the rule that it breaks.
pub(crate) fn read_index(path: &Path) -> Result<ShardIndex, Error> {
    let folder = Folder::new(path.parent().unwrap_or(Path::new("")), Reach::FollowLinks)?;
    let (index, _) = index_in(&folder, path.file_name().unwrap_or_default())?;
    Ok(index)
}

/// The index `name` of a directory, and its open file.
fn index_in(folder: &Folder, name: &OsStr) -> Result<(ShardIndex, FileSource), Error> {
    let path = folder.path(name);
    let file = folder.open(name)?;
    let open_fault = unopened(&path);
    let facts = disk::facts(&file).map_err(open_fault)?;
    if facts.kind != Kind::File {
        return Err(open_fault(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        )));
    }
    let file = FileSource::new(file).map_err(open_fault)?;
    let index = index_of(file.file(), facts.nbytes, &path)?;
    Ok((index, file))
}

/// Reads an index of `nbytes` through a window, so that 60 MB of it cost no more memory than the names in it. `path`
/// is for the errors.
pub(crate) fn index_of(mut bytes: impl Read, nbytes: u64, path: &Path) -> Result<ShardIndex, Error> {
    const WINDOW_NBYTES: usize = 128 << 10;
    let index_fault = |fault| Error::Index {
        path: path.to_owned(),
        fault,
    };
    let mut reader = IndexReader::new(nbytes).map_err(index_fault)?;
    let mut window = vec![0; WINDOW_NBYTES];
    let (mut position, mut filled) = (0, 0);
    while position < nbytes {
        let found = bytes.read(&mut window[filled..]).map_err(unopened(path))?;
        if found == 0 {
            return Err(Error::Changed {
                path: Some(path.to_owned()),
                nbytes_at_open: nbytes,
                nbytes_now: Some(position),
            });
        }
        position += to_u64(found);
        filled += found;
        let taken = reader.feed(&window[..filled]).map_err(index_fault)?;
        window.copy_within(taken..filled, 0);
        filled -= taken;
        if filled == window.len() {
            // One item is longer than the window. Rule I3 and the size of the whole bound what this may come to.
            window.resize(2 * filled, 0);
        }
    }
    reader.finish().map_err(index_fault)
}
