//! AWQ: integers of 4 bits along the rows of `qweight`, whose rows are the inputs of a layer; the columns of a word are in an
//! order of their own.
//!
//! `(weight - zero point) × scale`.

use ingot_format::{Dtype, saturating_usize};

use super::codes::{length, place, transposed};
use super::group::Group;
use super::matrix::{Decode, Tile};
use super::model::{FLOATS, Model, names};
use super::order::Groups;
use super::part::{Part, Reads};
use crate::error::Error;

/// The bit at which each of eight columns begins in a word: the even ones come first.
const SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

/// Outputs of a tile: a read of 512 bytes of each row of words.
const ROWS_AT_ONCE: u64 = 1024;

/// Find the group of a `qweight` that is not GPTQ.
pub(super) fn find(model: &Model<'_>, weight: &Part) -> Result<Option<Group>, Error> {
    let Some(stem) = weight.name.strip_suffix("qweight") else {
        return Ok(None);
    };
    let method = model.config.text("quant_method").unwrap_or("awq".to_owned());
    if method != "awq" {
        let reason = format!("quantised by {method}, which is not dequantised");
        return Err(model.refuse(&weight.name, reason));
    }
    if let Some(version) = model.config.text("version").filter(|version| version != "gemm") {
        let reason = format!("AWQ of version {version} is not dequantised: expected gemm");
        return Err(model.refuse(&weight.name, reason));
    }
    let scales = model.needed(weight, &format!("{stem}scales"))?;
    let zeros = model.needed(weight, &format!("{stem}qzeros"))?;
    let parts = names([weight, &zeros, &scales]);
    let (inputs, outputs, many) = (weight.rows(), scales.columns(), scales.rows());
    model.check(&scales, &FLOATS, &[many, outputs])?;
    if !outputs.is_multiple_of(8) {
        let reason = format!("{outputs} outputs are not a multiple of 8");
        return Err(model.refuse(&scales.name, reason));
    }
    model.check(weight, &[Dtype::I32], &[inputs, outputs / 8])?;
    model.check(&zeros, &[Dtype::I32], &[many, outputs / 8])?;
    model.check_settings(weight, 4, inputs, &scales)?;
    if many == 0 || !inputs.is_multiple_of(many) {
        let reason = format!("{inputs} inputs are not a multiple of {many} groups");
        return Err(model.refuse(&weight.name, reason));
    }
    let decoder = Awq {
        weight: weight.clone(),
        zeros,
        scales,
        group_size: (inputs / many).max(1),
    };
    Ok(Some(Group {
        name: format!("{stem}weight"),
        shape: vec![outputs, inputs],
        matrix: [outputs, inputs],
        decoder: Box::new(decoder),
        parts,
    }))
}

#[derive(Debug)]
struct Awq {
    weight: Part,
    zeros: Part,
    scales: Part,
    group_size: u64,
}

impl Decode for Awq {
    fn rows_at_once(&self) -> u64 {
        ROWS_AT_ONCE
    }

    fn decode(&self, tile: &Tile, reads: Reads<'_>, values: &mut [f32]) -> Result<(), Error> {
        let (outputs, inputs) = (&tile.rows, &tile.columns);
        let (needed, groups) = Groups::needed(None, inputs, self.group_size, reads)?;
        let span = outputs.start / 8..outputs.end.div_ceil(8);
        let words = reads.words(&self.weight, inputs.clone(), span.clone())?;
        let zeros = reads.words(&self.zeros, needed.clone(), span.clone())?;
        let scales = reads.floats(&self.scales, needed.clone(), outputs.clone())?;
        let (words, zeros) = (
            transposed(&words, tile.width()),
            transposed(&zeros, length(&needed)),
        );
        let scales = transposed(&scales, length(&needed));
        let mut zero_points = Vec::new();
        let rows = outputs.clone().zip(values.chunks_exact_mut(tile.width()));
        for ((output, values), scales) in rows.zip(scales.chunks_exact(length(&needed))) {
            let at = place(output / 8, span.start);
            let shift = SHIFTS[saturating_usize(output % 8)];
            let code = |word: u32| {
                let [low, ..] = (word.wrapping_shr(shift) & 15).to_le_bytes();
                low
            };
            let zeros = &zeros[at * length(&needed)..][..length(&needed)];
            zero_points.clear();
            zero_points.extend(zeros.iter().map(|&word| f32::from(code(word))));
            let words = &words[at * tile.width()..][..tile.width()];
            groups.scale(words, code, &zero_points, scales, values);
        }
        Ok(())
    }
}
