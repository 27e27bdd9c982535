//! Distances of tensors, compared with a naive loop.
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the numbers are small"
)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ingot_format::{Dtype, to_u64};
use ingot_inspect::{Distance, Number, distances, has_values};
use ingot_io::{Archive, Error, ReadOptions, Tensor, Unwatched, Watch};
use proptest::prelude::*;

use crate::in_memory::archive;

/// The distance of one tensor from another.
fn between(one: (Dtype, Vec<u8>), two: (Dtype, Vec<u8>)) -> Option<Distance> {
    let [one, two] = [one, two].map(|(dtype, bytes)| archive(&[("t", dtype, bytes)]));
    let pair = [one.tensor(0).unwrap(), two.tensor(0).unwrap()];
    let found = distances(&[pair], &ReadOptions::default(), &Unwatched);
    found.unwrap().pop().unwrap()
}

fn bytes<T: Copy, const N: usize>(values: &[T], encode: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| encode(value)).collect()
}

fn singles(values: &[f32]) -> Vec<u8> {
    bytes(values, f32::to_le_bytes)
}

fn of_singles(one: &[f32], two: &[f32]) -> Option<Distance> {
    between((Dtype::F32, singles(one)), (Dtype::F32, singles(two)))
}

/// The naive way: one pair after the other.
fn naive(one: &[f64], two: &[f64]) -> Option<Distance> {
    let mut different = 0;
    let mut largest = 0.0_f64;
    let [mut squares, mut ours, mut theirs, mut products] = [0.0_f64; 4];
    for (&a, &b) in one.iter().zip(two) {
        let is_equal = a == b || a.is_nan() && b.is_nan();
        if is_equal && !a.is_finite() {
            continue;
        }
        let apart = if is_equal { 0.0 } else { a - b };
        different += u64::from(!is_equal);
        largest = if largest.is_nan() || apart.is_nan() {
            f64::NAN
        } else {
            largest.max(apart.abs())
        };
        squares += apart * apart;
        ours += a * a;
        theirs += b * b;
        products += a * b;
    }
    (different > 0).then(|| Distance {
        different: Some(different),
        max_abs: Some(Number::Float(largest)),
        relative_l2: (ours != 0.0).then(|| (squares / ours).sqrt()),
        cosine: (ours != 0.0 && theirs != 0.0).then(|| products / (ours.sqrt() * theirs.sqrt())),
    })
}

fn is_near(one: Option<f64>, two: Option<f64>) -> bool {
    match (one, two) {
        (Some(one), Some(two)) => {
            one.is_nan() && two.is_nan() || one == two || (one - two).abs() <= 1e-9 * two.abs().max(1e-3)
        }
        _ => one == two,
    }
}

fn assert_near(found: Option<Distance>, expected: Option<Distance>) {
    let (Some(one), Some(two)) = (found, expected) else {
        assert_eq!(found, expected);
        return;
    };
    let float = |number: Option<Number>| match number {
        Some(Number::Float(value)) => Some(value),
        _ => None,
    };
    assert_eq!(one.different, two.different);
    let (ours, theirs) = (float(one.max_abs), float(two.max_abs));
    // Compared exactly: the greatest difference is one of the differences.
    assert!(
        ours == theirs || ours.is_some_and(f64::is_nan) && theirs.is_some_and(f64::is_nan),
        "{one:?}\n{two:?}"
    );
    assert!(is_near(one.relative_l2, two.relative_l2), "{one:?}\n{two:?}");
    assert!(is_near(one.cosine, two.cosine), "{one:?}\n{two:?}");
}

