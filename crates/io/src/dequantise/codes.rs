//! Packed integers of a few bits.

use std::ops::Range;

use ingot_format::saturating_usize;

/// A row of integers of 1 to 8 bits in words of 32 bits, which are little-endian, so that the bits of the row are
/// the bits of its bytes, from the lowest on: an integer may begin in one word and end in the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packing {
    pub(super) bits: u64,
}

impl Packing {
    /// Return the number of words that `count` integers take.
    pub(super) fn words(self, count: u64) -> u64 {
        (count * self.bits).div_ceil(32)
    }

    /// Return the words that have these integers, in whole groups of 32 integers if there are as many.
    pub(super) fn span(self, integers: &Range<u64>, count: u64) -> Range<u64> {
        let first = integers.start / 32 * self.bits;
        let end = integers.end.div_ceil(32) * self.bits;
        first..end.min(self.words(count))
    }

    /// Unpack integers from `bytes`, from integer number `first` on.
    pub(super) fn unpack(self, bytes: &[u8], first: usize, codes: &mut [u8]) {
        match self.bits {
            8 => codes.copy_from_slice(&bytes[first..first + codes.len()]),
            4 => unpack_halves(bytes, first, codes),
            _ => self.unpack_bits(bytes, first, codes),
        }
    }

    fn unpack_bits(self, bytes: &[u8], first: usize, codes: &mut [u8]) {
        let bits = saturating_usize(self.bits);
        let mask = u16::MAX >> (16 - bits);
        for (number, code) in codes.iter_mut().enumerate() {
            let bit = (first + number) * bits;
            let low = bytes.get(bit / 8).copied().unwrap_or(0);
            let high = bytes.get(bit / 8 + 1).copied().unwrap_or(0);
            let [found, _] = ((u16::from_le_bytes([low, high]) >> (bit % 8)) & mask).to_le_bytes();
            *code = found;
        }
    }

    /// Return the integers from number `first` on of a row of words.
    pub(super) fn codes(self, bytes: &[u8], first: u64, count: usize) -> Vec<u8> {
        let mut codes = vec![0; count];
        self.unpack(bytes, saturating_usize(first), &mut codes);
        codes
    }

    /// Return the number of the first integer in the first word of [`Packing::span`].
    pub(super) fn first(integers: &Range<u64>) -> u64 {
        integers.start / 32 * 32
    }
}

/// Unpack two integers of each byte, the lower half first.
fn unpack_halves(bytes: &[u8], first: usize, codes: &mut [u8]) {
    let bytes = &bytes[first / 2..];
    let (odd, codes) = codes.split_at_mut((first % 2) & usize::from(!codes.is_empty()));
    let (before, bytes) = bytes.split_at(odd.len());
    for (byte, code) in before.iter().zip(odd) {
        *code = byte >> 4;
    }
    let (pairs, last) = codes.as_chunks_mut::<2>();
    let count = pairs.len();
    for (byte, pair) in bytes.iter().zip(pairs) {
        *pair = [byte & 15, byte >> 4];
    }
    if let ([code], Some(byte)) = (last, bytes.get(count)) {
        *code = byte & 15;
    }
}

/// The numbers of the two halves of each byte, in the order in which they are stored.
#[derive(Clone)]
pub(super) struct Pairs([[f32; 2]; 256]);

impl std::fmt::Debug for Pairs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pairs")
    }
}

impl Pairs {
    /// Return the pairs of a table of 16 numbers. The lower half comes first if `is_low_first`.
    pub(super) fn new(table: &[f32; 16], is_low_first: bool) -> Pairs {
        Pairs(std::array::from_fn(|byte| {
            let (low, high) = (table[byte & 15], table[byte >> 4]);
            if is_low_first { [low, high] } else { [high, low] }
        }))
    }

    /// Look up the codes in `bytes`, from code number `first` on.
    pub(super) fn look_up(&self, bytes: &[u8], first: usize, values: &mut [f32]) {
        let bytes = &bytes[first / 2..];
        let (odd, values) = values.split_at_mut((first % 2) & usize::from(!values.is_empty()));
        let (before, bytes) = bytes.split_at(odd.len());
        for (byte, value) in before.iter().zip(odd) {
            *value = self.0[usize::from(*byte)][1];
        }
        let (pairs, last) = values.as_chunks_mut::<2>();
        let count = pairs.len();
        for (byte, pair) in bytes.iter().zip(pairs) {
            *pair = self.0[usize::from(*byte)];
        }
        if let ([value], Some(byte)) = (last, bytes.get(count)) {
            *value = self.0[usize::from(*byte)][0];
        }
    }
}

/// The numbers of F4 (E2M1).
pub(super) const F4: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// Return the groups of `size` that a range touches, each with its part of the range, counted from the start of the range.
pub(super) fn groups(range: &Range<u64>, size: u64) -> impl Iterator<Item = (u64, Range<usize>)> + use<> {
    let (start, end) = (range.start, range.end);
    let count = if start < end {
        end.div_ceil(size)
    } else {
        start / size
    };
    (start / size..count).map(move |group| {
        let first = (group * size).max(start) - start;
        let last = ((group + 1) * size).min(end) - start;
        (group, saturating_usize(first)..saturating_usize(last))
    })
}

/// Return the matrix of `height` rows with rows and columns exchanged.
pub(super) fn transposed<T: Copy + Default>(matrix: &[T], height: usize) -> Vec<T> {
    let width = matrix.len() / height.max(1);
    let mut turned = vec![T::default(); matrix.len()];
    // Blocks of 16, so that the lines of both sides stay in the first cache.
    for from in (0..height).step_by(16) {
        let rows = from..(from + 16).min(height);
        for column in 0..width {
            for row in rows.clone() {
                turned[column * height + row] = matrix[row * width + column];
            }
        }
    }
    turned
}

/// Return the length of a range.
pub(super) fn length(range: &Range<u64>) -> usize {
    saturating_usize(range.end - range.start)
}

/// Return the place of element `number` of a row that begins with element `first`.
pub(super) fn place(number: u64, first: u64) -> usize {
    saturating_usize(number - first)
}

/// Return the bytes of words.
pub(super) fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
