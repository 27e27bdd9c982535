//! Weights of 8 bits with a scale for each block, each row, or all of the matrix: FP8 of DeepSeek, compressed-tensors, FBGEMM and
//! ComfyUI, MXFP8, and integers of 8 bits.
//!
//! `(weight - zero point) × scale`. `weight_scale_inv` multiplies too, despite its name.

use std::ops::Range;

use ingot_format::Dtype;

use super::codes::{groups, length, place};
use super::group::Group;
use super::matrix::{Decode, Tile};
use super::model::{FLOATS, Model, names};
use super::part::{Part, Reads};
use crate::convert::convert;
use crate::error::Error;

/// The block size of most FP8 models with scales for blocks.
const BLOCK: u64 = 128;

const FP8: [Dtype; 4] = [
    Dtype::F8_E4M3,
    Dtype::F8_E5M2,
    Dtype::F8_E4M3FNUZ,
    Dtype::F8_E5M2FNUZ,
];

/// Find the group of a weight of 8 bits that has scales.
pub(super) fn find(model: &Model<'_>, weight: &Part) -> Result<Option<Group>, Error> {
    if !FP8.contains(&weight.dtype) && weight.dtype != Dtype::I8 {
        return Ok(None);
    }
    let Some(scales) = scales_of(model, &weight.name) else {
        return Ok(None);
    };
    let zeros = model.part(&format!("{}_zero_point", weight.name));
    let parts: Vec<_> = [Some(weight), Some(&scales), zeros.as_ref()]
        .into_iter()
        .flatten()
        .collect();
    let (parts, name) = (names(parts), weight.name.clone());
    let decoder = Scaled::new(model, weight.clone(), scales, zeros)?;
    Ok(Some(Group {
        name,
        shape: weight.shape.clone(),
        matrix: [weight.rows(), weight.columns()],
        decoder: Box::new(decoder),
        parts,
    }))
}

/// Return the scales of a weight.
fn scales_of(model: &Model<'_>, name: &str) -> Option<Part> {
    let stem = name.strip_suffix("weight");
    let mut likely = vec![format!("{name}_scale_inv"), format!("{name}_scale")];
    likely.extend(stem.map(|stem| format!("{stem}scale_weight")));
    model.first(&likely)
}

/// The decoder.
#[derive(Debug)]
pub(super) struct Scaled {
    weight: Part,
    scales: Part,
    zeros: Option<Part>,
    grid: Grid,
    /// The number of each byte of the weight.
    numbers: Box<[f32; 256]>,
}

impl Scaled {
    /// Return the decoder of a weight.
    pub(super) fn new(
        model: &Model<'_>,
        weight: Part,
        scales: Part,
        zeros: Option<Part>,
    ) -> Result<Scaled, Error> {
        // Exponents are stored as bytes by libraries for which PyTorch had no dtype yet.
        let scales = if scales.dtype == Dtype::U8 {
            scales.of(Dtype::F8_E8M0)
        } else {
            scales
        };
        model.check(&scales, &[&FLOATS[..], &[Dtype::F8_E8M0]].concat(), &scales.shape)?;
        let Some(grid) = Grid::new(&weight.shape, &scales.shape, model.config.block_size()) else {
            let reason = format!(
                "scales of shape {:?} fit no blocks of {:?}",
                scales.shape, weight.shape
            );
            return Err(model.refuse(&scales.name, reason));
        };
        if let Some(zeros) = &zeros {
            model.check(zeros, &[&[Dtype::I8], &FLOATS[..], &FP8].concat(), &scales.shape)?;
        }
        let [rows, columns] = grid.shape;
        Ok(Scaled {
            numbers: Box::new(numbers_of(weight.dtype)),
            weight,
            scales: scales.seen_as(rows, columns),
            zeros: zeros.map(|zeros| zeros.seen_as(rows, columns)),
            grid,
        })
    }
}

