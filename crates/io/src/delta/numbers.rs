//! Numbers in units of 1 to 32 bits. A unit of all ones adds its value and continues the number; any other unit ends it. So
//! a small number takes one unit, and no number is too large.

use std::io;

use ingot_format::{StopFlag, saturating_usize, to_u64, to_usize};

use crate::payload::Payload;

/// The widest unit.
pub(super) const MAX_BITS: u32 = 32;

/// Numbers below this are counted by value.
const SMALL: u64 = 1024;

/// The unit of all ones.
fn escape(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// How many units numbers take, for each width of a unit.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    /// How often each small number occurs; empty before the first.
    small: Vec<u64>,
    /// The units of all other numbers, for each width.
    units: [u64; 32],
}

impl Counts {
    /// Count a number that occurs `times`.
    pub(super) fn add(&mut self, number: u64, times: u64) {
        if number < SMALL {
            if self.small.is_empty() {
                self.small.resize(saturating_usize(SMALL), 0);
            }
            self.small[saturating_usize(number)] += times;
        } else {
            for (bits, units) in (1..).zip(&mut self.units) {
                *units = units.saturating_add(times.saturating_mul(number / escape(bits) + 1));
            }
        }
    }

    pub(super) fn join(&mut self, other: &Counts) {
        if self.small.is_empty() {
            self.small.clone_from(&other.small);
        } else {
            for (all, more) in self.small.iter_mut().zip(&other.small) {
                *all += more;
            }
        }
        for (all, more) in self.units.iter_mut().zip(&other.units) {
            *all = all.saturating_add(*more);
        }
    }

    /// Return the width of a unit for which the numbers take the fewest bytes, and the number of bytes. Of several such
    /// widths, return the smallest.
    pub(super) fn best(&self) -> (u32, u64) {
        let nbytes = |bits: u32| {
            let small = (0..).zip(&self.small);
            let units = small.map(|(number, times): (u64, _)| times * (number / escape(bits) + 1));
            let units = units.fold(self.units[saturating_usize(bits.into()) - 1], u64::saturating_add);
            units.saturating_mul(bits.into()).div_ceil(8)
        };
        let widths = (1..=MAX_BITS).map(|bits| (bits, nbytes(bits)));
        widths.min_by_key(|(_, nbytes)| *nbytes).unwrap_or((1, 0))
    }
}

/// Packs numbers, beginning with the lowest bits of the first byte.
#[derive(Debug)]
pub(super) struct Packer {
    bits: u32,
    pending: u64,
    filled: u32,
}

impl Packer {
    pub(super) fn new(bits: u32) -> Packer {
        Packer {
            bits,
            pending: 0,
            filled: 0,
        }
    }

    pub(super) fn push(&mut self, mut number: u64, out: &mut Vec<u8>) {
        let escape = escape(self.bits);
        while number >= escape {
            self.unit(escape, out);
            number -= escape;
        }
        self.unit(number, out);
    }

    fn unit(&mut self, unit: u64, out: &mut Vec<u8>) {
        self.pending |= unit << self.filled;
        self.filled += self.bits;
        while self.filled >= 8 {
            out.push(self.pending.to_le_bytes()[0]);
            self.pending >>= 8;
            self.filled -= 8;
        }
    }

    /// Fill the last byte with zeros.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        if self.filled > 0 {
            out.push(self.pending.to_le_bytes()[0]);
            (self.pending, self.filled) = (0, 0);
        }
    }
}

/// Bytes of a payload, read from some position on in bounded pieces.
#[derive(Debug)]
pub(super) struct Bytes<'a> {
    payload: Payload<'a>,
    stop: StopFlag<'a>,
    /// The position behind the buffer.
    end: u64,
    buffer: Vec<u8>,
    used: usize,
}

/// The number of bytes that are read at once.
const PIECE: u64 = 64 << 10;

impl<'a> Bytes<'a> {
    pub(super) fn new(payload: Payload<'a>, position: u64, stop: StopFlag<'a>) -> Bytes<'a> {
        Bytes {
            payload,
            stop,
            end: position,
            buffer: Vec::new(),
            used: 0,
        }
    }

    /// Read the next piece. Return false at the end.
    fn refill(&mut self) -> io::Result<bool> {
        let len = PIECE.min(self.payload.nbytes().saturating_sub(self.end));
        self.buffer.resize(saturating_usize(len), 0);
        self.payload.read(self.end, &mut self.buffer, self.stop)?;
        self.end += len;
        self.used = 0;
        Ok(len > 0)
    }

    fn next(&mut self) -> io::Result<Option<u8>> {
        if self.used == self.buffer.len() && !self.refill()? {
            return Ok(None);
        }
        self.used += 1;
        Ok(Some(self.buffer[self.used - 1]))
    }

    /// Continue at `position` of the payload.
    pub(super) fn seek(&mut self, position: u64) {
        let begin = self.end - to_u64(self.buffer.len());
        match position.checked_sub(begin).and_then(to_usize) {
            Some(used) if used <= self.buffer.len() => self.used = used,
            _ => {
                self.buffer.clear();
                (self.end, self.used) = (position, 0);
            }
        }
    }

    /// Fill `into` with the next bytes.
    pub(super) fn copy(&mut self, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            if self.used == self.buffer.len() && !self.refill()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let rest = &self.buffer[self.used..];
            let len = rest.len().min(into.len());
            into[..len].copy_from_slice(&rest[..len]);
            self.used += len;
            into = &mut into[len..];
        }
        Ok(())
    }
}

