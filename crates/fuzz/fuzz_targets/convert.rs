//! Conversions round to the nearest float of the other dtype, tested over 32-bit patterns. Converting many elements at
//! once gives the same results as converting each alone.
#![no_main]

use ingot_format::Dtype;
use ingot_io::fuzzing::value;
use ingot_io::binding::{convert, converts};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let &[from, to, ref source @ ..] = input else {
        return;
    };
    let dtype = |number: u8| Dtype::ALL[usize::from(number) % Dtype::ALL.len()];
    let (from, to) = (dtype(from), dtype(to));
    if from == to || !converts(from, to) {
        return;
    }
    let elements = source.chunks_exact(size(from));
    let mut together = vec![0; elements.len() * size(to)];
    convert(from, to, source, &mut together);
    for (element, found) in elements.zip(together.chunks(size(to))) {
        assert_eq!(alone(from, to, element), found, "{from} {element:?} to {to}");
        is_right(from, to, element, found);
    }
});

fn size(dtype: Dtype) -> usize {
    dtype.bits() as usize / 8
}

fn alone(from: Dtype, to: Dtype, element: &[u8]) -> Vec<u8> {
    let mut found = vec![0; size(to)];
    convert(from, to, element, &mut found);
    found
}

fn is_right(from: Dtype, to: Dtype, element: &[u8], found: &[u8]) {
    let single = match from {
        Dtype::F32 => element.to_vec(),
        _ => alone(from, Dtype::F32, element),
    };
    let number = f32::from_le_bytes(bytes(&single));
    let is_nan = match from {
        Dtype::F64 => {
            let double = f64::from_le_bytes(bytes(element));
            assert!(double.is_nan() || (double as f32).to_bits() == number.to_bits());
            double.is_nan()
        }
        Dtype::F8_E8M0 => element == [0xFF],
        _ => match value(from, pattern(element)) {
            Some(meant) => {
                assert_eq!(f64::from(number).to_bits(), meant.to_bits(), "{from} {element:?}");
                false
            }
            None => true,
        },
    };
    assert_eq!(is_nan, number.is_nan(), "{from} {element:?}");
    match to {
        Dtype::F32 => {}
        Dtype::F64 => {
            let double = f64::from_le_bytes(bytes(found));
            assert!(is_nan && double.is_nan() || double.to_bits() == f64::from(number).to_bits());
        }
        _ if is_nan => assert_eq!(value(to, pattern(found)), None, "{from} {element:?} to {to}"),
        _ => is_nearest(to, number, pattern(found)),
    }
}

fn bytes<const N: usize>(element: &[u8]) -> [u8; N] {
    std::array::from_fn(|at| element[at])
}

fn pattern(element: &[u8]) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|at| element.get(at).copied().unwrap_or(0)))
}

/// No other pattern of the dtype is nearer to the number, and of two equally near ones it is the even one.
fn is_nearest(dtype: Dtype, number: f32, pattern: u32) {
    let sign = 1 << (dtype.bits() - 1);
    let is_unsigned = matches!(dtype, Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ);
    let of = |magnitude: u32| value(dtype, magnitude).filter(|value| value.is_finite());
    let what = format!("{number:e} to {dtype} {pattern:#x}");
    let wanted = f64::from(number.abs());
    // The largest number, or the result of overflow.
    let largest = (0..sign)
        .rev()
        .find(|&magnitude| of(magnitude).is_some())
        .unwrap_or(0);
    let step = of(largest)
        .zip(of(largest - 1))
        .map_or(0.0, |(last, before)| last - before);
    let end = of(largest).unwrap_or(0.0) + step / 2.0;
    let magnitude = pattern & (sign - 1);
    if pattern == sign && is_unsigned {
        // These dtypes have no negative zero: that pattern is NaN.
        assert!(wanted > end || wanted == end && largest % 2 == 1, "{what}");
        return;
    }
    let is_signed = !(is_unsigned && magnitude == 0);
    assert_eq!(
        pattern & sign != 0,
        number.is_sign_negative() && is_signed,
        "{what}"
    );
    let Some(found) = of(magnitude) else {
        assert!(value(dtype, magnitude) == Some(f64::INFINITY), "{what}");
        assert!(wanted > end || wanted == end && largest % 2 == 1, "{what}");
        return;
    };
    let (distance, is_even) = ((wanted - found).abs(), magnitude.is_multiple_of(2));
    let is_nearer = |other: f64| {
        let other = (wanted - other).abs();
        distance < other || distance == other && is_even
    };
    assert!(
        magnitude == 0 || of(magnitude - 1).is_none_or(is_nearer),
        "{what}"
    );
    // PyTorch's dtypes without infinities saturate at the largest number.
    let saturates = dtype == Dtype::F8_E4M3 && magnitude == largest;
    assert!(
        saturates || is_nearer(of(magnitude + 1).unwrap_or(found + step)),
        "{what}"
    );
}
