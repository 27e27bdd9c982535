//! Writing the pieces of a file into it, by several threads.

use std::fs::File;
use std::io;
use std::ops::Range;

use ingot_format::to_u64;

use super::direct::DirectWriter;
use super::pieces::{PIECE, Pieces};
use super::ring::{Closing, Ending, Ring};
use crate::digest::{NewHeader, Sealing};
use crate::error::{Error, Step, step};
use crate::pages::Pages;
use crate::payload::Payload;
use crate::save::flush::Flusher;
use crate::sync::{AtomicUsize, Ordering, thread};
use crate::watch::{POLL, Watch};
use crate::workers::Team;

/// The smallest file that several threads write. Starting them takes about 0.1 ms, as long as writing 0.5 MB.
const PARALLEL: u64 = 32 << 20;
/// More than 4 threads in one file wait for each other in the kernel.
const THREADS: usize = 4;
/// Threads that wait for their payloads: as many as read from a URL at once.
const WAITING_THREADS: usize = 16;
/// Pieces that are shared at once, 64 MiB. The time of a call depends on the number of its runs of blocks, not on their
/// size (2026-11, 2 GiB on XFS: 6 ms in pieces of 4 MiB, 0.4 ms in pieces of 64 MiB). If the file system copies instead, a piece
/// of this size does not take long.
const SHARED_PIECES: usize = 16;

/// The way in which bytes reach the file.
pub(super) enum Route {
    /// Through the page cache. The flusher, if there is one, learns how much is written.
    Cached(Option<Flusher>),
    /// By sharing the blocks of other files if possible.
    Shared,
    /// Past the page cache.
    Direct(DirectWriter),
}

/// Write all bytes into `file`, each piece at its position. `file` is empty or is to be overwritten.
pub(super) fn write(pieces: &Pieces<'_>, file: &File, route: &Route, watch: &dyn Watch) -> Result<(), Error> {
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    let sealing = pieces.sealed.map(NewHeader::begin);
    // Digests that need their bytes in order would wait for the pieces that this thread fetches.
    let waits = sealing.as_ref().is_some_and(Sealing::in_order) && !pieces.fetched.is_empty();
    let threads = match (pieces.nbytes() < PARALLEL || waits, route) {
        // This thread has to poll the watch in the meantime.
        _ if pieces.wait() => WAITING_THREADS.min(pieces.count()),
        (true, _) => 0,
        (false, Route::Cached(_) | Route::Shared) => cores().min(THREADS),
        // The threads wait for the disk, not for a core.
        (false, Route::Direct(_)) => THREADS,
    };
    let buffers = if pieces.fetched.is_empty() { 0 } else { threads + 1 };
    let writer = PieceWriter {
        pieces,
        file,
        route,
        sealing,
        next: AtomicUsize::new(0),
        team: Team::new(pieces.nbytes(), watch),
        ring: Ring::new(buffers, PIECE).step(step::WRITE)?,
    };
    writer.write_with(threads)?;
    writer.prove_complete()?;
    let Some(sealing) = writer.sealing else {
        return Ok(());
    };
    let sealed = sealing.layout().step(step::SEAL)?;
    crate::disk::write_all_at(file, &sealed.head, 0).step(step::WRITE)
}

struct PieceWriter<'w, 'a> {
    pieces: &'w Pieces<'a>,
    file: &'w File,
    route: &'w Route,
    /// Computes the digests of all bytes that are written.
    sealing: Option<Sealing<'w>>,
    /// The next piece that no thread has taken.
    next: AtomicUsize,
    team: Team<'w, Error>,
    ring: Ring,
}

/// A buffer that a thread fills before it writes.
#[derive(Default)]
struct Buffers {
    gathered: Vec<u8>,
    passing: Vec<u8>,
    copied: Option<Pages>,
}

