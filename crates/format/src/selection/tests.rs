use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::extent::ExtentError;

const DTYPES: [Dtype; 5] = [Dtype::F4, Dtype::F6_E2M3, Dtype::U8, Dtype::F16, Dtype::I64];

fn stepped(start: Option<i64>, stop: Option<i64>, step: i64) -> Index {
    Index::Span {
        start,
        stop,
        step: Some(step),
    }
}

fn code(dtype: Dtype, shape: &[u64], index: &[Index]) -> &'static str {
    Selection::new(dtype, shape, index).map_or_else(|fault| fault.code(), |_| "accepted")
}

fn runs(dtype: Dtype, shape: &[u64], index: &[Index]) -> Vec<(u64, u64)> {
    let selection = Selection::new(dtype, shape, index).unwrap();
    selection.runs().map(|run| (run.begin, run.end)).collect()
}

#[test]
fn a_whole_tensor_is_one_run() {
    for index in [vec![], vec![Index::Rest], vec![Index::WHOLE; 3]] {
        assert_eq!(runs(Dtype::F32, &[2, 3, 4], &index), [(0, 96)]);
    }
}

#[test]
fn a_slice_of_the_first_dimension_is_one_run() {
    assert_eq!(runs(Dtype::F32, &[6, 5], &[Index::from(2..4)]), [(40, 80)]);
    assert_eq!(
        runs(Dtype::F32, &[6, 5, 1], &[Index::At(2), Index::from(1..3)]),
        [(44, 52)]
    );
}

#[test]
fn dimensions_at_one_pace_become_one_row() {
    let selection = Selection::new(Dtype::U8, &[3, 4, 8], &[Index::Rest, stepped(Some(1), None, 2)]).unwrap();
    let rows: Vec<Row> = selection.rows().collect();
    assert_eq!(
        rows,
        [Row {
            begin: 1,
            nbytes: 1,
            count: 48,
            stride: 2
        }]
    );
}

#[test]
fn a_list_that_is_like_a_slice_is_one() {
    let listed = Selection::new(Dtype::U8, &[9, 4], &[Index::from(vec![1, 3, -4, 7])]).unwrap();
    let sliced = Selection::new(Dtype::U8, &[9, 4], &[stepped(Some(1), None, 2)]).unwrap();
    assert_eq!(listed, sliced);
}

#[test]
fn bounds_are_clipped() {
    assert_eq!(
        runs(Dtype::U8, &[6], &[Index::from(i64::MIN..i64::MAX)]),
        [(0, 6)]
    );
    assert_eq!(runs(Dtype::U8, &[6], &[Index::from(-3..100)]), [(3, 6)]);
    assert_eq!(
        runs(Dtype::U8, &[6], &[stepped(Some(4), None, i64::MAX)]),
        [(4, 5)]
    );
    for (start, stop) in [(4, 2), (6, 9), (i64::MAX, i64::MIN), (-1, -1)] {
        let selection = Selection::new(Dtype::U8, &[6, 2], &[Index::from(start..stop)]).unwrap();
        assert_eq!(selection.shape(), [0, 2]);
        assert_eq!(selection.runs().next(), None);
    }
}

#[test]
fn an_int_out_of_range_is_named_with_its_dimension() {
    let fault = Selection::new(Dtype::U8, &[2, 5], &[Index::WHOLE, Index::At(7)]).unwrap_err();
    assert_eq!(
        fault.to_string(),
        "index 7 is out of range for dimension 1 of size 5"
    );
    for at in [5, -6, i64::MAX, i64::MIN] {
        assert_eq!(
            code(Dtype::U8, &[2, 5], &[Index::Rest, Index::At(at)]),
            "index-out-of-range"
        );
        assert_eq!(
            code(Dtype::U8, &[5], &[Index::from(vec![0, at])]),
            "index-out-of-range"
        );
    }
    // Even if nothing would be read.
    assert_eq!(
        code(Dtype::U8, &[0, 5], &[Index::WHOLE, Index::At(5)]),
        "index-out-of-range"
    );
    assert_eq!(code(Dtype::U8, &[0], &[Index::At(0)]), "index-out-of-range");
}

