"""`ingot.inspect` of models on disk: counts as in huggingface.js and results as in huggingface_hub."""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import re
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot
import ingot.numpy
from ingot._read import parameters
from support import hub_metadata
from support.counted_models import INDEX, files_of, write
from support.errors import raises
from vectors.case import counts

CASES = pytest.mark.parametrize("case", counts(), ids=lambda case: case["name"])
# A .bt file has no F8_E8M0.
IN_BINTENSORS = [case for case in counts() if "F8_E8M0" not in case["stored"]]
SHARDS = next(case for case in counts() if case["name"] == "shards")
FP8 = {"quantization_config": {"quant_method": "fp8"}}


def a_model(folder: Path, *names: str) -> Path:
    """Write a file with these tensors, of one element each."""
    folder.mkdir(exist_ok=True)
    path = folder / "model.safetensors"
    ingot.numpy.save_file({name: np.zeros(1, np.float32) for name in names}, path)
    return path


# The golden vectors


@CASES
def test_inspect_counts_parameters_as_huggingface_js_does(case: dict[str, Any], tmp_path: Path) -> None:
    check_counts(case, write(tmp_path, files_of(case)))


@pytest.mark.parametrize("case", IN_BINTENSORS, ids=lambda case: case["name"])
def test_inspect_counts_parameters_of_bintensors(case: dict[str, Any], tmp_path: Path) -> None:
    check_counts(case, write(tmp_path, files_of(case, "bintensors")))


def check_counts(case: dict[str, Any], folder: Path) -> None:
    logical = ingot.inspect(folder)
    assert (logical.parameter_count, logical.parameter_total) == (case["logical"], case["total"])
    stored = ingot.inspect(folder, count="stored")
    assert stored.parameter_count == case["stored"]
    assert stored.parameter_total == sum(case["stored"].values())


@CASES
def test_inspect_counts_add_up(case: dict[str, Any], tmp_path: Path) -> None:
    found = ingot.inspect(write(tmp_path, files_of(case)))
    in_all: Counter[str] = Counter()
    for file in found.files_metadata.values():
        of_file: Counter[str] = Counter()
        for tensor in file.tensors.values():
            of_file[tensor.dtype] += tensor.parameter_count
        # Dtypes without parameters may be missing.
        assert of_file == Counter(file.parameter_count)
        in_all.update(file.parameter_count)
    assert in_all == Counter(found.parameter_count)


@CASES
def test_inspect_equals_huggingface_hub(case: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, files_of(case))
    expected = asdict(huggingface_hub.get_local_safetensors_metadata(folder))
    assert hub_metadata.of_repo(ingot.inspect(folder, count="stored")) == expected
    for name, file in ingot.inspect(folder, count="stored").files_metadata.items():
        of_file = huggingface_hub.parse_local_safetensors_file_metadata(folder / name)
        assert hub_metadata.of_file(file) == asdict(of_file)


def test_inspect_has_the_fields_of_huggingface_hub() -> None:
    for ours, theirs, more in [
        (ingot.FileMetadata, huggingface_hub.utils.SafetensorsFileMetadata, []),
        (ingot.RepoMetadata, huggingface_hub.utils.SafetensorsRepoMetadata, ["parameter_total"]),
    ]:
        assert [field.name for field in fields(ours)] == [field.name for field in fields(theirs)] + more


# Arguments


def test_inspect_reads_a_file_an_index_and_a_directory(tmp_path: Path) -> None:
    one = write(tmp_path / "one", files_of(counts()[0]))
    assert ingot.inspect(one) == ingot.inspect(one / "model.safetensors")
    assert not ingot.inspect(one).sharded
    many = write(tmp_path / "many", files_of(SHARDS))
    assert ingot.inspect(many) == ingot.inspect(str(many / INDEX)) == ingot.inspect(os.fsencode(many))
    found = ingot.inspect(many)
    assert (found.sharded, sorted(found.files_metadata)) == (True, sorted(dict(SHARDS["files"])))
    assert found.weight_map == json.loads((many / INDEX).read_text())["weight_map"]


