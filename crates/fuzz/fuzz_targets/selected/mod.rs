//! Indexes and their selections, computed element by element: for the targets `selection` and `plan`.

use ingot_format::{Dtype, Index, Places};
use libfuzzer_sys::arbitrary::{Result, Unstructured};

/// Returns one part of an index, usually near the valid indices.
pub fn part(input: &mut Unstructured<'_>) -> Result<Index> {
    fn place(input: &mut Unstructured<'_>) -> Result<i64> {
        if input.ratio(1, 16)? {
            input.arbitrary()
        } else {
            input.int_in_range(-8..=8)
        }
    }
    fn places(input: &mut Unstructured<'_>) -> Result<Places> {
        if input.ratio(1, 2)? {
            return Ok(Places::from(place(input)?));
        }
        // A number of indices that fits into memory: each backward index is a run of its own.
        let count = if input.ratio(1, 16)? { 1 << 16 } else { 4 };
        Ok(Places {
            start: place(input)?,
            count: input.int_in_range(0..=count)?,
            step: if input.ratio(1, 16)? { input.arbitrary()? } else { input.int_in_range(-3..=3)? },
        })
    }
    fn bound(input: &mut Unstructured<'_>) -> Result<Option<i64>> {
        if input.arbitrary()? {
            Ok(Some(place(input)?))
        } else {
            Ok(None)
        }
    }
    Ok(match input.int_in_range(0..=9)? {
        0..=2 => Index::At(place(input)?),
        3..=6 => Index::Span {
            start: bound(input)?,
            stop: bound(input)?,
            step: match input.int_in_range(0..=9)? {
                0 => Some(input.arbitrary()?),
                step @ 1..=4 => Some(step),
                _ => None,
            },
        },
        7 => {
            let mut list = Vec::new();
            for _ in 0..input.int_in_range(0..=5)? {
                list.push(places(input)?);
            }
            Index::Pick(list)
        }
        8 => Index::Rest,
        _ => Index::NewAxis,
    })
}

/// The selection of an index, computed element by element.
pub struct Naive {
    pub shape: Vec<u64>,
    /// Ranges of bits in the order of the result, with adjacent ones merged.
    pub bits: Vec<(u64, u64)>,
}

pub fn naive(dtype: Dtype, shape: &[u64], index: &[Index]) -> Naive {
    let speaks = index
        .iter()
        .filter(|part| !matches!(part, Index::Rest | Index::NewAxis))
        .count();
    let mut result = Vec::new();
    let mut axes: Vec<Vec<u64>> = Vec::new();
    let whole = |axes: &mut Vec<Vec<u64>>, result: &mut Vec<u64>| {
        result.push(shape[axes.len()]);
        axes.push((0..shape[axes.len()]).collect());
    };
    for part in index {
        match part {
            Index::NewAxis => result.push(1),
            Index::Rest => (speaks..shape.len()).for_each(|_| whole(&mut axes, &mut result)),
            Index::At(at) => {
                let size = shape[axes.len()];
                axes.push(vec![counted(*at, size)]);
            }
            Index::Pick(list) => {
                let size = shape[axes.len()];
                let written_out = |places: &Places| {
                    let Places { start, count, step } = *places;
                    (0..count as i64).map(move |turns| counted(start + turns * step, size))
                };
                let places: Vec<u64> = list.iter().flat_map(written_out).collect();
                result.push(places.len() as u64);
                axes.push(places);
            }
            Index::Span { start, stop, step } => {
                let size = i128::from(shape[axes.len()]);
                let clip = |bound: i64| match i128::from(bound) {
                    bound if bound < 0 => (bound + size).max(0),
                    bound => bound.min(size),
                };
                let (start, stop) = (start.map_or(0, clip), stop.map_or(size, clip));
                let step = i128::from(step.unwrap_or(1));
                let places: Vec<u64> = (0..size)
                    .filter(|&at| start <= at && at < stop && (at - start) % step == 0)
                    .map(|at| at as u64)
                    .collect();
                result.push(places.len() as u64);
                axes.push(places);
            }
        }
    }
    while axes.len() < shape.len() {
        whole(&mut axes, &mut result);
    }
    let mut elements = vec![0];
    for (places, size) in axes.iter().zip(shape) {
        elements = elements
            .iter()
            .flat_map(|before| places.iter().map(move |place| before * size + place))
            .collect();
    }
    let bits = elements
        .iter()
        .map(|element| (element * dtype.bits(), (element + 1) * dtype.bits()));
    Naive {
        shape: result,
        bits: merged(bits),
    }
}

fn counted(at: i64, size: u64) -> u64 {
    if at < 0 {
        size - at.unsigned_abs()
    } else {
        at.unsigned_abs()
    }
}

/// Returns the ranges, merged if one begins where the previous one ends.
pub fn merged(ranges: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (begin, end) in ranges {
        match merged.last_mut() {
            Some(last) if last.1 == begin => last.1 = end,
            _ => merged.push((begin, end)),
        }
    }
    merged
}
