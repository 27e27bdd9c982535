//! Statistics of the values of tensors: their range, mean and spread, and the number of values that are not finite.
//!
//! A block of values is folded twice while it is in a core's cache, for the mean and then for the deviations from it, and
//! blocks are joined by the formula of Chan, Golub and LeVeque (1979). Squares are never subtracted from each other, so
//! that a small spread around a large mean is right.

use ingot_format::{Dtype, to_u64};
use ingot_io::binding::{After, Fold, fold};
use ingot_io::{Error, ReadOptions, Tensor, Watch};

use crate::values::{Number, as_floats, has_values, single, singles};

/// The number of bytes that are folded at once, small enough to stay in a core's cache. A multiple of every element's
/// size.
const STEP_NBYTES: usize = 64 << 10;

/// Statistics of the values of one tensor. Values that are not finite are counted, and otherwise ignored.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// The number of values. An element of a complex dtype has two values.
    pub count: u64,
    /// Zeros of both signs.
    pub zeros: u64,
    /// Not a number.
    pub nans: u64,
    /// Infinities of both signs.
    pub infinities: u64,
    /// Elements of `BOOL` that are neither 0 nor 1.
    pub malformed: u64,
    /// The lowest and the highest value; `None` if no value is finite.
    pub range: Option<(Number, Number)>,
    /// The mean; `None` if no value is finite.
    pub mean: Option<f64>,
    /// The square root of the mean square of the deviations from the mean; `None` if no value is finite.
    pub deviation: Option<f64>,
    /// The number of values in each of equal parts of the range. The highest value is in the last part.
    pub bins: Vec<u64>,
}

/// Return the statistics of these tensors, in order; `None` for dtypes without [`has_values`]. A histogram of `bins`
/// parts takes a second pass over the files.
///
/// ```
/// use ingot_inspect::{Number, statistics};
/// use ingot_io::{Archive, Dtype, OpenOptions, ReadOptions, TensorView, Unwatched, serialize_to_file};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let values: Vec<u8> = [1.0_f32, 2.0, 3.0, f32::NAN].iter().flat_map(|value| value.to_le_bytes()).collect();
/// serialize_to_file([("weight", &TensorView::new(Dtype::F32, vec![4], &values)?)], None, &path)?;
///
/// let archive = Archive::open(&path, &OpenOptions::default())?;
/// let found = statistics(&[archive.find("weight")?], 2, &ReadOptions::default(), &Unwatched)?;
/// let weight = found[0].as_ref().ok_or("a dtype without values")?;
/// assert_eq!((weight.count, weight.nans, weight.mean), (4, 1, Some(2.0)));
/// assert_eq!(weight.range, Some((Number::Float(1.0), Number::Float(3.0))));
/// assert_eq!(weight.bins, [1, 2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`read`](fn@ingot_io::read).
pub fn statistics(
    tensors: &[Tensor<'_>],
    bins: usize,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Option<Statistics>>, Error> {
    let (ranks, chosen): (Vec<usize>, Vec<[Tensor<'_>; 1]>) = tensors
        .iter()
        .enumerate()
        .filter(|(_, tensor)| has_values(tensor.entry().dtype))
        .map(|(rank, &tensor)| (rank, [tensor]))
        .unzip();
    let dtypes: Vec<Dtype> = chosen.iter().map(|[tensor]| tensor.entry().dtype).collect();
    let sizes = chosen.iter().map(|[tensor]| tensor.entry().nbytes());
    let nbytes = sizes.fold(0, u64::saturating_add);
    let total = if bins == 0 {
        nbytes
    } else {
        nbytes.saturating_mul(2)
    };
    let pass = |before| After { watch, before, total };
    let moments = fold(&chosen, &Summary(&dtypes), options, &pass(0))?;
    let counted = if bins == 0 {
        vec![Vec::new(); chosen.len()]
    } else {
        let empty = moments
            .iter()
            .map(|moments| Histogram::over(moments.range, bins))
            .collect();
        let count = Count {
            dtypes: &dtypes,
            empty,
        };
        let counted = fold(&chosen, &count, options, &pass(nbytes))?;
        counted.into_iter().map(|histogram| histogram.bins).collect()
    };
    let mut found = vec![None; tensors.len()];
    for (rank, (moments, bins)) in ranks.into_iter().zip(moments.into_iter().zip(counted)) {
        found[rank] = Some(moments.statistics(bins));
    }
    Ok(found)
}

/// Computes the moments of tensors with these dtypes.
struct Summary<'d>(&'d [Dtype]);

impl Fold<1> for Summary<'_> {
    type Result = Moments;

    fn empty(&self, _: usize) -> Moments {
        Moments::default()
    }

    fn add(&self, tensor: usize, moments: &mut Moments, [bytes]: [&[u8]; 1]) {
        for step in bytes.chunks(STEP_NBYTES) {
            *moments = moments.joined(Moments::of(self.0[tensor], step));
        }
    }

    fn join(earlier: Moments, later: Moments) -> Moments {
        earlier.joined(later)
    }
}

/// Counts the values of tensors in the parts of their ranges.
struct Count<'d> {
    dtypes: &'d [Dtype],
    /// Returns an empty histogram for each tensor.
    empty: Vec<Histogram>,
}

impl Fold<1> for Count<'_> {
    type Result = Histogram;

    fn empty(&self, tensor: usize) -> Histogram {
        self.empty[tensor].clone()
    }

    fn add(&self, tensor: usize, histogram: &mut Histogram, [bytes]: [&[u8]; 1]) {
        for step in bytes.chunks(STEP_NBYTES) {
            histogram.count(self.dtypes[tensor], step);
        }
    }

    fn join(earlier: Histogram, later: Histogram) -> Histogram {
        earlier.joined(later)
    }
}

