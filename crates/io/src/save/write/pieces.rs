//! The bytes of a file, divided into pieces.

use std::fs::File;
use std::io;
use std::ops::Range;

use ingot_format::{FormatError, Layout, StopFlag, saturating_usize, to_u64, to_usize};

use crate::device::{Copy, DeviceBytes, DeviceStream, Lent};
use crate::digest::NewHeader;
use crate::disk::write_all_at;
use crate::memory::Bytes;
use crate::payload::{FileRange, Payload, prove_sizes, prove_total};

/// The number of bytes that are written at once: small enough that threads share the work evenly, the watch is polled
/// often and buffers are cheap; large enough to make the cost of calls negligible. Pieces begin at pages, so threads do
/// not write to the same page.
pub(crate) const PIECE: usize = 4 << 20;
/// Bytes of one payload in one piece that are written from their place in memory; fewer are gathered first. 1 MiB, because
/// copying that costs less than 0.1 ms and a call for each of thousands of small tensors costs more.
const STRAIGHT: usize = 1 << 20;

/// The header and payloads of a file, in file order, divided into pieces of a few MiB. The payloads are known to have
/// exactly the sizes in the header.
pub struct Pieces<'a> {
    head: Payload<'a>,
    payloads: &'a [Payload<'a>],
    /// The end of each part in the file. The head is the first part.
    ends: Vec<u64>,
    /// Pieces with bytes that only the thread that called save can read, in order.
    pub(crate) fetched: Vec<usize>,
    /// Whether bytes of devices are among them. Looking for them in each piece takes 8 % of the time to write tensors of 400
    /// bytes, and 28 % of 40 bytes (2026-11, into the page cache).
    on_device: bool,
    /// The header that will contain digests of all bytes, if the file records any.
    pub(crate) sealed: Option<&'a NewHeader>,
}

/// Bytes of one part in one piece.
struct PartSpan<'p, 'a> {
    payload: &'p Payload<'a>,
    begin: u64,
    len: usize,
}

impl<'a> Pieces<'a> {
    /// The file of `layout`, with one payload for each tensor, in the order of the data.
    ///
    /// # Errors
    /// If a payload and its tensor differ in size, or if their numbers differ.
    pub fn of(layout: &'a Layout, payloads: &'a [Payload<'a>]) -> Result<Pieces<'a>, FormatError> {
        prove_sizes(&layout.header, payloads)?;
        Ok(Pieces::cut(&layout.head, payloads))
    }

    /// Return the file of `head`, with the digests that it records and one payload for each tensor, in data order.
    ///
    /// # Errors
    /// As [`Pieces::of`].
    pub fn of_new(head: &'a NewHeader, payloads: &'a [Payload<'a>]) -> Result<Pieces<'a>, FormatError> {
        prove_sizes(&head.layout().header, payloads)?;
        Pieces::of_all(head, payloads)
    }

    /// As [`Pieces::of_new`], with payloads that together form the data, split at any position.
    pub(crate) fn of_all(
        head: &'a NewHeader,
        payloads: &'a [Payload<'a>],
    ) -> Result<Pieces<'a>, FormatError> {
        let Layout {
            header, head: bytes, ..
        } = head.layout();
        Ok(Pieces {
            sealed: head.keeps_digests().then_some(head),
            ..Pieces::of_data(bytes, header.data_nbytes(), payloads)?
        })
    }

    /// Return a file that consists of these payloads only.
    #[must_use]
    pub fn of_bytes(payloads: &'a [Payload<'a>]) -> Pieces<'a> {
        Pieces::cut(b"", payloads)
    }

