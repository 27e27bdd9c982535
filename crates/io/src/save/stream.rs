//! Writing into what takes bytes in order only: a pipe, a terminal.

use std::fs::File;
use std::io::{self, Write};

use super::pieces::{PIECE, Pieces, WriteRun};
use crate::disk::wait_writable;
use crate::error::{Step, Stop, step};
use crate::payload::Payload;
use crate::watch::{POLL, Watch};
use ingot_format::to_u64;

/// Writes everything into `file` from where it stands.
pub(super) fn write(pieces: &Pieces<'_>, file: &File, watch: &dyn Watch) -> Result<(), Stop> {
    if pieces.sealed().is_some() {
        return Err(io::Error::from(io::ErrorKind::NotSeekable)).step(step::SEAL);
    }
    let (mut buffer, mut passing) = (Vec::new(), Vec::new());
    let mut done = 0;
    let read = |payload: &Payload<'_>, begin, into: &mut [u8]| payload.read_watched(begin, into, watch);
    for piece in 0..pieces.count() {
        pieces.each_run(pieces.range(piece), &mut buffer, read, |run| {
            let nbytes = run.len();
            write_run(&run, file, &mut passing, watch)?;
            done += nbytes;
            watch.progressed(done, pieces.nbytes());
            Ok::<(), Stop>(())
        })?;
    }
    match done == pieces.nbytes() {
        true => Ok(()),
        false => Err(io::Error::from(io::ErrorKind::UnexpectedEof)).step(step::WRITE),
    }
}

fn write_run(run: &WriteRun<'_>, file: &File, buffer: &mut Vec<u8>, watch: &dyn Watch) -> Result<(), Stop> {
    match run {
        WriteRun::Gathered(bytes) => write_all(file, bytes, watch),
        WriteRun::Bytes(bytes, range) => bytes.lend(range.clone(), |bytes| write_all(file, bytes, watch)),
        WriteRun::File(source, range) => {
            for begin in (range.start..range.end).step_by(PIECE) {
                let end = range.end.min(begin + to_u64(PIECE));
                buffer.resize(ingot_format::to_usize(end - begin).unwrap_or(0), 0);
                source.read(begin, buffer).step(step::READ)?;
                write_all(file, buffer, watch)?;
            }
            Ok(())
        }
    }
}

fn write_all(mut file: &File, mut bytes: &[u8], watch: &dyn Watch) -> Result<(), Stop> {
    while !bytes.is_empty() {
        if watch.interrupted() {
            return Err(Stop::Interrupted);
        }
        match file.write(bytes) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero)).step(step::WRITE),
            Ok(count) => bytes = &bytes[count..],
            Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
            Err(fault) if fault.kind() == io::ErrorKind::WouldBlock => wait_writable(file, POLL),
            Err(fault) => return Err(fault).step(step::WRITE),
        }
    }
    Ok(())
}
