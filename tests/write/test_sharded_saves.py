"""Sharded checkpoints of torch's tensors."""

from __future__ import annotations

import json
import os
import random
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.checkpoints import INDEX, A, opened

torch = pytest.importorskip("torch")
import ingot.torch  # noqa: E402


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def state(seed: int) -> dict[str, Any]:
    """Return a state dict like a model's: shared, transposed, empty and scalar tensors of several dtypes."""
    generator = random.Random(seed)
    tensors: dict[str, Any] = {}
    for number in range(generator.randrange(1, 12)):
        shape = [generator.randrange(0, 6) for _ in range(generator.randrange(0, 3))]
        dtype = generator.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
        tensor = torch.arange(int(np.prod(shape))).to(dtype).reshape(shape)
        name = f"{generator.choice('zyxab')}.{number}.wé"[: generator.randrange(3, 9)] + str(number)
        tensors[name] = tensor
        match generator.randrange(5):
            case 0 if tensor.numel():
                tensors[f"tied.{number}"] = tensor
            case 1 if tensor.numel():
                tensors[f"view.{number}"] = tensor.reshape(-1)[:1]
            case 2 if tensor.ndim == 2:
                tensors[name] = tensor.T
    names = list(tensors)
    generator.shuffle(names)
    return {name: tensors[name] for name in names}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("limit", [16, 100, "1KB"])
def test_save_sharded_writes_the_files_of_huggingface_hub(
    seed: int, limit: int | str, tmp_path: Path
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    tensors = state(seed)
    metadata = {"k": "ö", "tied.0": "mine"} if seed % 3 == 0 else None
    try:
        # The function removes shared names from the dict that it gets.
        hub.save_torch_state_dict(dict(tensors), theirs, max_shard_size=limit, metadata=metadata)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            ingot.torch.save_sharded(tensors, ours, limit, metadata=metadata)
        return
    ingot.torch.save_sharded(tensors, ours, limit, metadata=metadata)
    expected, found = files(theirs), files(ours)
    assert sorted(found) == sorted(expected)
    for name in expected:
        if name == "model.safetensors":
            # The order of several metadata keys is random in their writer.
            ours_of_file, theirs_of_file = parsed(found[name]), parsed(expected[name])
            assert ours_of_file == theirs_of_file
        else:
            assert found[name] == expected[name], name


def parsed(file: bytes) -> tuple[Any, bytes]:
    (nbytes,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + nbytes]), file[8 + nbytes :]


@pytest.mark.parametrize("size", ["5gb", "5 GB", "1.5KB", " 2MB", 1, 7])
def test_save_sharded_reads_sizes_as_huggingface_hub_does(size: int | str, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    tensors = {name: torch.zeros(1, 300) for name in "abc"}
    (tmp_path / "theirs").mkdir()
    hub.save_torch_state_dict(tensors, tmp_path / "theirs", max_shard_size=size)
    ingot.torch.save_sharded(tensors, tmp_path / "ours", size)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


OLD = {name: torch.full((4,), 1.0) for name in "abc"}


NEW = {name: torch.full((4,), 2.0) for name in "abc"}


SMALLER = {name: torch.full((4,), 3.0) for name in "ab"}


def loads(directory: Path, expected: Mapping[str, Any]) -> bool:
    found = ingot.torch.load_file(directory)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def test_save_sharded_replaces_another_checkpoint(tmp_path: Path) -> None:
    others = ["model.safetensors.bak", "model-1-of-2.safetensors", "xmodel.safetensors", "config.json"]
    for name in others:
        (tmp_path / name).write_text("mine")
    for tensors, limit, names in [
        (OLD, 16, [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)] + [INDEX]),
        (NEW, 16, [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)] + [INDEX]),
        (SMALLER, 16, [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)] + [INDEX]),
        (OLD, "1GB", ["model.safetensors"]),
        (NEW, "1GB", ["model.safetensors"]),
        (OLD, 16, [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)] + [INDEX]),
    ]:
        ingot.torch.save_sharded(tensors, tmp_path, limit, overwrite=True)
        for name in others:
            assert (tmp_path / name).read_text() == "mine"
        assert sorted(files(tmp_path)) == sorted(names + others)
        # The other files are visible, so that the index or the usual file must take precedence.
        assert loads(tmp_path, tensors)


class PowerFailure(BaseException):
    """Simulates a power failure: no code of the save runs after it."""


@pytest.mark.parametrize("old", ["sharded", "smaller", "single"])
@pytest.mark.parametrize("limit", [16, "1GB"])
def test_save_sharded_that_stops_leaves_one_checkpoint(
    old: str, limit: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"sharded": OLD, "smaller": SMALLER, "single": OLD}[old]
    steps = ["replace", "link", "remove", "fsync"]
    real = {step: getattr(os, step) for step in steps}
    for stop in range(1, 60):
        directory = tmp_path / str(stop)
        ingot.torch.save_sharded(before, directory, "1GB" if old == "single" else 16, overwrite=True)
        count = 0

        def counted(step: str, stop: int = stop) -> Callable[..., Any]:
            def call(*arguments: Any, **keywords: Any) -> Any:
                nonlocal count
                count += 1
                if count >= stop:
                    raise PowerFailure(step)
                return real[step](*arguments, **keywords)

            return call

        with monkeypatch.context() as patch:
            for step in steps:
                patch.setattr(os, step, counted(step))
            try:
                ingot.torch.save_sharded(NEW, directory, limit, overwrite=True)
            except PowerFailure:
                finished = False
            else:
                finished = True
        assert loads(directory, NEW) or (not finished and loads(directory, before)), f"stopped at step {stop}"
        # The next save succeeds, and leaves no other files.
        ingot.torch.save_sharded(SMALLER, directory, 16, overwrite=True)
        assert loads(directory, SMALLER)
        assert len(files(directory)) == 3
        if finished:
            return
    pytest.fail("a save takes more steps than the test looks at")


