//! The elements of a tensor that differ from another tensor of the same dtype and shape.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ingot_format::{Dtype, StopFlag, locked, saturating_usize, to_u64};

use super::numbers::{Counts, Packer, in_memory, push_varint, take_varint};
use super::version::ChunkDigests;
use crate::fold::Fold;
use crate::payload::{Payload, Produce};

/// The most bytes of changes that are in memory. Parts of tensors with more are read and compared again when the patch is
/// written.
const KEPT_NBYTES: u64 = 256 << 20;

/// Return the bytes of an element. Elements of packed dtypes are compared by bytes.
pub(super) fn width(dtype: Dtype) -> u64 {
    if dtype.bits().is_multiple_of(8) {
        dtype.bits() / 8
    } else {
        1
    }
}

/// How the positions of changed elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codec {
    /// For each changed element, how many unchanged ones are between it and the one before.
    Gaps,
    /// For each run of changed elements, how many unchanged ones are before it, and its length minus one.
    Runs,
}

/// The changed elements as runs, each with the number of unchanged elements before it. The first and the last run are
/// counted late, since the neighbouring part may continue them.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    gaps: Counts,
    runs: Counts,
    pub(super) changed: u64,
    first: Option<[u64; 2]>,
    last: Option<[u64; 2]>,
    after: u64,
}

impl Tally {
    pub(super) fn skip(&mut self, elements: u64) {
        self.after += elements;
    }

    pub(super) fn run(&mut self, gap: u64, len: u64) {
        self.changed += len;
        self.follow(gap, len);
    }

    fn follow(&mut self, gap: u64, len: u64) {
        let gap = std::mem::take(&mut self.after) + gap;
        let next = Some([gap, len]);
        match (self.first.as_mut(), self.last.as_mut()) {
            (Some(_), Some(run)) | (Some(run), None) if gap == 0 => run[1] += len,
            (_, Some(run)) => {
                let run = *run;
                self.count(run);
                self.last = next;
            }
            (Some(_), None) => self.last = next,
            (None, None) => self.first = next,
        }
    }

    fn count(&mut self, [gap, len]: [u64; 2]) {
        self.gaps.add(gap, 1);
        self.gaps.add(0, len - 1);
        self.runs.add(gap, 1);
        self.runs.add(len - 1, 1);
    }

    fn join(&mut self, later: &Tally) {
        self.gaps.join(&later.gaps);
        self.runs.join(&later.runs);
        self.changed += later.changed;
        let Some([gap, len]) = later.first else {
            self.after += later.after;
            return;
        };
        self.follow(gap, len);
        if let Some([gap, len]) = later.last {
            self.follow(gap, len);
        }
        self.after = later.after;
    }

    /// Return the smallest way to store the positions: its codec, the width of a unit, and the bytes.
    pub(super) fn best(mut self) -> (Codec, u32, u64) {
        for run in [self.first.take(), self.last.take()].into_iter().flatten() {
            self.count(run);
        }
        let (gaps, runs) = (self.gaps.best(), self.runs.best());
        let (codec, (bits, nbytes)) = if gaps.1 <= runs.1 {
            (Codec::Gaps, gaps)
        } else {
            (Codec::Runs, runs)
        };
        (codec, bits, 1 + nbytes)
    }
}

/// The changes in a part of a tensor: the runs, and the new elements.
#[derive(Clone, Debug, Default)]
pub(super) struct Chunk {
    nbytes: u64,
    /// For each run, a varint: twice the number of unchanged elements before it, plus one if the run is longer than
    /// one. Then a second varint follows: the length minus two.
    runs: Vec<u8>,
    values: Vec<u8>,
    /// The unchanged elements after the last run.
    after: u64,
    /// Whether `runs` and `values` are empty to save memory.
    is_dropped: bool,
}

impl Chunk {
    fn run(&mut self, gap: u64, len: u64) {
        let gap = std::mem::take(&mut self.after) + gap;
        push_varint(2 * gap + u64::from(len > 1), &mut self.runs);
        if len > 1 {
            push_varint(len - 2, &mut self.runs);
        }
    }

    fn each_run(&self, mut run: impl FnMut(u64, u64)) {
        let mut runs = &*self.runs;
        while let Some(number) = take_varint(&mut runs) {
            let more = if number % 2 == 0 {
                None
            } else {
                take_varint(&mut runs)
            };
            run(number / 2, more.map_or(1, |more| more + 2));
        }
    }

