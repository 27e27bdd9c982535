//! pack-quantized weights of compressed-tensors: integers of 1 to 8 bits along the rows of `weight_packed`.
//!
//! `(weight - zero point) × scale`. Half of the range is added to the integers and to the zero points before they are
//! stored. Zero points are packed along the columns; a weight without them has a zero point of 0. `weight_g_idx` has
//! the group of each column; without it, groups are consecutive columns.

use std::ops::Range;

use ingot_format::Dtype;

use super::codes::{Packing, bytes_of, length, transposed};
use super::group::Group;
use super::matrix::{Decode, Tile};
use super::model::{Model, names};
use super::order::{GroupIndex, Groups};
use super::part::{Part, Reads};
use crate::error::Error;

/// Find the group of a `weight_packed` of integers.
pub(super) fn find(model: &Model<'_>, weight: &Part) -> Result<Option<Group>, Error> {
    let Some(stem) = weight
        .name
        .strip_suffix("_packed")
        .filter(|_| weight.dtype == Dtype::I32)
    else {
        return Ok(None);
    };
    let scales = model.needed(weight, &format!("{stem}_scale"))?;
    let shape = model.needed(weight, &format!("{stem}_shape"))?;
    let zeros = model.part(&format!("{stem}_zero_point"));
    let order = model.part(&format!("{stem}_g_idx"));
    let parts = names([weight, &scales, &shape].into_iter().chain(&zeros).chain(&order));
    let columns = columns_of(model, weight, &shape)?;
    let decoder = Packed::new(model, weight.clone(), columns, scales, zeros, order)?;
    let leading = &weight.shape[..weight.shape.len() - 1];
    Ok(Some(Group {
        name: stem.to_owned(),
        shape: [leading, &[columns]].concat(),
        matrix: [weight.rows(), columns],
        decoder: Box::new(decoder),
        parts,
    }))
}

/// Return the columns of the weight: the last number in the tensor of its shape.
fn columns_of(model: &Model<'_>, weight: &Part, shape: &Part) -> Result<u64, Error> {
    let bytes = model.reads().all(shape)?;
    let width = if shape.dtype == Dtype::I64 { 8 } else { 4 };
    let last = bytes.len().checked_sub(width).map(|at| &bytes[at..]);
    let read = |bytes: &[u8]| match bytes.try_into() {
        Ok(bytes) => u64::try_from(i64::from_le_bytes(bytes)).ok(),
        Err(_) => Some(u64::from(u32::from_le_bytes(bytes.try_into().ok()?))),
    };
    let found = last.and_then(read).filter(|columns| *columns > 0);
    let is_known = matches!(shape.dtype, Dtype::I64 | Dtype::I32) && weight.shape.len() > 1;
    found
        .filter(|_| is_known)
        .ok_or_else(|| model.refuse(&shape.name, "it is not a shape"))
}

#[derive(Debug)]
struct Packed {
    weight: Part,
    scales: Part,
    zeros: Option<Part>,
    order: Option<GroupIndex>,
    packing: Packing,
    rows: u64,
    columns: u64,
    group_size: u64,
}

impl Packed {
    fn new(
        model: &Model<'_>,
        weight: Part,
        columns: u64,
        scales: Part,
        zeros: Option<Part>,
        order: Option<Part>,
    ) -> Result<Packed, Error> {
        let packing = packing_of(model, &weight, columns)?;
        let scales = if scales.count() == 1 {
            scales.seen_as(1, 1)
        } else {
            scales
        };
        let many = scales.columns();
        let is_even = many > 0 && columns.is_multiple_of(many);
        if !scales.is_float() || !is_even || !(scales.count() == 1 || scales.rows() == weight.rows()) {
            let reason = format!(
                "scales of {} and shape {:?} fit no groups of {} × {columns}",
                scales.dtype,
                scales.shape,
                weight.rows()
            );
            return Err(model.refuse(&scales.name, reason));
        }
        if let Some(zeros) = &zeros {
            let [.., rows, _] = weight.shape.as_slice() else {
                return Err(model.refuse(&zeros.name, "its weight is no matrix"));
            };
            let whole = weight.shape.len() == 2 || (rows * packing.bits).is_multiple_of(32);
            let mut expected = weight.shape.clone();
            let last = expected.len() - 1;
            (expected[last - 1], expected[last]) = (packing.words(*rows), many);
            model.check(zeros, &[Dtype::I32], if whole { &expected } else { &[] })?;
        }
        let sizes = model
            .config
            .weights()
            .map(|weights| weights.get("group_size")?.as_u64());
        let sizes: Vec<_> = sizes.collect();
        let is_told = |size: &Option<u64>| size.is_none_or(|size| columns.div_ceil(size.max(1)) == many);
        if many > 1 && !sizes.is_empty() && !sizes.iter().any(is_told) {
            let reason = format!("{many} groups of {columns} columns are not the groups in config.json");
            return Err(model.refuse(&scales.name, reason));
        }
        let order = order
            .map(|part| GroupIndex::new(model, part, columns, many))
            .transpose()?;
        Ok(Packed {
            group_size: columns / many,
            rows: weight.rows(),
            weight,
            scales,
            zeros,
            order,
            packing,
            columns,
        })
    }
}