impl PieceWriter<'_, '_> {
    /// Write with `threads` beside the calling one, which then only fetches and watches; with no threads, it writes itself.
    fn write_with(&self, threads: usize) -> Result<(), Error> {
        let failing = |outcome: Result<(), Error>| outcome.unwrap_or_else(|fault| self.team.fail(fault));
        let work = || {
            let mut ending = Ending(self.sealing.as_ref());
            match self.work().step(step::WRITE) {
                Ok(()) => ending.0 = None,
                Err(fault) => self.team.fail(fault),
            }
        };
        if !self
            .team
            .spread("ingot-save", threads, work, || failing(self.fetch()))
        {
            failing(self.work_alone());
        }
        self.team.tell();
        self.team.outcome()
    }

    /// Write all pieces on this thread.
    fn work_alone(&self) -> Result<(), Error> {
        let mut buffers = Buffers::default();
        for piece in (0..self.pieces.count()).take_while(|_| self.team.poll()) {
            self.write_pieces(piece..piece + 1, &mut buffers)
                .step(step::WRITE)?;
        }
        Ok(())
    }

    /// Write the pieces that the calling thread has fetched, as soon as they are ready, and other pieces in between.
    fn work(&self) -> io::Result<()> {
        let mut buffers = Buffers::default();
        while !self.team.stopped() {
            if let Some((piece, buffer)) = self.ring.ready() {
                self.write_fetched(piece, buffer)?;
                continue;
            }
            let first = self.next.fetch_add(self.at_once(), Ordering::Relaxed);
            if first >= self.pieces.count() {
                break;
            }
            if !self.pieces.is_fetched(first) {
                self.write_pieces(first..first + self.at_once(), &mut buffers)?;
            }
        }
        drop(buffers);
        while !self.pieces.fetched.is_empty()
            && !self.team.stopped()
            && let Some((piece, buffer)) = self.ring.next()
        {
            self.write_fetched(piece, buffer)?;
        }
        Ok(())
    }

    /// How many pieces a thread takes at once.
    fn at_once(&self) -> usize {
        match self.route {
            Route::Shared if self.pieces.fetched.is_empty() => SHARED_PIECES,
            _ => 1,
        }
    }

