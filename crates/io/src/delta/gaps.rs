//! Gaps between changed elements, decoded many at once: a scattered change of 2 % has a gap for every 50 elements.

use std::io;

use ingot_format::{StopFlag, saturating_usize, to_u64};

use crate::payload::Payload;

/// The most elements that are decoded at once.
const BATCH: usize = 1024;

/// Bytes that are read at once.
const PIECE: usize = 64 << 10;

/// Padding after the last byte, so that 8 bytes can be loaded from every position.
const PADDING: usize = 8;

/// Decodes gaps in batches.
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
    ends: Vec<usize>,
}

/// A batch of changed elements.
pub(super) struct Batch<'g> {
    /// Their positions.
    pub(super) elements: &'g [u64],
    /// For each element, the bit of the buffer at which the next number begins.
    ends: &'g [usize],
    /// The position of the buffer in bits, counted from the second byte of the payload.
    origin: u64,
}

impl Batch<'_> {
    /// Return the bit at which the number after element `number` of the batch begins, counted from the second byte.
    pub(super) fn end(&self, number: usize) -> u64 {
        self.origin + to_u64(self.ends[number])
    }
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
            ends: vec![0; BATCH + 1],
        }
    }

    /// Decode at most `most` elements of a tensor with `elements` elements. `None` at the end. A batch may be empty.
    ///
    /// # Errors
    /// Errors of reading; an element is beyond the last one.
    pub(super) fn batch(&mut self, most: u64, elements: u64) -> io::Result<Option<Batch<'_>>> {
        if 8 * self.len < self.bit + self.bits && !self.refill()? {
            return Ok(None);
        }
        let units = (8 * self.len - self.bit) / self.bits;
        let count = self.decode(units.min(BATCH), saturating_usize(most));
        if self.next > elements {
            return Err(beyond());
        }
        Ok(Some(Batch {
            elements: &self.elements[..count],
            ends: &self.ends[..count],
            origin: 8 * (self.begin - 1),
        }))
    }

    /// Decode units, and return the number of elements. No sum overflows: `next` is at first at most the number of
    /// elements of a tensor, and each unit adds less than 2³².
    fn decode(&mut self, units: usize, most: usize) -> usize {
        let mask = (1_u64 << self.bits) - 1;
        let (mut bit, mut next, mut count) = (self.bit, self.next, 0);
        let (elements, ends) = (&mut self.elements[..=BATCH], &mut self.ends[..=BATCH]);
        for _ in 0..units {
            if count == most {
                break;
            }
            let bytes = self.buffer[bit / 8..].first_chunk().copied().unwrap_or_default();
            let unit = (u64::from_le_bytes(bytes) >> (bit % 8)) & mask;
            bit += self.bits;
            next += unit;
            elements[count] = next;
            ends[count] = bit;
            // A branch here would be mispredicted often: a third of the units are all ones.
            let is_last = unit != mask;
            count += usize::from(is_last);
            next += u64::from(is_last);
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
        Ok(8 * self.len >= self.bit + self.bits)
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
    for (element, value) in elements.iter().zip(values.as_chunks::<W>().0) {
        let at = saturating_usize((element * to_u64(W)).wrapping_sub(begin));
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
                    found.extend_from_slice(batch.elements);
                    if let Some(last) = batch.elements.len().checked_sub(1) {
                        (position, first) = (batch.end(last), batch.elements[last] + 1);
                    }
                }
                prop_assert!(most < elements.len() || gaps.is_at_end().unwrap());
            }
            prop_assert_eq!(&found, &elements);
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
            assert_eq!(gaps.batch(1, 4).unwrap().unwrap().elements, [3]);
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
