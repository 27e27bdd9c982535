//! Statistics of values, compared with a naive loop.
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the numbers are small"
)]

use ingot_format::{Dtype, to_u64};
use ingot_inspect::{Number, Statistics, has_values, statistics};
use ingot_io::{ReadOptions, Tensor, Unwatched};
use proptest::prelude::*;

use crate::in_memory::archive;

fn of(dtype: Dtype, bytes: Vec<u8>, bins: usize) -> Statistics {
    let archive = archive(&[("t", dtype, bytes)]);
    let found = statistics(
        &[archive.tensor(0).unwrap()],
        bins,
        &ReadOptions::default(),
        &Unwatched,
    );
    found.unwrap().pop().unwrap().unwrap()
}

fn singles(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The naive way: one value after the other.
fn naive(values: &[f64], bins: usize) -> Statistics {
    let finite: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    let count = finite.len() as f64;
    let low = finite.iter().copied().fold(f64::INFINITY, f64::min);
    let high = finite.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mean = finite.iter().map(|value| value / count).sum::<f64>();
    let squares = finite.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    let mut counted = vec![0; bins];
    for value in &finite {
        let place = ((value - low) * (bins as f64 / (high - low))) as usize;
        if let Some(last) = bins.checked_sub(1) {
            counted[place.min(last)] += 1;
        }
    }
    let of_any = |value: f64| (!finite.is_empty()).then_some(value);
    Statistics {
        count: to_u64(values.len()),
        zeros: to_u64(values.iter().filter(|&&value| value == 0.0).count()),
        nans: to_u64(values.iter().filter(|value| value.is_nan()).count()),
        infinities: to_u64(values.iter().filter(|value| value.is_infinite()).count()),
        malformed: 0,
        range: (!finite.is_empty()).then_some((Number::Float(low), Number::Float(high))),
        mean: of_any(mean),
        deviation: of_any((squares / count).sqrt()),
        bins: counted,
    }
}

fn near(one: Option<f64>, two: Option<f64>, scale: f64) -> bool {
    match (one, two) {
        (Some(one), Some(two)) => (one - two).abs() <= 1e-9 * scale,
        _ => one == two,
    }
}

fn assert_near(found: &Statistics, expected: &Statistics) {
    let scale = expected.range.map_or(1.0, |(low, high)| match (low, high) {
        (Number::Float(low), Number::Float(high)) => low.abs().max(high.abs()),
        _ => 1.0,
    });
    assert!(near(found.mean, expected.mean, scale), "{found:?}\n{expected:?}");
    assert!(
        near(found.deviation, expected.deviation, scale),
        "{found:?}\n{expected:?}"
    );
    let same = Statistics {
        mean: expected.mean,
        deviation: expected.deviation,
        ..found.clone()
    };
    assert_eq!(&same, expected);
}

proptest! {
    #[test]
    fn equal_those_of_the_obvious_loop(bits in prop::collection::vec(any::<u32>(), 0..400)) {
        // The exponents are close to each other, so that rounding changes no part of a histogram.
        let value = |bits: &u32| match bits % 16 {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => -0.0,
            _ => f32::from_bits(bits & 0x807F_FFFF | 0x3F80_0000) * f32::from(u16::try_from(bits % 7).unwrap()),
        };
        let values: Vec<f32> = bits.iter().map(value).collect();
        let doubles: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
        let found = of(Dtype::F32, singles(&values), 8);
        assert_near(&found, &naive(&doubles, 8));
    }
}

#[test]
fn join_what_many_threads_read_of_many_tensors() {
    let large: Vec<f32> = (0..9_000_000_u32).map(|at| (at % 1000) as f32 - 250.0).collect();
    let doubles: Vec<f64> = large.iter().map(|&value| f64::from(value)).collect();
    let tensors = [
        ("large", Dtype::F32, singles(&large)),
        ("small", Dtype::F32, singles(&[3.0, 5.0])),
        ("none", Dtype::F32, Vec::new()),
    ];
    let archive = archive(&tensors);
    let three: Vec<Tensor<'_>> = (0..3).map(|number| archive.tensor(number).unwrap()).collect();
    let names: Vec<_> = three.iter().map(|tensor| tensor.entry().name).collect();
    let found = statistics(&three, 4, &ReadOptions::default(), &Unwatched).unwrap();
    let of = |name: &str| {
        found[names.iter().position(|&one| one == name).unwrap()]
            .clone()
            .unwrap()
    };
    assert_near(&of("large"), &naive(&doubles, 4));
    assert_near(&of("small"), &naive(&[3.0, 5.0], 4));
    assert_near(&of("none"), &naive(&[], 4));
    let again = statistics(&three, 4, &ReadOptions::default(), &Unwatched).unwrap();
    assert_eq!(found, again);
}

#[test]
fn tensors_of_several_files_keep_their_order() {
    let one = archive(&[("t", Dtype::F32, singles(&[1.0]))]);
    let two = archive(&[("t", Dtype::F32, singles(&[2.0]))]);
    let tensors = [&one, &two, &one].map(|archive| archive.tensor(0).unwrap());
    let found = statistics(&tensors, 0, &ReadOptions::default(), &Unwatched).unwrap();
    let means: Vec<_> = found
        .into_iter()
        .map(|found| found.and_then(|found| found.mean))
        .collect();
    assert_eq!(means, [Some(1.0), Some(2.0), Some(1.0)]);
}

#[test]
fn a_small_spread_around_a_large_mean_is_right() {
    let values: Vec<u8> = (0..40_000_u32)
        .flat_map(|at| (1e9 + f64::from(at % 2)).to_le_bytes())
        .collect();
    let found = of(Dtype::F64, values, 0);
    assert!(near(found.mean, Some(1e9 + 0.5), 1.0), "{found:?}");
    assert!(near(found.deviation, Some(0.5), 1.0), "{found:?}");
}

#[test]
fn numbers_at_the_edge_of_their_range_have_a_mean() {
    let values = [f64::MAX, f64::MAX, -f64::MAX, f64::MAX];
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let found = of(Dtype::F64, bytes, 2);
    assert_eq!(found.mean, Some(f64::MAX / 2.0));
    assert_eq!(found.bins, [1, 3]);
}

#[test]
fn integers_are_exact() {
    let values = [i64::MIN, 0, i64::MAX];
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let found = of(Dtype::I64, bytes, 2);
    let (low, high) = (i64::MIN.into(), i64::MAX.into());
    assert_eq!(found.range, Some((Number::Integer(low), Number::Integer(high))));
    assert_eq!(
        (found.zeros, found.count, found.bins.iter().sum::<u64>()),
        (1, 3, 3)
    );
}

#[test]
fn booleans_that_are_neither_are_counted() {
    let found = of(Dtype::BOOL, vec![0, 1, 2, 255, 1], 0);
    assert_eq!((found.malformed, found.zeros), (2, 1));
}

#[test]
fn every_dtype_but_those_of_six_bits_has_them() {
    for &dtype in Dtype::ALL {
        let archive = archive(&[("t", dtype, vec![0; 24])]);
        let tensor = archive.tensor(0).unwrap();
        let found = statistics(&[tensor], 3, &ReadOptions::default(), &Unwatched).unwrap();
        assert_eq!(found[0].is_some(), has_values(dtype), "{dtype}");
        let Some(found) = &found[0] else { continue };
        let complex = if dtype == Dtype::C64 { 2 } else { 1 };
        assert_eq!(found.count, 24 * 8 / dtype.bits() * complex, "{dtype}");
        assert_eq!(found.bins.iter().sum::<u64>(), found.count, "{dtype}");
    }
}

#[test]
fn two_values_in_a_byte_are_two() {
    // 0.5 and 6, -6 and 0.
    let found = of(Dtype::F4, vec![0x71, 0x0F], 0);
    assert_eq!(found.range, Some((Number::Float(-6.0), Number::Float(6.0))));
    assert_eq!((found.count, found.zeros, found.mean), (4, 1, Some(0.125)));
}

#[test]
fn are_those_of_each_tensor_of_many_files_in_any_order_and_more_than_once() {
    let values = |file: u16| -> Vec<f32> {
        (0..3_000_000_u32)
            .map(|at| (at % 700) as f32 + f32::from(file))
            .collect()
    };
    let files = [0, 1, 2].map(|file| {
        let tensors = [
            ("large", Dtype::F32, singles(&values(file))),
            ("packed", Dtype::F6_E2M3, vec![0; 3]),
            ("small", Dtype::F32, singles(&[f32::from(file), 5.0])),
        ];
        archive(&tensors)
    });
    let order = [
        (2, "small"),
        (0, "large"),
        (1, "packed"),
        (2, "large"),
        (0, "large"),
        (1, "small"),
    ];
    let tensors: Vec<Tensor<'_>> = order
        .iter()
        .map(|&(file, name)| files[file].find(name).unwrap())
        .collect();
    let found = statistics(&tensors, 4, &ReadOptions::default(), &Unwatched).unwrap();
    for ((file, name), found) in order.into_iter().zip(found) {
        let file = u16::try_from(file).unwrap();
        let values = match name {
            "large" => values(file),
            "small" => vec![f32::from(file), 5.0],
            _ => {
                assert_eq!(found, None);
                continue;
            }
        };
        let doubles: Vec<f64> = values.into_iter().map(f64::from).collect();
        assert_near(&found.unwrap(), &naive(&doubles, 4));
    }
}