#[test]
fn steps_must_be_above_zero() {
    let fault = Selection::new(Dtype::U8, &[5], &[stepped(None, None, -1)]).unwrap_err();
    assert_eq!(fault.code(), "negative-step");
    assert_eq!(
        fault.to_string(),
        "slice of dimension 0: expected a step above zero, found -1 — flip the tensor in memory"
    );
    assert_eq!(
        code(Dtype::U8, &[5], &[stepped(None, None, i64::MIN)]),
        "negative-step"
    );
    assert_eq!(code(Dtype::U8, &[0], &[stepped(None, None, 0)]), "zero-step");
}

#[test]
fn an_index_has_room_for_one_ellipsis_and_one_list() {
    assert_eq!(code(Dtype::U8, &[5], &[Index::Rest, Index::Rest]), "two-ellipses");
    let list = Index::from(vec![0]);
    assert_eq!(code(Dtype::U8, &[5, 5], &[list.clone(), list]), "two-lists");
    let fault = Selection::new(Dtype::U8, &[5], &[Index::At(0), Index::Rest, Index::At(0)]).unwrap_err();
    assert_eq!(
        fault.to_string(),
        "too many indices: expected at most 1, one for each dimension, found 2"
    );
}

#[test]
fn a_scalar_takes_no_index_that_needs_a_dimension() {
    for index in [
        vec![],
        vec![Index::Rest],
        vec![Index::NewAxis, Index::Rest, Index::NewAxis],
    ] {
        let selection = Selection::new(Dtype::F32, &[], &index).unwrap();
        assert!(selection.shape().iter().all(|&dim| dim == 1));
        assert_eq!(selection.runs().collect::<Vec<_>>(), [Run { begin: 0, end: 4 }]);
    }
    for part in [Index::At(0), Index::WHOLE, Index::from(vec![])] {
        assert_eq!(code(Dtype::F32, &[], &[part]), "too-many-indices");
    }
}

#[test]
fn a_list_apart_from_an_int_is_refused_unless_it_comes_first() {
    let list = || Index::from(vec![0, 1]);
    let at = || Index::At(0);
    for index in [
        vec![at(), Index::WHOLE, list()],
        vec![at(), Index::NewAxis, list()],
        vec![at(), Index::Rest, list()],
        vec![Index::WHOLE, list(), Index::NewAxis, at()],
        vec![Index::NewAxis, list(), Index::WHOLE, at()],
        // numpy treats them as separated, though the ellipsis covers no dimension.
        vec![Index::WHOLE, at(), Index::Rest, list()],
    ] {
        assert_eq!(code(Dtype::U8, &[2, 3, 4], &index), "separated-list", "{index:?}");
    }
    for (index, shape) in [
        (vec![list(), Index::WHOLE, at()], &[2, 3][..]),
        (vec![list(), Index::NewAxis, at()], &[2, 1, 4]),
        (vec![at(), list(), Index::WHOLE, Index::NewAxis], &[2, 4, 1]),
        (vec![Index::WHOLE, at(), list()], &[2, 2]),
        (vec![Index::NewAxis, at(), list(), Index::At(1)], &[1, 2]),
    ] {
        assert_eq!(
            Selection::new(Dtype::U8, &[2, 3, 4], &index).unwrap().shape(),
            shape
        );
    }
}

fn range(start: i64, count: u64, step: i64) -> Places {
    Places { start, count, step }
}

fn written_out(places: &Places) -> impl Iterator<Item = i64> + use<> {
    let Places { start, count, step } = *places;
    (0..i64::try_from(count).unwrap()).map(move |turns| start + turns * step)
}