    /// Compare more elements of this width, and report the runs to `tally` too.
    fn compare(&mut self, width: u64, [old, new]: [&[u8]; 2], tally: &mut Tally) {
        self.nbytes += to_u64(new.len());
        let mut end = 0;
        let mut found = |begin: usize, last: usize, values: &[u8]| {
            let (gap, len) = (to_u64(begin - end), to_u64(last - begin));
            end = last;
            self.run(gap, len);
            tally.run(gap, len);
            self.values.extend_from_slice(values);
        };
        match width {
            1 => each_run::<1>(old, new, &mut found),
            2 => each_run::<2>(old, new, &mut found),
            4 => each_run::<4>(old, new, &mut found),
            _ => each_run::<8>(old, new, &mut found),
        }
        let rest = to_u64(new.len()) / width - to_u64(end);
        self.after += rest;
        tally.skip(rest);
    }
}

/// Bytes that are compared at once. Most are equal.
const BLOCK: usize = 64;

/// Call `found` with the begin and the end of each run of elements of `W` bytes that differ, and the new bytes.
fn each_run<const W: usize>(old: &[u8], new: &[u8], found: &mut impl FnMut(usize, usize, &[u8])) {
    let mut run: Option<(usize, usize)> = None;
    let mut differs = |element: usize, found: &mut dyn FnMut(usize, usize, &[u8])| match &mut run {
        Some((_, end)) if *end == element => *end += 1,
        run => {
            if let Some((begin, end)) = run.replace((element, element + 1)) {
                found(begin, end, &new[begin * W..end * W]);
            }
        }
    };
    for (number, (ours, theirs)) in old.chunks(BLOCK).zip(new.chunks(BLOCK)).enumerate() {
        if ours == theirs {
            continue;
        }
        let first = number * BLOCK / W;
        let (our_words, our_rest) = ours.as_chunks::<8>();
        let (their_words, their_rest) = theirs.as_chunks::<8>();
        for (place, (one, two)) in our_words.iter().zip(their_words).enumerate() {
            let mut apart = u64::from_le_bytes(*one) ^ u64::from_le_bytes(*two);
            while apart != 0 {
                let element = saturating_usize(apart.trailing_zeros().into()) / (8 * W);
                differs(first + place * (8 / W) + element, found);
                apart = clear_through::<W>(apart, element);
            }
        }
        let begin = first + our_words.len() * (8 / W);
        let rest = our_rest.chunks_exact(W).zip(their_rest.chunks_exact(W));
        for (element, (one, two)) in rest.enumerate() {
            if one != two {
                differs(begin + element, found);
            }
        }
    }
    if let Some((begin, end)) = run {
        found(begin, end, &new[begin * W..end * W]);
    }
}

/// Clear the bits of all elements of `W` bytes up to `element`.
fn clear_through<const W: usize>(word: u64, element: usize) -> u64 {
    let bits = (element + 1) * 8 * W;
    if bits >= 64 { 0 } else { word >> bits << bits }
}

/// The changes in a tensor, and the digests of both tensors.
#[derive(Clone, Debug, Default)]
pub(super) struct Changes {
    pub(super) tally: Tally,
    pub(super) digests: [ChunkDigests; 2],
    chunks: Vec<Chunk>,
}

/// Compares pairs of tensors with elements of these widths.
pub(super) struct Comparison {
    widths: Vec<u64>,
    kept_nbytes: AtomicU64,
}

impl Comparison {
    pub(super) fn new(widths: Vec<u64>) -> Comparison {
        Comparison {
            widths,
            kept_nbytes: AtomicU64::new(0),
        }
    }
}

impl Fold<2> for Comparison {
    type Result = Changes;

    fn empty(&self, _: usize) -> Changes {
        Changes::default()
    }

    fn add(&self, pair: usize, changes: &mut Changes, bytes: [&[u8]; 2]) {
        for (digests, bytes) in changes.digests.iter_mut().zip(bytes) {
            digests.feed(bytes);
        }
        let mut chunk = changes.chunks.pop().unwrap_or_default();
        let nbytes = |chunk: &Chunk| to_u64(chunk.runs.len() + chunk.values.len());
        let before = nbytes(&chunk);
        chunk.compare(self.widths[pair], bytes, &mut changes.tally);
        let more = nbytes(&chunk) - before;
        if chunk.is_dropped || self.kept_nbytes.fetch_add(more, Relaxed) + more > KEPT_NBYTES {
            self.kept_nbytes.fetch_sub(nbytes(&chunk), Relaxed);
            chunk = Chunk {
                nbytes: chunk.nbytes,
                is_dropped: true,
                ..Chunk::default()
            };
        }
        changes.chunks.push(chunk);
    }

    fn join(mut earlier: Changes, mut later: Changes) -> Changes {
        earlier.tally.join(&later.tally);
        for (digests, more) in earlier.digests.iter_mut().zip(&mut later.digests) {
            digests.join(more);
        }
        earlier.chunks.append(&mut later.chunks);
        earlier
    }
}