/// Return the packing in which `columns` columns fill the packed tensor. If several do, the configuration decides.
fn packing_of(model: &Model<'_>, weight: &Part, columns: u64) -> Result<Packing, Error> {
    let fits = |bits: &u64| (Packing { bits: *bits }).words(columns) == weight.columns();
    let stated = model
        .config
        .weights()
        .filter_map(|weights| weights.get("num_bits")?.as_u64());
    let stated: Vec<u64> = stated.collect();
    let known = if stated.is_empty() {
        [4, 8].into_iter().chain(1..=8).collect()
    } else {
        stated
    };
    let found = known.iter().find(|bits| (1..=8).contains(*bits) && fits(bits));
    found.map(|&bits| Packing { bits }).ok_or_else(|| {
        let reason = format!(
            "{} words for {columns} columns are no packing of {known:?} bits",
            weight.columns()
        );
        model.refuse(&weight.name, reason)
    })
}

impl Packed {
    /// Return the zero points of a tile, row after row.
    fn zero_points(&self, tile: &Tile, groups: &Range<u64>, reads: Reads<'_>) -> Result<Vec<f32>, Error> {
        let Some(zeros) = &self.zeros else {
            let half = f32::from(1_u8 << (self.packing.bits - 1));
            return Ok(vec![half; tile.height() * length(groups)]);
        };
        let span = self.packing.span(&tile.rows, self.rows);
        let words = reads.words(zeros, span.clone(), groups.clone())?;
        let words = transposed(&words, length(&span));
        let first = tile.rows.start - Packing::first(&tile.rows);
        let zeros = words.chunks_exact(length(&span)).flat_map(|words| {
            let codes = self.packing.codes(&bytes_of(words), first, tile.height());
            codes.into_iter().map(f32::from)
        });
        Ok(transposed(&zeros.collect::<Vec<_>>(), length(groups)))
    }

    /// Return the scales of a tile, row after row.
    fn scales(&self, tile: &Tile, groups: &Range<u64>, reads: Reads<'_>) -> Result<Vec<f32>, Error> {
        if self.scales.count() == 1 {
            let scale = reads.floats(&self.scales, 0..1, 0..1)?;
            return Ok(scale.repeat(tile.height()));
        }
        reads.floats(&self.scales, tile.rows.clone(), groups.clone())
    }
}

impl Decode for Packed {
    fn decode(&self, tile: &Tile, reads: Reads<'_>, values: &mut [f32]) -> Result<(), Error> {
        let columns = &tile.columns;
        let (needed, groups) = Groups::needed(self.order.as_ref(), columns, self.group_size, reads)?;
        let scales = self.scales(tile, &needed, reads)?;
        let zeros = self.zero_points(tile, &needed, reads)?;
        let span = self.packing.span(columns, self.columns);
        let bytes = reads.bytes(&self.weight, tile.rows.clone(), span.clone())?;
        let first = columns.start - Packing::first(columns);
        let rows = values
            .chunks_exact_mut(tile.width())
            .zip(bytes.chunks_exact(4 * length(&span)));
        let factors = scales
            .chunks_exact(length(&needed))
            .zip(zeros.chunks_exact(length(&needed)));
        for ((values, bytes), (scales, zeros)) in rows.zip(factors) {
            let codes = self.packing.codes(bytes, first, values.len());
            groups.scale(&codes, |code| code, zeros, scales, values);
        }
        Ok(())
    }
}