    /// Return the file that begins with `head` and has `data_nbytes` of data in payloads that are split at any
    /// position.
    pub(crate) fn of_data(
        head: &'a [u8],
        data_nbytes: u64,
        payloads: &'a [Payload<'a>],
    ) -> Result<Pieces<'a>, FormatError> {
        let found = payloads.iter().map(Payload::nbytes);
        prove_total(data_nbytes, found.fold(0, u64::saturating_add))?;
        Ok(Pieces::cut(head, payloads))
    }

    fn cut(head: &'a [u8], payloads: &'a [Payload<'a>]) -> Pieces<'a> {
        let mut pieces = Pieces {
            head: Payload::from(head),
            payloads,
            ends: Vec::with_capacity(payloads.len() + 1),
            fetched: Vec::new(),
            on_device: false,
            sealed: None,
        };
        let mut end = to_u64(head.len());
        pieces.ends.push(end);
        for payload in payloads {
            let begin = end;
            end = end.saturating_add(payload.nbytes());
            pieces.ends.push(end);
            match payload {
                Payload::Produced(_) => pieces.fetch(begin..end),
                Payload::Device(_) => pieces.on_device = true,
                _ => {}
            }
        }
        pieces
    }

    /// Record that the bytes of `range` have to be fetched. It must come after all recorded ranges.
    fn fetch(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let number = |position: u64| saturating_usize(position / to_u64(PIECE));
        let first = self
            .fetched
            .last()
            .map_or(0, |last| last + 1)
            .max(number(range.start));
        self.fetched.extend(first..=number(range.end - 1));
    }

    /// Return whether blocks of other files may be shared. Always false if digests are computed.
    pub(super) fn share_blocks(&self) -> bool {
        let shares = |(payload, &begin): (&Payload<'_>, &u64)| match payload {
            Payload::File(range) => payload.nbytes() >= to_u64(STRAIGHT) && range.has_blocks_at(begin),
            _ => false,
        };
        self.sealed.is_none() && self.payloads.iter().zip(&self.ends).any(shares)
    }

    /// Return whether reading some payload waits for a network or a device.
    pub(super) fn wait(&self) -> bool {
        self.payloads.iter().any(Payload::waits)
    }

    /// Size of the file.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The number of pieces.
    #[must_use]
    pub fn count(&self) -> usize {
        saturating_usize(self.nbytes().div_ceil(to_u64(PIECE)))
    }

    pub(in crate::save) fn is_fetched(&self, piece: usize) -> bool {
        self.fetched.binary_search(&piece).is_ok()
    }

    /// The range of `piece` in the file.
    pub(crate) fn range(&self, piece: usize) -> Range<u64> {
        let begin = to_u64(piece).saturating_mul(to_u64(PIECE));
        begin..begin.saturating_add(to_u64(PIECE)).min(self.nbytes())
    }

    /// The size of `piece` in bytes.
    #[must_use]
    pub fn len(&self, piece: usize) -> usize {
        let range = self.range(piece);
        to_usize(range.end - range.start).unwrap_or(0)
    }

    /// Return the parts of the payloads that have bytes in `range`.
    fn spans(&self, range: Range<u64>) -> impl Iterator<Item = PartSpan<'_, 'a>> {
        let first = self.ends.partition_point(|&end| end <= range.start);
        let spans = (first..self.ends.len()).map_while(move |part| {
            let starts = part.checked_sub(1).map_or(0, |before| self.ends[before]);
            let begin = starts.max(range.start);
            (begin < range.end).then(|| PartSpan {
                payload: part
                    .checked_sub(1)
                    .map_or(&self.head, |number| &self.payloads[number]),
                begin: begin - starts,
                len: to_usize(self.ends[part].min(range.end) - begin).unwrap_or(0),
            })
        });
        // The payload of an empty tensor may be for the calling thread only.
        spans.filter(|span| span.len > 0)
    }

    /// Fill `into`, which has the size of `piece`, with its bytes. A payload that waits for a network fails soon
    /// after `stop` is set.
    ///
    /// # Errors
    /// A payload cannot be read.
    ///
    /// # Panics
    /// `into` is shorter than the piece.
    pub fn fill(&self, piece: usize, into: &mut [u8], stop: StopFlag<'_>) -> io::Result<()> {
        let is_fetched = self.each_slot(piece, stop, |at, bytes| {
            into[at..at + bytes.len()].copy_from_slice(bytes);
            Ok(())
        })?;
        if is_fetched {
            return Ok(());
        }
        let mut rest = into;
        for span in self.spans(self.range(piece)) {
            let (place, after) = rest.split_at_mut(span.len);
            span.payload.read(span.begin, place, stop)?;
            rest = after;
        }
        Ok(())
    }

    /// Call `take` with the bytes of `piece`, in order and with their positions in it, if some of them are on a device: they
    /// are copied to slots of pinned memory, and many small tensors take one wait. One slot is filled while `take` has the
    /// other, if there are two. Return whether some are on a device.
    ///
    /// # Errors
    /// As for [`Pieces::fill`] and `take`.
    pub(crate) fn each_slot(
        &self,
        piece: usize,
        stop: StopFlag<'_>,
        mut take: impl FnMut(usize, &[u8]) -> io::Result<()>,
    ) -> io::Result<bool> {
        let range = self.range(piece);
        let first = self
            .on_device
            .then(|| self.spans(range.clone()).find_map(|span| span.stream()));
        let Some(at) = first.flatten() else {
            return Ok(false);
        };
        let taken = self.each_slot_of(range.clone(), at, stop, &mut take);
        if taken.is_err() {
            // Copies may still run, and the bytes may be freed next.
            let mut settled: Option<&DeviceStream> = None;
            for stream in self.spans(range).filter_map(|span| span.stream()) {
                if settled.is_none_or(|settled| !settled.is(stream)) {
                    stream.settle();
                }
                settled = Some(stream);
            }
        }
        taken.map(|()| true)
    }

    /// Call `take` with the bytes of `range`, in order and with their positions in it, in slots of `at`.
    fn each_slot_of(
        &self,
        range: Range<u64>,
        at: &DeviceStream,
        stop: StopFlag<'_>,
        take: &mut impl FnMut(usize, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut waiting: Option<Fetched<'_>> = None;
        let chunk = to_u64(at.device().chunk_nbytes());
        let mut begin = range.start;
        while begin < range.end {
            let end = range.end.min(begin + chunk);
            let another = if waiting.is_some() { at.lend_now()? } else { None };
            let slot = match (another, waiting.take()) {
                (Some(slot), kept) => {
                    waiting = kept;
                    slot
                }
                (None, Some(full)) => full.arrive(stop, take)?,
                (None, None) => at.lend(stop)?,
            };
            let at_piece = saturating_usize(begin - range.start);
            let fetched = self.queue(slot, begin..end, at_piece, stop)?;
            if let Some(full) = waiting.replace(fetched) {
                full.arrive(stop, take)?;
            }
            begin = end;
        }
        if let Some(full) = waiting {
            full.arrive(stop, take)?;
        }
        Ok(())
    }

    /// Queue the copies of `range` to `slot`, and read the bytes there that are on no device.
    fn queue(
        &self,
        mut slot: Lent,
        range: Range<u64>,
        at: usize,
        stop: StopFlag<'_>,
    ) -> io::Result<Fetched<'_>> {
        let mut copies: Vec<(&DeviceBytes, Vec<Copy>)> = Vec::new();
        let mut end = 0;
        for span in self.spans(range) {
            let place = end..end + span.len;
            end = place.end;
            match span.payload {
                Payload::Device(bytes) => {
                    let begin = to_usize(span.begin).ok_or(io::ErrorKind::InvalidInput)?;
                    let copy = bytes.copied_to(place.start, begin..begin + span.len);
                    let is_there = |(known, _): &&mut (&DeviceBytes, _)| known.stream().is(bytes.stream());
                    match copies.iter_mut().find(is_there) {
                        Some((_, copies)) => copies.push(copy),
                        None => copies.push((bytes, vec![copy])),
                    }
                }
                payload => payload.read(span.begin, &mut slot.bytes()[place], stop)?,
            }
        }
        let mut last: Option<&DeviceBytes> = None;
        for (bytes, copies) in copies {
            // A slot knows the copies of one stream.
            if let Some(last) = last.replace(bytes) {
                last.arrive(&mut slot, stop)?;
            }
            bytes.fetch(&mut slot, &copies)?;
        }
        Ok(Fetched {
            slot,
            bytes: last,
            at,
            len: end,
        })
    }

    /// Return whether some bytes of these pieces are on a device.
    pub(crate) fn are_on_device(&self, pieces: Range<usize>) -> bool {
        let range = self.range(pieces.start).start..self.range(pieces.end.saturating_sub(1)).end;
        self.on_device && self.spans(range).any(|span| span.stream().is_some())
    }

    /// Call `write` with the bytes of `range` of the file, in order: long ones as they are, short ones gathered in
    /// `buffer`, which grows to the size of a piece, and by `read`.
    pub(super) fn each_run<E>(
        &self,
        range: Range<u64>,
        buffer: &mut Vec<u8>,
        read: impl Fn(&Payload<'_>, u64, &mut [u8]) -> Result<(), E>,
        mut write: impl FnMut(WriteRun<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        buffer.clear();
        for span in self.spans(range) {
            if let Some(run) = span.straight() {
                write(WriteRun::Gathered(buffer))?;
                write(run)?;
                buffer.clear();
            } else {
                if buffer.len() + span.len > PIECE {
                    write(WriteRun::Gathered(buffer))?;
                    buffer.clear();
                }
                let filled = buffer.len();
                buffer.resize(filled + span.len, 0);
                read(span.payload, span.begin, &mut buffer[filled..])?;
            }
        }
        write(WriteRun::Gathered(buffer))
    }
}

/// A slot whose copies are queued.
struct Fetched<'p> {
    slot: Lent,
    /// The bytes that are copied last.
    bytes: Option<&'p DeviceBytes>,
    /// The position in the piece.
    at: usize,
    len: usize,
}

impl Fetched<'_> {
    /// Wait for the copies, call `take` with the bytes, and return the slot.
    fn arrive(
        mut self,
        stop: StopFlag<'_>,
        take: &mut impl FnMut(usize, &[u8]) -> io::Result<()>,
    ) -> io::Result<Lent> {
        if let Some(bytes) = self.bytes {
            bytes.arrive(&mut self.slot, stop)?;
        }
        take(self.at, &self.slot.bytes()[..self.len])?;
        Ok(self.slot)
    }
}

/// Bytes of a piece, one after another in the file.
pub(super) enum WriteRun<'r> {
    Gathered(&'r [u8]),
    Bytes(&'r Bytes<'r>, Range<usize>),
    File(&'r FileRange<'r>, Range<u64>),
}

impl<'p> PartSpan<'p, '_> {
    /// The stream of its bytes, if they are on a device.
    fn stream(&self) -> Option<&'p DeviceStream> {
        match self.payload {
            Payload::Device(bytes) => Some(bytes.stream()),
            _ => None,
        }
    }

    fn straight(&self) -> Option<WriteRun<'p>> {
        if self.len < STRAIGHT {
            return None;
        }
        match self.payload {
            Payload::Bytes(bytes) if bytes.is_contiguous() => {
                let begin = to_usize(self.begin)?;
                Some(WriteRun::Bytes(bytes, begin..begin + self.len))
            }
            Payload::File(range) => Some(WriteRun::File(range, self.begin..self.begin + to_u64(self.len))),
            _ => None,
        }
    }
}

