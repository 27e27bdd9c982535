//! A remote file that is read through the cache.

use std::fs;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ingot_format::{StopFlag, to_u64, to_usize};
use ingot_remote::{Fault, GAP_NBYTES, READS_AT_ONCE, RemoteFile};

use super::block::{BLOCK_NBYTES, Block, Piece, Unwritten};
use super::{Cache, Turn, Version, unfinished};
use crate::disk::{self, Locked};
use crate::file::ReadAt;

/// A remote file of one version, whose blocks are in the cache or are fetched into it.
#[derive(Debug)]
pub(in crate::remote) struct CachedFile {
    file: RemoteFile,
    cache: Arc<Cache>,
    version: Version,
    /// Whether the store has answered a request of this process for the file.
    is_answered: AtomicBool,
}

impl CachedFile {
    /// Return the file with its blocks. A file that another process opened is requested before the first block is used.
    pub(in crate::remote) fn new(
        file: RemoteFile,
        cache: Arc<Cache>,
        version: Version,
        is_answered: bool,
    ) -> CachedFile {
        CachedFile {
            file,
            cache,
            version,
            is_answered: AtomicBool::new(is_answered),
        }
    }

    /// Return a block of the cache, which is fetched first if necessary. `None` if the cache cannot hold it.
    fn block(&self, number: u64, stop: StopFlag<'_>) -> io::Result<Option<Block>> {
        let place = self.cache.place(&self.version, number);
        for _ in 0..2 {
            if let Some(block) = self.cache.block(&place) {
                self.check_identity(stop)?;
                return Ok(Some(block));
            }
            if self.file.options().is_offline() {
                return Err(Fault::offline().into());
            }
            if self.cache.is_full() || !self.fetch_in_turn(number, stop)? {
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Let the store check the identity of the caller before the first block is used.
    fn check_identity(&self, stop: StopFlag<'_>) -> io::Result<()> {
        if self.is_answered.load(Ordering::Relaxed) || self.file.options().is_offline() {
            return Ok(());
        }
        let end = self.version.nbytes;
        self.file.reader(end - 1..end, stop).read_exact(&mut [0])?;
        self.is_answered.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Fetch a block unless another process does. Return whether the cache has it.
    fn fetch_in_turn(&self, number: u64, stop: StopFlag<'_>) -> io::Result<bool> {
        let patience = self.file.options().stall_timeout;
        match self.cache.turn(&self.version, number, patience, stop) {
            Ok(Turn::Done) => Ok(true),
            Ok(Turn::Mine(lock)) => self.fetch(number, &lock, stop),
            Err(fault) if Fault::of(&fault).is_some() => Err(fault),
            Err(fault) if fault.kind() == io::ErrorKind::TimedOut => {
                self.cache.note(&fault);
                Ok(false)
            }
            Err(fault) => {
                self.cache.give_up(&fault);
                Ok(false)
            }
        }
    }

    /// Fetch a block under its lock. Return whether the cache has it.
    fn fetch(&self, number: u64, _lock: &Locked, stop: StopFlag<'_>) -> io::Result<bool> {
        let place = self.cache.place(&self.version, number);
        let (part, nbytes) = (unfinished(&place.path), place.file_nbytes());
        let write = || {
            let mut bytes = self.file.reader(place.span.clone(), stop);
            place.write(&part, &mut bytes)?;
            fs::rename(&part, &place.path).map_err(Unwritten::Disk)
        };
        let folder = place.path.parent().unwrap_or(&part);
        let reserved = disk::create_private_directory(folder)
            .and_then(|()| self.cache.reserve(&place.path, nbytes, stop));
        if let Err(fault) = reserved {
            self.cache.give_up(&fault);
            return Ok(false);
        }
        let written = write();
        if written.is_err() {
            let _ = fs::remove_file(&part);
            self.cache.release(nbytes);
        }
        match written {
            Ok(()) => {
                self.is_answered.store(true, Ordering::Relaxed);
                Ok(true)
            }
            Err(Unwritten::Store(fault)) => Err(fault),
            Err(Unwritten::Disk(fault)) => {
                self.cache.give_up(&fault);
                Ok(false)
            }
        }
    }
}

impl ReadAt for CachedFile {
    fn nbytes(&self) -> u64 {
        self.file.nbytes()
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let nbytes = self.nbytes();
        let end = nbytes.min(position.saturating_add(to_u64(dest.len())));
        let count = to_usize(end.saturating_sub(position)).unwrap_or(0);
        let mut reader = Reader::new(self, position..end, StopFlag::never());
        reader.read_exact(&mut dest[..count])?;
        Ok(count)
    }

    fn gap_nbytes(&self) -> u64 {
        GAP_NBYTES
    }

    fn stream<'s>(&'s self, span: Range<u64>, stop: StopFlag<'s>) -> Option<Box<dyn Read + 's>> {
        Some(Box::new(Reader::new(self, span, stop)))
    }

    fn waits(&self) -> bool {
        true
    }

    fn reads_at_once(&self) -> usize {
        READS_AT_ONCE
    }

    fn version(&self) -> Option<String> {
        self.file.description()
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        Ok(self.file.nbytes_now())
    }
}

/// A reader of a range.
struct Reader<'s> {
    cached: &'s CachedFile,
    /// The bytes that are not read yet.
    range: Range<u64>,
    stop: StopFlag<'s>,
    current: Current<'s>,
    last: Piece,
    /// Damaged blocks that were found.
    damaged: u32,
}

/// The source of the next bytes.
enum Current<'s> {
    Nothing,
    Block(Block),
    /// The rest of the range, past the cache.
    Store(Box<dyn Read + 's>),
}

impl<'s> Reader<'s> {
    fn new(cached: &'s CachedFile, range: Range<u64>, stop: StopFlag<'s>) -> Reader<'s> {
        Reader {
            cached,
            range,
            stop,
            current: Current::Nothing,
            last: Piece::default(),
            damaged: 0,
        }
    }

    /// Return the first bytes of the file that are left of the range, if they are in memory.
    fn start(&self) -> &'s [u8] {
        let start = self.cached.file.start();
        let end = to_usize(self.range.end).unwrap_or(usize::MAX).min(start.len());
        let begin = to_usize(self.range.start);
        begin.and_then(|begin| start.get(begin..end)).unwrap_or_default()
    }

    fn store(&self) -> Current<'s> {
        Current::Store(Box::new(self.cached.file.reader(self.range.clone(), self.stop)))
    }

