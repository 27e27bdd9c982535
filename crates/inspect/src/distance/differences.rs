//! The differences between the values of two runs of elements.

use std::iter::zip;

use ingot_format::{Dtype, saturating_usize};

use crate::values::{Number, as_floats, as_integers, is_integer, rounded};

/// The number of elements that are compared at once, small enough that their values stay in a core's L1 cache.
pub(super) const STEP: u64 = 2048;

/// The number of values that are folded side by side, so that the compiler vectorises the loop.
const LANES: usize = 4;

/// Sums over some pairs of values, which can be joined with the sums over others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Differences {
    /// The number of pairs that are not equal. A NaN equals every other NaN.
    pub(super) different: u64,
    /// The greatest absolute difference: an integer if both are integers, and NaN if only one of two values is NaN.
    pub(super) largest: Number,
    /// The sum of the squares of the differences. This sum and all sums below ignore pairs of equal infinities
    /// and of NaN.
    pub(super) squares: f64,
    /// The sum of the squares of the first values.
    pub(super) ours: f64,
    /// The sum of the squares of the second values.
    pub(super) theirs: f64,
    /// The sum of the products.
    pub(super) products: f64,
}

impl Differences {
    /// The sums over no pairs.
    pub(super) const NOTHING: Differences = Differences {
        different: 0,
        largest: Number::Integer(0),
        squares: 0.0,
        ours: 0.0,
        theirs: 0.0,
        products: 0.0,
    };

    /// Add the elements with these dtypes in these bytes, as many on both sides.
    pub(super) fn add(&mut self, dtypes: [Dtype; 2], bytes: [&[u8]; 2]) {
        let [one, two] = dtypes.map(|dtype| saturating_usize(STEP * dtype.bits() / 8));
        for (ours, theirs) in zip(bytes[0].chunks(one), bytes[1].chunks(two)) {
            *self = self.joined(Differences::of(dtypes, [ours, theirs]));
        }
    }

    fn of(dtypes: [Dtype; 2], bytes: [&[u8]; 2]) -> Differences {
        let [one, two] = Values::of(dtypes, bytes);
        match (one, two) {
            (Values::Floats(ours), Values::Floats(theirs)) => {
                let found = Differences::of_finite(&ours, &theirs);
                let mut found = found.unwrap_or_else(|| Differences::of_any(floats(&ours, &theirs)));
                if dtypes.into_iter().all(is_integer) {
                    found.largest = whole(found.largest.as_float());
                }
                found
            }
            (Values::Integers(ours), Values::Integers(theirs)) => {
                let each = || zip(&ours, &theirs);
                let triples = each().map(|(&one, &two)| (rounded(one), rounded(two), rounded(one - two)));
                let largest = each().map(|(one, two)| (one - two).abs()).max();
                Differences {
                    largest: Number::Integer(largest.unwrap_or(0)),
                    ..Differences::of_any(triples)
                }
            }
            (Values::Integers(ours), Values::Floats(theirs)) => {
                let triple = |(one, two): (i128, f64)| (rounded(one), two, difference(one, two));
                Differences::of_any(zip(ours, theirs).map(triple))
            }
            (Values::Floats(ours), Values::Integers(theirs)) => {
                let triple = |(one, two): (f64, i128)| (one, rounded(two), -difference(two, one));
                Differences::of_any(zip(ours, theirs).map(triple))
            }
        }
    }

    /// Returns the sums over finite values; `None` if a value or a sum is not finite.
    fn of_finite(ours: &[f64], theirs: &[f64]) -> Option<Differences> {
        let (our_rows, our_rest) = ours.as_chunks::<LANES>();
        let (their_rows, their_rest) = theirs.as_chunks::<LANES>();
        let mut different = [0_u64; LANES];
        let [mut largest, mut squares, mut our, mut their, mut products] = [[0.0; LANES]; 5];
        for (one, two) in zip(our_rows, their_rows) {
            for lane in 0..LANES {
                let (one, two) = (one[lane], two[lane]);
                let delta = one - two;
                let distance = delta.abs();
                largest[lane] = if distance > largest[lane] {
                    distance
                } else {
                    largest[lane]
                };
                // `wrapping_add`, since an overflow check would prevent vector code. A step has too few values to overflow.
                different[lane] = different[lane].wrapping_add(u64::from(delta != 0.0));
                squares[lane] += delta * delta;
                our[lane] += one * one;
                their[lane] += two * two;
                products[lane] += one * two;
            }
        }
        let found = Differences {
            different: different.iter().sum(),
            largest: Number::Float(largest.into_iter().fold(0.0, f64::max)),
            squares: squares.iter().sum(),
            ours: our.iter().sum(),
            theirs: their.iter().sum(),
            products: products.iter().sum(),
        };
        let found = found.joined(Differences::of_any(floats(our_rest, their_rest)));
        // A value that is not finite makes the sum not finite.
        (found.squares + found.ours + found.theirs)
            .is_finite()
            .then_some(found)
    }

