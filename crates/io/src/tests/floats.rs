//! The values of floats, computed the slow way: for tests, and for the fuzz target `convert`.
#![allow(clippy::unwrap_used, reason = "tests")]

use ingot_format::Dtype;

/// Return the value of a pattern, from the layout of the dtype alone; `None` for NaN.
pub(crate) fn value(dtype: Dtype, pattern: u32) -> Option<f64> {
    let (bits, mantissa_bits, bias) = match dtype {
        Dtype::F32 => (32, 23, 127),
        Dtype::F16 => (16, 10, 15),
        Dtype::BF16 => (16, 7, 127),
        Dtype::F8_E4M3 => (8, 3, 7),
        Dtype::F8_E5M2 => (8, 2, 15),
        Dtype::F8_E4M3FNUZ => (8, 3, 8),
        Dtype::F8_E5M2FNUZ => (8, 2, 16),
        _ => unreachable!(),
    };
    let sign = if pattern >> (bits - 1) == 1 { -1.0 } else { 1.0 };
    let magnitude = pattern & ((1 << (bits - 1)) - 1);
    let exponent = i32::try_from(magnitude >> mantissa_bits).unwrap();
    let mantissa = f64::from(magnitude & ((1 << mantissa_bits) - 1)) / f64::from(1_u32 << mantissa_bits);
    let highest = (1 << (bits - 1 - mantissa_bits)) - 1;
    match dtype {
        Dtype::F8_E4M3 if magnitude == 0x7F => return None,
        Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ if pattern == 0x80 => return None,
        Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E5M2 if exponent == highest => {
            return (mantissa == 0.0).then_some(sign * f64::INFINITY);
        }
        _ => {}
    }
    let (lead, exponent) = if exponent == 0 { (0.0, 1) } else { (1.0, exponent) };
    Some(sign * (lead + mantissa) * 2_f64.powi(exponent - bias))
}

/// Return the pattern with the nearest value, or the even one of two, by trying all.
#[cfg(test)]
pub(crate) fn nearest(dtype: Dtype, wanted: f64) -> u32 {
    let sign_bit = if dtype.bits() == 16 { 0x8000 } else { 0x80 };
    let of = |magnitude: u32| value(dtype, magnitude).filter(|value| value.is_finite());
    // Magnitudes ascend, and those that are numbers come first.
    let numbers: Vec<f64> = (0..sign_bit).map_while(of).collect();
    let after = numbers.partition_point(|&number| number <= wanted.abs());
    let largest = numbers.len() - 1;
    // The step after the largest number is as long as the one before it.
    let upper = |at: usize| {
        numbers
            .get(at)
            .copied()
            .unwrap_or(2.0 * numbers[largest] - numbers[largest - 1])
    };
    let below = after - 1;
    let (down, up) = (wanted.abs() - numbers[below], upper(below + 1) - wanted.abs());
    let magnitude = match down.total_cmp(&up) {
        std::cmp::Ordering::Less => below,
        std::cmp::Ordering::Equal if below % 2 == 0 => below,
        _ => below + 1,
    };
    let magnitude = u32::try_from(magnitude).unwrap();
    match dtype {
        Dtype::F8_E4M3 if magnitude == 0x7F => 0x7E | u32::from(wanted.is_sign_negative()) << 7,
        Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ if magnitude > 0x7F => 0x80,
        Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ if magnitude == 0 => 0,
        _ if wanted.is_sign_negative() => sign_bit | magnitude,
        _ => magnitude,
    }
}
