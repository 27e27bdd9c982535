//! torchao's flattened tensors: `module._weight_qdata` with `module._weight_scale`, and the class of `module.weight` in the metadata,
//! as JSON.

use ingot_format::Dtype;
use serde_json::Value;

use super::fp4::{Floats, Whole};
use super::group::Group;
use super::matrix::Decode;
use super::model::{Model, names};
use super::part::Part;
use super::scaled::Scaled;
use crate::error::Error;

/// Find the group of a `qdata`.
pub(super) fn find(model: &Model<'_>, data: &Part) -> Result<Option<Group>, Error> {
    let Some((prefix, name)) = flattened(&data.name) else {
        return Ok(None);
    };
    let Some(described) = model.metadata(&name) else {
        return Ok(None);
    };
    let class = described.get("_type").and_then(Value::as_str).unwrap_or_default();
    let settings = described.get("_data").unwrap_or(&Value::Null);
    let scale = model.needed(data, &format!("{prefix}scale"))?;
    if model.part(&format!("{prefix}act_pre_scale")).is_some() {
        return Err(model.refuse(&data.name, "its activations are scaled first (act_pre_scale)"));
    }
    if settings.get("is_swizzled_scales") == Some(&Value::Bool(true)) {
        return Err(model.refuse(
            &scale.name,
            "its scales are in the order of a kernel (is_swizzled_scales)",
        ));
    }
    let zeros = model.part(&format!("{prefix}zero_point"));
    let whole = model.part(&format!("{prefix}per_tensor_scale"));
    let others = ["act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale"];
    let others: Vec<_> = others
        .iter()
        .filter_map(|part| model.part(&format!("{prefix}{part}")))
        .collect();
    let parts = names(
        [data, &scale]
            .into_iter()
            .chain(&zeros)
            .chain(&whole)
            .chain(&others),
    );
    let block = last_block(settings);
    let (decoder, shape): (Box<dyn Decode>, _) = match class {
        "Float8Tensor" => scaled(model, data, &FLOATS8, scale, zeros)?,
        "Int8Tensor" | "IntxUnpackedToInt8Tensor" => scaled(model, data, &[Dtype::I8], scale, zeros)?,
        "MXTensor" if is_float8(data) => scaled(model, data, &FLOATS8, scale, zeros)?,
        "MXTensor" | "NVFP4Tensor" => floats(model, data, scale, whole, block)?,
        _ => {
            let reason =
                format!("torchao's {class} is not dequantised: its numbers are in the order of a kernel");
            return Err(model.refuse(&data.name, reason));
        }
    };
    let columns = shape.last().copied().unwrap_or(1);
    Ok(Some(Group {
        matrix: [data.rows(), columns],
        name,
        shape,
        decoder,
        parts,
    }))
}

/// Return whether a key of the metadata describes flattened tensors.
pub(super) fn describes(model: &Model<'_>, key: &str) -> bool {
    let has_class = |value: &Value| value.get("_type").is_some();
    let names = model.metadata("tensor_names").filter(Value::is_array);
    names.is_some() && (key == "tensor_names" || model.metadata(key).is_some_and(|value| has_class(&value)))
}

/// Return the start of the names of a tensor's parts, and its name: `a._weight_` and `a.weight` of `a._weight_qdata`.
fn flattened(name: &str) -> Option<(&str, String)> {
    let prefix = name.strip_suffix("qdata")?;
    let (module, weight) = prefix.strip_suffix('_')?.rsplit_once("._")?;
    Some((prefix, format!("{module}.{weight}")))
}

/// Return the numbers of a row that share a scale.
fn last_block(settings: &Value) -> Option<u64> {
    let block = settings.get("block_size")?;
    block.as_u64().or_else(|| block.as_array()?.last()?.as_u64())
}

const FLOATS8: [Dtype; 2] = [Dtype::F8_E4M3, Dtype::F8_E5M2];

fn is_float8(data: &Part) -> bool {
    FLOATS8.contains(&data.dtype)
}

type Found = (Box<dyn Decode>, Vec<u64>);

fn scaled(
    model: &Model<'_>,
    data: &Part,
    dtypes: &[Dtype],
    scale: Part,
    zeros: Option<Part>,
) -> Result<Found, Error> {
    model.check(data, dtypes, &data.shape)?;
    let decoder = Scaled::new(model, data.clone(), scale, zeros)?;
    Ok((Box::new(decoder), data.shape.clone()))
}

/// Return the decoder of floats of 4 bits, and the shape.
fn floats(
    model: &Model<'_>,
    data: &Part,
    scale: Part,
    whole: Option<Part>,
    block: Option<u64>,
) -> Result<Found, Error> {
    model.check(data, &[Dtype::U8, Dtype::F4], &data.shape)?;
    let mut shape = data.shape.clone();
    let columns = 2 * data.columns();
    if let Some(last) = shape.last_mut() {
        *last = columns;
    }
    let block = block.filter(|block| *block > 0).unwrap_or(columns.max(1));
    let scale = if scale.dtype == Dtype::U8 {
        scale.of(Dtype::F8_E8M0)
    } else {
        scale
    };
    let mut blocks = shape.clone();
    if let Some(last) = blocks.last_mut() {
        *last = columns.div_ceil(block);
    }
    model.check(&scale, &[Dtype::F8_E4M3, Dtype::F8_E8M0], &blocks)?;
    let scale = scale.seen_as(data.rows(), columns.div_ceil(block));
    let whole = match whole {
        None => None,
        Some(whole) => Some(Whole::read(model, data, &whole, false)?),
    };
    Ok((Box::new(Floats::new(data, scale, block, whole)), shape))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_flattened_tensor_is_the_name_of_its_parameter() {
        assert_eq!(
            flattened("a.b._weight_qdata"),
            Some(("a.b._weight_", "a.b.weight".to_owned()))
        );
        assert_eq!(flattened("a._w_x_qdata"), Some(("a._w_x_", "a.w_x".to_owned())));
        assert_eq!(flattened("a.weight_qdata"), None);
        assert_eq!(flattened("qdata"), None);
    }
}