proptest! {
    #[test]
    fn equal_those_of_the_obvious_loop(
        bits in prop::collection::vec((any::<u32>(), any::<u32>()), 0..5000),
        odd in 0_u32..3,
    ) {
        let value = |bits: u32, other: u32| match (odd, bits % 64) {
            // Half of the pairs have equal values.
            (_, 32..) => other,
            (1, 0) => f32::INFINITY.to_bits(),
            (1, 1) => f32::NEG_INFINITY.to_bits(),
            (2, 2) => f32::NAN.to_bits(),
            (_, 3) => (-0.0_f32).to_bits(),
            (_, 4) => 1,
            _ => bits & 0x807F_FFFF | 0x3F80_0000,
        };
        let one: Vec<f32> = bits.iter().map(|&(a, _)| f32::from_bits(value(a % 61, a & 0x807F_FFFF | 0x3F80_0000))).collect();
        let two: Vec<f32> = bits.iter().zip(&one).map(|(&(_, b), one)| f32::from_bits(value(b, one.to_bits()))).collect();
        let wide = |values: &[f32]| values.iter().map(|&value| f64::from(value)).collect::<Vec<_>>();
        assert_near(of_singles(&one, &two), naive(&wide(&one), &wide(&two)));
    }

    #[test]
    fn integers_of_64_bits_are_exact(pairs in prop::collection::vec((any::<i64>(), any::<u64>()), 1..3000)) {
        let (one, two): (Vec<i64>, Vec<u64>) = pairs.iter().copied().unzip();
        let found = between((Dtype::I64, bytes(&one, i64::to_le_bytes)), (Dtype::U64, bytes(&two, u64::to_le_bytes)));
        let apart = |(one, two): &(i64, u64)| i128::from(*one) - i128::from(*two);
        let largest = pairs.iter().map(apart).map(i128::abs).max().unwrap();
        let different = to_u64(pairs.iter().map(apart).filter(|&apart| apart != 0).count());
        let found = found.unwrap();
        prop_assert_eq!(found.max_abs, Some(Number::Integer(largest)));
        prop_assert_eq!(found.different, Some(different));
    }
}

#[test]
fn equal_bytes_and_equal_values_are_no_distance() {
    let values: Vec<f32> = (0..100_000_u32).map(|at| at as f32).collect();
    assert_eq!(of_singles(&values, &values), None);
    assert_eq!(of_singles(&[0.0, f32::NAN], &[-0.0, -f32::NAN]), None);
    let halves = bytes(&[1.0_f64, -2.5], f64::to_le_bytes);
    assert_eq!(
        between((Dtype::F64, halves), (Dtype::F32, singles(&[1.0, -2.5]))),
        None
    );
    assert_eq!(of_singles(&[], &[]), None);
}

#[test]
fn neighbours_that_no_float_tells_apart_are_told_apart() {
    let whole = (1_i64 << 53) + 1;
    let of = |one: i64, two: i64| {
        between(
            (Dtype::I64, bytes(&[one], i64::to_le_bytes)),
            (Dtype::I64, bytes(&[two], i64::to_le_bytes)),
        )
    };
    let found = of(whole, whole - 1).unwrap();
    assert_eq!(
        (found.different, found.max_abs),
        (Some(1), Some(Number::Integer(1)))
    );
    assert_eq!(
        of(i64::MIN, i64::MAX).unwrap().max_abs,
        Some(Number::Integer(i128::from(u64::MAX)))
    );
    let float = |value: f64| (Dtype::F64, bytes(&[value], f64::to_le_bytes));
    let integer = || (Dtype::I64, bytes(&[whole], i64::to_le_bytes));
    let rounded = whole as f64;
    for found in [
        between(integer(), float(rounded)),
        between(float(rounded), integer()),
    ] {
        let found = found.unwrap();
        assert_eq!(
            (found.different, found.max_abs),
            (Some(1), Some(Number::Float(1.0)))
        );
    }
    assert_eq!(
        between(integer(), float(1e300)).unwrap().max_abs,
        Some(Number::Float(1e300))
    );
    let infinite = between(integer(), float(f64::NEG_INFINITY)).unwrap();
    assert_eq!(infinite.max_abs, Some(Number::Float(f64::INFINITY)));
}

#[test]
fn small_integers_are_integers() {
    let found = between((Dtype::I8, vec![0x80, 1]), (Dtype::U8, vec![0xFF, 1])).unwrap();
    assert_eq!(
        (found.different, found.max_abs),
        (Some(1), Some(Number::Integer(383)))
    );
    let found = between((Dtype::BOOL, vec![0, 1, 2]), (Dtype::BOOL, vec![1, 1, 1])).unwrap();
    assert_eq!(
        (found.different, found.max_abs),
        (Some(2), Some(Number::Integer(1)))
    );
    let wide = bytes(&[-1_i64, 1], i64::to_le_bytes);
    let found = between((Dtype::U8, vec![255, 1]), (Dtype::I64, wide)).unwrap();
    assert_eq!(
        (found.different, found.max_abs),
        (Some(1), Some(Number::Integer(256)))
    );
}

