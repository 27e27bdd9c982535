//! Copying payloads into the temporary file.

use std::io;
use std::ops::Range;

use ingot_format::{StopFlag, to_u64, to_usize};

use crate::disk::write_all_at;
use crate::error::{Error, Failure};
use crate::payload::Payload;
use crate::save::Temp;
use crate::watch::{Asked, Watch};
use crate::workers::watched;

/// Bytes of a payload that pass through memory at a time, if the payload is not contiguous in memory.
const PIECE: u64 = 4 << 20;

/// Copies payloads into a temporary file.
pub(super) struct Filler<'f> {
    temp: &'f Temp,
    watch: &'f dyn Watch,
    buffer: Vec<u8>,
}

impl<'f> Filler<'f> {
    pub(super) fn new(temp: &'f Temp, watch: &'f dyn Watch) -> Filler<'f> {
        let buffer = Vec::new();
        Filler { temp, watch, buffer }
    }

    /// Write the bytes `range` of `payload` at `position`.
    pub(super) fn put(
        &mut self,
        payload: &Payload<'_>,
        range: Range<u64>,
        mut position: u64,
    ) -> Result<(), Error> {
        let mut begin = range.start;
        while begin < range.end {
            if self.watch.interrupted() {
                return Err(Failure::Interrupted.into());
            }
            let end = range.end.min(begin + PIECE);
            self.put_piece(payload, begin..end, position)
                .map_err(|fault| self.temp.write_fault(fault))?;
            position += end - begin;
            begin = end;
        }
        Ok(())
    }

    fn put_piece(&mut self, payload: &Payload<'_>, range: Range<u64>, mut position: u64) -> io::Result<()> {
        let file = self.temp.file();
        let too_large = io::ErrorKind::OutOfMemory;
        let in_memory = || -> Result<Range<usize>, io::ErrorKind> {
            Ok(to_usize(range.start).ok_or(too_large)?..to_usize(range.end).ok_or(too_large)?)
        };
        match payload {
            Payload::Bytes(bytes) if bytes.is_contiguous() => {
                bytes.lend(in_memory()?, |bytes| write_all_at(file, bytes, position))
            }
            Payload::Device(bytes) => {
                let range = in_memory()?;
                let write = |stop: StopFlag<'_>| {
                    bytes.each(range, stop, |bytes| {
                        write_all_at(file, bytes, position)?;
                        position += to_u64(bytes.len());
                        Ok(())
                    })
                };
                watched(false, write, &Asked(self.watch))
                    .map_err(|_| io::Error::other(Error::from(Failure::Interrupted)))?
            }
            Payload::File(of) => of.copy(range, file, position, &mut self.buffer),
            _ => {
                let len = to_usize(range.end - range.start).ok_or(too_large)?;
                self.buffer.resize(len, 0);
                payload.read_watched(range.start, &mut self.buffer, self.watch)?;
                write_all_at(file, &self.buffer, position)
            }
        }
    }
}