#[test]
fn a_range_of_a_list_is_not_written_out() {
    const HALF: u64 = 1 << 50;
    const START: i64 = 1 << 50;
    let huge = [2 * HALF];
    for (list, expected) in [
        (vec![range(0, 2 * HALF, 1)], vec![(0, 2 * HALF)]),
        (
            vec![range(START, HALF, 1), range(0, HALF, 1)],
            vec![(HALF, 2 * HALF), (0, HALF)],
        ),
        (
            vec![range(-START, HALF + 1, 1), Places::from(5)],
            vec![(HALF, 2 * HALF), (0, 1), (5, 6)],
        ),
    ] {
        assert_eq!(runs(Dtype::U8, &huge, &[Index::Pick(list)]), expected);
    }
    // An empty list takes no memory, however many indices it has.
    for list in [vec![range(-1, HALF, -1)], vec![range(0, HALF, 1), range(0, 9, 1)]] {
        let selection = Selection::new(Dtype::U8, &[HALF, 0], &[Index::Pick(list)]).unwrap();
        assert_eq!(selection.runs().next(), None);
    }
    let backwards = Selection::new(Dtype::U8, &huge, &[Index::Pick(vec![range(-1, HALF, -1)])]).unwrap_err();
    assert_eq!(backwards.code(), "too-many-places");
    assert_eq!(
        backwards.to_string(),
        "no memory for the 1125899906842624 places of a list — read it in parts"
    );
    let again = vec![range(0, u64::MAX, 0), range(0, u64::MAX, 0)];
    assert_eq!(code(Dtype::U8, &[3], &[Index::Pick(again)]), "size-overflow");
}

#[test]
fn a_range_that_leaves_its_dimension_is_refused_by_its_first_place_outside() {
    for (places, outside) in [
        (range(0, 1 << 33, 1), 3),
        (range(2, 2, 7), 9),
        (range(-3, 7, 1), 3),
        (range(-4, 2, 1), -4),
        (range(5, 9, -1), 5),
        (range(2, 9, -2), -4),
        (range(0, u64::MAX, i64::MIN), i64::MIN),
        (range(1, u64::MAX, i64::MAX), i64::MAX),
        (range(i64::MIN, u64::MAX, i64::MIN), i64::MIN),
    ] {
        let fault =
            Selection::new(Dtype::U8, &[3], &[Index::Pick(vec![Places::from(0), places])]).unwrap_err();
        assert_eq!(
            fault.to_string(),
            alloc::format!("index {outside} is out of range for dimension 0 of size 3"),
            "{places:?}"
        );
    }
    assert_eq!(
        code(Dtype::U8, &[3], &[Index::Pick(vec![range(7, 0, 1)])]),
        "accepted"
    );
}

#[test]
fn packed_elements_are_taken_by_whole_bytes() {
    assert_eq!(
        runs(Dtype::F4, &[4, 6], &[Index::WHOLE, Index::from(2..4)]),
        [(1, 2), (4, 5), (7, 8), (10, 11)]
    );
    // A row of three takes a byte and a half; two neighbours take three.
    assert_eq!(runs(Dtype::F4, &[4, 3], &[Index::from(0..2)]), [(0, 3)]);
    assert_eq!(
        runs(Dtype::F4, &[4, 3], &[Index::from(vec![2, 3, 0, 1])]),
        [(3, 6), (0, 3)]
    );
    assert_eq!(runs(Dtype::F6_E3M2, &[8], &[Index::from(4..)]), [(3, 6)]);
    assert_eq!(runs(Dtype::F4, &[4, 3], &[Index::from(1..1)]), []);
    let fault = Selection::new(Dtype::F4, &[4, 3], &[Index::At(1)]).unwrap_err();
    assert_eq!(fault.code(), "partial-byte");
    assert_eq!(
        fault.to_string(),
        "expected runs of F4 that begin and end on a byte, found bits 12..24 — load the tensor, then index it"
    );
    assert_eq!(
        code(Dtype::F4, &[4, 3], &[Index::from(vec![0, 1, 3, 2])]),
        "partial-byte"
    );
    assert_eq!(
        code(Dtype::F6_E2M3, &[8], &[stepped(None, None, 4)]),
        "partial-byte"
    );
}

