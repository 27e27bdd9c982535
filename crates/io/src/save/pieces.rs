//! The bytes of a file, cut into pieces and written.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use ingot_format::to_u64;

use super::{POLL, Seal, Step, Stop, Watch, step};
use crate::dest::Payload;
use crate::failure::Failure;

/// Payloads at least this long are written from where they lie; shorter ones are gathered first. 1 MiB, because
/// copying one costs less than 0.1 ms and a call for each of thousands of small tensors costs more.
const DIRECT: usize = 1 << 20;
/// Gathered bytes that are written at once.
const GATHERED: usize = 4 << 20;
/// Bytes of a large payload that are written at once: few enough that threads share the work evenly and a watch is
/// heard soon, enough that the calls do not count.
const PIECE: usize = 8 << 20;
/// From this size on, threads write: starting them costs about 0.1 ms, as long as writing 0.5 MB.
const PARALLEL: u64 = 32 << 20;
/// More than 4 threads in one file wait for each other in the kernel.
const THREADS: usize = 4;

/// Head and payloads, in file order.
pub(super) struct Pieces<'a> {
    head: Payload<'a>,
    payloads: &'a [Payload<'a>],
    pieces: Vec<Piece>,
    nbytes: u64,
    seal: Option<&'a Seal<'a>>,
}

/// Bytes that are written in one call. They begin inside one part of the file and may run on into the parts after it.
struct Piece {
    /// Counted from the start of the file.
    position: u64,
    /// 0 is the head, 1 the first payload.
    part: usize,
    /// Where in that part.
    begin: usize,
    len: usize,
}

impl<'a> Pieces<'a> {
    pub(super) fn cut(head: &'a [u8], payloads: &'a [Payload<'a>]) -> Pieces<'a> {
        let mut cut = Pieces {
            head: Payload::from(head),
            payloads,
            pieces: Vec::new(),
            nbytes: 0,
            seal: None,
        };
        let mut gathered: Option<Piece> = None;
        for part in 0..=payloads.len() {
            let len = cut.part(part).len();
            if len >= DIRECT {
                cut.pieces.extend(gathered.take());
                cut.cut_large(part, len);
                continue;
            }
            if gathered.as_ref().is_some_and(|piece| piece.len + len > GATHERED) {
                cut.pieces.extend(gathered.take());
            }
            let position = cut.nbytes;
            gathered
                .get_or_insert(Piece {
                    position,
                    part,
                    begin: 0,
                    len: 0,
                })
                .len += len;
            cut.nbytes += to_u64(len);
        }
        cut.pieces.extend(gathered);
        cut
    }

    /// The same, with another head once everything is written.
    pub(super) fn sealed_by(self, seal: &'a Seal<'a>) -> Pieces<'a> {
        Pieces {
            seal: Some(seal),
            ..self
        }
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.seal.is_some()
    }

    fn seal(&self, file: &File, watch: &dyn Watch) -> Result<(), Stop> {
        let Some(seal) = self.seal else {
            return Ok(());
        };
        let head = seal(file, watch).map_err(unread)?;
        debug_assert_eq!(head.len(), self.head.len());
        write_all_at(file, &head, 0).step(step::WRITE)
    }

    fn cut_large(&mut self, part: usize, len: usize) {
        let mut begin = 0;
        while begin < len {
            // The first cut comes where the position in the file is a multiple of PIECE, so that two threads do not
            // write into one page.
            let past = self.nbytes % to_u64(PIECE);
            let until = PIECE - ingot_format::to_usize(past).unwrap_or(0);
            let count = until.min(len - begin);
            self.pieces.push(Piece {
                position: self.nbytes,
                part,
                begin,
                len: count,
            });
            begin += count;
            self.nbytes = self.nbytes.saturating_add(to_u64(count));
        }
    }

    fn part(&self, part: usize) -> Payload<'a> {
        match part.checked_sub(1) {
            None => self.head,
            Some(payload) => self.payloads[payload],
        }
    }

    /// Size of the file.
    pub(super) fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Calls `write` with the bytes of `piece`: in place when they lie in one part, else gathered in `buffer`.
    fn lend<R>(&self, piece: &Piece, buffer: &mut Vec<u8>, write: impl FnOnce(&[u8]) -> R) -> R {
        let first = self.part(piece.part);
        let in_first: Range<usize> = piece.begin..piece.begin + piece.len;
        if in_first.end <= first.len() {
            return first.lend(in_first, write);
        }
        buffer.resize(piece.len, 0);
        let mut filled = first.copy_into(piece.begin, buffer);
        let mut part = piece.part;
        while filled < piece.len {
            part += 1;
            filled += self.part(part).copy_into(0, &mut buffer[filled..]);
        }
        write(buffer)
    }

    /// Writes everything into `file`, each piece at its position. `file` is empty or is to be overwritten.
    pub(super) fn write(&self, file: &File, watch: &dyn Watch) -> Result<(), Stop> {
        let threads = match self.nbytes < PARALLEL {
            true => 0,
            false => thread::available_parallelism().map_or(1, |threads| threads.get().min(THREADS)),
        };
        self.write_with(file, threads, watch)?;
        self.seal(file, watch)
    }