/// Sums over some values, which can be joined with the sums over others.
#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    count: u64,
    zeros: u64,
    nans: u64,
    infinities: u64,
    malformed: u64,
    range: Option<(Number, Number)>,
    /// The number of finite values. All sums below are over finite values too.
    mean: f64,
    /// The sum of the squares of the deviations from the mean.
    squares: f64,
}

impl Moments {
    fn of(dtype: Dtype, bytes: &[u8]) -> Moments {
        match dtype {
            Dtype::BOOL => Moments {
                malformed: to_u64(bytes.iter().filter(|&&byte| byte > 1).count()),
                ..integers(bytes, u8::from_le_bytes)
            },
            Dtype::U8 => integers(bytes, u8::from_le_bytes),
            Dtype::I8 => integers(bytes, i8::from_le_bytes),
            Dtype::U16 => integers(bytes, u16::from_le_bytes),
            Dtype::I16 => integers(bytes, i16::from_le_bytes),
            Dtype::U32 => integers(bytes, u32::from_le_bytes),
            Dtype::I32 => integers(bytes, i32::from_le_bytes),
            Dtype::U64 => integers(bytes, u64::from_le_bytes),
            Dtype::I64 => integers(bytes, i64::from_le_bytes),
            Dtype::F64 => floats(bytes, f64::from_le_bytes),
            Dtype::F32 | Dtype::C64 => floats(bytes, single),
            _ => floats(&singles(dtype, bytes), single),
        }
    }

    fn finite(&self) -> u64 {
        self.count - self.nans - self.infinities
    }

    #[allow(
        clippy::cast_precision_loss,
        reason = "2^53 values are more than a file holds"
    )]
    fn joined(self, other: Moments) -> Moments {
        let (one, two) = (self.finite() as f64, other.finite() as f64);
        let delta = other.mean - self.mean;
        let part = if two == 0.0 { 0.0 } else { two / (one + two) };
        // The difference of two large numbers with different signs may be infinite, and so is its square.
        let mean = if delta.is_finite() {
            self.mean + delta * part
        } else {
            self.mean * (1.0 - part) + other.mean * part
        };
        let between = if part == 0.0 {
            0.0
        } else {
            delta * delta * one * part
        };
        Moments {
            count: self.count + other.count,
            zeros: self.zeros + other.zeros,
            nans: self.nans + other.nans,
            infinities: self.infinities + other.infinities,
            malformed: self.malformed + other.malformed,
            range: hull(self.range, other.range),
            mean,
            squares: self.squares + other.squares + between,
        }
    }

    #[allow(
        clippy::cast_precision_loss,
        reason = "2^53 values are more than a file holds"
    )]
    fn statistics(self, bins: Vec<u64>) -> Statistics {
        let finite = self.finite();
        let of_any = |value: f64| (finite > 0).then_some(value);
        Statistics {
            count: self.count,
            zeros: self.zeros,
            nans: self.nans,
            infinities: self.infinities,
            malformed: self.malformed,
            range: self.range,
            mean: of_any(self.mean),
            deviation: of_any((self.squares / finite as f64).sqrt()),
            bins,
        }
    }
}