#[test]
fn no_size_overflows() {
    let huge = [1 << 32, (1 << 29) - 1];
    let selection = Selection::new(
        Dtype::U8,
        &huge,
        &[
            stepped(Some(1), None, (1 << 32) - 2),
            stepped(None, None, (1 << 29) - 2),
        ],
    )
    .unwrap();
    assert_eq!(selection.shape(), [2, 2]);
    assert_eq!(selection.runs().count(), 4);
    assert_eq!(
        selection.span().unwrap().end,
        (1 << 32) * ((1 << 29) - 1),
        "it reaches to the end"
    );
    assert_eq!(
        code(Dtype::U8, &huge, &[Index::from(vec![0; 5]), Index::NewAxis]),
        "accepted",
        "fewer rows than the tensor has"
    );
    let fault = Selection::new(Dtype::U8, &[2, 1 << 59], &[Index::from([0, 1, 1, 0].repeat(8))]).unwrap_err();
    assert_eq!(fault.code(), "size-overflow");
    assert_eq!(
        fault.to_string(),
        "shape [32, 576460752303423488] of U8: its size overflows 64 bits"
    );
    assert_eq!(
        Selection::new(Dtype::U8, &[1 << 61], &[]),
        Err(SelectionError::Extent {
            dtype: Dtype::U8,
            shape: vec![1 << 61],
            reason: ExtentError::Overflow
        })
    );
    assert_eq!(code(Dtype::F4, &[3], &[]), "partial-byte");
}

/// The selection of an index, computed the slow and naive way.
struct Naive {
    shape: Vec<u64>,
    /// Numbers of the elements, in the order of the result.
    elements: Vec<u64>,
}

/// NumPy's rules, one element after the other. `None` if NumPy or this crate rejects the index.
fn naive_select(shape: &[u64], index: &[Index]) -> Option<Naive> {
    let used = index
        .iter()
        .filter(|part| !matches!(part, Index::Rest | Index::NewAxis))
        .count();
    let rests = index.iter().filter(|part| **part == Index::Rest).count();
    let lists = index.iter().filter(|part| matches!(part, Index::Pick(_))).count();
    if used > shape.len() || rests > 1 || lists > 1 {
        return None;
    }
    let mut parts = index.to_vec();
    if rests == 0 {
        parts.push(Index::Rest);
    }
    let at = parts.iter().position(|part| *part == Index::Rest).unwrap();
    let mut spread = parts.clone();
    spread.splice(at..=at, vec![Index::WHOLE; shape.len() - used]);

    let numpy_first = naive_list_dimension(&parts, &spread, true);
    if numpy_first != naive_list_dimension(&parts, &spread, false) {
        return None;
    }

    let mut result = Vec::new();
    let mut taken: Vec<Vec<u64>> = Vec::new();
    let wrap = |at: i64, dim: i64| {
        let place = if at < 0 { at.checked_add(dim)? } else { at };
        u64::try_from(place).ok().filter(|_| (0..dim).contains(&place))
    };
    for part in &spread {
        if *part == Index::NewAxis {
            result.push(1);
            continue;
        }
        let dim = i64::try_from(shape[taken.len()]).unwrap();
        let places: Vec<u64> = match part {
            Index::At(at) => vec![wrap(*at, dim)?],
            Index::Pick(list) => list
                .iter()
                .flat_map(written_out)
                .map(|at| wrap(at, dim))
                .collect::<Option<_>>()?,
            Index::Span { start, stop, step } => {
                let clip = |bound: i64| {
                    let bound = i128::from(bound) + if bound < 0 { i128::from(dim) } else { 0 };
                    bound.clamp(0, i128::from(dim))
                };
                let stop = stop.map_or(i128::from(dim), clip);
                let mut place = start.map_or(0, clip);
                let step = step.unwrap_or(1);
                if step < 1 {
                    return None;
                }
                let mut places = Vec::new();
                while place < stop {
                    places.push(u64::try_from(place).unwrap());
                    place += i128::from(step);
                }
                places
            }
            Index::Rest | Index::NewAxis => unreachable!(),
        };
        if !matches!(part, Index::At(_)) {
            result.push(to_u64(places.len()));
        }
        taken.push(places);
    }
    let mut elements = vec![0];
    for (places, dim) in taken.iter().zip(shape) {
        elements = elements
            .iter()
            .flat_map(|element| places.iter().map(move |place| element * dim + place))
            .collect();
    }
    Some(Naive {
        shape: result,
        elements,
    })
}

