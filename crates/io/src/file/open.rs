//! Opening files, and keeping the last ones open.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use ingot_format::briefly;

#[cfg(target_os = "linux")]
use super::direct::DirectReader;
use super::stamp::Stamp;
use crate::disk::{self, Beneath, Facts, Kind, Refusal, is_out_of_descriptors, remote_file_system};

/// The place of a file that may be opened several times.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Path(PathBuf),
    /// A name in a directory that the file must not leave.
    Beneath(Arc<Beneath>, OsString),
}

impl Place {
    /// Return the place of `path`, which stays valid when the process changes its directory.
    pub(crate) fn of(path: &Path) -> Place {
        Place::Path(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
    }

    /// Open the file that has this place now.
    pub(crate) fn open(&self) -> Result<File, Refusal> {
        OPEN_FILES.with_room(|| match self {
            Place::Path(path) => Ok(disk::open_for_reading(path)?),
            Place::Beneath(directory, name) => {
                let file = directory.open(name)?;
                let facts = disk::facts(&file)?;
                if facts.kind == Kind::File && facts.names != 1 {
                    return Err(Refusal::Elsewhere(
                        "it has a second name somewhere, which is a hard link",
                    ));
                }
                Ok(file)
            }
        })
    }

    /// Return the facts of the file that has this place now. Only a confined file is opened for that.
    pub(crate) fn facts(&self) -> Result<Facts, Refusal> {
        match self {
            Place::Path(path) => Ok(disk::facts_at(path)?),
            Place::Beneath(..) => Ok(disk::facts(&self.open()?)?),
        }
    }
}

/// An open descriptor.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: File,
    /// The file system, if reading from it waits for a network or another process.
    pub(super) remote: Option<&'static str>,
    #[cfg(target_os = "linux")]
    direct: DirectReader,
}

impl Opened {
    /// Take over an open file and return it with its stamp. Fails if it is a directory, a FIFO, a socket or a device.
    pub(super) fn new(file: File) -> io::Result<(Opened, Stamp)> {
        let facts = disk::facts(&file)?;
        match facts.kind {
            Kind::File => {}
            Kind::Directory => return Err(disk::is_a_directory()),
            Kind::Link | Kind::Other => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
            }
        }
        let remote = remote_file_system(&file);
        if remote.is_some() {
            read_far_ahead(&file);
        }
        let opened = Opened {
            file,
            remote,
            #[cfg(target_os = "linux")]
            direct: DirectReader::default(),
        };
        Ok((opened, Stamp::of(&facts)))
    }

    pub(super) fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        #[cfg(target_os = "linux")]
        if self.remote.is_none()
            && let Some(count) = self.direct.read_at(&self.file, position, dest)
        {
            return Ok(count);
        }
        disk::read_at(&self.file, dest, position)
    }
}

/// Double the kernel's read-ahead of sequential reads. Each answer of a remote file system takes as long, whatever its
/// size, and the kernel requests at most 128 KiB at once from a FUSE mount. Random reads are not affected.
#[cfg(target_os = "linux")]
fn read_far_ahead(file: &File) {
    // This is advice: reads work without it.
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Sequential);
}

#[cfg(not(target_os = "linux"))]
fn read_far_ahead(_: &File) {}

/// Files of checkpoints that stay open between reads. Each may use a second descriptor for direct reads, and each reading
/// thread keeps its own file open: with the 16 threads that open and read local files, that is 128 descriptors.
const MOST_OPEN: usize = 48;

pub(super) static OPEN_FILES: OpenFiles = OpenFiles::new(MOST_OPEN);

/// Return how many files of checkpoints stay open between reads.
pub(crate) fn most_open() -> usize {
    OPEN_FILES.most()
}

/// The files that were opened last. A file that leaves the list is closed when no thread reads it.
#[derive(Debug)]
pub(super) struct OpenFiles {
    most: usize,
    files: Mutex<VecDeque<Arc<Opened>>>,
}

impl OpenFiles {
    pub(super) const fn new(most: usize) -> OpenFiles {
        OpenFiles {
            most,
            files: Mutex::new(VecDeque::new()),
        }
    }

    /// At most a quarter of the descriptors that the process is allowed.
    fn most(&self) -> usize {
        self.most.min(disk::descriptors_allowed() / 4)
    }

    #[cfg(test)]
    pub(super) fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Arc<Opened>>> {
        self.files.lock().unwrap()
    }

    /// Keep `file` open until as many other files were opened after it. Does nothing if a fork left the lock closed.
    pub(super) fn keep(&self, file: Arc<Opened>) {
        let Some(mut files) = briefly(&self.files) else {
            return;
        };
        files.push_back(file);
        let surplus = files.len().saturating_sub(self.most());
        let closed: Vec<_> = files.drain(..surplus).collect();
        // Closing may take time on a network file system.
        drop((files, closed));
    }

    /// Stop keeping `file` open.
    pub(super) fn release(&self, file: &Arc<Opened>) {
        if let Some(mut files) = briefly(&self.files) {
            files.retain(|kept| !Arc::ptr_eq(kept, file));
        }
    }

    /// Call `open`. If the process has no descriptor left, stop keeping files open and call it again.
    pub(super) fn with_room(&self, open: impl Fn() -> Result<File, Refusal>) -> Result<File, Refusal> {
        match open() {
            Err(Refusal::System(fault)) if is_out_of_descriptors(&fault) => {
                let closed = briefly(&self.files).map(|mut files| std::mem::take(&mut *files));
                drop(closed);
                open()
            }
            opened => opened,
        }
    }
}