/// Numbers of a payload whose first byte is the width of a unit.
#[derive(Debug)]
pub(super) struct Numbers<'a> {
    bytes: Bytes<'a>,
    bits: u32,
    pending: u64,
    filled: u32,
    /// The position of the next number, in bits behind the first byte.
    position: u64,
}

impl<'a> Numbers<'a> {
    /// Read numbers from `position` on, in bits behind the first byte.
    pub(super) fn new(
        payload: Payload<'a>,
        bits: u32,
        position: u64,
        stop: StopFlag<'a>,
    ) -> io::Result<Numbers<'a>> {
        let mut numbers = Numbers {
            bytes: Bytes::new(payload, 1 + position / 8, stop),
            bits,
            pending: 0,
            filled: 0,
            position,
        };
        let inside = u32::try_from(position % 8).unwrap_or(0);
        if inside > 0 && numbers.fill(inside)? {
            numbers.pending >>= inside;
            numbers.filled -= inside;
        }
        Ok(numbers)
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Read until `bits` bits are there. Return false at the end.
    fn fill(&mut self, bits: u32) -> io::Result<bool> {
        while self.filled < bits {
            let Some(byte) = self.bytes.next()? else {
                return Ok(false);
            };
            self.pending |= u64::from(byte) << self.filled;
            self.filled += 8;
        }
        Ok(true)
    }

    /// Return the next number; `None` at the end, and for a number beyond 64 bits.
    pub(super) fn next(&mut self) -> io::Result<Option<u64>> {
        let (escape, mut number) = (escape(self.bits), 0_u64);
        loop {
            if !self.fill(self.bits)? {
                return Ok(None);
            }
            let unit = self.pending & escape;
            self.pending >>= self.bits;
            self.filled -= self.bits;
            self.position += u64::from(self.bits);
            let Some(sum) = number.checked_add(unit) else {
                return Ok(None);
            };
            number = sum;
            if unit < escape {
                return Ok(Some(number));
            }
        }
    }

    /// Return whether only zeros that fill the last byte are left.
    pub(super) fn is_at_end(&mut self) -> io::Result<bool> {
        Ok(self.filled < 8 && self.pending == 0 && self.bytes.next()?.is_none())
    }
}

/// Return the width of a unit, the first byte of these numbers.
pub(super) fn width(payload: &Payload<'_>, stop: StopFlag<'_>) -> io::Result<Option<u32>> {
    let mut first = [0];
    if payload.nbytes() > 0 {
        payload.read(0, &mut first, stop)?;
    }
    let bits = u32::from(first[0]);
    Ok((1..=MAX_BITS).contains(&bits).then_some(bits))
}

/// Append a number in groups of 7 bits, the lowest first.
pub(super) fn push_varint(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}

/// Take a number from the front of `bytes`, which [`push_varint`] has written.
pub(super) fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let (mut number, mut shift) = (0, 0);
    loop {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
        shift += 7;
    }
}

/// Return `nbytes` as a size in memory.
pub(super) fn in_memory(nbytes: u64) -> io::Result<usize> {
    to_usize(nbytes).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packed(bits: u32, numbers: &[u64]) -> Vec<u8> {
        let (mut packer, mut out) = (Packer::new(bits), vec![bits.to_le_bytes()[0]]);
        numbers.iter().for_each(|&number| packer.push(number, &mut out));
        packer.finish(&mut out);
        out
    }

    proptest! {
        #[test]
        fn numbers_are_read_as_they_were_packed_from_any_of_them_on(
            bits in 1..=MAX_BITS,
            numbers in proptest::collection::vec(prop_oneof![0..4_u64, 0..3000_u64], 0..200),
        ) {
            let bytes = packed(bits, &numbers);
            let payload = Payload::from(&*bytes);
            let mut counts = Counts::default();
            numbers.iter().for_each(|&number| counts.add(number, 1));
            let (best, nbytes) = counts.best();
            prop_assert_eq!(1 + nbytes, to_u64(packed(best, &numbers).len()));
            for other in 1..=MAX_BITS {
                prop_assert!(to_u64(packed(other, &numbers).len()) > nbytes);
            }
            prop_assert_eq!(width(&payload, StopFlag::never()).unwrap(), Some(bits));
            let mut all = Numbers::new(payload.clone(), bits, 0, StopFlag::never()).unwrap();
            for (at, &number) in numbers.iter().enumerate() {
                let mut rest = Numbers::new(payload.clone(), bits, all.position(), StopFlag::never()).unwrap();
                prop_assert_eq!(rest.next().unwrap(), Some(number), "{}", at);
                prop_assert_eq!(all.next().unwrap(), Some(number));
            }
            prop_assert!(all.is_at_end().unwrap());
        }

        #[test]
        fn a_varint_is_read_as_it_was_written(number in any::<u64>()) {
            let mut bytes = Vec::new();
            push_varint(number, &mut bytes);
            let mut rest = &*bytes;
            prop_assert_eq!(take_varint(&mut rest), Some(number));
            prop_assert!(rest.is_empty());
        }
    }
}
