//! Reading an index.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::path::Path;

use ingot_format::{IndexReader, ShardIndex, to_u64};

use super::folder::Folder;
use crate::error::Error;
use crate::options::Reach;

/// Reads an index, and none of its shards.
///
/// # Errors
/// [`Error::Open`], and [`Error::Index`] with the rule that it breaks.
pub fn read_index(path: &Path) -> Result<ShardIndex, Error> {
    let folder = Folder::new(path.parent().unwrap_or(Path::new("")), Reach::FollowLinks)?;
    index_in(&folder, path.file_name().unwrap_or_default())
}

/// The index `name` of a directory.
pub(super) fn index_in(folder: &Folder, name: &OsStr) -> Result<ShardIndex, Error> {
    let path = folder.path(name);
    let file = folder.open(name)?;
    let open_fault = |source| Error::Open {
        path: path.clone(),
        source,
    };
    let metadata = file.metadata().map_err(open_fault)?;
    if !metadata.is_file() {
        return Err(open_fault(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        )));
    }
    index_of(file, metadata.len(), &path)
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
        let found = bytes.read(&mut window[filled..]).map_err(|source| Error::Open {
            path: path.to_owned(),
            source,
        })?;
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
