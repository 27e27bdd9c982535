//! Quantised weights as floats: a checkpoint whose tensors are dequantised while they are read.
//!
//! ```text
//! names ─find─► Group ─Decode─► floats ─round─► bytes of the result
//! ```
//!
//! A [`group::Group`] is a weight with its scales, zero points and other parts. Each family of formats has a file, with a function
//! that finds its groups by names, dtypes and shapes, and a decoder ([`matrix::Decode`]) that computes any tile of the weight
//! from the ranges of the parts that the tile needs. [`matrix`] splits a read into tiles, and rounds the numbers from F32 to the
//! dtype of the result, once.

mod awq;
mod bits;
mod codes;
mod config;
mod fp4;
mod gptq;
mod group;
mod matrix;
mod model;
mod order;
mod packed;
mod part;
mod refused;
mod scaled;
mod torchao;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::Arc;

use ingot_format::{Dtype, StopFlag, saturating_usize};

use crate::checkpoint::Checkpoint;
use crate::computed::{Made, Make, compute};
use crate::edit::STALE_KEYS;
use crate::error::Error;
use crate::file::Tensor;
use crate::options::ReadOptions;
use crate::watch::Unwatched;
use config::Config;
use group::Group;
use model::Model;
use part::Part;

/// Finds the group whose main tensor is `part`.
type Find = fn(&Model<'_>, &Part) -> Result<Option<Group>, Error>;

/// In this order: a tensor belongs to the first family that finds a group for it.
const FAMILIES: [Find; 8] = [
    refused::find,
    torchao::find,
    bits::find,
    gptq::find,
    awq::find,
    packed::find,
    fp4::find,
    scaled::find,
];

/// Tensors beside a weight that only a module with quantised activations needs.
const BESIDE: [&str; 5] = [
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "scale_input",
    "input_activation_scale",
];

/// The dtype of dequantised weights if neither the caller nor `config.json` names one.
const USUAL: Dtype = Dtype::BF16;

/// A checkpoint whose weights are dequantised while they are read.
#[derive(Debug)]
pub struct Dequantised {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// The names that the checkpoint lacks: packed weights, scales, zero points and the like.
    pub removed: Vec<String>,
}

/// Dequantise the weights of `inputs` whenever they are read. `config` is the text of the `config.json` beside the model.
/// Weights are computed in F32 and rounded once to `dtype`, by default the dtype of the model in `config.json`, or else BF16.
/// Tensors that are not quantised stay as they are. `None` if no tensor is quantised.
///
/// # Errors
/// [`Failure::Dequantization`](crate::Failure) for a format that cannot be dequantised, or a part that is missing or does not
/// fit; and as [`Checkpoint::all`].
pub fn dequantise(
    inputs: Arc<Checkpoint>,
    config: Option<&str>,
    dtype: Option<Dtype>,
) -> Result<Option<Dequantised>, Error> {
    let config = Config::parse(config);
    let dtype = dtype.or_else(|| config.dtype()).unwrap_or(USUAL);
    let model = Model::new(&inputs, config)?;
    let mut found = groups(&model)?;
    if found.is_empty() {
        return Ok(None);
    }
    let parts: BTreeSet<String> = found
        .values()
        .flat_map(|group| group.parts.iter().cloned())
        .collect();
    let weights: BTreeSet<String> = found.values().map(|group| group.name.clone()).collect();
    let metadata = kept_metadata(&model);
    let mut made = Vec::new();
    for tensor in everything(&inputs)? {
        let name = tensor.entry().name;
        match found.remove(name) {
            Some(group) => made.push(group.made(dtype)),
            None if parts.contains(name) => {}
            None => made.push(Stored::made(&tensor)),
        }
    }
    let format = inputs.format()?;
    let metadata: Vec<_> = metadata
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    let checkpoint = compute(Arc::clone(&inputs), made, &metadata, format)?;
    let removed = parts.into_iter().filter(|name| !weights.contains(name)).collect();
    Ok(Some(Dequantised { checkpoint, removed }))
}

/// Return all tensors, and then the aliases.
fn everything(inputs: &Checkpoint) -> Result<Vec<Tensor<'_>>, Error> {
    let mut tensors = inputs.all()?;
    for alias in inputs.aliases(&Unwatched)? {
        tensors.push(inputs.find(&alias.name)?);
    }
    Ok(tensors)
}

/// Return the groups of a model by the names of their main tensors.
fn groups(model: &Model<'_>) -> Result<BTreeMap<String, Group>, Error> {
    let mut found = BTreeMap::new();
    for tensor in everything(model.inputs)? {
        let part = Part::new(tensor.entry());
        for find in FAMILIES {
            if let Some(mut group) = find(model, &part)? {
                let stem = group.name.strip_suffix("weight").unwrap_or(&group.name);
                let beside = BESIDE.iter().map(|end| format!("{stem}{end}"));
                let beside = beside.filter(|name| model.part(name).is_some());
                group.parts.extend(beside.collect::<Vec<_>>());
                found.insert(part.name, group);
                break;
            }
        }
    }
    Ok(found)
}

/// Return the metadata that also describes the result.
fn kept_metadata(model: &Model<'_>) -> Vec<(String, String)> {
    let pairs = model.metadata_pairs();
    let kept = pairs.filter(|(key, _)| !STALE_KEYS.contains(key) && !torchao::describes(model, key));
    kept.map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

/// The maker of a tensor that stays as it is.
#[derive(Debug)]
struct Stored(String);

impl Stored {
    fn made(tensor: &Tensor<'_>) -> Made {
        let entry = tensor.entry();
        Made {
            name: entry.name.to_owned(),
            dtype: entry.dtype,
            shape: entry.shape.to_vec(),
            maker: Box::new(Stored(entry.name.to_owned())),
        }
    }
}

impl Make for Stored {
    fn fill(
        &self,
        inputs: &Checkpoint,
        begin: u64,
        dest: &mut [u8],
        stop: StopFlag<'_>,
    ) -> Result<(), Error> {
        let tensor = inputs.find(&self.0)?;
        if tensor.strides().is_none() {
            return tensor.read_at(begin, dest, stop);
        }
        // A part of another tensor, which is not contiguous there. Few files have any.
        let bytes = tensor
            .read(&ReadOptions::new().threads(NonZeroUsize::MIN), &stop)?
            .to_vec();
        let at = saturating_usize(begin);
        dest.copy_from_slice(&bytes[at..at + dest.len()]);
        Ok(())
    }
}
