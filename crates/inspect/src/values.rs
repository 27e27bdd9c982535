//! The elements of every dtype as Rust numbers.

use ingot_format::{Dtype, to_usize};
use ingot_io::binding::{convert, converts, is_float};

/// A value with the exactness of its dtype.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A value of an integer dtype, or of `BOOL`.
    Integer(i128),
    /// A value of any other dtype.
    Float(f64),
}

impl Number {
    /// Returns the nearest float.
    pub(crate) fn as_float(self) -> f64 {
        match self {
            Number::Integer(value) => rounded(value),
            Number::Float(value) => value,
        }
    }

    pub(crate) fn below(self, other: Number) -> bool {
        match (self, other) {
            (Number::Integer(one), Number::Integer(two)) => one < two,
            _ => self.as_float() < other.as_float(),
        }
    }
}

/// Return whether the values of the dtype are known. The packing of dtypes of 6 bits is not settled.
#[must_use]
pub fn has_values(dtype: Dtype) -> bool {
    !matches!(dtype, Dtype::F6_E2M3 | Dtype::F6_E3M2)
}

/// Return whether the values are integers, as are the values of `BOOL`.
pub(crate) fn is_integer(dtype: Dtype) -> bool {
    !is_float(dtype) && dtype != Dtype::C64
}

/// Return the values of elements: two for each byte of `F4` and each element of `C64`. Integers of 64 bits are rounded.
pub(crate) fn as_floats(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::BOOL | Dtype::U8 => each(bytes, |byte| f64::from(u8::from_le_bytes(byte))),
        Dtype::I8 => each(bytes, |byte| f64::from(i8::from_le_bytes(byte))),
        Dtype::U16 => each(bytes, |element| f64::from(u16::from_le_bytes(element))),
        Dtype::I16 => each(bytes, |element| f64::from(i16::from_le_bytes(element))),
        Dtype::U32 => each(bytes, |element| f64::from(u32::from_le_bytes(element))),
        Dtype::I32 => each(bytes, |element| f64::from(i32::from_le_bytes(element))),
        Dtype::U64 => each(bytes, |element| rounded(u64::from_le_bytes(element).into())),
        Dtype::I64 => each(bytes, |element| rounded(i64::from_le_bytes(element).into())),
        Dtype::F64 => each(bytes, f64::from_le_bytes),
        Dtype::F32 | Dtype::C64 => each(bytes, single),
        Dtype::BF16 => each(bytes, |element| {
            f64::from(f32::from_bits(u32::from(u16::from_le_bytes(element)) << 16))
        }),
        _ => each(&singles(dtype, bytes), single),
    }
}

/// Return the exact values of integers, and an empty list for other dtypes.
pub(crate) fn as_integers(dtype: Dtype, bytes: &[u8]) -> Vec<i128> {
    match dtype {
        Dtype::BOOL | Dtype::U8 => each(bytes, |byte| u8::from_le_bytes(byte).into()),
        Dtype::I8 => each(bytes, |byte| i8::from_le_bytes(byte).into()),
        Dtype::U16 => each(bytes, |element| u16::from_le_bytes(element).into()),
        Dtype::I16 => each(bytes, |element| i16::from_le_bytes(element).into()),
        Dtype::U32 => each(bytes, |element| u32::from_le_bytes(element).into()),
        Dtype::I32 => each(bytes, |element| i32::from_le_bytes(element).into()),
        Dtype::U64 => each(bytes, |element| u64::from_le_bytes(element).into()),
        Dtype::I64 => each(bytes, |element| i64::from_le_bytes(element).into()),
        _ => Vec::new(),
    }
}

fn each<const N: usize, T>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (elements, _) = bytes.as_chunks::<N>();
    elements.iter().map(|&element| decode(element)).collect()
}

/// Returns the nearest float. Most integers have 64 bits, which processors convert directly.
#[allow(clippy::cast_precision_loss, reason = "says that it rounds")]
pub(crate) fn rounded(value: i128) -> f64 {
    i64::try_from(value).map_or_else(|_| value as f64, |value| value as f64)
}

#[inline]
pub(crate) fn single(element: [u8; 4]) -> f64 {
    f64::from(f32::from_le_bytes(element))
}

/// Returns the values of a float dtype of at most 16 bits, as bytes of `F32`.
pub(crate) fn singles(dtype: Dtype, bytes: &[u8]) -> Vec<u8> {
    if dtype == Dtype::F4 {
        return bytes.iter().flat_map(|&byte| nibbles(byte)).collect();
    }
    debug_assert!(converts(dtype, Dtype::F32), "{dtype} is a float");
    let width = to_usize(dtype.bits()).map_or(1, |bits| bits.div_ceil(8));
    let mut singles = vec![0; bytes.len() / width * 4];
    convert(dtype, Dtype::F32, bytes, &mut singles);
    singles
}

/// The two values of E2M1 in a byte, the first in the low half.
fn nibbles(byte: u8) -> [u8; 8] {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let value = |nibble: u8| {
        let magnitude = MAGNITUDES[usize::from(nibble & 7)];
        if nibble & 8 == 0 { magnitude } else { -magnitude }
    };
    let [a, b, c, d] = value(byte & 0xF).to_le_bytes();
    let [e, f, g, h] = value(byte >> 4).to_le_bytes();
    [a, b, c, d, e, f, g, h]
}
