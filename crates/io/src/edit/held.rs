//! A file that is being edited, and a save that is called off when it is overtaken.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use ingot_format::{Header, Limits, StopFlag, locked};

use crate::disk::{self, Facts, Kind, Lock, Locked, has_no_locks, lock_holder, try_lock};
use crate::error::{EditError, Error, Failure, Step, size, unopened};
use crate::file::{LocalFile, is_in_its_place, read_exactly, read_header};
use crate::options::SaveOptions;
use crate::payload::Payload;
use crate::save::{Pieces, save_pieces};
use crate::watch::Watch;

/// An open file, locked against other edits until this is dropped, and the facts of its path.
pub(crate) struct Held<'p> {
    path: &'p Path,
    file: Locked,
    facts: Facts,
    /// Whether other names lead to the file too, so that it must not be written in place.
    pub(crate) is_shared: bool,
}

impl<'p> Held<'p> {
    /// Wait until no other edit of the file is in progress, up to [`PATIENCE`].
    pub(crate) fn open(path: &'p Path, watch: &dyn Watch) -> Result<Held<'p>, Error> {
        let open_fault = unopened(path);
        loop {
            let file = Locked::new(disk::open_both_ways(path).map_err(open_fault)?);
            wait_for_lock(path, &file, PATIENCE, watch)?;
            let facts = disk::facts(&file).map_err(open_fault)?;
            if facts.kind != Kind::File {
                let fault = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
                return Err(open_fault(fault));
            }
            // One system call reports which file has the name and whether the name is a link.
            let named = disk::facts_of_name(path).map_err(open_fault)?;
            let found = if named.kind == Kind::Link {
                disk::facts_at(path).map_err(open_fault)?
            } else {
                named
            };
            // The edit that held the lock may have replaced this file by another.
            if found.identity == facts.identity {
                let is_shared =
                    disk::is_shared(path, &named, watch).map_err(|fault| fault.in_save(path, 0))?;
                return Ok(Held {
                    path,
                    file,
                    facts,
                    is_shared,
                });
            }
        }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Close the file, which was replaced.
    pub(crate) fn release(self) {
        self.file.unlock();
        crate::save::release(self.file);
    }

    /// Return all bytes before the data, and the header that they hold.
    pub(super) fn head(&self) -> Result<(Vec<u8>, Header), Error> {
        let source = self.file.try_clone().and_then(LocalFile::of);
        let source = source.map_err(unopened(self.path))?;
        let header = read_header(&source, Some(self.path), &Limits::default())?;
        let mut head = vec![0; size(header.data_start())?];
        let read = read_exactly(&source, 0, &mut head, StopFlag::never());
        read.map_err(|failure| failure.about(Some(self.path), None))?;
        Ok((head, header))
    }

    /// Replace the file by one of `head` and `payloads`, with as much data as its `header` promises, unless another process
    /// changed it.
    pub(super) fn replace(
        &self,
        head: &[u8],
        header: &Header,
        payloads: &[Payload<'_>],
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        let check = || self.check();
        let guard = Guard::new(watch, &check);
        let pieces = Pieces::of_data(head, header.data_nbytes(), payloads);
        let saved = save_pieces(self.path, pieces, options, &guard);
        guard.outcome(saved)
    }

    /// Fail if the path leads to another file by now, or a process wrote to this one.
    pub(super) fn check(&self) -> Result<(), Error> {
        let is_this = |now| is_in_its_place(&self.facts, &now, false);
        if disk::facts_at(self.path).is_ok_and(is_this) {
            return Ok(());
        }
        Err(EditError::Overtaken.about(self.path))
    }

    /// Write `bytes`, which are in one page, at `position`.
    pub(super) fn overwrite(&self, position: u64, bytes: &[u8], durable: bool) -> Result<(), Error> {
        let write = || -> io::Result<()> {
            disk::write_all_at(&self.file, bytes, position)?;
            if durable {
                self.file.sync_data()?;
            }
            Ok(())
        };
        let written = write().step("change its header in place");
        written.map_err(|fault| fault.in_save(self.path, self.facts.nbytes))
    }
}

/// A watch that stops a save when its premise is no longer true: it calls `check` whenever the save asks whether to stop,
/// the last time right before the new file gets its name.
pub(crate) struct Guard<'a> {
    watch: &'a dyn Watch,
    check: &'a (dyn Fn() -> Result<(), Error> + Sync),
    fault: Mutex<Option<Error>>,
}

impl<'a> Guard<'a> {
    pub(crate) fn new(watch: &'a dyn Watch, check: &'a (dyn Fn() -> Result<(), Error> + Sync)) -> Guard<'a> {
        Guard {
            watch,
            check,
            fault: Mutex::new(None),
        }
    }

    /// Return the outcome of the save: the fault that `check` found, if the save stopped for that reason.
    pub(crate) fn outcome<T>(self, saved: Result<T, Error>) -> Result<T, Error> {
        let fault = locked(&self.fault).take();
        match (saved, fault) {
            (Err(ended), Some(fault)) if ended.is_interrupted() => Err(fault),
            (saved, _) => saved,
        }
    }
}

impl Watch for Guard<'_> {
    fn interrupted(&self) -> bool {
        if self.watch.interrupted() {
            return true;
        }
        let Err(fault) = (self.check)() else {
            return false;
        };
        locked(&self.fault).get_or_insert(fault);
        true
    }

    fn progressed(&self, done: u64, total: u64) {
        self.watch.progressed(done, total);
    }
}

/// How long to sleep before the lock is tried again: an edit in place takes less.
const PAUSE: Duration = Duration::from_millis(5);

/// How long an edit waits for another one, which may have to copy a large file.
const PATIENCE: Duration = Duration::from_secs(60);

/// Locks `file`, which is at `path`, as soon as no other process has it locked.
fn wait_for_lock(path: &Path, file: &File, patience: Duration, watch: &dyn Watch) -> Result<(), Error> {
    let begin = Instant::now();
    loop {
        match try_lock(file, Lock::Exclusive) {
            Ok(true) => return Ok(()),
            Ok(false) if watch.interrupted() => return Err(Failure::Interrupted.into()),
            Ok(false) if begin.elapsed() >= patience => {
                let locked = EditError::Locked {
                    holder: lock_holder(file),
                    seconds: patience.as_secs(),
                };
                return Err(locked.about(path));
            }
            Ok(false) => thread::sleep(PAUSE),
            // Without locks, an edit that is overtaken is still found, though not to the microsecond.
            Err(fault) if has_no_locks(&fault) => return Ok(()),
            Err(fault) => return Err(unopened(path)(fault)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::Unwatched;

    #[test]
    fn a_lock_that_is_never_released_is_an_error_that_names_the_file_and_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        let theirs = File::create(&path).unwrap();
        assert!(try_lock(&theirs, Lock::Exclusive).unwrap());
        let ours = disk::open_both_ways(&path).unwrap();
        let fault = wait_for_lock(&path, &ours, Duration::from_millis(20), &Unwatched).unwrap_err();
        assert_eq!(fault.code(), "locked");
        let text = fault.to_string();
        assert!(text.starts_with(&path.display().to_string()), "{text}");
        let process = format!("in process {}", std::process::id());
        assert!(!cfg!(target_os = "linux") || text.contains(&process), "{text}");
        drop(theirs);
        wait_for_lock(&path, &ours, Duration::ZERO, &Unwatched).unwrap();
    }
}