    /// Read some of the next bytes into `dest`, which is not longer than the range.
    fn next(&mut self, dest: &mut [u8]) -> io::Result<usize> {
        loop {
            let position = self.range.start;
            match &mut self.current {
                Current::Store(reader) => return reader.read(dest),
                Current::Block(block) if block.span().contains(&position) => {
                    match block.read(position, dest, &mut self.last) {
                        Ok(count) => return Ok(count),
                        Err(_) => self.replace(),
                    }
                }
                _ => {
                    let block = self.cached.block(position / BLOCK_NBYTES, self.stop)?;
                    self.current = block.map_or_else(|| self.store(), Current::Block);
                }
            }
        }
    }

    /// Remove a damaged block, so that it is fetched again. A disk that damages each block is passed by.
    fn replace(&mut self) {
        if let Current::Block(block) = &self.current {
            self.cached.cache.discard(block);
        }
        self.damaged += 1;
        self.current = if self.damaged > 2 && !self.cached.file.options().is_offline() {
            self.store()
        } else {
            Current::Nothing
        };
    }
}

impl Read for Reader<'_> {
    fn read(&mut self, dest: &mut [u8]) -> io::Result<usize> {
        let left = to_usize(self.range.end - self.range.start).unwrap_or(usize::MAX);
        let most = left.min(dest.len());
        if most == 0 {
            return Ok(0);
        }
        let start = self.start();
        let count = if start.is_empty() {
            self.next(&mut dest[..most])?
        } else {
            let count = start.len().min(most);
            dest[..count].copy_from_slice(&start[..count]);
            count
        };
        self.range.start += to_u64(count);
        Ok(count)
    }
}