impl Decode for Scaled {
    fn decode(&self, tile: &Tile, reads: Reads<'_>, values: &mut [f32]) -> Result<(), Error> {
        let (rows, columns) = (&tile.rows, &tile.columns);
        let weights = reads.bytes(&self.weight, rows.clone(), columns.clone())?;
        let (down, across) = (self.grid.rows(rows), self.grid.columns(columns));
        let scales = reads.floats(&self.scales, down.clone(), across.clone())?;
        let zeros = match &self.zeros {
            Some(zeros) => Some(numbers(zeros, reads, down.clone(), across.clone())?),
            None => None,
        };
        let (width, step) = (tile.width(), length(&across));
        for (number, row) in rows.clone().enumerate() {
            let at = place(self.grid.row(row), down.start) * step;
            let from = &weights[number * width..][..width];
            let to = &mut values[number * width..][..width];
            for (group, range) in groups(columns, self.grid.block_columns) {
                let at = at + place(group, across.start);
                let zero = zeros.as_ref().map_or(0.0, |zeros| zeros[at]);
                scale(
                    &self.numbers,
                    &from[range.clone()],
                    zero,
                    scales[at],
                    &mut to[range],
                );
            }
        }
        Ok(())
    }
}

fn scale(numbers: &[f32; 256], weights: &[u8], zero: f32, scale: f32, values: &mut [f32]) {
    for (value, weight) in values.iter_mut().zip(weights) {
        *value = (numbers[usize::from(*weight)] - zero) * scale;
    }
}

/// Return the number of each byte of a dtype of 8 bits.
fn numbers_of(dtype: Dtype) -> [f32; 256] {
    let bytes: [u8; 256] = std::array::from_fn(|byte| byte.to_le_bytes()[0]);
    if dtype == Dtype::I8 {
        return bytes.map(|byte| f32::from(byte.cast_signed()));
    }
    let mut floats = [0; 4 * 256];
    convert(dtype, Dtype::F32, &bytes, &mut floats);
    let floats = floats.as_chunks::<4>().0;
    std::array::from_fn(|byte| f32::from_le_bytes(floats[byte]))
}

/// Return a part of a matrix of floats, or of integers of 8 bits.
fn numbers(part: &Part, reads: Reads<'_>, rows: Range<u64>, columns: Range<u64>) -> Result<Vec<f32>, Error> {
    if part.dtype != Dtype::I8 {
        return reads.floats(part, rows, columns);
    }
    let bytes = reads.bytes(part, rows, columns)?;
    Ok(bytes.iter().map(|byte| f32::from(byte.cast_signed())).collect())
}

/// Which scale each element of a matrix has.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Grid {
    /// The rows and columns of the scales.
    shape: [u64; 2],
    /// Rows of one matrix: tensors of three dimensions and more have several.
    matrix_rows: u64,
    /// Rows of scales of one matrix; 0 if all matrices have the same.
    matrix_scales: u64,
    block_rows: u64,
    block_columns: u64,
}

impl Grid {
    /// Return the grid of scales of a weight, if their shapes fit. The last block of a row or column may be incomplete.
    fn new(weight: &[u64], scales: &[u64], config: Option<[u64; 2]>) -> Option<Grid> {
        let [leading @ .., rows, columns] = weight else {
            return None;
        };
        let scales = of_rank(weight, scales)?;
        let [many @ .., down, across] = scales.as_slice() else {
            return None;
        };
        let is_shared = many.iter().all(|&count| count == 1);
        if !is_shared && many != leading {
            return None;
        }
        let [block_rows, block_columns] = config.unwrap_or([BLOCK, BLOCK]);
        // Scales of the configuration's blocks, of rows or of the whole.
        let is_usual = (
            rows.div_ceil(block_rows.max(1)),
            columns.div_ceil(block_columns.max(1)),
        ) == (*down, *across);
        if config.is_some() && !is_usual && !(*across == 1 && (*down == 1 || down == rows)) {
            return None;
        }
        Some(Grid {
            shape: [many.iter().product::<u64>() * down, *across],
            matrix_rows: (*rows).max(1),
            matrix_scales: if is_shared { 0 } else { *down },
            block_rows: block(*rows, *down, block_rows)?,
            block_columns: block(*columns, *across, block_columns)?,
        })
    }

