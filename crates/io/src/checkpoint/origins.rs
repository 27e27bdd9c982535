//! Files, or checkpoints of many, whose tensors go into others.

use std::path::{Path, PathBuf};

use ingot_format::ShardIndex;

use super::folder::Beside;
use super::locate::{Located, locate};
use super::parallel::of_directory;
use crate::edit::origin::Origin;
use crate::error::Error;
use crate::options::Reach;
use crate::watch::Unwatched;

/// All files of a checkpoint, open so that tensors can be taken from them byte by byte.
#[derive(Debug)]
pub struct Origins {
    path: PathBuf,
    files: Vec<Origin>,
    index: Option<ShardIndex>,
}

impl Origins {
    /// Opens a file, the shards of an index, or whatever of these a directory holds.
    ///
    /// # Errors
    /// As [`Checkpoint::open`](super::Checkpoint::open).
    pub fn open(path: &Path) -> Result<Origins, Error> {
        match locate(path, Reach::FollowLinks, Origin::of_file)? {
            Located::File(file) => Ok(Origins {
                path: file.path().to_owned(),
                files: vec![file],
                index: None,
            }),
            Located::Index { folder, name } => {
                let (shards, beside) = Beside::index(folder, &name)?;
                let open = |number| {
                    let (file, path) = beside.open(&shards, number)?;
                    Origin::of_file(file, path)
                };
                let holds = |number, tensor: &str| beside.holds(&shards, number, tensor);
                let numbers: Vec<usize> = (0..shards.len()).collect();
                let files = shards.open(&numbers, of_directory(), open, Origin::header, holds, &Unwatched)?;
                Ok(Origins {
                    path: shards.path().to_owned(),
                    files,
                    index: Some(shards.into_index()),
                })
            }
        }
    }

    /// Opens what is behind a URL.
    ///
    /// # Errors
    /// As [`Checkpoint::open_url`](super::Checkpoint::open_url).
    #[cfg(feature = "remote")]
    pub fn open_url(
        url: &str,
        options: &crate::RemoteOptions,
        watch: &dyn crate::Watch,
    ) -> Result<Origins, Error> {
        let checkpoint = super::Checkpoint::open_url(url, options, &crate::remote::header_limits(), watch)?;
        let path = checkpoint.path().map(Path::to_owned).unwrap_or_default();
        let (archives, index) = checkpoint.into_files(watch)?;
        let files = archives.into_iter().map(Origin::of_archive).collect();
        Ok(Origins { path, files, index })
    }

    /// The only file, or the index.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files, in the order of their names.
    #[must_use]
    pub fn files(&self) -> &[Origin] {
        &self.files
    }

    /// The index, where there is one.
    #[must_use]
    pub fn index(&self) -> Option<&ShardIndex> {
        self.index.as_ref()
    }
}