    /// Adds any values, pair by pair.
    fn of_any(triples: impl Iterator<Item = (f64, f64, f64)>) -> Differences {
        let (mut different, mut largest) = (0, 0.0);
        let [mut squares, mut ours, mut theirs, mut products] = [0.0; 4];
        for (one, two, delta) in triples {
            // Two infinities of one sign are equal, and their difference is NaN.
            let is_equal = delta == 0.0 || one.is_nan() && two.is_nan() || one.is_infinite() && one == two;
            if is_equal && !one.is_finite() {
                continue;
            }
            different += u64::from(!is_equal);
            largest = greater(largest, delta.abs());
            squares += delta * delta;
            ours += one * one;
            theirs += two * two;
            products += one * two;
        }
        Differences {
            different,
            largest: Number::Float(largest),
            squares,
            ours,
            theirs,
            products,
        }
    }

    pub(super) fn joined(self, other: Differences) -> Differences {
        Differences {
            different: self.different + other.different,
            largest: match (self.largest, other.largest) {
                (Number::Integer(one), Number::Integer(two)) => Number::Integer(one.max(two)),
                (one, two) => Number::Float(greater(one.as_float(), two.as_float())),
            },
            squares: self.squares + other.squares,
            ours: self.ours + other.ours,
            theirs: self.theirs + other.theirs,
            products: self.products + other.products,
        }
    }
}

/// The values of one side. Integers are converted to floats, unless one side has integers that a float cannot
/// represent.
enum Values {
    Floats(Vec<f64>),
    Integers(Vec<i128>),
}

impl Values {
    fn of(dtypes: [Dtype; 2], bytes: [&[u8]; 2]) -> [Values; 2] {
        let is_exact = dtypes
            .iter()
            .all(|dtype| !matches!(dtype, Dtype::I64 | Dtype::U64));
        let is_complex = dtypes.contains(&Dtype::C64);
        [0, 1].map(|side| {
            let (dtype, bytes) = (dtypes[side], bytes[side]);
            let values = if is_exact || !is_integer(dtype) {
                Values::Floats(as_floats(dtype, bytes))
            } else {
                Values::Integers(as_integers(dtype, bytes))
            };
            if is_complex && dtype != Dtype::C64 {
                values.into_complex()
            } else {
                values
            }
        })
    }

    /// Real values with an imaginary part of zero.
    fn into_complex(self) -> Values {
        match self {
            Values::Floats(values) => {
                Values::Floats(values.into_iter().flat_map(|value| [value, 0.0]).collect())
            }
            Values::Integers(values) => {
                Values::Integers(values.into_iter().flat_map(|value| [value, 0]).collect())
            }
        }
    }
}

fn floats<'v>(ours: &'v [f64], theirs: &'v [f64]) -> impl Iterator<Item = (f64, f64, f64)> + 'v {
    zip(ours, theirs).map(|(&one, &two)| (one, two, one - two))
}

/// Returns the difference of an integer and a float, rounded once from the exact value: zero if and only if they are
/// equal.
#[allow(
    clippy::cast_possible_truncation,
    reason = "so far from the ends, nothing is cut off"
)]
fn difference(one: i128, two: f64) -> f64 {
    // Larger than every integer of a tensor, and small enough for an `i128`.
    if two.abs() < 1e30 {
        let whole = two.trunc();
        rounded(one - whole as i128) - (two - whole)
    } else {
        rounded(one) - two
    }
}

/// Returns the value of a float that is not a NaN.
#[allow(
    clippy::cast_possible_truncation,
    reason = "integers of 32 bits are this far apart at most"
)]
fn whole(value: f64) -> Number {
    Number::Integer(value as i128)
}

/// Returns the greater value, or NaN if one is NaN.
fn greater(one: f64, two: f64) -> f64 {
    if one.is_nan() || one > two { one } else { two }
}
