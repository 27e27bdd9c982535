//! Floats of 4 bits (E2M1), two in a byte with the lower half first: NVFP4, with a scale in F8_E4M3 for each 16 and one for the
//! whole matrix, and MXFP4, with a power of two for each 32.
//!
//! The scales of ModelOpt are multiplied by the number for the whole matrix (`weight_scale_2`), and the scales of
//! compressed-tensors are divided by it (`weight_global_scale`).

use ingot_format::{Dtype, saturating_usize};

use super::codes::{F4, Pairs, groups, length, place};
use super::group::Group;
use super::matrix::{Decode, Tile};
use super::model::{Model, names};
use super::part::{Part, Reads};
use crate::error::Error;

/// The numbers that share a scale.
const NVFP4_BLOCK: u64 = 16;
const MXFP4_BLOCK: u64 = 32;

/// Rows of a tile of exchanged rows and columns: a read of 256 bytes of each stored row.
const ROWS_AT_ONCE: u64 = 512;

/// Find the group of bytes that have scales for blocks.
pub(super) fn find(model: &Model<'_>, weight: &Part) -> Result<Option<Group>, Error> {
    if weight.dtype != Dtype::U8 && weight.dtype != Dtype::F4 {
        return Ok(None);
    }
    if let Some(stem) = weight.name.strip_suffix("_blocks") {
        return blocks(model, weight, stem).map(Some);
    }
    let packed = weight.name.strip_suffix("_packed");
    let stem = packed.unwrap_or(&weight.name);
    let Some(scales) = model.part(&format!("{stem}_scale")) else {
        return match packed {
            Some(_) => Err(model.refuse(&weight.name, format!("its part `{stem}_scale` is missing"))),
            None => Ok(None),
        };
    };
    let divisor = model.part(&format!("{stem}_global_scale"));
    let is_divided = divisor.is_some();
    match divisor.or_else(|| model.part(&format!("{stem}_scale_2"))) {
        Some(whole) => nvfp4(model, weight, stem, scales, &whole, is_divided).map(Some),
        None if matches!(scales.dtype, Dtype::U8 | Dtype::F8_E8M0) => {
            mxfp4(model, weight, stem, scales).map(Some)
        }
        None if packed.is_some() => Err(model.refuse(&weight.name, "it has no scale for the whole matrix")),
        None => Ok(None),
    }
}

/// Return the group of an NVFP4 weight.
fn nvfp4(
    model: &Model<'_>,
    weight: &Part,
    stem: &str,
    scales: Part,
    whole: &Part,
    is_divided: bool,
) -> Result<Group, Error> {
    let shape = with_last(&weight.shape, 2 * weight.columns());
    model.check(
        &scales,
        &[Dtype::F8_E4M3],
        &with_last(&shape, (2 * weight.columns()).div_ceil(NVFP4_BLOCK)),
    )?;
    let parts = names([weight, &scales, whole]);
    let whole = Whole::read(model, weight, whole, is_divided)?;
    Ok(group(
        stem,
        shape,
        parts,
        Floats::new(weight, scales, NVFP4_BLOCK, Some(whole)),
    ))
}

/// Return the group of an MXFP4 weight.
fn mxfp4(model: &Model<'_>, weight: &Part, stem: &str, scales: Part) -> Result<Group, Error> {
    let shape = with_last(&weight.shape, 2 * weight.columns());
    let scales = scales.of(Dtype::F8_E8M0);
    model.check(
        &scales,
        &[Dtype::F8_E8M0],
        &with_last(&shape, (2 * weight.columns()).div_ceil(MXFP4_BLOCK)),
    )?;
    let parts = names([weight, &scales]);
    Ok(group(
        stem,
        shape,
        parts,
        Floats::new(weight, scales, MXFP4_BLOCK, None),
    ))
}

/// Return the group of an MXFP4 weight in blocks of 16 bytes. The blocks of an expert run along the inputs, and the
/// model has the inputs first: the result is transposed.
fn blocks(model: &Model<'_>, weight: &Part, stem: &str) -> Result<Group, Error> {
    let scales = model.needed(weight, &format!("{stem}_scales"))?;
    let [leading @ .., outputs, many, 16] = weight.shape.as_slice() else {
        let reason = format!("expected the shape […, 16], found {:?}", weight.shape);
        return Err(model.refuse(&weight.name, reason));
    };
    let expected = &weight.shape[..weight.shape.len() - 1];
    model.check(&scales, &[Dtype::U8, Dtype::F8_E8M0], expected)?;
    let scales = scales.of(Dtype::F8_E8M0);
    let parts = names([weight, &scales]);
    let (inputs, matrices) = (many * MXFP4_BLOCK, leading.iter().product::<u64>());
    let rows = matrices * outputs;
    let (weight, scales) = (
        weight.clone().seen_as(rows, inputs / 2),
        scales.seen_as(rows, *many),
    );
    let floats = Floats::new(&weight, scales, MXFP4_BLOCK, None);
    if leading.is_empty() {
        return Ok(group(stem, vec![*outputs, inputs], parts, floats));
    }
    let turned = Turned {
        floats,
        outputs: *outputs,
        inputs,
    };
    Ok(Group {
        name: stem.to_owned(),
        shape: [leading, &[inputs, *outputs]].concat(),
        matrix: [matrices * inputs, *outputs],
        decoder: Box::new(turned),
        parts,
    })
}