    /// With `threads` at work beside the calling one, which then only watches; with none, it writes itself.
    fn write_with(&self, file: &File, threads: usize, watch: &dyn Watch) -> Result<(), Stop> {
        let next = AtomicUsize::new(0);
        let stop = AtomicBool::new(false);
        let work = |interrupted: &dyn Fn() -> bool| -> io::Result<()> {
            let mut buffer = Vec::new();
            while let Some(piece) = self.pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                if interrupted() {
                    break;
                }
                self.lend(piece, &mut buffer, |bytes| {
                    write_all_at(file, bytes, piece.position)
                })?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let (sender, faults) = mpsc::channel();
            let work = &work;
            let stop = &stop;
            let spawn = |_: &usize| {
                let sender = sender.clone();
                let run = move || {
                    // Dropped on unwinding as well, so that the watcher below never waits for ever.
                    let sender = sender;
                    if let Err(fault) = work(&|| stop.load(Ordering::Relaxed)) {
                        // Nobody listens when another thread failed first.
                        let _ = sender.send(fault);
                    }
                };
                thread::Builder::new()
                    .name("ingot-save".into())
                    .spawn_scoped(scope, run)
            };
            let spawned = (0..threads).take_while(|n| spawn(n).is_ok()).count();
            drop(sender);
            if spawned == 0 {
                return match work(&|| note(stop, watch.interrupted())) {
                    Ok(()) if stop.load(Ordering::Relaxed) => Err(Stop::Interrupted),
                    result => result.step(step::WRITE),
                };
            }
            loop {
                match faults.recv_timeout(POLL) {
                    Ok(fault) => {
                        stop.store(true, Ordering::Relaxed);
                        return Err(fault).step(step::WRITE);
                    }
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                    Err(RecvTimeoutError::Timeout) if note(stop, watch.interrupted()) => {
                        return Err(Stop::Interrupted);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
            }
        })
    }

    /// Writes everything into `file` from where it stands, in order. For what has no positions: a pipe, a terminal.
    #[cfg(unix)]
    pub(super) fn stream(&self, file: &File, watch: &dyn Watch) -> Result<(), Stop> {
        if self.seal.is_some() {
            return Err(io::Error::from(io::ErrorKind::Unsupported)).step(step::SEAL);
        }
        let mut buffer = Vec::new();
        for piece in &self.pieces {
            self.lend(piece, &mut buffer, |bytes| stream_all(file, bytes, watch))?;
        }
        Ok(())
    }
}

/// Why the file could not be read again.
fn unread(failure: Failure) -> Stop {
    let source = match failure {
        Failure::Interrupted => return Stop::Interrupted,
        Failure::Read { source, .. } => source.unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into()),
        Failure::OutOfMemory { source, .. } => source.unwrap_or_else(|| io::ErrorKind::OutOfMemory.into()),
    };
    Stop::Fault {
        step: step::SEAL,
        source,
    }
}

/// Sets `stop` when `interrupted`, and says whether it is.
fn note(stop: &AtomicBool, interrupted: bool) -> bool {
    if interrupted {
        stop.store(true, Ordering::Relaxed);
    }
    interrupted
}

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], position: u64) -> io::Result<()> {
    // Goes on after short writes and after signals.
    std::os::unix::fs::FileExt::write_all_at(file, bytes, position)
}

#[cfg(windows)]
fn write_all_at(file: &File, mut bytes: &[u8], mut position: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, bytes, position) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = &bytes[count..];
                position += to_u64(count);
            }
            Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
            Err(fault) => return Err(fault),
        }
    }
    Ok(())
}

#[cfg(unix)]
fn stream_all(mut file: &File, mut bytes: &[u8], watch: &dyn Watch) -> Result<(), Stop> {
    use std::io::Write;
    while !bytes.is_empty() {
        if watch.interrupted() {
            return Err(Stop::Interrupted);
        }
        match file.write(bytes) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero)).step(step::WRITE),
            Ok(count) => bytes = &bytes[count..],
            Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
            Err(fault) if fault.kind() == io::ErrorKind::WouldBlock => wait_writable(file),
            Err(fault) => return Err(fault).step(step::WRITE),
        }
    }
    Ok(())
}

/// Waits until a reader made room, or it is time to ask the watch.
#[cfg(unix)]
fn wait_writable(file: &File) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let timeout = Timespec::try_from(POLL).ok();
    // What poll could say, the next write says better.
    let _ = poll(&mut [PollFd::new(file, PollFlags::OUT)], timeout.as_ref());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Read;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|n| u8::try_from(n % 251).unwrap_or(0)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn pieces_are_the_file_for_any_sizes(
            sizes in prop::collection::vec(prop_oneof![
                4 => 0..2000usize, 2 => DIRECT - 2..DIRECT + 2, 1 => PIECE - 2..2 * PIECE + 2, 1 => GATHERED..GATHERED + 2,
            ], 0..8),
            head in 0..3000usize,
            threads in 0..3usize,
        ) {
            let whole = bytes(2 * PIECE + 4);
            let payloads: Vec<Payload<'_>> = sizes.iter().map(|&len| Payload::from(&whole[..len])).collect();
            let naive = sizes.iter().fold(whole[..head].to_vec(), |mut file, &len| {
                file.extend(&whole[..len]);
                file
            });
            let pieces = Pieces::cut(&whole[..head], &payloads);
            prop_assert_eq!(pieces.nbytes(), to_u64(naive.len()));
            let mut file = tempfile::tempfile().unwrap();
            prop_assert!(pieces.write_with(&file, threads, &crate::Unwatched).is_ok());
            let mut found = Vec::new();
            file.read_to_end(&mut found).unwrap();
            prop_assert!(found == naive);
        }
    }

    #[test]
    fn small_payloads_share_a_call() {
        let small = bytes(1000);
        let payloads = vec![Payload::from(&small[..]); 4000];
        let pieces = Pieces::cut(&small, &payloads);
        assert_eq!(pieces.pieces.len(), 1);
    }
}