/// The part of the changes that a tensor of the patch stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The positions, in units of some bits.
    Positions(Codec, u32),
    /// The new elements.
    Values,
}

/// The bytes of a tensor of the patch, made chunk by chunk.
#[derive(Debug)]
pub(super) struct Encoded<'a> {
    pub(super) changes: &'a Changes,
    /// Where to read chunks again that are not in memory.
    pub(super) pair: [Payload<'a>; 2],
    pub(super) width: u64,
    pub(super) part: Part,
    pub(super) nbytes: u64,
    pub(super) state: Mutex<Encoding>,
}

/// Bytes that were made and not yet taken.
#[derive(Debug, Default)]
pub(super) struct Encoding {
    position: u64,
    next: usize,
    packer: Option<Positions>,
    out: Vec<u8>,
    used: usize,
}

/// Packs runs, and joins those that touch.
#[derive(Debug)]
pub(super) struct Positions {
    codec: Codec,
    packer: Packer,
    last: Option<[u64; 2]>,
    after: u64,
}

impl Positions {
    /// Begin with the width of a unit.
    pub(super) fn new(codec: Codec, bits: u32, out: &mut Vec<u8>) -> Positions {
        out.push(bits.to_le_bytes()[0]);
        Positions {
            codec,
            packer: Packer::new(bits),
            last: None,
            after: 0,
        }
    }

    pub(super) fn run(&mut self, gap: u64, len: u64, out: &mut Vec<u8>) {
        let gap = std::mem::take(&mut self.after) + gap;
        match &mut self.last {
            Some(run) if gap == 0 => run[1] += len,
            last => {
                if let Some(run) = last.replace([gap, len]) {
                    self.pack(run, out);
                }
            }
        }
    }

    fn pack(&mut self, [gap, len]: [u64; 2], out: &mut Vec<u8>) {
        self.packer.push(gap, out);
        match self.codec {
            Codec::Runs => self.packer.push(len - 1, out),
            Codec::Gaps => (1..len).for_each(|_| self.packer.push(0, out)),
        }
    }

    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        if let Some(run) = self.last.take() {
            self.pack(run, out);
        }
        self.packer.finish(out);
    }
}