/// Returns the range that covers both ranges.
fn hull(one: Option<(Number, Number)>, two: Option<(Number, Number)>) -> Option<(Number, Number)> {
    let (Some((low, high)), Some((other_low, other_high))) = (one, two) else {
        return one.or(two);
    };
    Some((
        if other_low.below(low) { other_low } else { low },
        if high.below(other_high) { other_high } else { high },
    ))
}

/// The number of values that are folded side by side, so that the compiler vectorises the loop. A larger number would
/// not fit into the registers of every x86-64 processor.
const LANES: usize = 4;

/// Sums over some values.
#[derive(Clone, Copy)]
struct Sums {
    low: f64,
    high: f64,
    sum: f64,
    zeros: u64,
    nans: u64,
    infinities: u64,
}

const NO_SUMS: Sums = Sums {
    low: f64::INFINITY,
    high: f64::NEG_INFINITY,
    sum: 0.0,
    zeros: 0,
    nans: 0,
    infinities: 0,
};

impl Sums {
    /// Returns the sums over finite values; `None` if a value or a sum is not finite.
    fn of_finite<const N: usize>(elements: &[[u8; N]], decode: impl Fn([u8; N]) -> f64) -> Option<Sums> {
        let (rows, rest) = elements.as_chunks::<LANES>();
        let mut low = [f64::INFINITY; LANES];
        let mut high = [f64::NEG_INFINITY; LANES];
        let mut sum = [0.0; LANES];
        let mut zeros = [0_u64; LANES];
        for row in rows {
            for lane in 0..LANES {
                let value = decode(row[lane]);
                low[lane] = if value < low[lane] { value } else { low[lane] };
                high[lane] = if value > high[lane] { value } else { high[lane] };
                sum[lane] += value;
                // `wrapping_add`, since an overflow check would prevent vector code. A block has too few values to overflow.
                zeros[lane] = zeros[lane].wrapping_add(u64::from(value == 0.0));
            }
        }
        let mut sums = NO_SUMS;
        for lane in 0..LANES {
            sums.low = sums.low.min(low[lane]);
            sums.high = sums.high.max(high[lane]);
            sums.sum += sum[lane];
            sums.zeros += zeros[lane];
        }
        for &element in rest {
            sums.take(decode(element));
        }
        // A value that is not finite makes the sum not finite.
        (sums.sum.is_finite() && sums.nans + sums.infinities == 0).then_some(sums)
    }

    fn of_any<const N: usize>(elements: &[[u8; N]], decode: impl Fn([u8; N]) -> f64) -> Sums {
        let mut sums = NO_SUMS;
        for &element in elements {
            sums.take(decode(element));
        }
        sums
    }

    fn take(&mut self, value: f64) {
        if value.is_nan() {
            self.nans += 1;
        } else if value.is_infinite() {
            self.infinities += 1;
        } else {
            self.low = self.low.min(value);
            self.high = self.high.max(value);
            self.sum += value;
            self.zeros += u64::from(value == 0.0);
        }
    }
}

#[allow(
    clippy::cast_precision_loss,
    reason = "2^53 values are more than a block holds"
)]
fn floats<const N: usize>(bytes: &[u8], decode: impl Fn([u8; N]) -> f64 + Copy) -> Moments {
    let (elements, _) = bytes.as_chunks::<N>();
    let sums = Sums::of_finite(elements, decode).unwrap_or_else(|| Sums::of_any(elements, decode));
    let count = to_u64(elements.len());
    let finite = count - sums.nans - sums.infinities;
    let mean = match finite {
        0 => 0.0,
        _ if sums.sum.is_finite() => sums.sum / finite as f64,
        _ => mean_of_large(elements, decode, finite as f64),
    };
    Moments {
        count,
        zeros: sums.zeros,
        nans: sums.nans,
        infinities: sums.infinities,
        malformed: 0,
        range: (finite > 0).then_some((Number::Float(sums.low), Number::Float(sums.high))),
        mean,
        squares: if count == finite {
            squares(elements, decode, mean)
        } else {
            // Values that are not finite are replaced by the mean, from which they do not deviate.
            squares(elements, |element| finite_or(decode(element), mean), mean)
        },
    }
}

