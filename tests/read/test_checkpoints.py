"""Checkpoints of many files: opening, reading, and inconsistent files."""

from __future__ import annotations

import json
import os
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot import CheckpointError, HeaderError
from support.checkpoints import INDEX, LEFT, RIGHT, A, B, assert_equal, opened, write
from support.errors import raises
from vectors.case import indexes

torch = pytest.importorskip("torch")
import ingot.torch  # noqa: E402


@pytest.mark.parametrize("spell", [Path, lambda path: path / INDEX], ids=["directory", "index"])
def test_checkpoint_is_read_by_one_handle(
    checkpoint: Path, spell: Callable[[Path], Any], backend: str
) -> None:
    with opened(spell(checkpoint), backend=backend) as file:
        assert file.keys() == ["a", "b", "c", "d"]
        assert file.offset_keys() == ["c", "a", "d", "b"]
        assert len(file) == 4
        assert "b" in file
        assert "e" not in file
        assert 3 not in file
        assert (file.format, file.backend) == ("safetensors", backend)
        for name, expected in (LEFT | RIGHT).items():
            found = file.get_tensor(name)
            assert found.dtype == expected.dtype
            assert found.shape == expected.shape
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(file.get_slice("a")[:, 1:], LEFT["a"][:, 1:])
        info = file.info("a")
        assert (info.dtype, info.shape, info.nbytes) == ("F32", (2, 3), 24)
        some = file.get_tensors(["d", "a", "d"])
        assert list(some) == ["d", "a"]
        assert list(file.get_tensors()) == file.offset_keys()
        assert file.shards == [str(checkpoint / A), str(checkpoint / B)]
        assert file.shard_of("b") == str(checkpoint / B)
        assert file.shard_metadata() == {A: {"format": "np"}, B: {"format": "np"}}
        assert file.parameter_count() == {"I8": 4, "F32": 6, "I64": 1}
        assert "4 tensors" in repr(file)