/// The dimension of the result in which the list ends up, in NumPy or in PyTorch.
fn naive_list_dimension(parts: &[Index], spread: &[Index], numpy: bool) -> Option<usize> {
    let list = spread.iter().position(|part| matches!(part, Index::Pick(_)))?;
    let fancy: Vec<usize> = (0..parts.len())
        .filter(|&number| matches!(parts[number], Index::At(_) | Index::Pick(_)))
        .collect();
    if numpy && fancy.windows(2).any(|pair| pair[1] != pair[0] + 1) {
        return Some(0);
    }
    let before = spread[..list].iter();
    Some(before.filter(|part| !matches!(part, Index::At(_))).count())
}

/// The elements as runs of bits, merged if they are adjacent.
fn naive_runs(elements: &[u64], bits: u64) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for begin in elements.iter().map(|element| element * bits) {
        match runs.last_mut() {
            Some((_, end)) if *end == begin => *end += bits,
            _ => runs.push((begin, begin + bits)),
        }
    }
    runs
}

fn shapes() -> impl Strategy<Value = Vec<u64>> {
    let dim = prop_oneof![1 => Just(0_u64), 6 => 1..6_u64, 4 => prop::sample::select(vec![2_u64, 4, 8])];
    prop::collection::vec(dim, 0..=4)
}

/// A part of an index that usually fits a dimension of `dim`.
fn part(dim: u64) -> BoxedStrategy<Index> {
    let dim = i64::try_from(dim).unwrap();
    let reach = dim.max(1);
    let bound = prop::option::of(prop_oneof![8 => -reach - 2..=reach + 2, 1 => any::<i64>()]);
    let step = prop::option::of(prop_oneof![8 => 1..=4_i64, 1 => 1..=i64::MAX]);
    let slice =
        (bound.clone(), bound, step).prop_map(|(start, stop, step)| Index::Span { start, stop, step });
    let list = |most: usize| prop::collection::vec(-reach..reach, 0..most).prop_map(Index::from);
    // Neighbours in a list grow together.
    let stretches = prop::collection::vec((0..reach, 1..4_i64), 0..4).prop_map(move |stretches| {
        let places = stretches
            .into_iter()
            .flat_map(|(from, count)| from..(from + count).min(reach));
        Index::from(places.collect::<Vec<i64>>())
    });
    let ranges = prop::collection::vec((-reach..reach, 0..4_u64, -3..=3_i64), 0..4).prop_map(|ranges| {
        let places = ranges
            .into_iter()
            .map(|(start, count, step)| range(start, count, step));
        Index::Pick(places.collect())
    });
    prop_oneof![
        4 => slice,
        2 => Just(Index::WHOLE),
        3 => (-reach..reach).prop_map(Index::At),
        1 => list(5),
        1 => stretches,
        1 => ranges,
    ]
    .boxed()
}

/// An index that usually fits `shape`: a part for some of the first or last dimensions, mixed with others.
fn index_for(shape: &[u64]) -> impl Strategy<Value = Vec<Index>> + use<> {
    let parts: Vec<_> = shape.iter().map(|&dim| part(dim)).collect();
    let rank = shape.len();
    let extra = prop::collection::vec(0..=rank, 0..2);
    (parts, 0..=rank, 0..=rank, any::<bool>(), extra).prop_map(|(parts, head, tail, rest, extra)| {
        let mut index = parts[..head].to_vec();
        if rest {
            index.push(Index::Rest);
            index.extend_from_slice(&parts[head.max(tail)..]);
        }
        for at in extra {
            index.insert(at.min(index.len()), Index::NewAxis);
        }
        // Most have at most one list, because nearly all others would be rejected for the second.
        let mut lists = 0;
        for part in &mut index {
            if let Index::Pick(_) = part {
                lists += 1;
                if lists > 1 {
                    *part = Index::At(0);
                }
            }
        }
        index
    })
}

