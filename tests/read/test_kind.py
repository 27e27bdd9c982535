"""What the tensors of published models show, in Python and in JavaScript."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ingot._read.kind import Kind, configurations, kind_of
from support.kinds import FILES, Stored, case, unfolded

NODE = shutil.which("node")
PROGRAM = Path(__file__).parents[1] / "web" / "kinds.mjs"


def beside(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name.endswith(".json")}


def kind(tensors: dict[str, tuple[int, ...]], metadata: dict[str, str] | None = None, **texts: Any) -> Kind:
    rows = [Stored(name, "F16", shape) for name, shape in tensors.items()]
    return kind_of(rows, metadata or {}, texts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kind_of_published_models(path: Path) -> None:
    found = case(path)
    expected = found["expected"]
    said = kind_of(found["tensors"], found.get("metadata", {}), beside(found))
    assert (said.kind, said.base) == (expected["kind"], expected["base"])
    assert said.rank == (expected["rank"] and tuple(expected["rank"]))
    assert said.packing == expected.get("packing")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_kind_is_the_same_in_javascript() -> None:
    cases = [case(path) for path in FILES]
    given = [[one["tensors"], one.get("metadata", {}), beside(one)] for one in cases]
    ran = subprocess.run(
        [str(NODE), str(PROGRAM)], input=json.dumps(given), capture_output=True, encoding="utf-8", check=True
    )
    here = [kind_of(*one)._asdict() for one in given_as_tensors(given)]
    assert json.loads(ran.stdout) == json.loads(json.dumps(here))


def given_as_tensors(given: list[list[Any]]) -> list[list[Any]]:
    return [[[Stored(*row) for row in tensors], *rest] for tensors, *rest in given]


def test_kind_names_its_sources() -> None:
    down, up = "unet.x.lora_A.weight", "unet.x.lora_B.weight"
    tensors = {down: (4, 64), up: (64, 4)}
    assert kind(tensors).text == "LoRA, rank 4, base unknown, alpha not stored, F16"
    said = kind(tensors, {"ss_base_model_version": "sdxl_base_v1-0", "ss_network_alpha": "2"})
    assert (
        said.text
        == "LoRA, rank 4, Stable Diffusion XL (ss_base_model_version), alpha 2 (ss_network_alpha), F16"
    )
    assert (kind(tensors).alpha, said.alpha, kind({**tensors, "unet.x.alpha": ()}).alpha) == (
        None,
        2,
        "stored",
    )


def test_kind_counts_layers_of_whole_models_only() -> None:
    layer = {
        **{f"self_attn.{part}_proj.weight": (4096, 4096) for part in "qko"},
        **{f"mlp.{part}_proj.weight": (11008, 4096) for part in ("gate", "down")},
        **dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (4096,)),
    }

    def llama(layers: tuple[int, ...], *last: str) -> str:
        tensors = {f"model.layers.{at}.{name}": shape for at in layers for name, shape in layer.items()}
        tensors |= {"model.embed_tokens.weight": (32000, 4096), **dict.fromkeys(last, (4096,))}
        return kind(tensors).text

    assert llama((0, 1), "model.norm.weight") == "Llama, 2 layers, hidden size 4096, F16"
    assert llama((0,), "model.norm.weight") == "Llama, 1 layer, hidden size 4096, F16"
    # The files of a sharded checkpoint.
    assert llama((0, 1)) == llama((1, 2), "model.norm.weight") == "Llama, hidden size 4096, F16"


def test_kind_reports_metadata_that_contradicts_the_tensors() -> None:
    tensors = {
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k.lora_down.weight": (8, 768),
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k.lora_up.weight": (320, 8),
    }
    said = kind(tensors, {"modelspec.architecture": "flux-1-dev/lora"})
    assert said.base == "Stable Diffusion 1.x"
    assert said.text.endswith("modelspec.architecture says flux-1-dev/lora, F16")


@pytest.mark.parametrize(
    ("model_type", "shown"),
    [("camembert", ", config.json says camembert"), ("bert", ""), ("bert_something", "")],
)
def test_kind_reports_a_configuration_that_the_rules_do_not_know(model_type: str, shown: str) -> None:
    tensors = case(next(path for path in FILES if path.stem == "bert-base"))["tensors"]
    said = kind_of(tensors, {}, {"config.json": {"model_type": model_type}})
    assert said.base == "BERT"
    assert said.text == f"text encoder, BERT, 12 layers, hidden size 768{shown}, F32"


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"a": ()},
        {"a\nb": (0,)},
        {"": (2, 2)},
        {"x.lora_A.weight": (4, 2)},
        {f"{n:x}z": (1,) for n in range(9000)},
    ],
    ids=["none", "scalar", "newline", "no name", "half of a pair", "too many forms"],
)
def test_kind_says_nothing_of_unknown_tensors(tensors: dict[str, tuple[int, ...]]) -> None:
    assert kind(tensors) == Kind(None, None, None, None, None, "F16" if said_dtype(tensors) else None, "")


def said_dtype(tensors: dict[str, tuple[int, ...]]) -> bool:
    return any(0 not in shape for shape in tensors.values())


def test_configurations_are_read_for_files_with_standard_names_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "adapter_config.json").write_text("[")
    assert configurations(str(tmp_path / "model.safetensors")) == {"config.json": {"model_type": "mistral"}}
    assert configurations(str(tmp_path / "model-00001-of-00002.safetensors"))
    assert configurations(str(tmp_path / "other.safetensors")) == {}
    assert configurations("https://localhost/model.safetensors") == {}


def test_unfolded_names() -> None:
    assert unfolded("a.{0-1,3}.b.{2}") == ["a.0.b.2", "a.1.b.2", "a.3.b.2"]
