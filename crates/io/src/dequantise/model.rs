//! The tensors of a checkpoint by name, and the settings of its quantisation.

use std::collections::BTreeMap;

use ingot_format::{Dtype, StopFlag};
use serde_json::Value;

use super::config::Config;
use super::part::{Part, Reads};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Failure};
use crate::watch::Unwatched;

/// A checkpoint in which groups are searched.
#[derive(Debug)]
pub(super) struct Model<'m> {
    pub(super) inputs: &'m Checkpoint,
    pub(super) config: Config,
    /// The metadata of all files.
    metadata: BTreeMap<&'m str, &'m str>,
}

impl<'m> Model<'m> {
    /// Open all files of `inputs`.
    pub(super) fn new(inputs: &'m Checkpoint, config: Config) -> Result<Model<'m>, Error> {
        let files = inputs.all_files()?;
        let metadata = files.iter().filter_map(|file| file.header().metadata());
        Ok(Model {
            metadata: metadata.flat_map(|metadata| metadata.iter()).collect(),
            inputs,
            config,
        })
    }

    /// Return the tensor of this name.
    pub(super) fn part(&self, name: &str) -> Option<Part> {
        let is_known = self.inputs.contains(name) || self.inputs.is_alias(name, &Unwatched).unwrap_or(false);
        if !is_known {
            return None;
        }
        let tensor = self.inputs.find(name).ok()?;
        tensor.strides().is_none().then(|| Part::new(tensor.entry()))
    }

    /// Return the first tensor that has one of these names.
    pub(super) fn first(&self, names: &[String]) -> Option<Part> {
        names.iter().find_map(|name| self.part(name))
    }

    /// Return a JSON value in the metadata.
    pub(super) fn metadata(&self, key: &str) -> Option<Value> {
        serde_json::from_str(self.metadata.get(key)?).ok()
    }

    /// Return all pairs of the metadata.
    pub(super) fn metadata_pairs(&self) -> impl Iterator<Item = (&'m str, &'m str)> {
        self.metadata.iter().map(|(key, value)| (*key, *value))
    }

    pub(super) fn reads(&self) -> Reads<'m> {
        Reads {
            inputs: self.inputs,
            stop: StopFlag::never(),
        }
    }

    /// Return the error for a tensor that cannot be dequantised.
    pub(super) fn refuse(&self, part: &str, reason: impl Into<String>) -> Error {
        Failure::Dequantization(reason.into()).about(self.inputs.path(), Some(part))
    }

    /// Return the part that a group needs.
    pub(super) fn needed(&self, of: &Part, name: &str) -> Result<Part, Error> {
        self.part(name)
            .ok_or_else(|| self.refuse(&of.name, format!("its part `{name}` is missing")))
    }

    /// Fail if a part does not have the shape or one of the dtypes that its group needs.
    pub(super) fn check(&self, part: &Part, dtypes: &[Dtype], shape: &[u64]) -> Result<(), Error> {
        if !dtypes.contains(&part.dtype) {
            let names: Vec<_> = dtypes.iter().map(ToString::to_string).collect();
            let reason = format!("expected {}, found {}", names.join(" or "), part.dtype);
            return Err(self.refuse(&part.name, reason));
        }
        if part.shape != shape {
            let reason = format!("expected the shape {shape:?}, found {:?}", part.shape);
            return Err(self.refuse(&part.name, reason));
        }
        Ok(())
    }
}

impl Model<'_> {
    /// Fail if the configuration has another number of bits than the tensors, or a group size with which `inputs`
    /// inputs have another number of groups than the scales.
    pub(super) fn check_settings(
        &self,
        weight: &Part,
        bits: u64,
        inputs: u64,
        scales: &Part,
    ) -> Result<(), Error> {
        if let Some(stated) = self.config.number("bits").filter(|stated| *stated != bits) {
            let reason = format!("config.json has {stated} bits, and the tensors have {bits}");
            return Err(self.refuse(&weight.name, reason));
        }
        let size = ["group_size", "q_group_size"]
            .iter()
            .find_map(|key| self.config.number(key));
        let many = size.filter(|size| *size > 0).map(|size| inputs.div_ceil(size));
        if let Some(many) = many.filter(|many| *many != scales.rows()) {
            let reason = format!(
                "config.json has groups of {} inputs, which are {many} of {inputs} inputs, and the scales have {}",
                size.unwrap_or_default(),
                scales.rows()
            );
            return Err(self.refuse(&scales.name, reason));
        }
        Ok(())
    }
}

/// Return the names of these parts.
pub(super) fn names<'p>(parts: impl IntoIterator<Item = &'p Part>) -> Vec<String> {
    parts.into_iter().map(|part| part.name.clone()).collect()
}

/// The dtypes of scales.
pub(super) const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];