fn wild_part() -> impl Strategy<Value = Index> {
    let bound = prop::option::of(-6..6_i64);
    prop_oneof![
        (-6..6_i64).prop_map(Index::At),
        (bound.clone(), bound.clone(), bound).prop_map(|(start, stop, step)| Index::Span {
            start,
            stop,
            step
        }),
        prop::collection::vec(-6..6_i64, 0..4).prop_map(Index::from),
        Just(Index::Rest),
        Just(Index::NewAxis),
    ]
}

fn check(dtype: Dtype, shape: &[u64], index: &[Index]) -> Result<(), TestCaseError> {
    let found = Selection::new(dtype, shape, index);
    if let Err(reason) = extent::nbytes(dtype, shape) {
        let is_extent = matches!(found, Err(SelectionError::Extent { reason: found, .. }) if found == reason);
        prop_assert!(is_extent, "{found:?}");
        return Ok(());
    }
    let Some(naive) = naive_select(shape, index) else {
        prop_assert!(found.is_err(), "{found:?}");
        return Ok(());
    };
    let expected = naive_runs(&naive.elements, dtype.bits());
    if expected.iter().any(|(begin, end)| begin % 8 != 0 || end % 8 != 0) {
        let Err(SelectionError::PartialByte {
            begin_bit, end_bit, ..
        }) = found
        else {
            return Err(TestCaseError::fail(alloc::format!("{found:?}")));
        };
        prop_assert!(begin_bit % 8 != 0 || end_bit % 8 != 0);
        let named = naive.elements.contains(&(begin_bit / dtype.bits()));
        prop_assert!(named && begin_bit % dtype.bits() == 0 && begin_bit < end_bit);
        return Ok(());
    }
    let selection = found.map_err(|fault| TestCaseError::fail(fault.to_string()))?;
    let expected: Vec<Run> = expected
        .iter()
        .map(|&(begin, end)| Run {
            begin: begin / 8,
            end: end / 8,
        })
        .collect();
    let runs: Vec<Run> = selection.runs().collect();
    prop_assert_eq!(&runs, &expected);
    prop_assert!(runs.windows(2).all(|pair| pair[0].end != pair[1].begin));
    prop_assert_eq!(selection.shape(), naive.shape);
    prop_assert_eq!(selection.nbytes(), runs.iter().map(Run::nbytes).sum::<u64>());
    prop_assert_eq!(selection.is_contiguous(), runs.len() <= 1);
    let span = runs.iter().copied().reduce(|a, b| Run {
        begin: a.begin.min(b.begin),
        end: a.end.max(b.end),
    });
    prop_assert_eq!(selection.span(), span);
    let rows: Vec<Row> = selection.rows().collect();
    prop_assert_eq!(
        selection.block_count(),
        rows.iter().map(|row| row.count).sum::<u64>()
    );
    prop_assert!(to_u64(runs.len()) <= selection.block_count());
    prop_assert!(to_u64(runs.len()) * 2 >= selection.block_count());
    let bytes_of_rows: Vec<u64> = rows
        .iter()
        .flat_map(|row| (0..row.count).map(move |turn| row.begin + turn * row.stride))
        .zip(rows.iter().flat_map(|row| (0..row.count).map(|_| row.nbytes)))
        .flat_map(|(begin, nbytes)| begin..begin + nbytes)
        .collect();
    let bytes_of_runs: Vec<u64> = runs.iter().flat_map(|run| run.begin..run.end).collect();
    prop_assert_eq!(bytes_of_rows, bytes_of_runs);
    Ok(())
}

