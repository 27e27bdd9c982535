//! Files, or checkpoints of many, whose tensors go into others.

use std::path::{Path, PathBuf};

use ingot_format::ShardIndex;

use super::Checkpoint;
use crate::edit::origin::Origin;
use crate::error::Error;
use crate::options::CheckpointOptions;
use crate::watch::{Unwatched, Watch};

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
        let options = CheckpointOptions {
            open: Origin::options(),
            ..CheckpointOptions::default()
        };
        Origins::of(Checkpoint::open_lent(path, &options)?, &Unwatched)
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
        Origins::of(
            Checkpoint::open_url(url, options, &crate::remote::header_limits(), watch)?,
            watch,
        )
    }

    fn of(checkpoint: Checkpoint, watch: &dyn Watch) -> Result<Origins, Error> {
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
