//! Writing the pieces of a file in one of three ways: into a temporary file that is renamed when it is complete, into
//! the existing file, or into a stream.

mod direct;
mod parallel;
pub(super) mod pieces;
pub(super) mod ring;
mod stream;

use std::fs::File;
use std::io::{self, Seek};
use std::path::Path;
use std::sync::Arc;

use self::direct::DirectWriter;
use self::parallel::Route;
use self::pieces::Pieces;
use super::flush::{Flusher, flush};
use super::space::{self, release};
use super::temp::{self, Temp};
use crate::disk::{self, Directory, DirectoryEntry, Size};
use crate::error::{Error, Step, step};
use crate::options::SaveOptions;
use crate::payload::{FileRange, Payload};
use crate::watch::{Asked, Watch};

/// Files of at least this size are flushed while they are written. A smaller file is written before a thread has started.
const LONG_FLUSH: u64 = 32 << 20;

/// A save: the bytes, the options, and the watch that may stop it.
#[derive(Clone, Copy)]
pub(super) struct Writing<'w> {
    pub(super) path: &'w Path,
    pub(super) pieces: &'w Pieces<'w>,
    pub(super) options: &'w SaveOptions,
    pub(super) watch: &'w dyn Watch,
}

impl Writing<'_> {
    /// Write a temporary file and rename it to `entry`: the path always leads to the whole old file or to the whole new one.
    pub(super) fn atomic(&self, entry: DirectoryEntry) -> Result<(), Error> {
        entry.check(self.options)?;
        let entry = Arc::new(entry);
        temp::remove_stale(&entry);
        let mut temp = self.fill(&entry, false)?;
        if !temp.link()? {
            temp = self.named_copy(&temp, &entry)?;
        }
        if temp.take_name(self.watch)? {
            temp.flush_name()
        } else {
            self.open(&entry, |file| self.copy(temp.file(), file))
        }
    }

    /// Return a file with a name and the bytes of `temp`. The payloads are not read again, since the caller may change
    /// them once the watch has reported all bytes.
    fn named_copy(&self, temp: &Temp, entry: &Arc<DirectoryEntry>) -> Result<Temp, Error> {
        let nbytes = self.pieces.nbytes();
        let all = [Payload::File(FileRange::new(temp.file(), 0, nbytes))];
        let pieces = Pieces::of_bytes(&all);
        let watch = Asked(self.watch);
        let copying = Writing {
            pieces: &pieces,
            watch: &watch,
            ..*self
        };
        copying.fill(entry, true)
    }

    /// Return a complete temporary file, without the name of its target.
    fn fill(&self, entry: &Arc<DirectoryEntry>, has_name: bool) -> Result<Temp, Error> {
        let temp = Temp::make(self.path, entry, self.options, has_name)?;
        let file = temp.file();
        let shares = self.pieces.share_blocks() && crate::payload::shares_blocks(file);
        let size = if shares { Size::Sparse } else { Size::Set };
        space::reserve(file, self.pieces.nbytes(), size, self.watch)?;
        let route = if shares { Route::Shared } else { self.route(file) };
        parallel::write(self.pieces, file, &route, self.watch)?;
        temp.apply_attributes()?;
        match route {
            Route::Cached(Some(flusher)) => flusher.finish(file, self.watch)?,
            _ if self.options.durable || close_would_flush(file) => flush(file, self.watch)?,
            _ => {}
        }
        Ok(temp)
    }

    /// A durable file is written past the page cache if possible, or otherwise flushed while the rest is written.
    fn route(&self, file: &File) -> Route {
        let nbytes = self.pieces.nbytes();
        if !self.options.durable {
            Route::Cached(None)
        } else if let Some(direct) = DirectWriter::open(file, nbytes) {
            Route::Direct(direct)
        } else {
            Route::Cached((nbytes >= LONG_FLUSH).then(|| Flusher::start(file)).flatten())
        }
    }

    /// Write into the file of `entry`, or make it. A failure may leave it half written.
    pub(super) fn in_place(&self, entry: &DirectoryEntry) -> Result<(), Error> {
        self.open(entry, |file| self.overwrite(file, Some(entry)))
    }

    /// Let `write` fill the file of `entry`, or a new one, which is removed if that fails.
    fn open(
        &self,
        entry: &DirectoryEntry,
        write: impl FnOnce(&File) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (file, made) = entry.open().step(step::OPEN)?;
        if !made && self.options.keeps_existing() {
            return Err(disk::exists()).step(step::OPEN);
        }
        let done = write(&file);
        match done {
            Err(_) if made => entry.remove(),
            Ok(()) if made && self.options.durable => {
                entry.directory.flush(&file).step(step::FLUSH_DIRECTORY)?;
            }
            _ => {}
        }
        done
    }

    /// Replace the contents of `file`. `entry` is its name, if it has one.
    pub(super) fn overwrite(&self, file: &File, entry: Option<&DirectoryEntry>) -> Result<(), Error> {
        let nbytes = self.pieces.nbytes();
        let fill = |file| {
            space::reserve(file, nbytes, Size::Set, self.watch)?;
            parallel::write(self.pieces, file, &Route::Cached(None), self.watch)
        };
        if file.metadata().step(step::OPEN)?.len() == 0 {
            // No process can have mapped bytes of it.
            let filled = fill(file);
            if filled.is_err() {
                let _ = file.set_len(0);
                return filled;
            }
            return self.finish(file);
        }
        // The payloads may be views of a mapping of this very file, as when a loaded model is saved again. This cannot be
        // detected, so all bytes go to another file first.
        let scratch = scratch(entry).step(step::CREATE)?;
        fill(&scratch)?;
        space::reserve(file, nbytes, Size::Kept, self.watch)?;
        self.copy(&scratch, file)?;
        release(scratch);
        Ok(())
    }

    /// Copy `from` into `file`. This cannot be interrupted, since the old bytes are lost: a late complete file is better than an
    /// incomplete one.
    fn copy(&self, mut from: &File, mut file: &File) -> Result<(), Error> {
        let nbytes = self.pieces.nbytes();
        from.rewind().step(step::COPY)?;
        if io::copy(&mut from, &mut file).step(step::COPY)? != nbytes {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).step(step::COPY);
        }
        // The file is truncated at the end and not at the start, so that a process that has it mapped reads wrong bytes
        // instead of a hole, which would crash it. If the new file is shorter, such a process still crashes.
        file.set_len(nbytes).step(step::COPY)?;
        self.finish(file)
    }

    fn finish(&self, file: &File) -> Result<(), Error> {
        if self.options.durable {
            file.sync_all().step(step::FLUSH)?;
        }
        Ok(())
    }

    /// Write into a pipe, a terminal or another device.
    pub(super) fn stream(&self, file: &File) -> Result<(), Error> {
        stream::write(self.pieces, file, self.watch)?;
        if self.options.durable {
            flush(file, self.watch)?;
        }
        Ok(())
    }
}

