"""SGLang's own loader, iterators and plugins on the CPU, with ingot as the reader of the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import ingot.torch

HERE = Path(__file__).parent
PINS = dict(
    line.split()[0].split("==")
    for line in (HERE.parents[2] / "requirements" / "engine-sources.txt").read_text().splitlines()
    if not line.startswith("#")
)
LAYERS, WIDTH = 6, 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of linear layers in three files, with the configuration of one that SGLang knows."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    state = {}
    for layer in range(LAYERS):
        state[f"model.layers.{layer}.weight"] = torch.randn(WIDTH, WIDTH)
        state[f"model.layers.{layer}.bias"] = torch.randn(WIDTH)
    ingot.torch.save_sharded(state, folder, 2 * (WIDTH + 1) * WIDTH * 4)
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


def said(folder: Path, place: Path, plugins: str, options: Any) -> subprocess.CompletedProcess[str]:
    asked = {
        "folder": str(folder),
        "layers": LAYERS,
        "width": WIDTH,
        "options": options,
        "report": str(place / "report"),
    }
    return subprocess.run(
        [sys.executable, str(HERE / "with_sglang.py"), json.dumps(asked)],
        env={
            **os.environ,
            "SGLANG_PLUGINS": plugins,
            "HOME": str(place),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )


def loaded(folder: Path, place: Path, plugins: str, options: Any) -> dict[str, Any]:
    done = said(folder, place, plugins, options)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((place / "report").read_text())
    assert report["version"] == PINS["sglang"]
    expected = ingot.torch.load_file(folder)
    assert len(report["digests"]) == LAYERS
    assert report["digests"] == {name: digest(expected[name]) for name in report["digests"]}
    return report


def digest(tensor: torch.Tensor) -> str:
    import hashlib

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ingot": {"read": "used"}},
        {"ingot": {"threads": 2}, "enable_multithread_load": False},
        {"ingot": {}, "enable_multithread_load": True, "num_threads": 2},
    ],
    ids=["as it comes", "used", "one thread", "several"],
)
def test_sglang_loads_by_ingot(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    assert loaded(folder, tmp_path, "ingot", options)["by"] == ["ingot"]


@pytest.mark.parametrize(("plugins", "options"), [("", {}), ("other", {}), ("ingot", {"ingot": False})])
def test_sglang_loads_without_ingot(folder: Path, tmp_path: Path, plugins: str, options: Any) -> None:
    assert loaded(folder, tmp_path, plugins, options)["by"] == ["safetensors"]


def test_sglang_pipeline_stage_reads_its_layers(folder: Path, tmp_path: Path) -> None:
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    read = loaded(folder, tmp_path, "ingot", {"ingot": {"backend": "pread"}})["nbytes_read"]
    # Half of the layers, and bytes that the process reads elsewhere.
    assert read < 0.65 * files


def test_sglang_names_the_options_for_an_unknown_one(folder: Path, tmp_path: Path) -> None:
    done = said(folder, tmp_path, "ingot", {"ingot": {"thread": 4}})
    assert done.returncode != 0
    words = (
        'model_loader_extra_config["ingot"]: unknown option `thread`: expected one of read, device, backend'
    )
    assert words in done.stderr


def test_sglang_rejects_options_for_ingot_without_ingot(folder: Path, tmp_path: Path) -> None:
    done = said(folder, tmp_path, "", {"ingot": {"threads": 4}})
    assert done.returncode != 0
    # In SGLang's words.
    assert "Unexpected extra config keys" in done.stderr
