//! Gaps between changed elements, decoded many at once: a scattered change of 2 % has a gap for every 50 elements.

use std::io;

use ingot_format::{StopFlag, saturating_usize, to_u64};

use crate::memory::load_line;
use crate::payload::Payload;

/// The most elements that are decoded at once.
const BATCH: usize = 1024;

/// Bytes that are read at once.
const PIECE: usize = 64 << 10;

/// Padding after the last byte, so that 8 bytes can be loaded from every position.
const PADDING: usize = 8;

/// Decodes gaps.
pub(super) struct Gaps<'a> {
    payload: Payload<'a>,
    stop: StopFlag<'a>,
    bits: usize,
    /// Bytes of the payload, and `PADDING`.
    buffer: Vec<u8>,
    /// The bytes of the buffer without the padding.
    len: usize,
    /// The position of the buffer in the payload.
    begin: u64,
    /// The next bit in the buffer.
    bit: usize,
    /// The element after the last changed one, plus the part of the next gap that is decoded.
    next: u64,
    elements: Vec<u64>,
}

impl<'a> Gaps<'a> {
    /// Decode from the bit `position` on, counted from the second byte. `next` is the first element that may have
    /// changed.
    pub(super) fn new(
        payload: Payload<'a>,
        bits: u32,
        position: u64,
        next: u64,
        stop: StopFlag<'a>,
    ) -> Gaps<'a> {
        Gaps {
            payload,
            stop,
            bits: saturating_usize(bits.into()),
            buffer: vec![0; PADDING],
            len: 0,
            begin: 1 + position / 8,
            bit: saturating_usize(position % 8),
            next,
            elements: vec![0; BATCH + 1],
        }
    }

    /// Return the next bit, counted from the second byte, and the first element that may have changed: the arguments of
    /// [`Gaps::new`] to continue here.
    pub(super) fn place(&self) -> (u64, u64) {
        (8 * (self.begin - 1) + to_u64(self.bit), self.next)
    }

    /// Decode at most `most` elements of a tensor with `elements` elements. `None` at the end. A batch may be empty.
    ///
    /// # Errors
    /// Errors of reading; an element is beyond the last one.
    pub(super) fn batch(&mut self, most: u64, elements: u64) -> io::Result<Option<&[u64]>> {
        if self.units() == 0 && !self.refill()? {
            return Ok(None);
        }
        let before = self.next;
        let count = self.decode(self.units().min(BATCH), saturating_usize(most));
        if self.next > elements || self.next < before {
            return Err(beyond());
        }
        Ok(Some(&self.elements[..count]))
    }

    /// Decode one element, as [`Gaps::batch`].
    ///
    /// # Errors
    /// As [`Gaps::batch`].
    pub(super) fn element(&mut self, elements: u64) -> io::Result<Option<u64>> {
        while let Some(batch) = self.batch(1, elements)? {
            if let Some(&element) = batch.first() {
                return Ok(Some(element));
            }
        }
        Ok(None)
    }

    /// Pass over elements below `until`, `most` or fewer, and return their number. The next element is not below `until`
    /// unless `most` were passed or the gaps end.
    ///
    /// # Errors
    /// Errors of reading.
    pub(super) fn skip(&mut self, until: u64, most: u64) -> io::Result<u64> {
        let mut count = 0;
        while count < most && (self.units() > 0 || self.refill()?) {
            count += self.pass(until, most - count);
            if self.units() > 0 {
                break;
            }
        }
        Ok(count)
    }

    /// Return the number of units in the buffer.
    fn units(&self) -> usize {
        (8 * self.len).saturating_sub(self.bit) / self.bits
    }

    /// Return the units from a bit of the buffer on, in the lowest 57 bits.
    fn word(&self, bit: usize) -> u64 {
        let bytes = self.buffer[bit / 8..].first_chunk().copied().unwrap_or_default();
        u64::from_le_bytes(bytes) >> (bit % 8)
    }

    /// Decode units, and return the number of elements. They add less than 2⁶³: if sums overflow, `next` is less than before.
    fn decode(&mut self, units: usize, most: usize) -> usize {
        // Shifts by constants are faster. If 0.5 to 10 % of the elements change, units have these widths.
        match self.bits {
            3 => self.decode_by(3, units, most),
            4 => self.decode_by(4, units, most),
            5 => self.decode_by(5, units, most),
            6 => self.decode_by(6, units, most),
            7 => self.decode_by(7, units, most),
            bits => self.decode_by(bits.min(32), units, most),
        }
    }

    #[inline(always)]
    fn decode_by(&mut self, bits: usize, units: usize, most: usize) -> usize {
        let mask = (1_u64 << bits) - 1;
        let (mut bit, mut next, mut count, mut rest) = (self.bit, self.next, 0, units);
        let mut decoded = std::mem::take(&mut self.elements);
        let elements = &mut decoded[..=BATCH];
        for step in [57 / bits, 1] {
            while rest >= step && count + step <= most {
                let mut word = self.word(bit);
                for _ in 0..step {
                    let unit = word & mask;
                    word >>= bits;
                    elements[count] = next.wrapping_add(unit);
                    // A branch here would be mispredicted often: a third of the units are all ones.
                    let is_last = unit != mask;
                    count = count.wrapping_add(usize::from(is_last));
                    next = next.wrapping_add(unit).wrapping_add(u64::from(is_last));
                }
                bit += step * bits;
                rest -= step;
            }
        }
        (self.bit, self.next, self.elements) = (bit, next, decoded);
        count
    }

    /// Pass over units of elements below `until`, and return the number of elements, `most` or fewer. Each word is added up,
    /// and not decoded.
    fn pass(&mut self, until: u64, most: u64) -> u64 {
        // No shift by more is compiled.
        let bits = self.bits.min(32);
        let mask = (1_u64 << bits) - 1;
        let (mut bit, mut next, mut count, mut rest) = (self.bit, self.next, 0, self.units());
        for step in [57 / bits, 1] {
            while rest >= step && count + to_u64(step) <= most {
                let (mut word, mut sum, mut ends) = (self.word(bit), 0_u64, 0_u64);
                for _ in 0..step {
                    let unit = word & mask;
                    word >>= bits;
                    // The sum of all units of a word is below 2⁵⁷.
                    sum = sum.wrapping_add(unit);
                    ends = ends.wrapping_add(u64::from(unit != mask));
                }
                let after = next.saturating_add(sum + ends);
                if after > until {
                    break;
                }
                bit += step * bits;
                rest -= step;
                (next, count) = (after, count + ends);
            }
        }
        (self.bit, self.next) = (bit, next);
        count
    }

    /// Read more bytes. Return false at the end.
    fn refill(&mut self) -> io::Result<bool> {
        let used = self.bit / 8;
        let rest = self.len - used;
        self.buffer.copy_within(used..self.len, 0);
        self.begin += to_u64(used);
        self.bit %= 8;
        let position = self.begin + to_u64(rest);
        let more = self.payload.nbytes().saturating_sub(position);
        let more = saturating_usize(more.min(to_u64(PIECE)));
        self.len = rest + more;
        self.buffer.resize(self.len + PADDING, 0);
        self.payload
            .read(position, &mut self.buffer[rest..self.len], self.stop)?;
        self.buffer[self.len..].fill(0);
        Ok(self.units() > 0)
    }

    /// Return whether only zeros that fill the last byte are left.
    pub(super) fn is_at_end(&mut self) -> io::Result<bool> {
        self.refill()?;
        let is_last = self.begin + to_u64(self.len) == self.payload.nbytes();
        let is_padding = self.len == 0 || (self.len == 1 && self.bit > 0 && self.buffer[0] >> self.bit == 0);
        Ok(is_last && is_padding)
    }
}

