"""Files of models whose parameters are counted: from the vectors, and random ones."""

from __future__ import annotations

import json
import random
from math import prod
from pathlib import Path
from typing import Any

import ingot
from support.dtypes import BITS

INDEX = "model.safetensors.index.json"


def zeros(tensors: list[list[Any]]) -> dict[str, Any]:
    """Return tensors with these names, dtypes and shapes, as arguments for `ingot.serialize`."""
    return {
        name: {"dtype": dtype, "shape": shape, "data": bytes(prod(shape) * BITS[dtype] // 8)}
        for name, dtype, shape in tensors
    }


def files_of(case: dict[str, Any], format: str = "safetensors") -> dict[str, bytes]:
    """The files of the model of a vector, with its index and its configuration."""
    files = {
        shard: ingot.serialize(zeros(tensors), case.get("metadata"), format=format)
        for shard, tensors in case["files"]
    }
    if len(files) > 1:
        weight_map = {tensor[0]: shard for shard, tensors in case["files"] for tensor in tensors}
        metadata = json.loads(case.get("index_metadata", "null"))
        files[INDEX] = json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()
    if "config" in case:
        files["config.json"] = case["config"].encode()
    return files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


class Chance:
    """Random models with every method of quantisation, with valid and invalid settings."""

    METHODS = ("gptq", "awq", "mxfp4", "fp8", "bitsandbytes", "compressed-tensors", "mlx", "quanto", None, 4)
    SUFFIXES = (
        *("weight", "qweight", "qzeros", "scales", "biases", "g_idx", "weight_scale", "weight_packed"),
        *("up_blocks", "up_scales", "absmax", "quant_state.bitsandbytes__nf4", "weight.weight", "bias"),
    )
    MODULES = ("a", "layers.0.q_proj", "layers.1.mlp.experts.7", "x.mlp.shared_experts.experts.1", "")
    DTYPES = ("U8", "I8", "I32", "U32", "BF16", "F32", "F8_E8M0", "F8_E4M3")
    PATTERNS = (
        *("a", "lm_head", "layers.*.q_proj", "mlp", "*", "", "re:.*q_proj", r"re:layers\..*$", "re:", 5),
        *(r"re:^layers\.0.*", "re:(a|b)", r"re:a\d", "re:a$", "re:^", "re:$", "re:a.b", None),
    )
    TOTALS = (None, "3", " +7", "-7", "1e9", "x", "00012 tensors", "9" * 500, "-" + "9" * 500)
    BITS = (1, 2, 3, 4, 5, 8, 16, 32, 64, 0, -4, 4.0, 2.5, "4", "x", None)
    FORMS = ("pack-quantized", "nvfp4-pack-quantized", "int-quantized", "dense", None, 8)

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def tensors(self) -> list[list[Any]]:
        pick = self._random.choice
        names = {".".join(filter(None, (pick(self.MODULES), pick(self.SUFFIXES)))) for _ in range(12)}
        shapes = ([], [0], [5], [3, 4], [1, 7])
        return [[name, pick(self.DTYPES), pick(shapes)] for name in sorted(names)]

    def config(self) -> dict[str, Any]:
        pick = self._random.choice
        config: dict[str, Any] = {}
        place = pick((config, config, config.setdefault("text_config", {}), {}))
        place[pick(("quantization_config", "quantization_config", "quantization"))] = self._settings()
        config |= self._some({"expert_dtype": pick(("fp4", "int2", "F4", None, 4))})
        return config

    def _some(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if self._random.random() < 0.7}

    def _patterns(self) -> list[Any]:
        return self._random.sample(self.PATTERNS, self._random.randrange(3))

    def _group(self) -> dict[str, Any]:
        pick = self._random.choice
        weights = pick(({"num_bits": pick(self.BITS)}, {}, None))
        return self._some({"weights": weights, "targets": self._patterns(), "format": pick(self.FORMS)})

    def _settings(self) -> dict[str, Any]:
        pick = self._random.choice
        return self._some(
            {
                "quant_method": pick(self.METHODS),
                "bits": pick(self.BITS),
                "group_size": pick((32, 64, 128, 48)),
                "load_in_4bit": pick((True, False, None)),
                "ignore": self._patterns(),
                "modules_to_not_convert": pick((self._patterns(), None, "a")),
                "format": pick(self.FORMS),
                "config_groups": pick(({"0": self._group(), "1": self._group()}, {}, [], {"0": 4})),
                "mode": pick(("affine", "mxfp4")),
                "a": pick((False, {"bits": 8}, 3)),
                "expert_dtype": pick(("nvfp4", "int4", None)),
                "store_dtype": pick(("int2", "fp8")),
            }
        )

    def metadata(self) -> dict[str, str] | None:
        total = self._random.choice(self.TOTALS)
        return None if total is None else {"total_parameters": total}
