//! Conversion between floats of different widths.
//!
//! The values equal the results of PyTorch's `.to` for tensors on x86-64, down to the bits of a NaN, so that a file that is
//! converted while it is loaded equals one that is converted afterwards. Every conversion goes through F32, as PyTorch's do, so
//! that from 64 bits to 16 it rounds twice.
//!
//! The loops have no branches and no state, so that the compiler makes vector code of them for any machine.

use ingot_format::Dtype;

/// Return whether [`convert`] supports a pair of dtypes.
#[must_use]
pub fn converts(from: Dtype, to: Dtype) -> bool {
    let is_source = |dtype| is_float(dtype) && !matches!(dtype, Dtype::F4 | Dtype::F6_E2M3 | Dtype::F6_E3M2);
    from == to || is_source(from) && is_source(to) && to != Dtype::F8_E8M0
}

/// Return whether the dtype is a real floating-point dtype.
#[must_use]
pub fn is_float(dtype: Dtype) -> bool {
    matches!(
        dtype,
        Dtype::F64
            | Dtype::F32
            | Dtype::F16
            | Dtype::BF16
            | Dtype::F8_E4M3
            | Dtype::F8_E5M2
            | Dtype::F8_E4M3FNUZ
            | Dtype::F8_E5M2FNUZ
            | Dtype::F8_E8M0
            | Dtype::F6_E2M3
            | Dtype::F6_E3M2
            | Dtype::F4
    )
}

/// Convert the elements of `source`, of dtype `from`, to dtype `to` in `dest`: as many as both slices can hold. For a pair
/// that [`converts`] does not support, `dest` is unchanged.
pub fn convert(from: Dtype, to: Dtype, source: &[u8], dest: &mut [u8]) {
    match from {
        _ if from == to => {
            let count = source.len().min(dest.len());
            dest[..count].copy_from_slice(&source[..count]);
        }
        Dtype::F64 => encode(to, source, dest, bits_of_f64, ALL_ONES),
        Dtype::F32 => encode(to, source, dest, u32::from_le_bytes, ALL_ONES),
        Dtype::F16 => encode(to, source, dest, bits_of_f16, QUIET),
        Dtype::BF16 => encode(to, source, dest, bits_of_bf16, QUIET),
        _ => {
            if let Some(small) = Small::of(from) {
                let bits = small.table();
                encode(to, source, dest, |[byte]| bits[usize::from(byte)], QUIET);
            }
        }
    }
}

/// The NaNs of BF16. For NaNs of 32 bits and more PyTorch's vector code writes the first one, and for narrower NaNs its
/// scalar code writes the second one.
const ALL_ONES: u32 = 0xFFFF;
const QUIET: u32 = 0x7FC0;

/// Converts elements to `to`. `decode` converts an element to F32.
fn encode<const N: usize>(
    to: Dtype,
    source: &[u8],
    dest: &mut [u8],
    decode: impl Fn([u8; N]) -> u32,
    bf16_nan: u32,
) {
    match to {
        Dtype::F64 => each(source, dest, |element| {
            f64::from(f32::from_bits(decode(element))).to_le_bytes()
        }),
        Dtype::F32 => each(source, dest, |element| decode(element).to_le_bytes()),
        Dtype::F16 => each(source, dest, |element| low_half(f16_of(decode(element)))),
        Dtype::BF16 => each(source, dest, |element| {
            low_half(bf16_of(decode(element), bf16_nan))
        }),
        // One branch for each dtype, so that its constants are known at compile time.
        Dtype::F8_E4M3 => each(source, dest, |element| [Small::E4M3.nearest(decode(element))]),
        Dtype::F8_E5M2 => each(source, dest, |element| [Small::E5M2.nearest(decode(element))]),
        Dtype::F8_E4M3FNUZ => each(source, dest, |element| [Small::E4M3FNUZ.nearest(decode(element))]),
        Dtype::F8_E5M2FNUZ => each(source, dest, |element| [Small::E5M2FNUZ.nearest(decode(element))]),
        _ => {}
    }
}

/// Converts element by element.
#[inline]
fn each<const A: usize, const B: usize>(
    source: &[u8],
    dest: &mut [u8],
    convert: impl Fn([u8; A]) -> [u8; B],
) {
    let (from, _) = source.as_chunks::<A>();
    let (to, _) = dest.as_chunks_mut::<B>();
    for (from, to) in from.iter().zip(to) {
        *to = convert(*from);
    }
}

#[inline]
fn low_half(bits: u32) -> [u8; 2] {
    let [first, second, _, _] = bits.to_le_bytes();
    [first, second]
}