def test_inspect_has_the_whole_header(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    arrays = {"w": np.zeros((2, 3), np.float16), "s": np.float32(1)}
    ingot.numpy.save_file(arrays, path, {"format": "pt"})
    found = ingot.inspect(path)
    assert found == ingot.RepoMetadata(
        metadata={"format": "pt"},
        sharded=False,
        weight_map={"w": "m.safetensors", "s": "m.safetensors"},
        files_metadata={
            "m.safetensors": ingot.FileMetadata(
                metadata={"format": "pt"},
                tensors={
                    "s": ingot.TensorInfo("s", "F32", [], 0, 4, parameter_count=0),
                    "w": ingot.TensorInfo("w", "F16", [2, 3], 4, 16),
                },
                parameter_count={"F16": 6},
            )
        },
        parameter_count={"F16": 6},
        parameter_total=6,
    )
    # The repr is as short for a model with a million tensors.
    assert repr(found) == "RepoMetadata(sharded=False, parameter_count={'F16': 6}, parameter_total=6)"
    assert pickle.loads(pickle.dumps(ingot.inspect(path))) == found
    with pytest.raises(AttributeError, match="no attribute 'tensors'"):
        found.tensors  # type: ignore[attr-defined]  # noqa: B018


def test_inspect_counts_tensors_when_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    ingot.numpy.save_file({f"w{n}": np.zeros(2) for n in range(500)}, path, {"format": "pt"})
    found = ingot.inspect(path)
    assert found.metadata == {"format": "pt"}
    assert "weight_map" not in vars(found)
    # From many threads at once, and after the file is gone.
    path.unlink()
    start = threading.Barrier(8)

    def total(_: int) -> int:
        start.wait()
        return found.parameter_total + len(found.weight_map) - len(found.files_metadata)

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(total, range(8))) == {1000 + 500 - 1}


def test_inspect_holds_no_object(tmp_path: Path) -> None:
    data = bytearray(ingot.numpy.save({"w": np.zeros((2, 3))}, {"format": "pt"}))
    found = ingot.inspect(data)
    # A buffer that something holds cannot be resized.
    data.clear()
    assert (found.metadata, found.weight_map) == ({"format": "pt"}, {"w": "<buffer>"})
    assert found.parameter_count == {"F64": 6}


def test_inspect_keeps_few_files_open(tmp_path: Path) -> None:
    for number in range(100):
        ingot.numpy.save_file({"w": np.zeros(2)}, tmp_path / f"{number}", {"number": str(number)})
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    found = [ingot.inspect(tmp_path / f"{number}") for number in range(100)]
    assert [one.metadata for one in found] == [{"number": str(number)} for number in range(100)]
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) - before < 60


def test_inspect_takes_index_metadata_of_any_json_type(tmp_path: Path) -> None:
    said = {"total_size": 30, "nested": [None, {"a": 1.5}]}
    found = ingot.inspect(write(tmp_path, files_of(SHARDS | {"index_metadata": json.dumps(said)})))
    assert found.metadata == said


@pytest.mark.parametrize(
    ("said", "total"), [(3.7, 3), (-1, 9), (True, 9), (None, 9), ([3], 9), (1e300, 9), (" 4.9", 4)]
)
def test_inspect_takes_a_declared_total(tmp_path: Path, said: object, total: int) -> None:
    metadata = json.dumps({"total_parameters": said})
    found = ingot.inspect(write(tmp_path, files_of(SHARDS | {"index_metadata": metadata})))
    assert (found.parameter_total, sum(found.parameter_count.values())) == (total, 9)


def test_inspect_takes_a_configuration(tmp_path: Path) -> None:
    path = a_model(tmp_path, "a.weight", "a.weight_scale")
    assert ingot.inspect(path).parameter_total == 2
    assert ingot.inspect(path, config=FP8).parameter_total == 1
    (tmp_path / "config.json").write_text(json.dumps(FP8))
    assert ingot.inspect(path).parameter_total == 1
    assert ingot.inspect(path, config={}).parameter_total == 2
    with pytest.raises(TypeError, match="config must be a dict or None, found str"):
        ingot.inspect(path, config="config.json")  # type: ignore[arg-type]


# Errors


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "is not JSON: "),
        ("\udcff", "is not JSON: "),
        ("[" * 100_000, "is not JSON: "),
        ("[]", "is not a JSON object: found list"),
        (" " * 10_000_001, "is too large: expected at most 10000000 bytes"),
    ],
    ids=["cut", "no text", "deep", "a list", "large"],
)
def test_inspect_rejects_an_unreadable_configuration(tmp_path: Path, content: str, what: str) -> None:
    path = a_model(tmp_path, "a.weight")
    config = tmp_path / "config.json"
    config.write_bytes(content.encode(errors="surrogateescape"))
    with raises(ingot.CheckpointError, code="invalid-config") as caught:
        ingot.inspect(path)
    assert str(caught.value).startswith(f"{config}: the configuration {what}")
    assert "config=" in str(caught.value)
    # Without the configuration, the call succeeds.
    assert ingot.inspect(path, count="stored").parameter_total == 1
    assert ingot.inspect(path, config={}).parameter_total == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs")
