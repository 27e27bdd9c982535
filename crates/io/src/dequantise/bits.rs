//! bitsandbytes: NF4 and FP4, as indices of a table with a scale for each block, and integers of 8 bits with the largest magnitude
//! of each row.
//!
//! Blocks of numbers of 4 bits do not end with rows. Their scales may be quantised too, after their mean was
//! subtracted.

use ingot_format::{Dtype, saturating_usize, to_u64};
use serde_json::Value;

use super::codes::{Pairs, groups, place};
use super::group::Group;
use super::matrix::{Decode, Tile};
use super::model::{Model, names};
use super::part::{Part, Reads};
use crate::error::Error;

/// The approximation of 1/127 in bitsandbytes.
const PER_UNIT: f32 = 7.874_016e-3;

/// Find the group of a weight with a state of 4 bits, or with row maxima.
pub(super) fn find(model: &Model<'_>, weight: &Part) -> Result<Option<Group>, Error> {
    match weight.dtype {
        Dtype::I8 => rows(model, weight),
        Dtype::U8 | Dtype::BF16 | Dtype::F16 | Dtype::F32 => table(model, weight),
        _ => Ok(None),
    }
}

/// Find the group of integers of 8 bits.
fn rows(model: &Model<'_>, weight: &Part) -> Result<Option<Group>, Error> {
    let Some(stem) = weight.name.strip_suffix("weight") else {
        return Ok(None);
    };
    let format = model.part(&format!("{stem}weight_format"));
    let maxima = format!("{stem}SCB");
    if format.is_none() && model.part(&maxima).is_none() {
        return Ok(None);
    }
    let maxima = model.needed(weight, &maxima)?;
    model.check(&maxima, &[Dtype::F32], &[weight.rows()])?;
    let parts = names([weight, &maxima].into_iter().chain(&format));
    if let Some(format) = &format
        && model.reads().all(format)?.iter().any(|byte| *byte != 0)
    {
        return Err(model.refuse(
            &weight.name,
            "its integers are in the order of a kernel: expected rows",
        ));
    }
    Ok(Some(Group {
        name: weight.name.clone(),
        shape: weight.shape.clone(),
        matrix: [weight.rows(), weight.columns()],
        decoder: Box::new(Rows {
            weight: weight.clone(),
            maxima: maxima.seen_as(weight.rows(), 1),
        }),
        parts,
    }))
}

#[derive(Debug)]
struct Rows {
    weight: Part,
    maxima: Part,
}

impl Decode for Rows {
    fn decode(&self, tile: &Tile, reads: Reads<'_>, values: &mut [f32]) -> Result<(), Error> {
        let bytes = reads.bytes(&self.weight, tile.rows.clone(), tile.columns.clone())?;
        let maxima = reads.floats(&self.maxima, tile.rows.clone(), 0..1)?;
        let rows = values
            .chunks_exact_mut(tile.width())
            .zip(bytes.chunks_exact(tile.width()));
        for ((values, bytes), largest) in rows.zip(maxima) {
            for (value, byte) in values.iter_mut().zip(bytes) {
                *value = f32::from(byte.cast_signed()) * largest * PER_UNIT;
            }
        }
        Ok(())
    }
}

/// Find the group of indices of 4 bits.
fn table(model: &Model<'_>, weight: &Part) -> Result<Option<Group>, Error> {
    let name = |part: &str| format!("{}.{part}", weight.name);
    let states = ["quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"].map(name);
    let Some(state) = model.first(&states) else {
        if ["quant_map", "absmax"]
            .iter()
            .all(|part| model.part(&name(part)).is_some())
        {
            let reason = "its part `quant_state` is missing, which has its shape";
            return Err(model.refuse(&weight.name, reason));
        }
        return Ok(None);
    };
    let text = model.reads().all(&state)?;
    let Some(settings) = Settings::parse(&text) else {
        return Err(model.refuse(&state.name, "it is no JSON with a shape and a blocksize"));
    };
    let (map, absmax) = (
        model.needed(weight, &name("quant_map"))?,
        model.needed(weight, &name("absmax"))?,
    );
    let count: u64 = settings.shape.iter().product();
    let weight_nbytes = weight.count() * weight.dtype.bits() / 8;
    if weight_nbytes != count.div_ceil(2) {
        let reason = format!("{weight_nbytes} bytes do not hold {count} numbers of 4 bits");
        return Err(model.refuse(&weight.name, reason));
    }
    model.check(&map, &[Dtype::F32], &[16])?;
    let blocks = count.div_ceil(settings.block);
    model.check(&absmax, &[Dtype::F32, Dtype::U8], &[blocks])?;
    let nested = nested(model, weight, &absmax, &settings)?;
    let more: Vec<_> = ["nested_absmax", "nested_quant_map"]
        .iter()
        .filter_map(|part| model.part(&name(part)))
        .collect();
    let parts = names([weight, &map, &absmax, &state].into_iter().chain(&more));
    let numbers: Vec<f32> = model.reads().floats(&map, 0..1, 0..16)?;
    let numbers = std::array::from_fn(|at| numbers.get(at).copied().unwrap_or_default());
    Ok(Some(Group {
        name: weight.name.clone(),
        // Blocks do not end with rows, so all numbers are one row.
        matrix: [1, count],
        shape: settings.shape,
        decoder: Box::new(Table {
            weight: bytes_of(weight, weight_nbytes),
            absmax,
            block: settings.block,
            nested,
            pairs: Pairs::new(&numbers, false),
        }),
        parts,
    }))
}