fn group(name: &str, shape: Vec<u64>, parts: Vec<String>, floats: Floats) -> Group {
    Group {
        name: name.to_owned(),
        matrix: [floats.weight.rows(), 2 * floats.weight.columns()],
        shape,
        decoder: Box::new(floats),
        parts,
    }
}

/// Return a shape with another last dimension.
fn with_last(shape: &[u64], last: u64) -> Vec<u64> {
    let leading = &shape[..shape.len().saturating_sub(1)];
    [leading, &[last]].concat()
}

/// A number for each matrix, by which its scales are multiplied or divided.
#[derive(Debug)]
pub(super) struct Whole {
    factors: Vec<f32>,
    /// Rows of one matrix.
    rows: u64,
    is_divided: bool,
}

impl Whole {
    /// Read the numbers of a weight.
    pub(super) fn read(
        model: &Model<'_>,
        weight: &Part,
        whole: &Part,
        is_divided: bool,
    ) -> Result<Whole, Error> {
        let matrices: u64 = weight.shape.iter().rev().skip(2).product();
        let count = whole.count();
        if count != 1 && count != matrices || !whole.is_float() {
            let reason = format!(
                "expected one float for each of {matrices} matrices, found {count} of {}",
                whole.dtype
            );
            return Err(model.refuse(&whole.name, reason));
        }
        let factors = model
            .reads()
            .floats(&whole.clone().seen_as(1, count), 0..1, 0..count)?;
        Ok(Whole {
            factors,
            rows: (weight.rows() / matrices.max(1)).max(1),
            is_divided,
        })
    }

    fn scale(&self, scale: f32, row: u64) -> f32 {
        let number = saturating_usize(row / self.rows).min(self.factors.len().saturating_sub(1));
        let factor = self.factors[number];
        if self.is_divided {
            scale / factor
        } else {
            scale * factor
        }
    }
}

/// The decoder.
#[derive(Debug)]
pub(super) struct Floats {
    weight: Part,
    scales: Part,
    block: u64,
    whole: Option<Whole>,
    pairs: Pairs,
}

impl Floats {
    /// Return the decoder of bytes of two numbers each.
    pub(super) fn new(weight: &Part, scales: Part, block: u64, whole: Option<Whole>) -> Floats {
        Floats {
            weight: weight.clone().of(Dtype::U8),
            scales,
            block,
            whole,
            pairs: Pairs::new(&F4, true),
        }
    }
}

impl Decode for Floats {
    fn decode(&self, tile: &Tile, reads: Reads<'_>, values: &mut [f32]) -> Result<(), Error> {
        let (rows, columns) = (&tile.rows, &tile.columns);
        let span = columns.start / 2..columns.end.div_ceil(2);
        let needed = columns.start / self.block..columns.end.div_ceil(self.block);
        let bytes = reads.bytes(&self.weight, rows.clone(), span.clone())?;
        let scales = reads.floats(&self.scales, rows.clone(), needed.clone())?;
        let first = place(columns.start, 2 * span.start);
        let parts = bytes
            .chunks_exact(length(&span))
            .zip(scales.chunks_exact(length(&needed)));
        for ((row, values), (bytes, scales)) in
            rows.clone().zip(values.chunks_exact_mut(tile.width())).zip(parts)
        {
            self.pairs.look_up(bytes, first, values);
            for (group, range) in groups(columns, self.block) {
                let scale = scales[place(group, needed.start)];
                let scale = self.whole.as_ref().map_or(scale, |whole| whole.scale(scale, row));
                values[range].iter_mut().for_each(|value| *value *= scale);
            }
        }
        Ok(())
    }
}

/// The matrices of experts with rows and columns exchanged.
#[derive(Debug)]
struct Turned {
    floats: Floats,
    outputs: u64,
    inputs: u64,
}

impl Decode for Turned {
    fn rows_at_once(&self) -> u64 {
        ROWS_AT_ONCE
    }

    fn decode(&self, tile: &Tile, reads: Reads<'_>, values: &mut [f32]) -> Result<(), Error> {
        let (mut row, mut rest) = (tile.rows.start, values);
        // Tiles may have rows of several matrices.
        while row < tile.rows.end {
            let (matrix, first) = (row / self.inputs, row % self.inputs);
            let last = self.inputs.min(first + tile.rows.end - row);
            let below = matrix * self.outputs;
            let stored = Tile {
                rows: below + tile.columns.start..below + tile.columns.end,
                columns: first..last,
            };
            let mut found = vec![0.0; stored.height() * stored.width()];
            self.floats.decode(&stored, reads, &mut found)?;
            let (now, later) = rest.split_at_mut(found.len());
            now.copy_from_slice(&super::codes::transposed(&found, stored.height()));
            (row, rest) = (row + last - first, later);
        }
        Ok(())
    }
}