    /// Write these pieces, none of which needs the calling thread. The last ones may be missing.
    fn write_pieces(&self, pieces: Range<usize>, buffers: &mut Buffers) -> io::Result<()> {
        let pieces = pieces.start..pieces.end.min(self.pieces.count());
        let range = self.pieces.range(pieces.start).start..self.pieces.range(pieces.end - 1).end;
        match (self.route, &self.sealing) {
            (Route::Cached(_) | Route::Shared, None) if !self.pieces.are_on_device(pieces.clone()) => {
                let mut position = range.start;
                let Buffers {
                    gathered, passing, ..
                } = buffers;
                let read = |payload: &Payload<'_>, begin, into: &mut [u8]| {
                    payload.read(begin, into, self.team.stop())
                };
                self.pieces.each_run(range.clone(), gathered, read, |run| {
                    run.write_at(self.file, position, passing)?;
                    position += run.len();
                    Ok::<(), io::Error>(())
                })?;
            }
            // Digests are computed of a copy, which no code changes before it is written.
            _ => {
                for piece in pieces {
                    self.write_copied(piece, buffers)?;
                }
            }
        }
        self.wrote(range.end - range.start);
        Ok(())
    }

    /// Write a piece from a copy of it: in slots of pinned memory if it comes from a device.
    fn write_copied(&self, piece: usize, buffers: &mut Buffers) -> io::Result<()> {
        let (len, position) = (self.pieces.len(piece), self.pieces.range(piece).start);
        // No slot is held while a thread waits for the digests of another.
        let waits = self.sealing.as_ref().is_some_and(Sealing::in_order);
        let write = |at, bytes: &[u8]| self.write_filled(bytes, position + to_u64(at));
        if !waits && self.pieces.each_slot(piece, self.team.stop(), write)? {
            return Ok(());
        }
        let pages = match &mut buffers.copied {
            Some(pages) => pages,
            none => none.insert(Pages::allocate(PIECE)?),
        };
        let bytes = &mut pages.bytes_mut()[..len];
        self.pieces.fill(piece, bytes, self.team.stop())?;
        self.write_filled(bytes, position)
    }

    fn write_fetched(&self, piece: usize, buffer: Pages) -> io::Result<()> {
        let len = self.pieces.len(piece);
        self.write_filled(&buffer.bytes()[..len], self.pieces.range(piece).start)?;
        self.ring.give_back(buffer);
        self.wrote(to_u64(len));
        Ok(())
    }

    fn write_filled(&self, bytes: &[u8], position: u64) -> io::Result<()> {
        if let Some(sealing) = &self.sealing {
            sealing.feed(position, bytes);
        }
        match self.route {
            Route::Cached(_) | Route::Shared => crate::disk::write_all_at(self.file, bytes, position),
            Route::Direct(direct) => direct.write(self.file, bytes, position),
        }
    }

    fn wrote(&self, nbytes: u64) {
        let done = self.team.did(nbytes);
        if let Route::Cached(Some(flusher)) = self.route {
            flusher.wrote(done);
        }
    }

    /// Fetches what only this thread may fetch, while the others write.
    fn fetch(&self) -> Result<(), Error> {
        let _closing = Closing(&self.ring);
        for &piece in &self.pieces.fetched {
            let mut buffer = loop {
                if !self.team.poll() {
                    return Ok(());
                }
                if let Some(buffer) = self.ring.empty(POLL) {
                    break buffer;
                }
            };
            let bytes = &mut buffer.bytes_mut()[..self.pieces.len(piece)];
            self.pieces
                .fill(piece, bytes, self.team.stop())
                .step(step::READ)?;
            self.ring.put(piece, buffer);
        }
        Ok(())
    }

    /// Fail unless all bytes were written. Each piece was written whole or is an error, so this finds pieces that were
    /// skipped.
    fn prove_complete(&self) -> Result<(), Error> {
        let (expected, found) = (self.pieces.nbytes(), self.team.done());
        if found == expected {
            return Ok(());
        }
        let message = format!("{found} bytes were written, expected {expected}");
        Err(io::Error::new(io::ErrorKind::UnexpectedEof, message)).step(step::WRITE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Unwatched;
    use crate::memory::Bytes;
    use crate::payload::{FileRange, Gather, Produce};
    use crate::save::save_pieces;
    use crate::sync::{Mutex, in_every_order, locked};
    use proptest::prelude::*;
    use std::io::Write;
    use std::time::Duration;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|n| u8::try_from(n % 251).unwrap()).collect()
    }

    /// A payload that only the calling thread can fetch. It records the threads that fetch it.
    #[derive(Debug)]
    struct Far<'b> {
        bytes: &'b [u8],
        asked_by: Mutex<Vec<std::thread::ThreadId>>,
    }

    impl Produce for Far<'_> {
        fn nbytes(&self) -> u64 {
            to_u64(self.bytes.len())
        }

        fn produce(&self, begin: u64, into: &mut [u8]) -> io::Result<()> {
            self.asked_by.lock().unwrap().push(std::thread::current().id());
            let begin = ingot_format::to_usize(begin).unwrap();
            into.copy_from_slice(&self.bytes[begin..begin + into.len()]);
            Ok(())
        }
    }

    fn writer<'w, 'a>(
        pieces: &'w Pieces<'a>,
        file: &'w File,
        route: &'w Route,
        threads: usize,
    ) -> PieceWriter<'w, 'a> {
        PieceWriter {
            pieces,
            file,
            route,
            sealing: None,
            next: AtomicUsize::new(0),
            team: Team::new(pieces.nbytes(), &Unwatched),
            ring: Ring::new(threads + 1, PIECE).unwrap(),
        }
    }

    fn written(pieces: &Pieces<'_>, threads: usize, direct: bool) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = File::create_new(&path).unwrap();
        let route = match direct.then(|| DirectWriter::open(&file, u64::MAX)).flatten() {
            Some(direct) => Route::Direct(direct),
            None => Route::Cached(Flusher::start(&file)),
        };
        let writer = writer(pieces, &file, &route, threads);
        assert!(writer.write_with(threads).is_ok());
        std::fs::read(&path).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn pieces_are_the_file_for_any_payloads_and_any_way(
            parts in prop::collection::vec((prop_oneof![
                4 => 0..2000usize, 2 => (1 << 20) - 2..(1usize << 20) + 2, 1 => PIECE - 2..2 * PIECE + 2,
            ], 0..4u8), 0..8),
            head in 0..3000usize,
            threads in 0..3usize,
            direct in any::<bool>(),
        ) {
            let whole = bytes(2 * PIECE + 4);
            let mut other = tempfile::tempfile().unwrap();
            other.write_all(&whole).unwrap();
            let far: Vec<Far<'_>> = parts
                .iter()
                .map(|&(len, _)| Far { bytes: &whole[..len], asked_by: Mutex::default() })
                .collect();
            let payloads: Vec<Payload<'_>> = parts
                .iter()
                .zip(&far)
                .map(|(&(len, kind), far)| match kind {
                    0 => Payload::File(FileRange::new(&other, 0, to_u64(len))),
                    1 => Payload::Produced(far),
                    _ => Payload::Bytes(Bytes::from(&whole[..len])),
                })
                .collect();
            let naive = parts.iter().fold(whole[..head].to_vec(), |mut file, &(len, _)| {
                file.extend(&whole[..len]);
                file
            });
            let nbytes = payloads.iter().map(Payload::nbytes).sum();
            let pieces = Pieces::of_data(&whole[..head], nbytes, &payloads).unwrap();
            prop_assert_eq!(pieces.nbytes(), to_u64(naive.len()));
            prop_assert!(written(&pieces, threads, direct) == naive);
            for far in far {
                prop_assert!(far.asked_by.into_inner().unwrap().iter().all(|&id| id == std::thread::current().id()));
            }
        }
    }

    /// A payload that fails at the end of its bytes if the flag is set.
    #[derive(Debug)]
    struct Few {
        nbytes: usize,
        fails: bool,
    }

    impl Produce for Few {
        fn nbytes(&self) -> u64 {
            to_u64(self.nbytes)
        }

        fn produce(&self, begin: u64, into: &mut [u8]) -> io::Result<()> {
            let begin = ingot_format::to_usize(begin).unwrap();
            into.copy_from_slice(&bytes(self.nbytes)[begin..begin + into.len()]);
            match self.fails && begin + into.len() == self.nbytes {
                true => Err(io::ErrorKind::InvalidData.into()),
                false => Ok(()),
            }
        }
    }

    #[test]
    fn in_every_order_of_threads_what_is_fetched_and_what_is_not_is_written_whole_or_the_failure_is_told() {
        for fails in [false, true] {
            in_every_order(move || {
                let (first, few) = (bytes(PIECE), Few { nbytes: 10, fails });
                let payloads = [Payload::Bytes(Bytes::from(&first[..])), Payload::Produced(&few)];
                let nbytes = payloads.iter().map(Payload::nbytes).sum();
                let pieces = Pieces::of_data(&[], nbytes, &payloads).unwrap();
                let file = tempfile::NamedTempFile::new().unwrap();
                let route = Route::Cached(None);
                let writer = writer(&pieces, file.as_file(), &route, 2);
                let outcome = writer.write_with(2);
                assert_eq!(outcome.is_err(), fails);
                if !fails {
                    assert!(writer.prove_complete().is_ok());
                    assert!(std::fs::read(file.path()).unwrap() == [first, bytes(10)].concat());
                }
            });
        }
    }

    /// A payload that fails at requests for bytes after `good`.
    #[derive(Debug)]
    struct Broken {
        nbytes: u64,
        good: u64,
    }

    impl Produce for Broken {
        fn nbytes(&self) -> u64 {
            self.nbytes
        }

        fn produce(&self, begin: u64, into: &mut [u8]) -> io::Result<()> {
            match begin + to_u64(into.len()) > self.good {
                true => Err(io::Error::other("the device fell off the bus")),
                false => Ok(()),
            }
        }
    }

    #[test]
    fn a_producer_that_fails_ends_the_save_and_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "old").unwrap();
        let near = bytes(40 << 20);
        // On one thread; with threads, at the start; and with threads, at the end.
        for (nbytes, good) in [(100, 0), (64 << 20, 0), (64 << 20, 60 << 20)] {
            let broken = Broken { nbytes, good };
            let payloads = [Payload::Produced(&broken), Payload::from(&near[..])];
            let payloads = if good == 0 && nbytes == 100 {
                &payloads[..1]
            } else {
                &payloads
            };
            let error = save_pieces(
                &path,
                Pieces::of_data(b"head", payloads.iter().map(Payload::nbytes).sum(), payloads),
                &crate::SaveOptions::default(),
                &Unwatched,
            )
            .unwrap_err();
            assert!(error.to_string().contains("could not "), "{error}");
            assert!(error.to_string().contains("fell off the bus"), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), b"old");
            // A flush may have the other file open, whose name some systems keep until it is closed.
            let names = || std::fs::read_dir(folder.path()).unwrap().count();
            let begin = std::time::Instant::now();
            while names() > 1 && begin.elapsed().as_secs() < 60 {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            assert_eq!(names(), 1);
        }
    }

    #[test]
    fn another_file_that_is_too_short_ends_the_save() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut other = tempfile::tempfile().unwrap();
        other.write_all(&bytes(3 << 20)).unwrap();
        for nbytes in [(3 << 20) + 1, 3 << 20] {
            let payloads = [Payload::File(FileRange::new(&other, 1, nbytes))];
            let saved = save_pieces(
                &path,
                Pieces::of_data(b"head", payloads.iter().map(Payload::nbytes).sum(), &payloads),
                &crate::SaveOptions::default(),
                &Unwatched,
            );
            let text = saved.unwrap_err().to_string();
            assert!(text.contains("ended at byte 3145728"), "{text}");
            assert!(!path.exists());
        }
    }

    /// No file may lack bytes that its header promises, even if the payloads are wrong. Each check was removed once:
    /// without `prove_sizes` the first loop fails, without `Bytes::read` and `lend` the second, without the count in
    /// `write` the third.
    #[test]
    fn a_save_that_lacks_bytes_ends_and_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "old").unwrap();
        let whole = bytes(40 << 20);
        for nbytes in [8, 40 << 20] {
            let shape = [to_u64(nbytes)];
            let specs = ["a", "b"].map(|name| ingot_format::Spec {
                name,
                dtype: ingot_format::Dtype::U8,
                shape: &shape,
            });
            let layout = ingot_format::layout(&specs, None, ingot_format::Format::Safetensors).unwrap();
            // Also if the sizes add up to the right total.
            for (a, b) in [
                (nbytes, nbytes - 1),
                (nbytes, 0),
                (0, nbytes),
                (nbytes - 1, nbytes),
            ] {
                let payloads = [Payload::from(&whole[..a]), Payload::from(&whole[..b])];
                for replace in [crate::Replace::Atomic, crate::Replace::InPlace] {
                    let options = crate::SaveOptions {
                        replace,
                        ..Default::default()
                    };
                    let saved = crate::save(&path, &layout, &payloads, &options, &Unwatched).unwrap_err();
                    assert_eq!(saved.code(), "wrong-length", "{saved}");
                    assert_eq!(saved.tensor(), Some(if a == nbytes { "b" } else { "a" }));
                    assert_eq!(std::fs::read(&path).unwrap(), b"old");
                }
            }
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_piece_that_nobody_writes_is_missed() {
        let whole = bytes(PIECE + 1);
        let payloads = [Payload::from(&whole[..])];
        let pieces = Pieces::of_data(b"", to_u64(whole.len()), &payloads).unwrap();
        let file = tempfile::tempfile().unwrap();
        let writer = writer(&pieces, &file, &Route::Cached(None), 0);
        writer.wrote(to_u64(PIECE));
        assert!(writer.prove_complete().is_err());
        writer.wrote(1);
        assert!(writer.prove_complete().is_ok());
    }

    #[test]
    fn progress_grows_and_ends_with_all() {
        #[derive(Default)]
        struct Seen(Mutex<Vec<(u64, u64)>>);
        impl Watch for Seen {
            fn progressed(&self, done: u64, total: u64) {
                self.0.lock().unwrap().push((done, total));
            }
        }
        let folder = tempfile::tempdir().unwrap();
        for len in [100, 10 << 20, 40 << 20] {
            let seen = Seen::default();
            let whole = bytes(len);
            let payloads = [Payload::from(&whole[..])];
            save_pieces(
                &folder.path().join("file"),
                Pieces::of_data(b"head", payloads.iter().map(Payload::nbytes).sum(), &payloads),
                &crate::SaveOptions::default(),
                &seen,
            )
            .unwrap();
            let total = to_u64(len) + 4;
            let seen = seen.0.into_inner().unwrap();
            assert!(
                seen.is_sorted() && seen.iter().all(|told| told.1 == total),
                "{seen:?}"
            );
            assert_eq!(seen.last(), Some(&(total, total)));
        }
    }

    #[test]
    fn a_thread_takes_one_piece_where_some_have_to_be_fetched() {
        let far = Far {
            bytes: &bytes(1),
            asked_by: Mutex::default(),
        };
        let near = bytes(10);
        let payloads = [Payload::from(&near[..]), Payload::Produced(&far)];
        let file = tempfile::tempfile().unwrap();
        for (payloads, expected) in [(&payloads[..1], SHARED_PIECES), (&payloads[..], 1)] {
            let nbytes = payloads.iter().map(Payload::nbytes).sum();
            let pieces = Pieces::of_data(&[], nbytes, payloads).unwrap();
            assert_eq!(writer(&pieces, &file, &Route::Shared, 0).at_once(), expected);
            assert_eq!(writer(&pieces, &file, &Route::Cached(None), 0).at_once(), 1);
        }
    }

    /// A payload that is read after a pause.
    #[derive(Debug)]
    struct Late(usize);

    impl Produce for Late {
        fn nbytes(&self) -> u64 {
            to_u64(self.0)
        }

        fn produce(&self, _: u64, into: &mut [u8]) -> io::Result<()> {
            std::thread::sleep(POLL);
            into.fill(7);
            Ok(())
        }
    }

    /// The header of a file with digests that are computed in order, of tensors of these sizes.
    fn in_order(lens: &[usize]) -> NewHeader {
        let names: Vec<String> = (0..lens.len()).map(|number| number.to_string()).collect();
        let shapes: Vec<[u64; 1]> = lens.iter().map(|&len| [to_u64(len)]).collect();
        let specs: Vec<ingot_format::Spec<'_>> = std::iter::zip(&names, &shapes)
            .map(|(name, shape)| ingot_format::Spec {
                name,
                dtype: ingot_format::Dtype::U8,
                shape,
            })
            .collect();
        let keep = crate::digest::Keep {
            model_spec: true,
            ..Default::default()
        };
        let options = ingot_format::LayoutOptions::default();
        NewHeader::new(&specs, None, ingot_format::Format::Safetensors, &options, keep).unwrap()
    }

    /// Fails if threads are used: each then waits for the bytes before its own, and none writes the fetched ones.
    #[test]
    fn digests_that_are_taken_in_order_wait_for_nothing_that_is_fetched() {
        let (late, near) = (Late(PIECE), vec![7; 10 * PIECE]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let payloads = [Payload::Produced(&late), Payload::from(&near[..])];
        let head = in_order(&[PIECE, near.len()]);
        let pieces = Pieces::of_new(&head, &payloads);
        save_pieces(&path, pieces, &crate::SaveOptions::default(), &Unwatched).unwrap();
        let file = std::fs::read(&path).unwrap();
        assert!(file.ends_with(&near) && crate::verify(&path, None, &Unwatched).unwrap().is_ok());
    }

    /// A payload whose read fails after a pause.
    #[derive(Debug)]
    struct Missing;

    impl Gather for Missing {
        fn nbytes(&self) -> u64 {
            10
        }

        fn waits(&self) -> bool {
            false
        }

        fn read(&self, _: u64, _: &mut [u8], _: ingot_format::StopFlag<'_>) -> io::Result<()> {
            std::thread::sleep(POLL);
            Err(io::Error::other("the cable was pulled"))
        }
    }

    /// Fails after a minute without [`Ending`].
    #[test]
    fn a_piece_that_fails_ends_those_whose_digests_wait_for_it() {
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let near = bytes(40 << 20);
            let folder = tempfile::tempdir().unwrap();
            let (path, head) = (folder.path().join("file"), in_order(&[10, near.len()]));
            let payloads = [Payload::Gathered(&Missing), Payload::from(&near[..])];
            let pieces = Pieces::of_new(&head, &payloads);
            let saved = save_pieces(&path, pieces, &crate::SaveOptions::default(), &Unwatched);
            tell.send(saved.unwrap_err().to_string()).unwrap();
        });
        let text = told.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(text.contains("the cable was pulled"), "{text}");
    }

    /// A payload that any thread may read. It records the threads that read it.
    #[derive(Debug)]
    struct Near {
        nbytes: usize,
        waits: bool,
        read_by: Mutex<Vec<std::thread::ThreadId>>,
    }

    impl Near {
        fn new(nbytes: usize, waits: bool) -> Near {
            let read_by = Mutex::default();
            Near {
                nbytes,
                waits,
                read_by,
            }
        }

        /// Return whether the calling thread has read it, and whether other threads have.
        fn is_read_by_this(&self) -> Vec<bool> {
            let this = std::thread::current().id();
            let mut found: Vec<bool> = locked(&self.read_by).iter().map(|&id| id == this).collect();
            found.sort_unstable();
            found.dedup();
            found
        }
    }

    impl Gather for Near {
        fn nbytes(&self) -> u64 {
            to_u64(self.nbytes)
        }

        fn waits(&self) -> bool {
            self.waits
        }

        fn read(&self, _: u64, into: &mut [u8], _: ingot_format::StopFlag<'_>) -> io::Result<()> {
            locked(&self.read_by).push(std::thread::current().id());
            into.fill(7);
            Ok(())
        }
    }

    #[test]
    fn threads_write_what_is_long_and_what_waits_but_not_what_is_short() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let (short, long) = (100, 40 << 20);
        let options = crate::SaveOptions::default();
        for (nbytes, waits, by_this) in [
            (short, false, true),
            (short, true, false),
            (long, false, false),
            (long, true, false),
        ] {
            let near = Near::new(nbytes, waits);
            let payload = Payload::Gathered(&near);
            save_pieces(
                &path,
                Pieces::of_data(b"head", payload.nbytes(), &[payload]),
                &options,
                &Unwatched,
            )
            .unwrap();
            assert_eq!(near.is_read_by_this(), [by_this], "{nbytes} bytes, {waits}");
        }
        // With a payload that only the calling thread fetches, and with digests that need their bytes in order.
        let (near, late) = (Near::new(long, false), Late(1));
        let payloads = [Payload::Gathered(&near), Payload::Produced(&late)];
        save_pieces(
            &path,
            Pieces::of_data(b"head", to_u64(long) + 1, &payloads),
            &options,
            &Unwatched,
        )
        .unwrap();
        // The calling thread reads the piece that has bytes of both payloads.
        assert_eq!(near.is_read_by_this(), [false, true]);
        let near = Near::new(long, false);
        let (head, payloads) = (in_order(&[long]), [Payload::Gathered(&near)]);
        save_pieces(&path, Pieces::of_new(&head, &payloads), &options, &Unwatched).unwrap();
        assert_eq!(near.is_read_by_this(), [false]);
    }

    #[test]
    fn what_lies_on_no_device_is_copied_for_digests_alone() {
        let near = bytes(10);
        let payloads = [Payload::from(&near[..])];
        let sealed = in_order(&[10]);
        let file = tempfile::tempfile().unwrap();
        let route = Route::Cached(None);
        for (sealing, gathered) in [(None, &near[..]), (Some(sealed.begin()), &[])] {
            let pieces = Pieces::of_data(&[], 10, &payloads).unwrap();
            let writer = PieceWriter {
                sealing,
                ..writer(&pieces, &file, &route, 0)
            };
            let mut buffers = Buffers::default();
            writer.write_pieces(0..1, &mut buffers).unwrap();
            assert_eq!(buffers.gathered, gathered);
        }
    }
}