impl Encoding {
    /// Fill `into` with the next bytes, which begin at `begin`. `refill` appends bytes to the buffer, and returns
    /// whether more will follow.
    pub(super) fn take(
        &mut self,
        begin: u64,
        mut into: &mut [u8],
        mut refill: impl FnMut(&mut Encoding) -> io::Result<bool>,
    ) -> io::Result<()> {
        if begin == 0 {
            *self = Encoding::default();
        }
        if begin != self.position {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        while !into.is_empty() {
            if self.used == self.out.len() {
                self.out.clear();
                self.used = 0;
                if !refill(self)? && self.out.is_empty() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            let rest = &self.out[self.used..];
            let len = rest.len().min(into.len());
            into[..len].copy_from_slice(&rest[..len]);
            self.used += len;
            self.position += to_u64(len);
            into = &mut into[len..];
        }
        Ok(())
    }

    /// Append bytes by `make`.
    pub(super) fn append(&mut self, make: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> io::Result<()> {
        make(&mut self.out)
    }

    /// Pack runs, or finish after the last run.
    pub(super) fn pack(&mut self, codec: Codec, bits: u32, runs: &[(u64, u64)]) {
        let (positions, out) = self.positions(codec, bits);
        if runs.is_empty() {
            positions.finish(out);
        }
        runs.iter().for_each(|&(gap, len)| positions.run(gap, len, out));
    }

    fn positions(&mut self, codec: Codec, bits: u32) -> (&mut Positions, &mut Vec<u8>) {
        let out = &mut self.out;
        let positions = self
            .packer
            .get_or_insert_with(|| Positions::new(codec, bits, out));
        (positions, out)
    }
}

impl Encoded<'_> {
    /// Append the bytes of the next chunk.
    fn refill(&self, state: &mut Encoding) -> io::Result<bool> {
        let Some(chunk) = self.changes.chunks.get(state.next) else {
            if let Part::Positions(codec, bits) = self.part {
                state.pack(codec, bits, &[]);
            }
            return Ok(false);
        };
        let before = self.changes.chunks[..state.next].iter();
        let begin = before.map(|chunk| chunk.nbytes).sum();
        state.next += 1;
        let again = if chunk.is_dropped {
            Some(self.compared_again(begin, chunk.nbytes)?)
        } else {
            None
        };
        let chunk = again.as_ref().unwrap_or(chunk);
        match self.part {
            Part::Values => state.out.extend_from_slice(&chunk.values),
            Part::Positions(codec, bits) => {
                let (positions, out) = state.positions(codec, bits);
                chunk.each_run(|gap, len| positions.run(gap, len, out));
                positions.after += chunk.after;
            }
        }
        Ok(true)
    }

    fn compared_again(&self, begin: u64, nbytes: u64) -> io::Result<Chunk> {
        let mut both = [vec![0; in_memory(nbytes)?], vec![0; in_memory(nbytes)?]];
        for (payload, bytes) in self.pair.iter().zip(&mut both) {
            payload.read(begin, bytes, StopFlag::never())?;
        }
        let mut chunk = Chunk::default();
        chunk.compare(
            self.width,
            both.each_ref().map(Vec::as_slice),
            &mut Tally::default(),
        );
        Ok(chunk)
    }
}

impl Produce for Encoded<'_> {
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    fn produce(&self, begin: u64, into: &mut [u8]) -> io::Result<()> {
        let mut state = locked(&self.state);
        state.take(begin, into, |state| self.refill(state))?;
        if begin + to_u64(into.len()) == self.nbytes {
            // Free the buffer: a patch has many tensors, and each has a buffer of its own.
            *state = Encoding::default();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn flags(old: &[u8], new: &[u8], width: usize) -> Vec<bool> {
        let pairs = old.chunks(width).zip(new.chunks(width));
        pairs.map(|(one, two)| one != two).collect()
    }

    proptest! {
        #[test]
        fn runs_are_the_elements_that_a_plain_loop_finds(
            old in proptest::collection::vec(any::<u8>(), 0..60),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..40),
            width in prop_oneof![Just(1_usize), Just(2), Just(4), Just(8)],
        ) {
            let old = old.repeat(8 * width);
            let mut new = old.clone();
            for (at, byte) in &changes {
                if !new.is_empty() {
                    let at = at.index(new.len());
                    new[at] = *byte;
                }
            }
            let (mut chunk, mut tally) = (Chunk::default(), Tally::default());
            chunk.compare(to_u64(width), [&old, &new], &mut tally);
            let mut found = Vec::new();
            chunk.each_run(|gap, len| {
                found.extend((0..gap).map(|_| false));
                found.extend((0..len).map(|_| true));
            });
            found.extend((0..chunk.after).map(|_| false));
            let expected = flags(&old, &new, width);
            prop_assert_eq!(to_u64(expected.iter().filter(|&&flag| flag).count()), tally.changed);
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn tallies_of_parts_join_to_the_tally_of_the_whole(
            flags in proptest::collection::vec(any::<bool>(), 0..200),
            cuts in proptest::collection::vec(0..200_usize, 0..4),
        ) {
            let tally = |flags: &[bool]| {
                let mut tally = Tally::default();
                flags.iter().for_each(|&flag| if flag { tally.run(0, 1) } else { tally.skip(1) });
                tally
            };
            let mut ends: Vec<usize> = cuts.iter().map(|&cut| cut.min(flags.len())).collect();
            ends.push(flags.len());
            ends.sort_unstable();
            let (mut joined, mut begin) = (Tally::default(), 0);
            for end in ends {
                joined.join(&tally(&flags[begin..end]));
                begin = end;
            }
            let whole = tally(&flags);
            prop_assert_eq!(joined.changed, whole.changed);
            prop_assert_eq!(joined.best(), whole.best());
        }
    }

    /// A generator that needs no crate: the same numbers in every run.
    fn random(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        f64::from(u32::try_from(*state >> 32).unwrap()) / f64::from(u32::MAX)
    }

    #[test]
    #[allow(clippy::cast_precision_loss, reason = "sizes are compared as ratios")]
    fn scattered_changes_of_16_bits_take_a_tenth_more_than_the_least_possible() {
        let elements = 2_000_000_u64;
        for (share, limit) in [
            (0.001, 1.10),
            (0.004, 1.10),
            (0.02, 1.10),
            (0.1, 1.10),
            (0.5, 1.10),
        ] {
            let (mut tally, mut state) = (Tally::default(), 7);
            for _ in 0..elements {
                if random(&mut state) < share {
                    tally.run(0, 1);
                } else {
                    tally.skip(1);
                }
            }
            let (n, k) = (elements as f64, tally.changed as f64);
            let p = k / n;
            // log2 of n over k, by Stirling's formula: a little too large, by a part in a million.
            let positions = -n * (p * p.log2() + (1.0 - p) * (1.0 - p).log2());
            let least = positions / 8.0 + 2.0 * k;
            let nbytes = tally.best().2 as f64 + 2.0 * k;
            assert!(nbytes <= limit * least, "{share}: {}", nbytes / least);
        }
    }
}