def test_inspect_does_not_wait_for_a_fifo_configuration(tmp_path: Path) -> None:
    path = a_model(tmp_path, "a.weight")
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ingot.CheckpointError, match="is not a regular file"):
        ingot.inspect(path)


def test_inspect_rejects_what_safe_open_rejects(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ingot.inspect(tmp_path / "none.safetensors")
    with pytest.raises(IsADirectoryError):
        ingot.inspect(tmp_path)
    path = a_model(tmp_path, "a")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ingot.HeaderError) as caught:
        ingot.inspect(tmp_path)
    assert caught.value.path == str(path)
    with pytest.raises(ingot.HeaderError, match="header too large"):
        ingot.inspect(a_model(tmp_path, "b"), max_header_size=10)
    folder = write(tmp_path / "shards", files_of(SHARDS))
    (shard, _), *_ = SHARDS["files"]
    a_model(folder, "other").rename(folder / shard)
    with pytest.raises(ingot.CheckpointError):
        ingot.inspect(folder)


def test_inspect_rejects_an_invalid_count(tmp_path: Path) -> None:
    with raises(ingot.OptionError, "expected one of logical, stored", code="unknown-count"):
        ingot.inspect(tmp_path, count="all")  # type: ignore[arg-type]


def test_inspect_survives_any_configuration(tmp_path: Path) -> None:
    path = a_model(tmp_path, "a.weight", "b.scales")
    methods = ["gptq", "mlx", "mxfp4", "compressed-tensors", "fp8", "bitsandbytes", "other", 4, [], {}]
    values = [None, "4", [], {}, 10**400, 1e400, math.nan, True]
    keys = [
        "bits",
        "format",
        "ignore",
        "config_groups",
        "modules_to_not_convert",
        "expert_dtype",
        "group_size",
    ]
    odd: list[Any] = [None, 1, "x", [], {}, 10**400, 1e400]
    for method in methods:
        odd.append({"quant_method": method})
        odd += [{"quant_method": method, **dict.fromkeys(keys, value)} for value in values]
    for settings in odd:
        for key in ("quantization_config", "quantization", "text_config"):
            for config in ({key: settings}, {"text_config": {key: settings}}):
                assert ingot.inspect(path, config=config).parameter_total in (1, 2), config


def test_inspect_matches_a_hostile_pattern_in_bounded_time(tmp_path: Path) -> None:
    path = a_model(tmp_path, "a" * 20_000 + ".weight")
    for key, pattern in [("modules_to_not_convert", "*a" * 60 + "b"), ("ignore", "re:" + ".*a" * 60 + "b$")]:
        config = {"quantization_config": {"quant_method": "gptq", key: [pattern]}}
        assert ingot.inspect(path, config=config).parameter_total == 1


@given(st.text("ab.[?!]", max_size=12), st.lists(st.text("ab.[?!]", max_size=3), min_size=1, max_size=5))
def test_inspect_globs_equal_regular_expressions(text: str, parts: list[str]) -> None:
    expression = ".*".join(map(re.escape, parts))
    patterns = parameters._Patterns(set(), ["*".join(parts)])
    assert patterns.match(text) == (re.fullmatch(expression, text) is not None)


@given(st.text("ab.\\*^$", max_size=8), st.text("ab.", max_size=10))
def test_inspect_targets_match_at_most_their_expression(pattern: str, module: str) -> None:
    try:
        expression = re.compile(pattern)
    except re.error:
        return
    if parameters._targets([f"re:{pattern}"]).match(module):
        assert expression.match(module) is not None


# Async


def test_inspect_async_leaves_the_event_loop_free(tmp_path: Path) -> None:
    folder, before = write(tmp_path, files_of(SHARDS)), threading.enumerate()

    async def several() -> list[ingot.RepoMetadata]:
        return await asyncio.gather(*(ingot.inspect_async(folder) for _ in range(8)))

    assert asyncio.run(several()) == [ingot.inspect(folder)] * 8
    with pytest.raises(FileNotFoundError):
        asyncio.run(ingot.inspect_async(tmp_path / "none", config={}))
    # Threads of other tests may end meanwhile.
    assert set(threading.enumerate()) <= set(before)