const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7F80_0000;
/// The bit of the mantissa that makes a NaN quiet.
const QUIET_BIT: u32 = 0x0040_0000;

#[inline]
#[allow(
    clippy::cast_possible_truncation,
    reason = "rounds to the nearest, ties to even"
)]
fn bits_of_f64(element: [u8; 8]) -> u32 {
    (f64::from_le_bytes(element) as f32).to_bits()
}

#[inline]
fn bits_of_bf16(element: [u8; 2]) -> u32 {
    u32::from(u16::from_le_bytes(element)) << 16
}

#[inline]
fn bits_of_f16(element: [u8; 2]) -> u32 {
    let half = u32::from(u16::from_le_bytes(element));
    let magnitude = (half & 0x7FFF) << 13;
    // The exponent's bias is 15 in F16 and 127 in F32.
    let normal = magnitude + (112 << 23);
    // The mantissa of a subnormal F16 counts units of 2^-24. Subtracting the float with that exponent converts it exactly.
    let unit = f32::from_bits(113 << 23);
    let subnormal = (f32::from_bits(magnitude + (113 << 23)) - unit).to_bits();
    let special = if magnitude > 0x1F << 23 {
        magnitude | INFINITY | QUIET_BIT
    } else {
        INFINITY
    };
    let value = match magnitude {
        _ if magnitude >= 0x1F << 23 => special,
        _ if magnitude < 1 << 23 => subnormal,
        _ => normal,
    };
    value | (half & 0x8000) << 16
}

/// The nearest F16, in the low half.
#[inline]
fn f16_of(bits: u32) -> u32 {
    let magnitude = bits & !SIGN;
    let odd = (magnitude >> 13) & 1;
    // Round to the remaining bits. A carry correctly increases the exponent, up to infinity.
    let normal = magnitude.wrapping_add(0xC800_0FFF + odd) >> 13;
    // After adding 0.5, the mantissa counts units of 2^-24, rounded by the processor.
    let half = f32::from_bits(126 << 23);
    let subnormal = (f32::from_bits(magnitude) + half)
        .to_bits()
        .wrapping_sub(126 << 23);
    let special = if magnitude > INFINITY {
        0x7E00 | (magnitude >> 13) & 0x3FF
    } else {
        0x7C00
    };
    let value = match magnitude {
        // 2^16 and above.
        _ if magnitude >= 143 << 23 => special,
        _ if magnitude < 113 << 23 => subnormal,
        _ => normal,
    };
    value | (bits & SIGN) >> 16
}

/// The nearest BF16, in the low half; `nan` for every NaN.
#[inline]
fn bf16_of(bits: u32, nan: u32) -> u32 {
    let odd = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7FFF + odd) >> 16;
    if bits & !SIGN > INFINITY { nan } else { rounded }
}

/// A float of 8 bits.
#[derive(Clone, Copy)]
struct Small {
    mantissa_bits: u32,
    /// The difference between the exponent biases of F32 and of this dtype.
    bias: u32,
    /// The largest finite magnitude.
    largest: u32,
    /// The result for larger magnitudes: infinity, a NaN, or the largest magnitude itself if PyTorch (2.13) saturates.
    overflow: u32,
    nan: Nan,
}

#[derive(Clone, Copy, PartialEq)]
enum Nan {
    /// NaN has all bits of the magnitude set, and the sign of the converted value. If the dtype has an infinity, all magnitudes
    /// above it are NaN too.
    Signed,
    /// The only NaN is the byte 0x80, which would be a negative zero.
    NegativeZero,
    /// The only NaN is the byte 0xFF.
    AllOnes,
}

impl Small {
    const E4M3: Small = Small::new(3, 7, 0x7E, 0x7E, Nan::Signed);
    const E5M2: Small = Small::new(2, 15, 0x7B, 0x7C, Nan::Signed);
    const E4M3FNUZ: Small = Small::new(3, 8, 0x7F, 0x80, Nan::NegativeZero);
    const E5M2FNUZ: Small = Small::new(2, 16, 0x7F, 0x80, Nan::NegativeZero);
    const E8M0: Small = Small::new(0, 127, 0xFE, 0xFF, Nan::AllOnes);

    const fn new(mantissa_bits: u32, bias: u32, largest: u32, overflow: u32, nan: Nan) -> Small {
        Small {
            mantissa_bits,
            bias,
            largest,
            overflow,
            nan,
        }
    }

    const fn of(dtype: Dtype) -> Option<Small> {
        match dtype {
            Dtype::F8_E4M3 => Some(Small::E4M3),
            Dtype::F8_E5M2 => Some(Small::E5M2),
            Dtype::F8_E4M3FNUZ => Some(Small::E4M3FNUZ),
            Dtype::F8_E5M2FNUZ => Some(Small::E5M2FNUZ),
            Dtype::F8_E8M0 => Some(Small::E8M0),
            _ => None,
        }
    }