fn finite_or(value: f64, other: f64) -> f64 {
    if value.is_finite() { value } else { other }
}

/// Returns the mean of values whose sum overflows.
fn mean_of_large<const N: usize>(elements: &[[u8; N]], decode: impl Fn([u8; N]) -> f64, finite: f64) -> f64 {
    let values = elements.iter().map(|&element| decode(element));
    values
        .filter(|value| value.is_finite())
        .map(|value| value / finite)
        .sum()
}

/// Returns the sum of the squares of the deviations of finite values from `mean`.
fn squares<const N: usize>(elements: &[[u8; N]], decode: impl Fn([u8; N]) -> f64, mean: f64) -> f64 {
    let square = |element: [u8; N]| {
        let delta = decode(element) - mean;
        delta * delta
    };
    let (rows, rest) = elements.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for row in rows {
        for (lane, &element) in lanes.iter_mut().zip(row) {
            *lane += square(element);
        }
    }
    let rest: f64 = rest.iter().map(|&element| square(element)).sum();
    lanes.iter().sum::<f64>() + rest
}

#[allow(
    clippy::cast_precision_loss,
    reason = "mean and deviation of integers are rounded as any other"
)]
fn integers<const N: usize, T: Copy + Ord + Default + Into<i128>>(
    bytes: &[u8],
    decode: impl Fn([u8; N]) -> T + Copy,
) -> Moments {
    let (elements, _) = bytes.as_chunks::<N>();
    let values = || elements.iter().map(|&element| decode(element));
    let (Some(low), Some(high)) = (values().min(), values().max()) else {
        return Moments::default();
    };
    let sum: i128 = values().map(Into::<i128>::into).sum();
    let mean = sum as f64 / elements.len() as f64;
    Moments {
        count: to_u64(elements.len()),
        zeros: to_u64(values().filter(|&value| value == T::default()).count()),
        range: Some((Number::Integer(low.into()), Number::Integer(high.into()))),
        mean,
        squares: squares(elements, |element| decode(element).into() as f64, mean),
        ..Moments::default()
    }
}

/// The number of values in each part of a range.
#[derive(Clone)]
struct Histogram {
    low: f64,
    /// Parts in one unit.
    scale: f64,
    bins: Vec<u64>,
}

impl Histogram {
    #[allow(
        clippy::cast_precision_loss,
        reason = "a place in a histogram is nothing exact"
    )]
    fn over(range: Option<(Number, Number)>, bins: usize) -> Histogram {
        let (low, high) = range.map_or((0.0, 0.0), |(low, high)| (low.as_float(), high.as_float()));
        // Halves, because the difference of two large numbers may overflow.
        let half = high / 2.0 - low / 2.0;
        let scale = if half > 0.0 { bins as f64 / half / 2.0 } else { 0.0 };
        Histogram {
            low,
            scale: if scale.is_finite() { scale } else { 0.0 },
            bins: vec![0; bins],
        }
    }

    /// Adds the counts of another histogram over the same range.
    fn joined(mut self, other: Histogram) -> Histogram {
        for (sum, count) in self.bins.iter_mut().zip(other.bins) {
            *sum += count;
        }
        self
    }

    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "rounds down, and saturates at both ends"
    )]
    fn count(&mut self, dtype: Dtype, bytes: &[u8]) {
        let last = self.bins.len() - 1;
        for value in as_floats(dtype, bytes) {
            if value.is_finite() {
                // Scaled before the subtraction if the difference would overflow.
                let delta = value - self.low;
                let place = if delta.is_finite() {
                    delta * self.scale
                } else {
                    value * self.scale - self.low * self.scale
                };
                self.bins[(place as usize).min(last)] += 1;
            }
        }
    }
}
