//! The settings of a quantisation: `quantization_config` in the `config.json` beside a model.

use ingot_format::Dtype;
use serde_json::{Map, Value};

/// What `config.json` says about the quantisation. Everything is optional: most settings show in the tensors too.
#[derive(Debug, Default)]
pub(super) struct Config {
    model: Map<String, Value>,
}

impl Config {
    /// Parse the text of `config.json`. An invalid text is as good as none: the tensors are decoded without it, or refused.
    pub(super) fn parse(text: Option<&str>) -> Config {
        let model = text.and_then(|text| serde_json::from_str(text).ok());
        Config {
            model: model.unwrap_or_default(),
        }
    }

    /// Return the dtype of the model before the quantisation.
    pub(super) fn dtype(&self) -> Option<Dtype> {
        let name = self.in_model("dtype").or_else(|| self.in_model("torch_dtype"))?;
        match name.as_str()?.trim_start_matches("torch.") {
            "bfloat16" => Some(Dtype::BF16),
            "float16" | "half" => Some(Dtype::F16),
            "float32" | "float" => Some(Dtype::F32),
            _ => None,
        }
    }

    /// Return a setting of the quantisation.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let names = ["quantization_config", "compression_config"];
        let found = names.iter().find_map(|name| self.in_model(name))?;
        found.get(key)
    }

    /// Return a setting that is a text, in lower case.
    pub(super) fn text(&self, key: &str) -> Option<String> {
        self.get(key)?.as_str().map(str::to_lowercase)
    }

    /// Return a setting that is a number, or None if modules may have others.
    pub(super) fn number(&self, key: &str) -> Option<u64> {
        let has_others = self.get("dynamic").is_some_and(|value| !value.is_null());
        self.get(key).filter(|_| !has_others)?.as_u64()
    }

    /// Return the block sizes of FP8 weights with scales for blocks.
    pub(super) fn block_size(&self) -> Option<[u64; 2]> {
        let [rows, columns] = self.get("weight_block_size")?.as_array()?.as_slice() else {
            return None;
        };
        Some([rows.as_u64()?, columns.as_u64()?])
    }

    /// Return the settings of weights of each group of compressed-tensors.
    pub(super) fn weights(&self) -> impl Iterator<Item = &Value> {
        let groups = self.get("config_groups").and_then(Value::as_object);
        groups
            .into_iter()
            .flat_map(|groups| groups.values())
            .filter_map(|group| group.get("weights"))
    }

    /// Return a value of the model, or of its part for text.
    fn in_model(&self, key: &str) -> Option<&Value> {
        let whole = self.model.get(key).filter(|value| !value.is_null());
        whole.or_else(|| self.model.get("text_config")?.get(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_found_in_the_model_and_in_its_part_for_text() {
        let inner = Config::parse(Some(
            r#"{"text_config": {"torch_dtype": "float16", "quantization_config": {"quant_method": "GPTQ"}}}"#,
        ));
        assert_eq!(
            (inner.dtype(), inner.text("quant_method")),
            (Some(Dtype::F16), Some("gptq".to_owned()))
        );
        let outer = Config::parse(Some(
            r#"{"dtype": "bfloat16", "quantization_config": {"weight_block_size": [64, 32]}}"#,
        ));
        assert_eq!(
            (outer.dtype(), outer.block_size()),
            (Some(Dtype::BF16), Some([64, 32]))
        );
    }

    #[test]
    fn an_invalid_text_has_no_settings() {
        for text in [
            "",
            "[]",
            "{\"quantization_config\": 3}",
            "{\"quantization_config\": {\"weight_block_size\": [1]}}",
        ] {
            let config = Config::parse(Some(text));
            assert_eq!(
                (config.dtype(), config.text("quant_method"), config.block_size()),
                (None, None, None)
            );
        }
    }
}