def test_checkpoint_of_one_file_has_the_same_properties(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    ingot.numpy.save_file(LEFT, path, {"k": "v"})
    for spelled in (path, tmp_path):
        with opened(spelled) as file:
            assert file.shards == [str(path)]
            assert file.shard_of("a") == str(path)
            assert file.shard_metadata() == {"one.safetensors": {"k": "v"}}
            assert file.parameter_count() == {"F32": 6, "I64": 1}
            with pytest.raises(ingot.TensorNotFoundError):
                file.shard_of("b")


def test_checkpoint_with_many_shards_is_read(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    shards = {
        f"sub/{number}.safetensors": {
            f"{number}.{rank}": generator.integers(0, 255, size, np.uint8)
            for rank, size in enumerate([3, 1 << 21, 70_000, 0])
        }
        for number in range(7)
    }
    write(tmp_path, shards)
    everything = {name: array for tensors in shards.values() for name, array in tensors.items()}
    names = list(everything)
    random.Random(0).shuffle(names)
    with opened(tmp_path, backend="pread") as file:
        found = file.get_tensors(names)
        assert list(found) == names
        for name in names:
            np.testing.assert_array_equal(found[name], everything[name])


def test_checkpoint_is_pickled_and_shared_by_threads(checkpoint: Path) -> None:
    file = pickle.loads(pickle.dumps(opened(checkpoint, backend="pread", confine=True)))
    assert file.path == str(checkpoint / INDEX)
    assert file.backend == "pread"
    failures = []

    def read() -> None:
        same = (np.array_equal(file.get_tensor("b"), RIGHT["b"]) for _ in range(20))
        failures.extend(equal for equal in same if not equal)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_checkpoint_has_metadata_of_any_json_type(tmp_path: Path) -> None:
    metadata = {"total_size": 44, "mergekit_version": "0.1.5", "x": [1, None, {"y": 1.5}], "big": 10**25}
    write(tmp_path, {A: LEFT, B: RIGHT}, metadata=metadata | {"total_size": 36})
    assert opened(tmp_path).metadata() == metadata | {"total_size": 36}
    write(tmp_path, {A: LEFT, B: RIGHT}, metadata=None)
    assert opened(tmp_path).metadata() is None


def test_checkpoint_with_a_wrong_total_size_warns(tmp_path: Path) -> None:
    write(tmp_path, {A: LEFT, B: RIGHT}, metadata={"total_size": 35})
    with pytest.warns(UserWarning, match="total_size as 35, but the tensors have 36 bytes"):
        assert len(opened(tmp_path).get_tensors()) == 4


def test_checkpoint_suggests_a_name_of_any_shard(checkpoint: Path) -> None:
    write(checkpoint, {A: {"model.wte": LEFT["a"]}, B: RIGHT})
    with pytest.raises(ingot.TensorNotFoundError, match=r"index\.json.*did you mean `model\.wte`"):
        opened(checkpoint).get_tensor("wte")


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in indexes()])
def test_checkpoint_index_is_judged_as_its_vector_states(case: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / INDEX
    path.write_bytes(case["bytes"])
    if "code" in case:
        with raises(CheckpointError, code=case["code"]) as caught:
            opened(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert caught.value.path == str(path)
        return
    shards: dict[str, dict[str, Any]] = {}
    for tensor, file in case["weight_map"]:
        shards.setdefault(file, {})[tensor] = np.zeros(1, np.uint8)
    for file, tensors in shards.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        ingot.numpy.save_file(tensors, tmp_path / file, format="safetensors")
    file = opened(path)
    assert file.keys() == sorted((tensor for tensor, _ in case["weight_map"]), key=str.encode)
    if "metadata" in case:
        assert file.metadata() == json.loads(case["metadata"])


def refusal(path: Path, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        opened(path, **options).get_tensors()
    return caught.value


def test_checkpoint_names_missing_shards(checkpoint: Path) -> None:
    (checkpoint / A).unlink()
    with pytest.raises(FileNotFoundError, match=rf"1 of the 2 files .* not there: `{A}`") as caught:
        opened(checkpoint)
    assert caught.value.filename == str(checkpoint / INDEX)


def test_checkpoint_names_both_files_of_a_missing_tensor(tmp_path: Path) -> None:
    write(tmp_path, {A: LEFT, B: RIGHT}, weight_map={"a": A, "c": A, "b": B, "d": B, "e": B})
    error = refusal(tmp_path)
    assert (error.code, error.tensor) == ("missing-tensor", "e")
    assert INDEX in str(error)
    assert B in str(error)
    write(tmp_path, {A: LEFT, B: RIGHT}, weight_map={"a": A, "c": B, "b": B, "d": B})
    error = refusal(tmp_path)
    assert error.tensor == "c"
    assert A in str(error)
    assert B in str(error)


def test_checkpoint_rejects_a_tensor_outside_the_index(tmp_path: Path) -> None:
    write(tmp_path, {A: LEFT, B: RIGHT}, weight_map={"a": A, "b": B, "d": B})
    error = refusal(tmp_path)
    assert (error.code, error.tensor) == ("extra-tensor", "c")
    assert INDEX in str(error)
    assert A in str(error)


def test_checkpoint_names_both_shards_of_a_duplicate(tmp_path: Path) -> None:
    write(tmp_path, {A: LEFT, B: RIGHT | {"a": LEFT["a"]}}, weight_map={"a": A, "c": A, "b": B, "d": B})
    error = refusal(tmp_path)
    assert (error.code, error.tensor) == ("tensor-in-two-shards", "a")
    assert A in str(error)
    assert B in str(error)


def test_checkpoint_names_a_broken_shard(checkpoint: Path) -> None:
    (checkpoint / B).write_bytes((checkpoint / B).read_bytes()[:-1])
    file = opened(checkpoint)
    np.testing.assert_array_equal(file["a"], LEFT["a"])
    for read in (lambda: file["b"], file.get_tensors, file.parameter_count, file.offset_keys):
        with pytest.raises(HeaderError, match=B):
            read()


def test_safe_open_reads_the_old_shards_after_a_save(checkpoint: Path, backend: str) -> None:
    with opened(checkpoint, backend=backend) as file:
        for name in (B, A):
            ingot.numpy.save_file({"other": RIGHT["b"]}, checkpoint / name)
        (checkpoint / INDEX).unlink()
        np.testing.assert_array_equal(file.get_tensor("b"), RIGHT["b"])
        (checkpoint / A).unlink()
        np.testing.assert_array_equal(file.get_tensor("a"), LEFT["a"])


def test_safe_open_rejects_a_shard_written_to_before_its_first_read(checkpoint: Path) -> None:
    for words, nbytes in (("was written to", 0), ("grew", 1)):
        write(checkpoint, {A: LEFT, B: RIGHT})
        file = opened(checkpoint)
        with open(checkpoint / B, "ab") as shard:
            shard.write(bytes(nbytes))
        os.utime(checkpoint / B, ns=(0, 0))
        with raises(ingot.StorageError, f"{B}.*{words}", code="changed"):
            file.get_tensor("b")
        np.testing.assert_array_equal(file.get_tensor("a"), LEFT["a"])


@pytest.mark.parametrize("is_read", [False, True], ids=["unread", "read"])
def test_safe_open_rejects_a_replaced_shard(tmp_path: Path, backend: str, is_read: bool) -> None:
    files = {f"{number:02}.safetensors": {f"t{number:02}": np.array([number])} for number in range(60)}
    write(tmp_path, files)
    with opened(tmp_path, backend=backend) as file:
        if is_read:
            # So many shards that the first ones are closed again.
            assert [int(file[f"t{number:02}"][0]) for number in range(60)] == [*range(60)]
        number = 1 if is_read else 59
        for replace in (ingot.numpy.save_file, lambda _, path: path.unlink()):
            replace(files[f"{number:02}.safetensors"], tmp_path / f"{number:02}.safetensors")
            with raises(ingot.StorageError, rf"{number:02}\.safetensors.*open it again", code="changed"):
                file.get_tensor(f"t{number:02}")
    ingot.numpy.save_file(files[f"{number:02}.safetensors"], tmp_path / f"{number:02}.safetensors")
    np.testing.assert_array_equal(ingot.numpy.load_file(tmp_path)[f"t{number:02}"], [number])


def test_checkpoint_directory_without_an_index_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / ".hidden.safetensors").write_text("")
    with pytest.raises(IsADirectoryError, match="no checkpoint"):
        opened(tmp_path)


@pytest.mark.parametrize("found", [(1,), (2, 3)])
def test_load_file_rejects_shards_without_an_index(tmp_path: Path, found: tuple[int, ...]) -> None:
    for number in found:
        ingot.numpy.save_file(RIGHT, tmp_path / f"model-{number:05}-of-00003.safetensors")
    error = refusal(tmp_path)
    assert error.code == "missing-index"
    assert "`model-0000" in str(error)
    with pytest.raises(ingot.CheckpointError):
        ingot.numpy.load_file(tmp_path)
    # `model.safetensors` is a complete model. A shard can be loaded by its path.
    assert ingot.numpy.load_file(tmp_path / f"model-{found[0]:05}-of-00003.safetensors")
    for path in tmp_path.iterdir():
        path.unlink()
    ingot.numpy.save_file(RIGHT, tmp_path / "model-00001-of-00001.safetensors")
    assert ingot.numpy.load_file(tmp_path).keys() == RIGHT.keys()


def test_checkpoint_directory_with_several_lists_them(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.bt"):
        ingot.numpy.save_file(RIGHT, tmp_path / name)
    error = refusal(tmp_path)
    assert error.code == "ambiguous-checkpoint"
    assert "`x.safetensors`, `y.bt`" in str(error)
    for name in ("x.safetensors.index.json", "model.safetensors.index.fp16.json"):
        (tmp_path / name).write_text('{"weight_map":{}}')
    assert "`model.safetensors.index.fp16.json`, `x.safetensors.index.json`" in str(refusal(tmp_path))
    # The choice is clear: the usual index, else the only index, else the usual file.
    (tmp_path / INDEX).write_text('{"weight_map":{}}')
    assert opened(tmp_path).path == str(tmp_path / INDEX)
    for path in tmp_path.glob("model*"):
        path.unlink()
    assert opened(tmp_path).path == str(tmp_path / "x.safetensors.index.json")
    (tmp_path / "x.safetensors.index.json").unlink()
    ingot.numpy.save_file(LEFT, tmp_path / "model.safetensors")
    assert opened(tmp_path).keys() == ["a", "c"]


def test_checkpoint_index_is_detected_by_contents(checkpoint: Path) -> None:
    # File names as in the cache of the Hub.
    (checkpoint / INDEX).rename(checkpoint / "9f2c")
    assert len(opened(checkpoint / "9f2c")) == 4


def test_confine_rejects_links(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blobs = tmp_path_factory.mktemp("blobs")
    assert len(opened(checkpoint, confine=True)) == 4
    for name in (A, INDEX):
        (checkpoint / name).rename(blobs / name)
        (checkpoint / name).symlink_to(blobs / name)
    assert len(opened(checkpoint)) == 4
    assert refusal(checkpoint, confine=True).code == "not-confined"
    (checkpoint / INDEX).unlink()
    (blobs / INDEX).rename(checkpoint / INDEX)
    error = refusal(checkpoint, confine=True)
    assert error.code == "not-confined"
    assert A in str(error)
    assert "symbolic link" in str(error)
    (checkpoint / A).unlink()
    os.link(blobs / A, checkpoint / A)
    assert len(opened(checkpoint)) == 4
    assert "hard link" in str(refusal(checkpoint, confine=True))
    assert "hard link" in str(refusal(checkpoint / A, confine=True))


@pytest.mark.parametrize("path", ["", "absent/.."])
def test_confine_reports_a_missing_path_without_file_name(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        ingot.open(path, confine=True)
    assert caught.value.filename == path


def test_confine_does_not_tell_whether_a_link_leads_to_a_directory(tmp_path: Path) -> None:
    model, outside = tmp_path / "model", tmp_path / "outside"
    model.mkdir()
    outside.mkdir()
    for place in (outside, tmp_path / "absent"):
        (model / "model.safetensors").symlink_to(place)
        assert refusal(model, confine=True).code == "not-confined"
        (model / "model.safetensors").unlink()


def test_checkpoint_directory_may_be_a_link(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write(model, {"sub/a.safetensors": LEFT})
    link = tmp_path / "link"
    link.symlink_to(model)
    assert len(opened(link, confine=True)) == 2
    (model / "sub").rename(tmp_path / "elsewhere")
    (model / "sub").symlink_to(tmp_path / "elsewhere")
    assert len(opened(model)) == 2
    assert refusal(model, confine=True).code == "not-confined"


@pytest.mark.parametrize("load", [ingot.numpy.load_file, ingot.torch.load_file], ids=["numpy", "torch"])
def test_load_file_selects_over_shards(checkpoint: Path, load: Callable[..., Any], backend: str) -> None:
    everything = LEFT | RIGHT

    def some(**options: Any) -> Any:
        return load(checkpoint, backend=backend, **options)

    assert_equal(some(keys=["d", "a", "b"]), {name: everything[name] for name in "dab"})
    assert_equal(some(keys=ingot.glob("b*", "c*")), {name: everything[name] for name in "cb"})
    assert_equal(some(keys=lambda info: info.dtype == "F32"), {name: everything[name] for name in "ad"})
    slices = {"a": (slice(None), slice(1, 3)), "b": slice(0, 4, 2)}
    assert_equal(
        some(keys=["b", "a", "c"], slices=slices),
        {"b": RIGHT["b"][::2], "a": LEFT["a"][:, 1:], "c": LEFT["c"]},
    )
    found, metadata = some(keys=["b"], return_metadata=True)
    assert_equal(found, {"b": RIGHT["b"]})
    assert metadata == {}
    with pytest.raises(ingot.TensorNotFoundError, match=r"index\.json"):
        some(keys=["b", "nowhere"])
    with pytest.raises(ingot.SliceError, match=f"{A}.*`a`"):
        some(slices={"b": slice(1), "a": 7})


def test_checkpoint_fills_destinations(checkpoint: Path, backend: str) -> None:
    strided = torch.zeros(3, 2).T
    out = {"b": torch.zeros(4, dtype=torch.int8), "a": strided}
    found = ingot.torch.load_file(checkpoint, out=out, backend=backend)
    assert found["a"] is strided
    assert found["b"] is out["b"]
    assert_equal(found, {name: (LEFT | RIGHT)[name] for name in "cadb"})
    twice = torch.zeros(6)
    with pytest.raises(ingot.DestinationError, match="shares memory"):
        ingot.torch.load_file(
            write(checkpoint, {A: {"a": LEFT["a"]}, B: {"e": LEFT["a"]}}),
            out={"a": twice.reshape(2, 3), "e": twice.reshape(2, 3)},
        )
    assert not twice.any()


def test_checkpoint_names_a_shard_that_shrinks(checkpoint: Path) -> None:
    options: list[dict[str, Any]] = [
        {"slices": {"b": slice(1)}},
        {"out": {"b": torch.zeros(4, dtype=torch.int8)}},
        {"dtype": "F16"},
    ]
    for given in options:
        for backend in ("mmap", "pread"):
            write(checkpoint, {A: LEFT, B: RIGHT})

            def shrink(info: ingot._native.TensorInfo) -> bool:
                if info.name == "b":
                    os.truncate(checkpoint / B, (checkpoint / B).stat().st_size - 1)
                return True

            with pytest.raises(ingot.StorageError, match=f"{B}.*shrank"):
                ingot.torch.load_file(checkpoint, keys=shrink, backend=backend, **given)


def test_prefault_counts_the_bytes_of_all_shards(checkpoint: Path) -> None:
    assert ingot.warm(checkpoint) == 36
    assert opened(checkpoint).warm(["b", "a", "b"]) == 28


def test_compat_reads_checkpoints(checkpoint: Path) -> None:
    from ingot.compat._handles import safe_open

    with safe_open(checkpoint / INDEX, "np") as file:
        assert file.keys() == ["a", "b", "c", "d"]
        with file.prefetch({"b": slice(1, 3), "a": None}) as loader:
            assert loader.names() == ["a", "b"]
            np.testing.assert_array_equal(loader.take("b"), RIGHT["b"][1:3])
            assert_equal(dict(loader), {"a": LEFT["a"]})
