//! GPTQ: integers of 2, 3, 4 and 8 bits along the columns of `qweight`, whose rows are the inputs of a layer.
//!
//! `(weight - zero point) × scale`. Each group of inputs has a zero point and a scale for each output. `g_idx` has the
//! group of each input; without it, groups are consecutive inputs. The first version of the format stores zero points
//! less one.

use ingot_format::{Dtype, saturating_usize};

use super::codes::{Packing, bytes_of, length, transposed};
use super::group::Group;
use super::matrix::{Decode, Tile};
use super::model::{FLOATS, Model, names};
use super::order::{GroupIndex, Groups};
use super::part::{Part, Reads};
use crate::error::Error;

/// Outputs of a tile: a read of 2,048 bytes of each row of words.
const ROWS_AT_ONCE: u64 = 512;

/// Find the group of a `qweight`, if the tensors or the configuration say that it is GPTQ.
pub(super) fn find(model: &Model<'_>, weight: &Part) -> Result<Option<Group>, Error> {
    let Some(stem) = weight.name.strip_suffix("qweight") else {
        return Ok(None);
    };
    let groups = model.part(&format!("{stem}g_idx"));
    let method = model.config.text("quant_method");
    if method
        .as_deref()
        .unwrap_or(if groups.is_some() { "gptq" } else { "awq" })
        != "gptq"
    {
        return Ok(None);
    }
    let zeros = model.needed(weight, &format!("{stem}qzeros"))?;
    let scales = model.needed(weight, &format!("{stem}scales"))?;
    let parts = names([weight, &zeros, &scales].into_iter().chain(&groups));
    let decoder = Gptq::new(model, weight.clone(), zeros, scales, groups)?;
    let shape = [decoder.scales.columns(), decoder.inputs];
    Ok(Some(Group {
        name: format!("{stem}weight"),
        shape: shape.to_vec(),
        matrix: shape,
        decoder: Box::new(decoder),
        parts,
    }))
}

#[derive(Debug)]
struct Gptq {
    weight: Part,
    zeros: Part,
    scales: Part,
    order: Option<GroupIndex>,
    packing: Packing,
    inputs: u64,
    /// The inputs of a group, if there is no `g_idx`.
    group_size: u64,
    /// Whether zero points are stored less one.
    is_first_version: bool,
}

impl Gptq {
    fn new(
        model: &Model<'_>,
        weight: Part,
        zeros: Part,
        scales: Part,
        groups: Option<Part>,
    ) -> Result<Gptq, Error> {
        let (many, outputs) = (scales.rows(), scales.columns());
        model.check(&scales, &FLOATS, &[many, outputs])?;
        let bits = zeros
            .columns()
            .saturating_mul(32)
            .checked_div(outputs)
            .unwrap_or(0);
        if ![2, 3, 4, 8].contains(&bits) {
            let reason = format!("GPTQ of {bits} bits: expected 2, 3, 4 or 8");
            return Err(model.refuse(&weight.name, reason));
        }
        let packing = Packing { bits };
        model.check(&zeros, &[Dtype::I32], &[many, packing.words(outputs)])?;
        let inputs = weight.rows() * 32 / bits;
        model.check(&weight, &[Dtype::I32], &[packing.words(inputs), outputs])?;
        model.check_settings(&weight, bits, inputs, &scales)?;
        let order = groups
            .map(|part| GroupIndex::new(model, part, inputs, many))
            .transpose()?;
        if order.is_none() && (many == 0 || !inputs.is_multiple_of(many)) {
            let reason = format!("{inputs} inputs are not a multiple of {many} groups");
            return Err(model.refuse(&weight.name, reason));
        }
        Ok(Gptq {
            is_first_version: model.config.text("checkpoint_format").as_deref() != Some("gptq_v2"),
            group_size: inputs.checked_div(many).unwrap_or(1).max(1),
            weight,
            zeros,
            scales,
            order,
            packing,
            inputs,
        })
    }

    /// Return the zero points of the outputs `rows` of each group, group after group.
    fn zero_points(
        &self,
        tile: &Tile,
        groups: std::ops::Range<u64>,
        reads: Reads<'_>,
    ) -> Result<Vec<f32>, Error> {
        let span = self.packing.span(&tile.rows, self.scales.columns());
        let mut words = reads.words(&self.zeros, groups, span.clone())?;
        if self.is_first_version && self.packing.bits != 3 {
            // The library adds 1 to all integers of a word at once, so the overflow of one integer carries into the
            // next.
            let ones = u32::MAX / ((1 << self.packing.bits) - 1);
            words.iter_mut().for_each(|word| *word = word.wrapping_add(ones));
        }
        // Integers of 3 bits are added to one by one.
        let more = u8::from(self.is_first_version && self.packing.bits == 3);
        let mask = u8::MAX >> (8 - self.packing.bits);
        let first = tile.rows.start - Packing::first(&tile.rows);
        let zeros = words.chunks_exact(length(&span)).flat_map(|words| {
            let codes = self.packing.codes(&bytes_of(words), first, tile.height());
            codes
                .into_iter()
                .map(move |code| f32::from(code.wrapping_add(more) & mask))
        });
        Ok(zeros.collect())
    }
}

impl Decode for Gptq {
    fn rows_at_once(&self) -> u64 {
        ROWS_AT_ONCE
    }

    fn decode(&self, tile: &Tile, reads: Reads<'_>, values: &mut [f32]) -> Result<(), Error> {
        let (outputs, inputs) = (&tile.rows, &tile.columns);
        let (needed, groups) = Groups::needed(self.order.as_ref(), inputs, self.group_size, reads)?;
        let scales = reads.floats(&self.scales, needed.clone(), outputs.clone())?;
        let zeros = self.zero_points(tile, needed.clone(), reads)?;
        let (scales, zeros) = (
            transposed(&scales, length(&needed)),
            transposed(&zeros, length(&needed)),
        );
        let span = self.packing.span(inputs, self.inputs);
        let bytes = reads.bytes(&self.weight, span.clone(), outputs.clone())?;
        let words = transposed(bytes.as_chunks::<4>().0, length(&span));
        let first = inputs.start - Packing::first(inputs);
        let rows = values
            .chunks_exact_mut(tile.width())
            .zip(words.chunks_exact(length(&span)));
        let factors = scales
            .chunks_exact(length(&needed))
            .zip(zeros.chunks_exact(length(&needed)));
        let mut codes = vec![0; tile.width()];
        for ((values, words), (scales, zeros)) in rows.zip(factors) {
            self.packing
                .unpack(words.as_flattened(), saturating_usize(first), &mut codes);
            groups.scale(&codes, |code| code, zeros, scales, values);
        }
        Ok(())
    }
}