fn beyond() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the positions are beyond the last element",
    )
}

/// Copy values of `W` bytes to elements of a tensor whose bytes from `begin` on are `into`. Other elements are passed over.
pub(super) fn put<const W: usize>(elements: &[u64], values: &[u8], begin: u64, into: &mut [u8]) {
    let at = |element: &u64| saturating_usize(element.wrapping_mul(to_u64(W)).wrapping_sub(begin));
    // Scattered elements are in as many cache lines, which are loaded at once. Without this, the loop takes 1.7 times as long.
    let places = elements.iter().filter_map(|element| into.get(at(element)));
    places.for_each(load_line);
    for (element, value) in elements.iter().zip(values.as_chunks::<W>().0) {
        let at = at(element);
        let place = into.get_mut(at..).and_then(<[u8]>::first_chunk_mut::<W>);
        if let Some(place) = place {
            *place = *value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delta::numbers::Packer;
    use proptest::prelude::*;

    fn packed(bits: u32, gaps: &[u64]) -> Vec<u8> {
        let (mut packer, mut out) = (Packer::new(bits), vec![0]);
        gaps.iter().for_each(|&gap| packer.push(gap, &mut out));
        packer.finish(&mut out);
        out
    }

    proptest! {
        #[test]
        fn batches_have_the_elements_of_the_gaps_from_any_of_them_on(
            bits in 1..=32_u32,
            gaps in prop::collection::vec(prop_oneof![0..4_u64, 0..3000_u64], 1..3000),
            begin in any::<prop::sample::Index>(),
        ) {
            let bytes = packed(bits, &gaps);
            let mut next = 0;
            let elements: Vec<u64> = gaps.iter().map(|gap| { next += gap + 1; next - 1 }).collect();
            let begin = begin.index(elements.len());
            let mut found = Vec::new();
            let (mut position, mut first) = (0, 0);
            // From the first gap to `begin`, and from there to the end.
            for most in [begin, elements.len()] {
                let payload = Payload::from(&*bytes);
                let mut gaps = Gaps::new(payload, bits, position, first, StopFlag::never());
                while found.len() < most {
                    let batch = gaps.batch(to_u64(most - found.len()), next).unwrap().unwrap();
                    found.extend_from_slice(batch);
                }
                (position, first) = gaps.place();
                prop_assert!(most < elements.len() || gaps.is_at_end().unwrap());
            }
            prop_assert_eq!(&found, &elements);
        }

        #[test]
        fn skipping_stops_at_the_first_element_that_is_not_below_a_limit(
            bits in 1..=32_u32,
            gaps in prop::collection::vec(prop_oneof![0..4_u64, 0..3000_u64], 1..3000),
            limits in prop::collection::vec((0..3_000_000_u64, 0..3000_u64), 1..20),
        ) {
            let bytes = packed(bits, &gaps);
            let mut next = 0;
            let elements: Vec<u64> = gaps.iter().map(|gap| { next += gap + 1; next - 1 }).collect();
            let mut gaps = Gaps::new(Payload::from(&*bytes), bits, 0, 0, StopFlag::never());
            let mut done = 0;
            for (until, most) in limits {
                let most = most.min(to_u64(elements.len() - done));
                let passed = gaps.skip(until.min(next), most).unwrap();
                let below = elements[done..].iter().filter(|&&element| element < until).count();
                prop_assert_eq!(passed, most.min(to_u64(below)));
                done += saturating_usize(passed);
                let (position, first) = gaps.place();
                let mut rest = Gaps::new(Payload::from(&*bytes), bits, position, first, StopFlag::never());
                if let Some(&element) = elements.get(done) {
                    prop_assert_eq!(rest.element(next).unwrap(), Some(element));
                }
            }
        }
    }

    #[test]
    fn rejects_elements_beyond_the_last_one() {
        let bytes = packed(4, &[3, 1]);
        let mut gaps = Gaps::new(Payload::from(&*bytes), 4, 0, 0, StopFlag::never());
        assert_eq!(
            gaps.batch(2, 5).map(|_| ()).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn only_zeros_may_follow_the_last_gap() {
        for (more, is_end) in [(&[][..], true), (&[0], false), (&[1], false)] {
            let bytes = [&packed(4, &[3]), more].concat();
            let mut gaps = Gaps::new(Payload::from(&*bytes), 4, 0, 0, StopFlag::never());
            assert_eq!(gaps.batch(1, 4).unwrap().unwrap(), [3]);
            assert_eq!(gaps.is_at_end().unwrap(), is_end);
        }
    }

    #[test]
    fn elements_outside_of_the_memory_are_passed_over() {
        let mut memory = [0; 5];
        put::<2>(&[0, 2, 3, 4, 9], &[1; 10], 4, &mut memory);
        assert_eq!(memory, [1, 1, 1, 1, 0]);
    }
}
