//! A file of any content, which another program or library fills before it is renamed.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::options::SaveOptions;
use crate::save::Temp;
use crate::watch::Watch;

/// An empty file beside a path. As with a [`Writer`](crate::Writer), dropping it leaves the file at the path unchanged, and
/// the next save to this path cleans up after a process that was killed.
pub struct TemporaryFile {
    /// `None` once it is committed.
    temp: Option<Temp>,
}

impl TemporaryFile {
    /// Make the file.
    ///
    /// # Errors
    /// [`Failure::Write`]; [`Failure::Edit`] if another writer fills a file for this path, or a file cannot be made there.
    pub fn create(path: &Path, options: &SaveOptions, watch: &dyn Watch) -> Result<TemporaryFile, Error> {
        let temp = Some(Temp::create(path, 0, options, watch)?);
        Ok(TemporaryFile { temp })
    }

    /// The path of the temporary file, which exists until the commit.
    #[must_use]
    pub fn temporary_path(&self) -> Option<PathBuf> {
        self.temp.as_ref().map(Temp::temporary_path)
    }

    /// Rename the file to its path. Later calls do nothing.
    ///
    /// # Errors
    /// [`Failure::Write`]; [`Failure::Open`] for a file that is not to be replaced. The new one is gone then.
    /// [`Failure::Edit`] in the child of a fork, whose parent has the file.
    pub fn commit(&mut self, watch: &dyn Watch) -> Result<(), Error> {
        if let Some(temp) = &self.temp {
            temp.check_process()?;
        }
        match self.temp.take() {
            Some(temp) => temp.publish(watch),
            None => Ok(()),
        }
    }
}
