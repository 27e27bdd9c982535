//! Files, or checkpoints of many, whose tensors go into others.

use std::path::{Path, PathBuf};

use ingot_format::ShardIndex;

use super::Reach;
use super::locate::{Located, locate};
use super::parallel::in_parallel;
use super::shards::Shards;
use crate::edit::origin::Origin;
use crate::error::Error;

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
                let shards = Shards::of_index(folder, &name)?;
                let open = |number| shards.opened(number, Origin::of_file, Origin::header);
                let files = in_parallel(shards.len(), open);
                Ok(Origins {
                    path: shards.path().to_owned(),
                    files: files.into_iter().collect::<Result<_, _>>()?,
                    index: Some(shards.into_index()),
                })
            }
        }
    }

    /// Opens the file behind a URL.
    ///
    /// # Errors
    /// As [`Archive::open_url`](crate::Archive::open_url).
    #[cfg(feature = "remote")]
    pub fn open_url(
        url: &str,
        options: &crate::RemoteOptions,
        watch: &dyn crate::Watch,
    ) -> Result<Origins, Error> {
        let archive = crate::Archive::open_url(url, options, &crate::remote::header_limits(), watch)?;
        let file = Origin::of_archive(archive);
        Ok(Origins {
            path: file.path().to_owned(),
            files: vec![file],
            index: None,
        })
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