    /// Return the row of scales of a row.
    fn row(&self, row: u64) -> u64 {
        row / self.matrix_rows * self.matrix_scales + row % self.matrix_rows / self.block_rows
    }

    /// Return the rows of scales of these rows.
    fn rows(&self, rows: &Range<u64>) -> Range<u64> {
        if rows.is_empty() {
            return 0..0;
        }
        // If matrices share their scales, rows of two matrices need rows of scales that do not follow each other:
        // return all.
        if self.matrix_scales == 0 && rows.start / self.matrix_rows != (rows.end - 1) / self.matrix_rows {
            return 0..self.shape[0];
        }
        self.row(rows.start)..self.row(rows.end - 1) + 1
    }

    /// Return the columns of scales of these columns.
    fn columns(&self, columns: &Range<u64>) -> Range<u64> {
        columns.start / self.block_columns..columns.end.div_ceil(self.block_columns)
    }
}

/// Return the shape of scales with as many dimensions as their weight has.
fn of_rank(weight: &[u64], scales: &[u64]) -> Option<Vec<u64>> {
    let ones = |count: usize| vec![1; count];
    match scales {
        _ if scales.len() == weight.len() => Some(scales.to_vec()),
        _ if scales.iter().all(|&dim| dim == 1) => Some(ones(weight.len())),
        // A scale for each index of the first dimension: for each row, or for each matrix of experts.
        [first] if weight.first() == Some(first) => Some([vec![*first], ones(weight.len() - 1)].concat()),
        _ => None,
    }
}

/// Return the length of a block, if `count` of them cover `length` elements: the usual one if it fits.
fn block(length: u64, count: u64, usual: u64) -> Option<u64> {
    let fits = |block: &u64| *block > 0 && length.div_ceil(*block) == count;
    let even = length.checked_div(count).filter(|block| block * count == length);
    [(count == 1).then_some(length.max(1)), Some(usual), even]
        .into_iter()
        .flatten()
        .find(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_for_a_tensor_for_rows_or_for_blocks() {
        let grid = |weight: &[u64], scales: &[u64]| Grid::new(weight, scales, None);
        let blocks = |weight: &[u64], scales: &[u64]| {
            grid(weight, scales).map(|grid| (grid.block_rows, grid.block_columns))
        };
        assert_eq!(blocks(&[300, 200], &[]), Some((300, 200)));
        assert_eq!(blocks(&[300, 200], &[1]), Some((300, 200)));
        assert_eq!(blocks(&[300, 200], &[300]), Some((1, 200)));
        assert_eq!(blocks(&[300, 200], &[300, 1]), Some((1, 200)));
        assert_eq!(blocks(&[300, 200], &[3, 2]), Some((128, 128)));
        assert_eq!(blocks(&[300, 64], &[300, 2]), Some((1, 32)));
        assert_eq!(blocks(&[300, 200], &[7, 2]), None);
        assert_eq!(blocks(&[300, 200], &[3, 3]), None);
        let experts = grid(&[4, 300, 200], &[4, 3, 2]).unwrap();
        assert_eq!(
            (
                experts.shape,
                experts.row(299),
                experts.row(300),
                experts.row(600)
            ),
            ([12, 2], 2, 3, 6)
        );
        assert_eq!(grid(&[4, 300, 200], &[4]).unwrap().row(600), 2);
        assert_eq!(
            grid(&[4, 300, 200], &[1, 300, 1]).unwrap().rows(&(299..301)),
            0..300
        );
    }
}
