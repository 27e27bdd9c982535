"""vLLM's own loader, groups, models and layers on the CPU, with ingot as the reader of the files.

No part of vLLM is replaced. It is installed without kernels: models are made and loaded, and never run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import ingot
import ingot.torch
from support.errors import raises

# Warnings of vLLM's own imports.
pytestmark = pytest.mark.filterwarnings("ignore")
HERE = Path(__file__).parent
PINS = dict(
    line.split()[0].split("==")
    for line in (HERE.parents[2] / "requirements" / "engine-sources.txt").read_text().splitlines()
    if not line.startswith("#")
)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# The platform, which vLLM otherwise reads from its installed distribution.
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size="20MB")
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    config = MixtralConfig(**{**SIZES, "num_hidden_layers": 2, "intermediate_size": 512}, num_local_experts=8)
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def ranks(
    folder: Path, place: Path, *, tensor: int = 1, pipeline: int = 1, experts: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """Return the report of each rank of a job."""
    asked = {
        "folder": str(folder),
        "tensor": tensor,
        "pipeline": pipeline,
        "experts": experts,
        "rendezvous": f"file://{place}/rendezvous",
        "options": options,
    }
    count = tensor * pipeline
    programs = [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "with_vllm.py"),
                json.dumps({**asked, "rank": rank, "report": str(place / f"{rank}.json")}),
            ],
            # vLLM caches its inspection of a model class, which takes a process.
            env={**ENVIRONMENT, "HOME": str(place), "VLLM_CACHE_ROOT": str(place.parent / "cache")},
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    said = [program.communicate()[0] for program in programs]
    assert [program.returncode for program in programs] == [0] * count, "\n".join(said)
    reports = [json.loads((place / f"{rank}.json").read_text()) for rank in range(count)]
    for report in reports:
        assert report["version"] == PINS["vllm"]
        assert report["ingot"]["loader"] == "ingot.engines.vllm"
        assert report["vllm"]["loader"] == "vllm.model_executor.model_loader.default_loader"
        # Every parameter, bit by bit.
        assert report["ingot"]["digests"] == report["vllm"]["digests"]
    return reports


@pytest.mark.parametrize(
    "options", [{}, {"backend": "pread", "threads": 2, "ahead": 1 << 20}, {"read": "used"}]
)
def test_vllm_loads_the_same_model_by_ingot(llama: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    (report,) = ranks(llama, tmp_path, **options)
    assert len(report["ingot"]["digests"]) == 27


def test_vllm_tensor_parallel_ranks_read_their_parts(llama: Path, tmp_path: Path) -> None:
    for report in ranks(llama, tmp_path, tensor=2, backend="pread"):
        # More than half: rows that are cut by columns are shorter than a page, and read whole.
        assert report["ingot"]["nbytes_read"] < 0.7 * nbytes(llama)


def test_vllm_pipeline_stage_reads_its_layers(llama: Path, tmp_path: Path) -> None:
    first, last = ranks(llama, tmp_path, pipeline=2, backend="pread")
    assert not set(first["ingot"]["digests"]) & set(last["ingot"]["digests"])
    for report in (first, last):
        assert report["ingot"]["nbytes_read"] < 0.65 * nbytes(llama)


def test_vllm_expert_parallel_ranks_read_their_experts(mixtral: Path, tmp_path: Path) -> None:
    for report in ranks(mixtral, tmp_path, tensor=2, experts=True, backend="pread"):
        assert report["ingot"]["nbytes_read"] < 0.65 * nbytes(mixtral)


@pytest.fixture
def loader() -> Any:
    """Return vLLM's factory of loaders after loading its plugins."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return lambda options, **more: get_model_loader(
        LoadConfig(load_format="ingot", model_loader_extra_config=options, **more)
    )


def test_vllm_names_the_options_for_an_unknown_one(loader: Any) -> None:
    with raises(ingot.OptionError, code="unknown-loader-option") as caught:
        loader({"thread": 4})
    assert str(caught.value) == (
        "model_loader_extra_config: unknown option `thread`: expected one of read, device, backend, threads, "
        "ahead, enable_weights_track"
    )


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"read": "all"}, ingot.OptionError, "read 'all' is unknown: expected one of auto, ahead, used"),
        ({"backend": "io_uring"}, ingot.OptionError, "expected one of auto, mmap, pread"),
        ({"threads": 0}, ingot.OptionError, "threads 0"),
        ({"ahead": -1}, ingot.OptionError, "ahead -1 is negative"),
        ({"ahead": "1GB"}, TypeError, "ahead must be int, found str"),
        ({"device": 0}, TypeError, "device must be str, found int"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_vllm_rejects_a_wrong_value(
    loader: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        loader(options)


def test_vllm_rejects_other_strategies(loader: Any) -> None:
    with pytest.raises(
        ingot.OptionError, match="safetensors_load_strategy 'eager' is for vLLM's own reading"
    ):
        loader({}, safetensors_load_strategy="eager")
    assert loader({"enable_weights_track": True}).enable_weights_track is True


def prepared(loader: Any, folder: Path) -> Any:
    return loader({})._prepare_weights(str(folder), None, None, True, None)


def test_vllm_rejects_a_folder_without_tensor_files(loader: Any, tmp_path: Path) -> None:
    with raises(ingot.CheckpointError, r"expected \*\.safetensors, found none", code="no-weights"):
        prepared(loader, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ingot.CheckpointError, match=r"found pytorch_model\.bin: .*`ingot convert`"):
        prepared(loader, tmp_path)


def test_vllm_names_missing_files(loader: Any, llama: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in llama.glob("*.safetensors"))
    for path in llama.iterdir():
        if path.name != names[1]:
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(FileNotFoundError, match=names[1]):
        prepared(loader, tmp_path)


def test_vllm_prefixes_the_weights_of_a_second_source(loader: Any, tmp_path: Path) -> None:
    import torch

    ingot.torch.save_file({"a": torch.arange(3.0)}, tmp_path / "model.safetensors")
    made = loader({})
    source = made.Source(str(tmp_path), revision=None, prefix="tower.")
    ((name, tensor),) = made._get_weights_iterator(source)
    assert (name, tensor.tolist()) == ("tower.a", [0, 1, 2])