    /// The F32 bits of each of the 256 values.
    fn table(self) -> [u32; 256] {
        std::array::from_fn(|byte| self.bits(u8::try_from(byte).unwrap_or(u8::MAX)))
    }

    fn bits(self, byte: u8) -> u32 {
        let (sign, magnitude) = match self.nan {
            Nan::AllOnes => (0, u32::from(byte)),
            _ => (u32::from(byte & 0x80) << 24, u32::from(byte & 0x7F)),
        };
        match self.nan {
            Nan::NegativeZero if byte == 0x80 => return INFINITY | 1,
            Nan::AllOnes if byte == 0xFF => return INFINITY | 1,
            Nan::AllOnes if byte == 0 => return 1 << 22,
            Nan::Signed if magnitude > self.largest => {
                let mantissa = magnitude & ((1 << self.mantissa_bits) - 1);
                let quiet = if mantissa == 0 { 0 } else { QUIET_BIT };
                return sign | INFINITY | quiet | mantissa << (23 - self.mantissa_bits);
            }
            _ => {}
        }
        let exponent = magnitude >> self.mantissa_bits;
        if exponent == 0 && self.mantissa_bits > 0 {
            // A subnormal is a multiple of the smallest number, which is normal in F32.
            let unit = f32::from_bits((128 - self.bias - self.mantissa_bits) << 23);
            let count = u16::try_from(magnitude).unwrap_or(0);
            return sign | (f32::from(count) * unit).to_bits();
        }
        sign | ((magnitude << (23 - self.mantissa_bits)) + ((127 - self.bias) << 23))
    }

    /// The nearest value, as its byte.
    // Always inlined: the calling loop becomes vector code only then, which is ten times as fast (2026-11, 4.7 GB/s of F32).
    #[inline(always)]
    fn nearest(self, bits: u32) -> u8 {
        let magnitude = bits & !SIGN;
        let cut = 23 - self.mantissa_bits;
        let odd = (magnitude >> cut) & 1;
        let rebased = magnitude.wrapping_sub((127 - self.bias) << 23);
        let normal = rebased.wrapping_add((1 << (cut - 1)) - 1 + odd) >> cut;
        // As for F16: after adding a large power of two, the mantissa counts units of the smallest number.
        let large = (151 - self.bias - self.mantissa_bits) << 23;
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(large))
            .to_bits()
            .wrapping_sub(large);
        let is_small = magnitude < (128 - self.bias) << 23;
        let number = if is_small { subnormal } else { normal };
        let number = if number > self.largest {
            self.overflow
        } else {
            number
        };
        let value = if magnitude > INFINITY { self.nan() } else { number };
        // If the byte of the negative zero is the NaN, the result is zero.
        let has_sign = (self.nan == Nan::Signed) | (value != 0);
        let sign = if has_sign { (bits & SIGN) >> 24 } else { 0 };
        let [byte, _, _, _] = (value | sign).to_le_bytes();
        byte
    }

    const fn nan(self) -> u32 {
        match self.nan {
            Nan::Signed => 0x7F,
            Nan::NegativeZero => 0x80,
            Nan::AllOnes => 0xFF,
        }
    }
}

