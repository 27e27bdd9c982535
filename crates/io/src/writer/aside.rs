//! A file of any content, which another program or library fills before it gets its name.

use std::path::{Path, PathBuf};

use crate::error::{EditError, Error};
use crate::options::SaveOptions;
use crate::save::Temp;
use crate::watch::Watch;

/// An empty file beside a path. As with a [`Writer`](crate::Writer), losing it leaves what is at the path, and the
/// next save to this path cleans up after a process that was killed.
pub struct Aside {
    /// `None` once it is committed.
    draft: Option<Temp>,
    path: PathBuf,
    options: SaveOptions,
    process: u32,
}

impl Aside {
    /// Makes the file.
    ///
    /// # Errors
    /// [`Error::Write`]; [`Error::Edit`] when somebody else fills a file for this path, or it can have none.
    pub fn create(path: &Path, options: &SaveOptions, watch: &dyn Watch) -> Result<Aside, Error> {
        Ok(Aside {
            draft: Some(Temp::create(path, 0, options, watch)?),
            path: path.to_owned(),
            options: *options,
            process: std::process::id(),
        })
    }

    /// The path of the temporary file, which exists until the commit.
    #[must_use]
    pub fn draft_path(&self) -> Option<PathBuf> {
        self.draft.as_ref().map(Temp::draft_path)
    }

    /// Gives the file the name of its path. A second time, nothing happens.
    ///
    /// # Errors
    /// [`Error::Write`]; [`Error::Open`] for a file that is not to be replaced. The new one is gone then. [`Error::Edit`] in the
    /// child of a fork, whose parent has the file.
    pub fn commit(&mut self, watch: &dyn Watch) -> Result<(), Error> {
        if self.process != std::process::id() {
            return Err(EditError::Forked.about(&self.path));
        }
        let Some(draft) = self.draft.take() else {
            return Ok(());
        };
        draft.publish(self.options.existing(), self.options.durable, watch)
    }
}