#[test]
fn what_is_not_finite_in_both_counts_for_nothing() {
    let [nan, inf] = [f32::NAN, f32::INFINITY];
    let found = of_singles(&[nan, inf, -inf, 3.0, 4.0], &[nan, inf, -inf, 3.0, 5.0]).unwrap();
    let expected = of_singles(&[3.0, 4.0], &[3.0, 5.0]).unwrap();
    assert_eq!(found, expected);
    assert_eq!(
        (found.different, found.max_abs, found.relative_l2),
        (Some(1), Some(Number::Float(1.0)), Some(0.2))
    );
}

#[test]
fn what_is_not_finite_in_one_leaves_no_cosine() {
    let of = |value: f32| of_singles(&[1.0, 2.0], &[1.0, value]).unwrap();
    let nan = of(f32::NAN);
    assert!(
        matches!(nan.max_abs, Some(Number::Float(value)) if value.is_nan()),
        "{nan:?}"
    );
    assert!(
        nan.relative_l2.is_some_and(f64::is_nan) && nan.cosine.is_some_and(f64::is_nan),
        "{nan:?}"
    );
    let infinite = of(f32::INFINITY);
    assert_eq!(
        (infinite.different, infinite.max_abs),
        (Some(1), Some(Number::Float(f64::INFINITY)))
    );
    assert!(infinite.cosine.is_some_and(f64::is_nan), "{infinite:?}");
    let opposite = of_singles(&[f32::INFINITY], &[f32::NEG_INFINITY]).unwrap();
    assert_eq!(
        (opposite.different, opposite.max_abs),
        (Some(1), Some(Number::Float(f64::INFINITY)))
    );
}

#[test]
fn zeros_have_no_norm_to_compare_with() {
    let found = of_singles(&[0.0, 0.0], &[3.0, 4.0]).unwrap();
    assert_eq!((found.relative_l2, found.cosine), (None, None));
    let found = of_singles(&[3.0, 4.0], &[0.0, 0.0]).unwrap();
    assert_eq!((found.relative_l2, found.cosine), (Some(1.0), None));
}

#[test]
fn a_complex_number_is_two_values_and_a_real_one_has_no_imaginary_part() {
    let complex = || (Dtype::C64, singles(&[1.0, 0.0, 2.0, -3.0]));
    let real = |values: &[f32]| (Dtype::F32, singles(values));
    let found = between(complex(), real(&[1.0, 2.0])).unwrap();
    assert_eq!(
        (found.different, found.max_abs),
        (Some(1), Some(Number::Float(3.0)))
    );
    assert_eq!(between((Dtype::C64, singles(&[1.0, 0.0])), real(&[1.0])), None);
    let integers = (Dtype::I64, bytes(&[1_i64, 2], i64::to_le_bytes));
    assert_eq!(
        between(integers, complex()).unwrap().max_abs,
        Some(Number::Float(3.0))
    );
}

#[test]
fn every_dtype_but_those_of_six_bits_is_compared_with_every_other() {
    for &one in Dtype::ALL {
        for &two in Dtype::ALL {
            // 8 elements: the first has all bits of zero, or of one in its first byte.
            let zeros = |dtype: Dtype| vec![0; usize::try_from(dtype.bits()).unwrap()];
            let mut other = zeros(two);
            other[0] = 0x31;
            let found = between((one, zeros(one)), (two, other)).unwrap();
            let is_compared = has_values(one) && has_values(two);
            assert_eq!(found.different.is_some(), is_compared, "{one} {two}");
            assert_eq!(found.max_abs.is_some(), is_compared, "{one} {two}");
        }
        let zeros = || (one, vec![0; usize::try_from(one.bits()).unwrap()]);
        assert_eq!(between(zeros(), zeros()), None, "{one}");
    }
}

#[test]
fn values_of_small_floats_are_those_of_their_dtype() {
    // 0.5 and 6, -6 and 0.
    let packed = (Dtype::F4, vec![0x71, 0x0F]);
    let found = between(packed, (Dtype::F32, singles(&[0.5, 6.0, 6.0, 0.0]))).unwrap();
    assert_eq!(
        (found.different, found.max_abs),
        (Some(1), Some(Number::Float(12.0)))
    );
    // 1.0 in BF16, F16 and F8_E4M3.
    for (dtype, one) in [
        (Dtype::BF16, vec![0x80, 0x3F]),
        (Dtype::F16, vec![0, 0x3C]),
        (Dtype::F8_E4M3, vec![0x38]),
    ] {
        let found = between((dtype, one), (Dtype::F64, bytes(&[-0.25], f64::to_le_bytes))).unwrap();
        assert_eq!(found.max_abs, Some(Number::Float(1.25)), "{dtype}");
        assert_eq!(found.cosine, Some(-1.0), "{dtype}");
    }
}