/// The positions that the strides describe, in the order of the result.
fn naive_places(taken: &Strides) -> Vec<u64> {
    let dims = taken.shape.iter().zip(&taken.strides);
    dims.fold(vec![taken.begin], |places, (&count, &stride)| {
        places
            .iter()
            .flat_map(|place| (0..count).map(move |turn| place + turn * stride))
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn strides_lead_to_the_elements_of_the_selection(
        (shape, index) in shapes().prop_flat_map(|shape| {
            let index = index_for(&shape);
            (Just(shape), index)
        }),
    ) {
        let selected = Selection::new(Dtype::U8, &shape, &index);
        let strides = Strides::new(&shape, &index);
        let has_list = index.iter().any(|part| matches!(part, Index::Pick(_)));
        match (selected, strides) {
            (Ok(selected), Ok(Some(strides))) => {
                prop_assert!(!has_list);
                prop_assert_eq!(selected.shape(), &strides.shape[..]);
                let bytes: Vec<u64> = selected.runs().flat_map(|run| run.begin..run.end).collect();
                prop_assert_eq!(strides.end, *bytes.iter().max().unwrap());
                prop_assert_eq!(naive_places(&strides), bytes);
            }
            (Ok(selected), Ok(None)) => prop_assert!(has_list || selected.nbytes() == 0),
            (Err(one), Err(other)) => prop_assert_eq!(one, other),
            (one, other) => prop_assert!(false, "{one:?} and {other:?}"),
        }
    }

    #[test]
    fn a_selection_equals_the_naive_loop(
        dtype in prop::sample::select(&DTYPES[..]),
        (shape, index) in shapes().prop_flat_map(|shape| {
            let index = index_for(&shape);
            (Just(shape), index)
        }),
    ) {
        check(dtype, &shape, &index)?;
    }

    #[test]
    fn an_index_is_refused_just_where_the_naive_loop_refuses_it(
        shape in shapes(),
        index in prop::collection::vec(wild_part(), 0..5),
    ) {
        check(Dtype::U8, &shape, &index)?;
    }

    #[test]
    fn a_strided_selection_has_the_elements_of_a_contiguous_one(
        dtype in prop::sample::select(&[Dtype::U8, Dtype::F16][..]),
        (shape, index, strides) in shapes().prop_flat_map(|shape| {
            let (index, strides) = (index_for(&shape), prop::collection::vec(0..40_u64, shape.len()));
            (Just(shape), index, strides)
        }),
    ) {
        let contiguous = Selection::new(Dtype::U8, &shape, &index);
        let strided = Selection::strided(dtype, &shape, &strides, &index);
        let (contiguous, strided) = match (contiguous, strided) {
            (Ok(contiguous), Ok(strided)) => (contiguous, strided),
            (Err(one), Err(other)) => {
                prop_assert_eq!(one.code(), other.code());
                return Ok(());
            }
            (one, other) => return Err(TestCaseError::fail(alloc::format!("{one:?} and {other:?}"))),
        };
        prop_assert_eq!(strided.shape(), contiguous.shape());
        let place = |mut number: u64| {
            let mut place = 0;
            for (dim, stride) in shape.iter().zip(&strides).rev() {
                place += number % dim * stride;
                number /= dim;
            }
            place
        };
        let places: Vec<u64> = contiguous.runs().flat_map(|run| run.begin..run.end).map(place).collect();
        let width = dtype.bits() / 8;
        let expected: Vec<u64> =
            places.iter().flat_map(|place| place * width..(place + 1) * width).collect();
        let found: Vec<u64> = strided.runs().flat_map(|run| run.begin..run.end).collect();
        prop_assert_eq!(&found, &expected);
        prop_assert_eq!(strided.nbytes(), to_u64(expected.len()));
        if let Some(span) = strided.span() {
            prop_assert_eq!(Some(span.begin), expected.iter().copied().min());
            prop_assert_eq!(Some(span.end - 1), expected.iter().copied().max());
        }
        if let Some(taken) = Strides::of(&shape, Some(&strides), &index).unwrap() {
            prop_assert_eq!(Some(taken.begin), places.iter().copied().min());
            prop_assert_eq!(Some(taken.end), places.iter().copied().max());
            prop_assert_eq!(naive_places(&taken), places);
        }
    }

    #[test]
    fn packed_selections_equal_the_naive_loop(
        dtype in prop::sample::select(&DTYPES[..2]),
        (shape, index) in shapes()
            .prop_filter("a whole number of bytes", |shape| {
                extent::nbytes(Dtype::F6_E2M3, shape).is_ok() && !shape.contains(&0)
            })
            .prop_flat_map(|shape| {
                let index = index_for(&shape);
                (Just(shape), index)
            }),
    ) {
        check(dtype, &shape, &index)?;
    }
}
