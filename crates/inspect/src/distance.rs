//! Distances between the values of two tensors.
//!
//! The first pass finds the tensors whose bytes differ, and stops reading each at the first difference. The second pass
//! computes their distances.

mod differences;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use ingot_format::Dtype;
use ingot_io::binding::{After, Fold, fold};
use ingot_io::{Error, ReadOptions, Tensor, Watch};

use self::differences::Differences;
use crate::values::{Number, has_values};

/// The distance between two tensors whose values are not all equal. A NaN equals every other NaN, and an infinity every
/// infinity of the same sign. Equal pairs that are not finite are ignored.
///
/// All fields are `None` if the values cannot be compared: the shapes differ, or the bytes differ and the values are
/// not known ([`has_values`]).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Distance {
    /// The number of values that are not equal. An element of a complex dtype has two values.
    pub different: Option<u64>,
    /// The greatest absolute difference, exact if both dtypes are integers. NaN if a value is NaN in one tensor only.
    pub max_abs: Option<Number>,
    /// The norm of the difference divided by the norm of the first tensor; `None` if the latter is zero. NaN if the values
    /// that differ are not all finite.
    pub relative_l2: Option<f64>,
    /// The cosine of the angle between the two; `None` if one is zero. NaN if the values that differ are not all
    /// finite.
    pub cosine: Option<f64>,
}

impl Distance {
    /// The distance; `None` if all values are equal.
    fn of(found: Differences) -> Option<Distance> {
        let Differences {
            squares,
            ours,
            theirs,
            products,
            ..
        } = found;
        let norms = ours.sqrt() * theirs.sqrt();
        let of_any = |value: f64, of: f64| (of != 0.0).then_some(value);
        (found.different > 0).then_some(Distance {
            different: Some(found.different),
            max_abs: Some(found.largest),
            relative_l2: of_any(squares.sqrt() / ours.sqrt(), ours),
            // Rounding may lead out of the range. NaN stays NaN.
            cosine: of_any((products / norms).clamp(-1.0, 1.0), norms),
        })
    }
}

/// Return the distance between the tensors of each pair, in order; `None` if all their values are equal.
///
/// ```
/// use ingot_inspect::{Number, distances};
/// use ingot_io::{Archive, Dtype, OpenOptions, ReadOptions, TensorView, Unwatched, serialize_to_file};
///
/// let folder = tempfile::tempdir()?;
/// let saved = |name: &str, value: i32| {
///     let path = folder.path().join(name);
///     let bytes = value.to_le_bytes();
///     serialize_to_file([("step", &TensorView::new(Dtype::I32, vec![1], &bytes)?)], None, &path)?;
///     Ok::<_, Box<dyn std::error::Error>>(Archive::open(&path, &OpenOptions::default())?)
/// };
/// let (one, two) = (saved("one.safetensors", 3)?, saved("two.safetensors", 5)?);
/// let pairs = [[one.find("step")?, two.find("step")?], [one.find("step")?, one.find("step")?]];
/// let found = distances(&pairs, &ReadOptions::default(), &Unwatched)?;
/// assert_eq!(found[0].as_ref().and_then(|distance| distance.max_abs), Some(Number::Integer(2)));
/// assert_eq!(found[1], None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`read`](fn@ingot_io::read).
pub fn distances(
    pairs: &[[Tensor<'_>; 2]],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Option<Distance>>, Error> {
    let (comparable, incomparable): (Vec<usize>, Vec<usize>) =
        (0..pairs.len()).partition(|&rank| are_comparable(&pairs[rank]));
    let of_ranks =
        |ranks: &[usize]| -> Vec<[Tensor<'_>; 2]> { ranks.iter().map(|&rank| pairs[rank]).collect() };
    let all = nbytes(&of_ranks(&comparable));
    let after = |looks: u64, pairs: &[[Tensor<'_>; 2]]| After {
        watch,
        before: (looks * all).saturating_add(all - nbytes(pairs)),
        total: all.saturating_mul(2),
    };
    let (alike, mut different): (Vec<usize>, Vec<usize>) =
        comparable.into_iter().partition(|&rank| is_alike(&pairs[rank]));
    let compared = of_ranks(&alike);
    let comparison = Comparison(alike.iter().map(|_| AtomicBool::new(false)).collect());
    fold(&compared, &comparison, options, &after(0, &compared))?;
    let differs = |&(place, _): &(usize, usize)| comparison.differs(place);
    different.extend(
        alike
            .into_iter()
            .enumerate()
            .filter(differs)
            .map(|(_, rank)| rank),
    );
    let (measurable, unknown): (Vec<usize>, Vec<usize>) = different
        .into_iter()
        .partition(|&rank| dtypes(&pairs[rank]).into_iter().all(has_values));
    let measured = of_ranks(&measurable);
    let measure = Measure(measured.iter().map(dtypes).collect());
    let differences = fold(&measured, &measure, options, &after(1, &measured))?;
    let mut found = vec![None; pairs.len()];
    for rank in incomparable.into_iter().chain(unknown) {
        found[rank] = Some(Distance::default());
    }
    for (rank, differences) in measurable.into_iter().zip(differences) {
        found[rank] = Distance::of(differences);
    }
    Ok(found)
}

fn are_comparable(pair: &[Tensor<'_>; 2]) -> bool {
    let [one, two] = pair.map(|tensor| tensor.entry().shape);
    one == two && (is_alike(pair) || dtypes(pair).into_iter().all(has_values))
}

fn is_alike(pair: &[Tensor<'_>; 2]) -> bool {
    let [one, two] = dtypes(pair);
    one == two
}

/// Finds the pairs of one dtype whose bytes differ.
struct Comparison(Vec<AtomicBool>);

impl Comparison {
    fn differs(&self, pair: usize) -> bool {
        self.0[pair].load(Relaxed)
    }
}

impl Fold<2> for Comparison {
    type Result = ();

    fn empty(&self, _: usize) {}

    fn add(&self, pair: usize, _: &mut (), [one, two]: [&[u8]; 2]) {
        if one != two {
            self.0[pair].store(true, Relaxed);
        }
    }

    fn join((): (), (): ()) {}

    fn is_done(&self, pair: usize) -> bool {
        self.differs(pair)
    }
}

/// Sums the differences of pairs of these dtypes.
struct Measure(Vec<[Dtype; 2]>);

impl Fold<2> for Measure {
    type Result = Differences;

    fn empty(&self, _: usize) -> Differences {
        Differences::NOTHING
    }

    fn add(&self, pair: usize, differences: &mut Differences, bytes: [&[u8]; 2]) {
        differences.add(self.0[pair], bytes);
    }

    fn join(earlier: Differences, later: Differences) -> Differences {
        earlier.joined(later)
    }
}

fn dtypes(pair: &[Tensor<'_>; 2]) -> [Dtype; 2] {
    pair.map(|tensor| tensor.entry().dtype)
}

fn nbytes(pairs: &[[Tensor<'_>; 2]]) -> u64 {
    let sizes = pairs.iter().flatten().map(|tensor| tensor.entry().nbytes());
    sizes.fold(0, u64::saturating_add)
}