/// Return whether closing `file` sends its bytes to a server, as network file systems do so that the next reader sees them. Rust
/// does not report errors of closing; a flush costs nothing more and does.
fn close_would_flush(file: &File) -> bool {
    matches!(
        disk::remote_file_system(file),
        Some("NFS" | "SMB" | "SMB2" | "CIFS")
    )
}

/// A file without a name: beside the target, or among the system's temporary files if the directory takes none.
fn scratch(entry: Option<&DirectoryEntry>) -> io::Result<File> {
    let name = entry.map_or("model".as_ref(), |entry| &*entry.name);
    if let Some(entry) = entry
        && let Ok(file) = temp::scratch(&entry.directory, name)
    {
        return Ok(file);
    }
    let directory = Directory::at(&std::env::temp_dir())?;
    temp::scratch(&directory, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Failure;
    use crate::options::Replace;
    use crate::save::target::find;
    use crate::watch::Unwatched;

    #[test]
    fn what_came_to_be_meanwhile_stays_where_nothing_may_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let entry = find(&path, &Unwatched).unwrap();
        let options = SaveOptions {
            replace: Replace::Nothing,
            ..SaveOptions::default()
        };
        let writing = Writing {
            path: &path,
            pieces: &Pieces::of_data(b"", 0, &[]).unwrap(),
            options: &options,
            watch: &Unwatched,
        };
        let put = || {
            writing.open(&entry, |mut file| {
                io::Write::write_all(&mut file, b"bytes").step(step::WRITE)
            })
        };
        assert!(put().is_ok());
        std::fs::write(&path, b"other").unwrap();
        let fault = put().unwrap_err();
        assert!(
            matches!(fault.failure(), Failure::Write { step: step::OPEN, .. }),
            "{fault}"
        );
        assert_eq!(fault.system().unwrap().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
    }
}
