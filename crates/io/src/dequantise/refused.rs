//! Formats that cannot be dequantised from the file alone, or whose order of numbers belongs to a kernel. They are refused by
//! name, so that no packed numbers pass for weights.

use ingot_format::Dtype;

use super::group::Group;
use super::model::Model;
use super::part::Part;
use crate::error::Error;

/// The end of the name of a tensor of each format, the end of the name of another of its tensors, and the format.
const FORMATS: [(&str, &str, &str); 15] = [
    (".B", ".s", "Marlin"),
    (".B_24", ".s", "Marlin with 2:4 sparsity"),
    (".weight_packed", ".meta", "Marlin with 2:4 sparsity (marlin-24)"),
    (".compressed", ".bitmask", "compressed-tensors' sparse-bitmask"),
    (
        ".weight_bitmask",
        ".weight_shape",
        "compressed-tensors' sparse-bitmask",
    ),
    (".bitmask", ".compressed", "compressed-tensors' sparse-bitmask"),
    (".W_q", ".meta", "HQQ"),
    (".W_q", ".scale", "HQQ"),
    (".codebooks", ".codes", "AQLM"),
    (".q_weight", ".q_scale", "EXL2"),
    (".trellis", ".suh", "EXL3"),
    (".Qidxs", ".SU", "QuIP#"),
    (".weight._data", ".weight._scale", "Quanto"),
    (".weight", ".weight_scales", "EETQ"),
    (".indices", ".centroids.weight", "VPTQ"),
];

/// Refuse a tensor of one of these formats. Never finds a group.
pub(super) fn find(model: &Model<'_>, part: &Part) -> Result<Option<Group>, Error> {
    for (end, other, format) in FORMATS {
        if let Some(stem) = part.name.strip_suffix(end)
            && model.part(&format!("{stem}{other}")).is_some()
        {
            let reason = format!(
                "{format} is not dequantised: its tensors are in the order of a kernel, or lack what a table has"
            );
            return Err(model.refuse(&part.name, reason));
        }
    }
    if part.name.ends_with("weight_packed") {
        let format = model.config.text("format").unwrap_or_default();
        if !matches!(part.dtype, Dtype::I32 | Dtype::U8)
            || ["mxfp6", "marlin", "sparse"]
                .iter()
                .any(|name| format.starts_with(name))
        {
            let reason = format!(
                "weights of {} in the format {format:?} are not dequantised",
                part.dtype
            );
            return Err(model.refuse(&part.name, reason));
        }
    }
    Ok(None)
}