#[test]
fn tensors_of_different_shapes_have_none() {
    let found = of_singles(&[1.0], &[1.0, 2.0]);
    assert_eq!(found, Some(Distance::default()));
}

/// Tensors of many sizes: of one chunk and of several, and of no whole step.
fn several(shift: u32) -> Archive {
    let values = |count: u32, from: u32| {
        (0..count)
            .map(|at| ((at * 7 + shift * u32::from(at >= from)) % 1000) as f32)
            .collect::<Vec<_>>()
    };
    archive(&[
        // Differs only in its last value.
        ("late", Dtype::F32, singles(&values(3_000_001, 3_000_000))),
        ("all", Dtype::F32, singles(&values(1_500_003, 0))),
        ("equal", Dtype::F32, singles(&values(2_000_000, u32::MAX))),
        ("small", Dtype::F32, singles(&values(5, 2))),
        ("none", Dtype::F32, Vec::new()),
    ])
}

fn by_name<'a>(one: &'a Archive, two: &'a Archive, names: &[&str]) -> Vec<[Tensor<'a>; 2]> {
    names
        .iter()
        .map(|name| [one.find(name).unwrap(), two.find(name).unwrap()])
        .collect()
}

#[test]
fn join_what_many_threads_read_of_many_tensors_in_any_order() {
    let (one, two) = (several(0), several(3));
    let names = ["small", "late", "none", "all", "equal", "late"];
    let found = distances(&by_name(&one, &two, &names), &ReadOptions::default(), &Unwatched).unwrap();
    let values = |archive: &Archive, name: &str| -> Vec<f64> {
        let bytes = archive.read(name).unwrap().to_vec();
        let (elements, _) = bytes.as_chunks::<4>();
        elements
            .iter()
            .map(|&element| f64::from(f32::from_le_bytes(element)))
            .collect()
    };
    for (name, &found) in names.iter().zip(&found) {
        assert_near(found, naive(&values(&one, name), &values(&two, name)));
    }
    assert_eq!(found[1].unwrap().different, Some(1));
    assert_eq!((found[2], found[4]), (None, None));
    for threads in [1, 3] {
        let options = ReadOptions::new().threads(std::num::NonZeroUsize::new(threads));
        // The results are identical to the last digit for any number of threads.
        assert_eq!(
            distances(&by_name(&one, &two, &names), &options, &Unwatched).unwrap(),
            found
        );
    }
}

#[test]
fn a_file_is_compared_with_itself() {
    let one = several(0);
    let found = distances(
        &by_name(&one, &one, &["late", "small"]),
        &ReadOptions::default(),
        &Unwatched,
    );
    assert_eq!(found.unwrap(), [None, None]);
    assert_eq!(distances(&[], &ReadOptions::default(), &Unwatched).unwrap(), []);
}

/// Records the reported progress, and stops after a number of reports.
struct Recorder {
    reported: Mutex<Vec<(u64, u64)>>,
    looks: AtomicUsize,
    most: usize,
}

impl Watch for Recorder {
    fn interrupted(&self) -> bool {
        self.looks.fetch_add(1, Ordering::Relaxed) >= self.most
    }

    fn progressed(&self, done: u64, total: u64) {
        self.reported.lock().unwrap().push((done, total));
    }
}

#[test]
fn progress_is_told_up_to_all_and_an_interruption_heard() {
    let (one, two) = (several(0), several(3));
    let pairs = by_name(&one, &two, &["late", "all", "equal"]);
    let watched = |most: usize| {
        let reported = Recorder {
            reported: Mutex::default(),
            looks: AtomicUsize::new(0),
            most,
        };
        let outcome = distances(&pairs, &ReadOptions::default(), &reported);
        (outcome, reported.reported.into_inner().unwrap())
    };
    let (outcome, reported) = watched(usize::MAX);
    assert_eq!(outcome.unwrap().len(), 3);
    let total = reported[0].1;
    assert!(
        total > 0 && reported.iter().all(|&(done, of)| done <= of && of == total),
        "{reported:?}"
    );
    assert!(reported.is_sorted(), "{reported:?}");
    assert_eq!(reported.last(), Some(&(total, total)));
    assert!(watched(0).0.as_ref().is_err_and(Error::is_interrupted));
}