def test_save_sharded_with_an_invalid_tensor_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    ingot.torch.save_sharded(OLD, tmp_path, 16, overwrite=True)
    before = files(tmp_path)
    with pytest.raises(ingot.SaveError):
        ingot.torch.save_sharded(NEW | {"z": torch.empty(2, device="meta")}, tmp_path, 16, overwrite=True)
    with pytest.raises(ValueError, match=r"expected a torch\.Tensor"):
        ingot.torch.save_sharded(NEW | {"z": "text"}, tmp_path, 16, overwrite=True)
    assert files(tmp_path) == before


def test_save_sharded_records_dropped_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    ingot.torch.save_sharded(model.state_dict(), tmp_path, 70)
    metadata = opened(tmp_path).metadata()
    assert metadata == {"total_size": 96, "1.weight": "0.weight"}
    twin = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    twin[1].weight = twin[0].weight
    ingot.torch.load_model(twin, tmp_path)
    assert torch.equal(twin[1].weight, model[0].weight)
    assert torch.equal(twin[1].bias, model[1].bias)


def test_save_sharded_keeps_shared_memory_within_a_shard(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    ingot.torch.save_file({"a": base, "b": base[1:]}, tmp_path / A, shared="alias")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": A}}))
    found = ingot.torch.load_file(tmp_path)
    found["a"][1] = 7
    assert found["b"][0] == 7


def test_huggingface_hub_reads_saved_shards(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    model = torch.nn.Linear(3, 3)
    ingot.torch.save_sharded(model.state_dict(), tmp_path, 16)
    twin = torch.nn.Linear(3, 3)
    hub.load_torch_model(twin, tmp_path)
    assert torch.equal(twin.weight, model.weight)


def test_load_file_reads_the_distributed_checkpoint_of_torch(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(dcp, "HuggingFaceStorageWriter"):
        pytest.skip("this torch has no HuggingFaceStorageWriter")
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"a": 1, "b": 2})
    with warnings.catch_warnings():
        # The warning that there is only one process.
        warnings.simplefilter("ignore")
        dcp.save(tensors, storage_writer=writer, no_dist=True)
    with opened(tmp_path) as file:
        assert file.metadata() == {"total_size": 40}
        np.testing.assert_array_equal(file.get_tensor("a"), tensors["a"].numpy())
        np.testing.assert_array_equal(file.get_tensor("b"), tensors["b"].numpy())


def many(value: float) -> dict[str, Any]:
    return {f"layers.{number}": torch.full((50, 7), value + number) for number in range(9)}


@pytest.mark.parametrize("snapshot", [True, "device", False])
def test_background_save_sharded_stores_the_values_of_the_call(tmp_path: Path, snapshot: Any) -> None:
    tensors = many(1.0)
    ingot.torch.save_sharded(tensors, tmp_path / "one", max_shard_size="4KB")
    future = ingot.torch.save_sharded(
        tensors, tmp_path / "all", max_shard_size="4KB", background=True, write_options={"snapshot": snapshot}
    )
    assert future.staged.result(60) is None
    for tensor in tensors.values():
        tensor.zero_()
    assert future.result(60) is None
    assert files(tmp_path / "all") == files(tmp_path / "one")


def test_background_save_sharded_keeps_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    futures = [
        ingot.torch.save_sharded(many(value), "model", background=True, overwrite=True)
        for value in (1.0, 2.0)
    ]
    monkeypatch.chdir("/")
    for future in futures:
        future.result(60)
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]
    assert ingot.torch.load_file(tmp_path / "model")["layers.0"][0, 0] == 2


def test_background_save_sharded_that_fails_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    ingot.torch.save_sharded(many(1.0), tmp_path / "model", max_shard_size="4KB")
    before = files(tmp_path / "model")
    # The call itself rejects existing files, before it starts the background save.
    with pytest.raises(FileExistsError):
        ingot.torch.save_sharded(many(2.0), tmp_path / "model", background=True)
    with pytest.raises(ingot.OptionError, match="expected one of host, device"):
        ingot.torch.save_sharded(
            many(2.0), tmp_path / "new", background=True, write_options={"snapshot": "gpu"}
        )  # type: ignore[call-overload]
    (tmp_path / "file").write_bytes(b"")
    future = ingot.torch.save_sharded(
        many(2.0), tmp_path / "file" / "model", background=True, write_options={"snapshot": False}
    )
    with pytest.raises(NotADirectoryError):
        future.result(60)
    with pytest.raises(NotADirectoryError):
        future.staged.result(0)
    assert files(tmp_path / "model") == before
    assert sorted(os.listdir(tmp_path)) == ["file", "model"]