/// Return the bytes of a weight, whose dtype may be of several bytes.
fn bytes_of(weight: &Part, nbytes: u64) -> Part {
    weight.clone().of(Dtype::U8).seen_as(1, nbytes)
}

/// The state of a quantisation, which is a JSON text in a tensor.
#[derive(Debug)]
struct Settings {
    shape: Vec<u64>,
    block: u64,
    nested_block: Option<u64>,
    offset: f32,
}

impl Settings {
    fn parse(text: &[u8]) -> Option<Settings> {
        let state: Value = serde_json::from_slice(text).ok()?;
        let shape = state.get("shape")?.as_array()?.iter().map(Value::as_u64);
        let shape: Vec<u64> = shape.collect::<Option<_>>()?;
        shape
            .iter()
            .try_fold(1_u64, |count, dim| count.checked_mul(*dim))?;
        let size = |key: &str| state.get(key)?.as_u64().filter(|size| *size > 0);
        Some(Settings {
            shape,
            block: size("blocksize")?,
            nested_block: size("nested_blocksize"),
            offset: rounded(
                state
                    .get("nested_offset")
                    .and_then(Value::as_f64)
                    .unwrap_or_default(),
            ),
        })
    }
}

#[allow(clippy::cast_possible_truncation, reason = "rounds to the nearest")]
fn rounded(number: f64) -> f32 {
    number as f32
}

/// Return the table of quantised scales.
fn nested(
    model: &Model<'_>,
    weight: &Part,
    absmax: &Part,
    settings: &Settings,
) -> Result<Option<Nested>, Error> {
    if absmax.dtype != Dtype::U8 {
        return Ok(None);
    }
    let Some(block) = settings.nested_block else {
        return Err(model.refuse(&absmax.name, "the state has no nested_blocksize"));
    };
    let map = model.needed(weight, &format!("{}.nested_quant_map", weight.name))?;
    let scales = model.needed(weight, &format!("{}.nested_absmax", weight.name))?;
    model.check(&map, &[Dtype::F32], &[256])?;
    model.check(&scales, &[Dtype::F32], &[absmax.count().div_ceil(block)])?;
    let map = model.reads().floats(&map, 0..1, 0..256)?;
    Ok(Some(Nested {
        map,
        scales,
        block,
        offset: settings.offset,
    }))
}

/// Scales that are quantised.
#[derive(Debug)]
struct Nested {
    map: Vec<f32>,
    scales: Part,
    block: u64,
    offset: f32,
}

impl Nested {
    fn decode(&self, codes: &[u8], first: u64, reads: Reads<'_>) -> Result<Vec<f32>, Error> {
        let range = first..first + to_u64(codes.len());
        let needed = range.start / self.block..range.end.div_ceil(self.block);
        let scales = reads.floats(&self.scales, 0..1, needed.clone())?;
        let mut found = vec![0.0; codes.len()];
        for (group, part) in groups(&range, self.block) {
            let scale = scales[place(group, needed.start)];
            for (value, code) in found[part.clone()].iter_mut().zip(&codes[part]) {
                *value = self.map[usize::from(*code)] * scale + self.offset;
            }
        }
        Ok(found)
    }
}

#[derive(Debug)]
struct Table {
    weight: Part,
    absmax: Part,
    block: u64,
    nested: Option<Nested>,
    pairs: Pairs,
}

impl Decode for Table {
    fn decode(&self, tile: &Tile, reads: Reads<'_>, values: &mut [f32]) -> Result<(), Error> {
        let numbers = &tile.columns;
        let span = numbers.start / 2..numbers.end.div_ceil(2);
        let needed = numbers.start / self.block..numbers.end.div_ceil(self.block);
        let bytes = reads.bytes(&self.weight, 0..1, span.clone())?;
        let scales = match &self.nested {
            None => reads.floats(&self.absmax, 0..1, needed.clone())?,
            Some(nested) => {
                let codes = reads.bytes(&self.absmax, 0..1, needed.clone())?;
                nested.decode(&codes, needed.start, reads)?
            }
        };
        self.pairs
            .look_up(&bytes, saturating_usize(numbers.start % 2), values);
        for (group, range) in groups(numbers, self.block) {
            let scale = scales[place(group, needed.start)];
            values[range].iter_mut().for_each(|value| *value *= scale);
        }
        Ok(())
    }
}