impl WriteRun<'_> {
    pub(super) fn len(&self) -> u64 {
        match self {
            WriteRun::Gathered(bytes) => to_u64(bytes.len()),
            WriteRun::Bytes(_, range) => to_u64(range.len()),
            WriteRun::File(_, range) => range.end - range.start,
        }
    }

    /// Write the run at `position` of `file`. `buffer` is for what passes through memory.
    pub(super) fn write_at(&self, file: &File, position: u64, buffer: &mut Vec<u8>) -> io::Result<()> {
        match self {
            WriteRun::Gathered(bytes) => write_all_at(file, bytes, position),
            WriteRun::Bytes(bytes, range) => {
                bytes.lend(range.clone(), |bytes| write_all_at(file, bytes, position))
            }
            WriteRun::File(source, range) => source.copy(range.clone(), file, position, buffer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_payloads_share_a_run() {
        let small = [1; 1000];
        let payloads = vec![Payload::from(&small[..]); 4000];
        let pieces = Pieces::cut(&small, &payloads);
        assert_eq!(pieces.count(), 1);
        assert_eq!(runs(&pieces), [(true, 4_001_000)]);
    }

    /// For each run, return whether its bytes are gathered, and its length. Empty runs are left out.
    fn runs(pieces: &Pieces<'_>) -> Vec<(bool, u64)> {
        let mut runs = Vec::new();
        let note = |run: WriteRun<'_>| -> io::Result<()> {
            runs.push((matches!(run, WriteRun::Gathered(_)), run.len()));
            Ok(())
        };
        let read =
            |payload: &Payload<'_>, begin, into: &mut [u8]| payload.read(begin, into, StopFlag::never());
        pieces
            .each_run(0..pieces.nbytes(), &mut Vec::new(), read, note)
            .unwrap();
        runs.retain(|&(_, len)| len > 0);
        runs
    }

    #[test]
    fn a_range_has_the_parts_that_have_bytes_in_it() {
        let bytes = vec![1; PIECE];
        let payloads = [Payload::from(&bytes[..]), Payload::from(&bytes[..])];
        let lens = |head: &[u8], piece: usize| -> Vec<usize> {
            let pieces = Pieces::cut(head, &payloads);
            pieces.spans(pieces.range(piece)).map(|span| span.len).collect()
        };
        assert_eq!((lens(b"", 0), lens(b"", 1)), (vec![PIECE], vec![PIECE]));
        assert_eq!(lens(b"head", 0), [4, PIECE - 4]);
        assert_eq!(lens(b"head", 1), [4, PIECE - 4]);
        assert_eq!(lens(b"head", 2), [4]);
    }

    #[test]
    fn what_is_gathered_is_no_longer_than_a_piece_and_what_is_long_goes_straight() {
        let bytes = vec![1; STRAIGHT];
        let small = vec![Payload::from(&bytes[..1024]); 2 * PIECE / 1024];
        let piece = to_u64(PIECE);
        assert_eq!(runs(&Pieces::cut(b"", &small)), [(true, piece), (true, piece)]);
        assert_eq!(
            runs(&Pieces::cut(b"1", &small)),
            [(true, piece - 1023), (true, piece), (true, 1024)]
        );
        let long = [Payload::from(&bytes[..STRAIGHT - 1]), Payload::from(&bytes[..])];
        let straight = to_u64(STRAIGHT);
        assert_eq!(
            runs(&Pieces::cut(b"", &long)),
            [(true, straight - 1), (false, straight)]
        );
    }

    #[test]
    fn only_pieces_with_something_to_fetch_are_fetched() {
        #[derive(Debug)]
        struct Absent(u64);
        impl crate::Produce for Absent {
            fn nbytes(&self) -> u64 {
                self.0
            }

            fn produce(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
                Ok(())
            }
        }
        let near = vec![0; PIECE];
        let (one, none, many) = (Absent(1), Absent(0), Absent(to_u64(2 * PIECE)));
        let payloads = [
            Payload::from(&near[..]),
            Payload::Produced(&one),
            Payload::Produced(&one),
            Payload::Produced(&none),
            Payload::from(&near[..]),
            Payload::Produced(&none),
            Payload::Produced(&many),
        ];
        let pieces = Pieces::cut(b"", &payloads);
        assert_eq!(pieces.fetched, [1, 2, 3, 4]);
        let pieces = Pieces::cut(b"head", &payloads[..6]);
        assert_eq!(pieces.fetched, [1]);
        assert!(pieces.is_fetched(1) && !pieces.is_fetched(0) && !pieces.is_fetched(2));
        // It ends at the end of a piece.
        assert_eq!(Pieces::cut(b"", &payloads[6..]).fetched, [0, 1]);
    }

    #[test]
    fn blocks_are_shared_of_long_ranges_that_begin_alike_in_a_block() {
        let file = tempfile::tempfile().unwrap();
        let shares = |head: &[u8], nbytes: usize| {
            let payloads = [Payload::File(FileRange::new(&file, 0, to_u64(nbytes)))];
            Pieces::cut(head, &payloads).share_blocks()
        };
        assert!(shares(b"", STRAIGHT));
        assert!(!shares(b"", STRAIGHT - 1));
        assert!(!shares(b"head", STRAIGHT));
        let in_memory = vec![0; STRAIGHT];
        assert!(!Pieces::cut(b"", &[Payload::from(&in_memory[..])]).share_blocks());
    }
}