#[cfg(any(test, feature = "fuzzing"))]
#[path = "tests/floats.rs"]
pub(crate) mod naive;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn converted(from: Dtype, to: Dtype, pattern: u32) -> u32 {
        let size = |dtype: Dtype| usize::try_from(dtype.bits() / 8).unwrap();
        let mut dest = [0; 4];
        convert(
            from,
            to,
            &pattern.to_le_bytes()[..size(from)],
            &mut dest[..size(to)],
        );
        u32::from_le_bytes(dest)
    }

    const NARROW: [Dtype; 6] = [
        Dtype::F16,
        Dtype::BF16,
        Dtype::F8_E4M3,
        Dtype::F8_E5M2,
        Dtype::F8_E4M3FNUZ,
        Dtype::F8_E5M2FNUZ,
    ];

    #[test]
    fn every_narrow_pattern_widens_to_its_value_and_comes_back() {
        for dtype in NARROW {
            for pattern in 0..1_u32 << dtype.bits() {
                let wide = converted(dtype, Dtype::F32, pattern);
                match naive::value(dtype, pattern) {
                    Some(value) => {
                        assert_eq!(
                            f64::from(f32::from_bits(wide)).to_bits(),
                            value.to_bits(),
                            "{dtype} {pattern:#x}"
                        );
                        assert_eq!(
                            converted(Dtype::F32, dtype, wide),
                            pattern,
                            "{dtype} {pattern:#x}"
                        );
                    }
                    None => assert!(f32::from_bits(wide).is_nan(), "{dtype} {pattern:#x}"),
                }
            }
        }
    }

    #[test]
    fn nans_become_what_pytorch_makes_of_them() {
        let cases = [
            (Dtype::F32, 0x7F80_0001, Dtype::BF16, 0xFFFF),
            (Dtype::F32, 0xFFC0_0000, Dtype::BF16, 0xFFFF),
            (Dtype::F32, 0x7FC1_2345, Dtype::F16, 0x7E09),
            (Dtype::F32, 0xFF80_0001, Dtype::F16, 0xFE00),
            (Dtype::F16, 0xFC01, Dtype::BF16, 0x7FC0),
            (Dtype::F16, 0x7C01, Dtype::F32, 0x7FC0_2000),
            (Dtype::BF16, 0x7F81, Dtype::F32, 0x7F81_0000),
            (Dtype::BF16, 0xFF81, Dtype::F16, 0xFE08),
            (Dtype::F32, 0xFFC0_0000, Dtype::F8_E4M3, 0xFF),
            (Dtype::F32, 0x7FC0_0000, Dtype::F8_E5M2FNUZ, 0x80),
            (Dtype::F8_E5M2, 0xFD, Dtype::F32, 0xFFE0_0000),
            (Dtype::F8_E4M3, 0x7F, Dtype::F16, 0x7F80),
            (Dtype::F8_E4M3FNUZ, 0x80, Dtype::F32, 0x7F80_0001),
        ];
        for (from, pattern, to, expected) in cases {
            assert_eq!(
                converted(from, to, pattern),
                expected,
                "{from} {pattern:#x} to {to}"
            );
        }
    }

    #[test]
    fn f8_e8m0_counts_powers_of_two() {
        for (pattern, value) in [
            (0, 2_f32.powi(-127)),
            (1, 2_f32.powi(-126)),
            (127, 1.0),
            (254, 2_f32.powi(127)),
        ] {
            assert_eq!(converted(Dtype::F8_E8M0, Dtype::F32, pattern), value.to_bits());
        }
        assert!(f32::from_bits(converted(Dtype::F8_E8M0, Dtype::F32, 255)).is_nan());
    }

    #[test]
    fn what_is_converted_and_what_is_not_is_settled_by_the_dtypes() {
        let floats = Dtype::ALL.iter().copied().filter(|&dtype| is_float(dtype));
        assert_eq!(floats.count(), 12);
        assert!(converts(Dtype::F8_E8M0, Dtype::BF16) && !converts(Dtype::BF16, Dtype::F8_E8M0));
        assert!(converts(Dtype::F4, Dtype::F4) && !converts(Dtype::F4, Dtype::F32));
        assert!(!converts(Dtype::I32, Dtype::F32) && !converts(Dtype::F32, Dtype::C64));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn a_float_becomes_the_nearest_narrow_one(
            bits in prop_oneof![any::<u32>(), (0_u32..1 << 16, -3_i32..4).prop_map(|(high, low)| (high << 16).wrapping_add_signed(low)),
                // Ties: values halfway between two neighbours of F16 or of an 8-bit float.
                (any::<u32>(), 8_u32..23, -2_i32..3).prop_map(|(bits, cut, near)| (bits >> cut << cut).wrapping_add_signed(near))],
            to in prop::sample::select(&NARROW[..]),
        ) {
            let value = f32::from_bits(bits);
            prop_assume!(!value.is_nan());
            if value.is_finite() {
                prop_assert_eq!(converted(Dtype::F32, to, bits), naive::nearest(to, f64::from(value)), "{} {:#x} {}", to, bits, value);
            }
        }

        #[test]
        fn doubles_round_to_32_bits_first(value in any::<f64>(), to in prop::sample::select(&NARROW[..])) {
            let (mut once, mut twice, mut single) = ([0; 2], [0; 2], [0; 4]);
            let size = usize::try_from(to.bits() / 8).unwrap();
            convert(Dtype::F64, to, &value.to_le_bytes(), &mut once[..size]);
            convert(Dtype::F64, Dtype::F32, &value.to_le_bytes(), &mut single);
            convert(Dtype::F32, to, &single, &mut twice[..size]);
            prop_assert_eq!(once, twice);
            let mut back = [0; 8];
            convert(Dtype::F32, Dtype::F64, &single, &mut back);
            prop_assert_eq!(f64::from_le_bytes(back).to_bits(), f64::from(f32::from_le_bytes(single)).to_bits());
        }
    }
}
