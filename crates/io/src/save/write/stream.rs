//! Writing into a pipe, a terminal or another stream.

use std::fs::File;
use std::io::{self, Write};

use super::pieces::{Pieces, WriteRun};
use crate::disk::wait_writable;
use crate::error::{Error, Failure, Step, step};
use crate::payload::Payload;
use crate::watch::{POLL, Watch};
use ingot_format::to_usize;

/// Write all bytes into `file` from its current position.
pub(super) fn write(pieces: &Pieces<'_>, file: &File, watch: &dyn Watch) -> Result<(), Error> {
    if pieces.sealed.is_some() {
        return Err(io::Error::from(io::ErrorKind::NotSeekable)).step(step::SEAL);
    }
    let (mut buffer, mut passing) = (Vec::new(), Vec::new());
    let mut done = 0;
    let read = |payload: &Payload<'_>, begin, into: &mut [u8]| {
        payload.read_watched(begin, into, watch).step(step::READ)
    };
    for piece in 0..pieces.count() {
        pieces.each_run(pieces.range(piece), &mut buffer, read, |run| {
            let nbytes = run.len();
            write_run(&run, file, &mut passing, watch)?;
            done += nbytes;
            watch.progressed(done, pieces.nbytes());
            Ok::<(), Error>(())
        })?;
    }
    if done != pieces.nbytes() {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).step(step::WRITE);
    }
    Ok(())
}

fn write_run(run: &WriteRun<'_>, file: &File, buffer: &mut Vec<u8>, watch: &dyn Watch) -> Result<(), Error> {
    match run {
        WriteRun::Gathered(bytes) => write_all(file, bytes, watch),
        WriteRun::Bytes(bytes, range) => {
            let write = |bytes: &[u8]| write_all(file, bytes, watch).map_err(io::Error::other);
            bytes.lend(range.clone(), write).step(step::WRITE)
        }
        WriteRun::File(source, range) => {
            buffer.resize(to_usize(run.len()).unwrap_or(0), 0);
            source.read(range.start, buffer).step(step::READ)?;
            write_all(file, buffer, watch)
        }
    }
}

fn write_all(file: &File, bytes: &[u8], watch: &dyn Watch) -> Result<(), Error> {
    write_each(file, || wait_writable(file, POLL), bytes, watch)
}

/// Write `bytes` as far as `into` accepts them, and call `wait` before the next try if it accepts none now.
fn write_each(
    mut into: impl Write,
    wait: impl Fn(),
    mut bytes: &[u8],
    watch: &dyn Watch,
) -> Result<(), Error> {
    while !bytes.is_empty() {
        if watch.interrupted() {
            return Err(Failure::Interrupted.into());
        }
        match into.write(bytes) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero)).step(step::WRITE),
            Ok(count) => bytes = &bytes[count..],
            Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
            Err(fault) if fault.kind() == io::ErrorKind::WouldBlock => wait(),
            Err(fault) => return Err(fault).step(step::WRITE),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::super::pieces::PIECE;
    use super::*;
    use crate::payload::FileRange;
    use crate::watch::Unwatched;

    #[test]
    fn what_lies_in_memory_and_in_another_file_is_written_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..2 * PIECE + 7)
            .map(|n| u8::try_from(n % 251).unwrap())
            .collect();
        let other = folder.path().join("other");
        std::fs::write(&other, &bytes).unwrap();
        let other = File::open(other).unwrap();
        let of_other = |begin: usize, end: usize| {
            Payload::File(FileRange::new(
                &other,
                ingot_format::to_u64(begin),
                ingot_format::to_u64(end - begin),
            ))
        };
        let payloads = [
            of_other(0, bytes.len()),
            Payload::from(&bytes[..PIECE]),
            of_other(3, 10),
            of_other(5, PIECE + 5),
        ];
        let expected = [
            b"head",
            &bytes[..],
            &bytes[..PIECE],
            &bytes[3..10],
            &bytes[5..PIECE + 5],
        ]
        .concat();
        let nbytes = payloads.iter().map(Payload::nbytes).sum();
        let pieces = Pieces::of_data(b"head", nbytes, &payloads).unwrap();
        let path = folder.path().join("file");
        let file = File::create(&path).unwrap();
        assert!(write(&pieces, &file, &Unwatched).is_ok());
        assert!(std::fs::read(&path).unwrap() == expected);
    }

    /// A stream that takes one byte at every third call, five bytes in all. Of the other calls one is interrupted by a signal,
    /// and one finds the stream full.
    #[derive(Default)]
    struct Moody {
        calls: usize,
        taken: Vec<u8>,
    }

    impl Write for Moody {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.calls += 1;
            match self.calls % 3 {
                1 => Err(io::ErrorKind::Interrupted.into()),
                2 => Err(io::ErrorKind::WouldBlock.into()),
                _ if self.calls > 15 => Err(io::ErrorKind::BrokenPipe.into()),
                _ => self.taken.write(&bytes[..1]),
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_breaks_off_a_write_or_has_it_wait_loses_no_byte() {
        let (mut moody, waits) = (Moody::default(), Cell::new(0));
        let wait = || waits.set(waits.get() + 1);
        assert!(write_each(&mut moody, wait, b"bytes", &Unwatched).is_ok());
        assert_eq!((&moody.taken[..], waits.get()), (&b"bytes"[..], 5));
        let fault = write_each(&mut moody, wait, b"more", &Unwatched).unwrap_err();
        assert_eq!(
            (fault.system().unwrap().kind(), waits.get()),
            (io::ErrorKind::BrokenPipe, 6)
        );
    }
}
