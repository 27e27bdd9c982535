"""`ingot.compat`: errors are of the wheel's classes and begin with its words."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modules import ONES, REAL, RealError, in_a_fresh_process
from torch import nn

import ingot
import ingot.compat
import ingot.torch
from ingot._base.frameworks import FRAMEWORKS


def test_both_classes_catch_the_errors_of_both(compat: SimpleNamespace, path: Path) -> None:
    file = compat.top.safe_open(path, "pt")
    for kind in (RealError, compat.top.SafetensorError, compat.rust.SafetensorError, ingot.SafetensorError):
        with pytest.raises(kind):
            file.get_tensor("nope")
        with pytest.raises(kind):
            # ingot's own, for a library that was started without compat.
            ingot.safe_open(path, "pt").get_tensor("nope")
    # A library that took the real function before raises the real class.
    with pytest.raises(compat.top.SafetensorError):
        REAL.torch.load(b"")
    assert issubclass(ingot.TensorNotFoundError, (RealError, KeyError))


def test_errors_can_be_pickled_while_installed(compat: SimpleNamespace, path: Path) -> None:
    with pytest.raises(ingot.TensorNotFoundError) as caught:
        compat.top.safe_open(path, "pt").get_tensor("nope")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.tensor) == (ingot.TensorNotFoundError, str(caught.value), "nope")
    text = compat.top.SafetensorError("text")
    assert str(pickle.loads(pickle.dumps(text))) == "text"


def with_header(header: bytes, data: bytes = b"", nbytes: int | None = None) -> bytes:
    return (len(header) if nbytes is None else nbytes).to_bytes(8, "little") + header + data


def entry(dtype: str = "F32", shape: str = "[1]", begin: int = 0, end: int = 4) -> bytes:
    text = f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}}}'
    return text.encode()


BROKEN = {
    "HeaderTooSmall": b"abc",
    "HeaderTooLarge": with_header(b"{}", nbytes=2**40),
    "InvalidHeaderLength": with_header(b"{}", nbytes=200),
    "InvalidHeader": with_header(b'{"\xff": 1}'),
    "InvalidHeaderDeserialization": with_header(b"{nope"),
    "TensorInvalidInfo": with_header(entry(shape="[2]"), b"1234"),
    "InvalidOffset": with_header(entry(begin=4, end=8), b"12345678"),
    "ValidationOverflow": with_header(entry(shape=f"[{2**40},{2**40}]"), b"1234"),
    "MetadataIncompleteBuffer": with_header(entry(), b"12"),
}


def words(text: str) -> str:
    """Upstream's words for a fault, as far as they do not depend on its JSON reader."""
    return ":".join(text.split(":")[:2])


@pytest.mark.parametrize("old_name", BROKEN)
def test_header_errors_begin_with_the_words_of_the_wheel(
    compat: SimpleNamespace, old_name: str, tmp_path: Path
) -> None:
    data = BROKEN[old_name]
    path = tmp_path / "broken"
    path.write_bytes(data)
    readers: list[tuple[Callable[..., Any], Callable[..., Any], Any]] = [
        (REAL.torch.load_file, compat.torch.load_file, path),
        (REAL.numpy.load_file, compat.numpy.load_file, path),
        (REAL.torch.load, compat.torch.load, data),
        (REAL.numpy.load, compat.numpy.load, data),
        (REAL.top.deserialize, compat.top.deserialize, data),
    ]
    for theirs, ours, argument in readers:
        with pytest.raises(RealError) as wanted:
            theirs(argument)
        with pytest.raises(ingot.HeaderError) as found:
            ours(argument)
        assert str(found.value).startswith(words(str(wanted.value)))
        # What safetensors up to 0.5 printed, which programs look for.
        assert f"[{old_name}]" in str(found.value)
        if argument is path:
            assert str(path) in str(found.value)


def test_a_git_lfs_pointer_is_a_header_too_large_and_named(compat: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n")
    with pytest.raises(RealError, match=r"^Error while deserializing header: header too large.*LFS"):
        compat.torch.load_file(tmp_path / "t")


CALLS: dict[str, Callable[[SimpleNamespace, Path], Any]] = {
    "missing tensor": lambda m, path: m.top.safe_open(path, "pt").get_tensor("nope"),
    "missing slice": lambda m, path: m.top.safe_open(path, "pt").get_slice("nope"),
    "framework": lambda m, path: m.top.safe_open(path, "foo"),
    "device": lambda m, path: m.top.safe_open(path, "pt", "foo"),
    "backend": lambda m, path: m.top.safe_open(path, "pt", backend="zzz"),
    "closed": lambda m, path: closed(m, path).get_tensor("a"),
    "closed keys": lambda m, path: closed(m, path).keys(),
    "closed metadata": lambda m, path: closed(m, path).metadata(),
    "spec": lambda m, path: m.top.TensorSpec(dtype="zzz", shape=[1], data_ptr=0, data_len=0),
    "size": lambda m, path: m.top.serialize(
        {"a": m.top.TensorSpec(dtype="float32", shape=[2], data_ptr=8, data_len=7)}
    ),
    "no folder": lambda m, path: m.torch.save_file({}, path.parent / "nope" / "t"),
    "not a dict": lambda m, path: m.torch.save([torch.ones(1)]),
    "not a tensor": lambda m, path: m.torch.save({"a": 3}),
    "nested": lambda m, path: m.torch.save({"a": {"b": torch.ones(1)}}),
    "sparse": lambda m, path: m.torch.save({"a": torch.eye(2).to_sparse()}),
    "strided": lambda m, path: m.torch.save({"layer": torch.ones(2, 3).t()}),
    "channels last": lambda m, path: m.torch.save(
        {"a": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)}
    ),
    "strided model": lambda m, path: m.torch.save_model(strided_model(), path, force_contiguous=False),
    "part of a storage": lambda m, path: m.torch.save_model(part_model(), path),
    "shared": lambda m, path: m.torch.save(dict.fromkeys("a", torch.ones(2)) | dict.fromkeys("ab", ONES)),
    "strict": lambda m, path: m.torch.load_model(nn.Linear(2, 2), path),
    "step": lambda m, path: m.top.safe_open(path, "pt").get_slice("b")[::-1],
}


def closed(modules: SimpleNamespace, path: Path) -> Any:
    with modules.top.safe_open(path, "pt") as file:
        pass
    return file


def strided_model() -> nn.Module:
    model = nn.Module()
    model.register_buffer("turned", torch.ones(2, 3).t())
    return model


def part_model() -> nn.Module:
    model = nn.Module()
    model.register_buffer("row", torch.ones(20, 3)[1:2])
    return model


@pytest.mark.parametrize("call", CALLS)
def test_other_errors_are_of_the_wheels_class_and_begin_with_its_words(
    compat: SimpleNamespace, path: Path, call: str
) -> None:
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        CALLS[call](REAL, path)
    with pytest.raises(wanted.type) as found:
        CALLS[call](compat, path)
    beginning = str(wanted.value)
    # Where it names a set, a temporary file, or goes on about its documentation.
    for stop in (
        " [{",
        " (os error",
        ": No such",
        " which ",
        " (expected",
        "amongst",
        "Supported",
        '"extra"',
    ):
        beginning = beginning.partition(stop)[0]
    assert str(found.value).startswith(beginning)
    assert len(beginning) > 8


@pytest.mark.parametrize(
    ("reach", "kind", "number"),
    [
        (lambda folder: folder / "nope", FileNotFoundError, errno.ENOENT),
        (lambda folder: folder / "file" / "nope", NotADirectoryError, errno.ENOTDIR),
        (lambda folder: folder / ("n" * 300), OSError, errno.ENAMETOOLONG),
    ],
)
def test_what_cannot_be_opened_is_what_the_system_says_too(
    compat: SimpleNamespace, tmp_path: Path, reach: Callable[[Path], Path], kind: type[OSError], number: int
) -> None:
    (tmp_path / "file").touch()
    path = reach(tmp_path)
    for read in (compat.torch.load_file, compat.numpy.load_file, lambda p: compat.top.safe_open(p, "pt")):
        with pytest.raises(FileNotFoundError) as caught:
            read(path)
        assert isinstance(caught.value, kind)
        assert (caught.value.errno, os.fsdecode(caught.value.filename)) == (number, str(path))
        assert str(caught.value).startswith(f"No such file or directory: {path}")
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), again.errno) == (type(caught.value), str(caught.value), number)


def test_a_shard_that_is_missing_is_still_named(compat: SimpleNamespace, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(FileNotFoundError, match="model-00001-of-00001"):
        compat.torch.load_file(index)


def test_words_of_ones_own_are_a_note(compat: SimpleNamespace, path: Path) -> None:
    """Where the message is upstream's and nothing else, what ingot has to say is shown below it."""
    calls = {
        "You are trying to save a sparse": lambda: compat.torch.save({"t": torch.eye(2).to_sparse()}),
        "Cannot copy out of meta tensor": lambda: compat.torch.save({"t": torch.ones(2, device="meta")}),
        "torch.complex128": lambda: compat.torch.save({"t": torch.ones(2, dtype=torch.complex128)}),
        "index 9 is out of bounds": lambda: compat.top.safe_open(path, "pt").get_slice("b")[9],
        "Error during slicing [9]": lambda: compat.top.safe_open(path, "np").get_slice("b")[9],
    }
    for words, call in calls.items():
        with pytest.raises(RealError) as caught:
            call()
        assert isinstance(caught.value, ingot.SafetensorError)
        assert str(caught.value).startswith(words)
        assert caught.value.tensor in ("t", "b")
        if "sparse" not in words:
            assert any(f"tensor `{caught.value.tensor}`" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_a_file_is_listed_without_its_framework(framework: str, path: Path) -> None:
    """Upstream imports most of them with the first tensor."""
    packages = ["numpy", "torch", "jax", "flax", "tensorflow", "mlx", "paddle"]
    script = f"""
import sys
sys.modules.update(dict.fromkeys({packages!r}))
import ingot.compat
ingot.compat.install()
from safetensors import safe_open
with safe_open({str(path)!r}, {framework!r}) as file:
    part = file.get_slice("b")
    print(file.keys(), file.offset_keys(), file.metadata(), part.get_shape(), part.get_dtype())
    for read in (lambda: file.get_tensor("b"), lambda: part[0], lambda: file.get_tensors()):
        try:
            read()
        except ModuleNotFoundError as error:
            assert f"No module named {{error.name!r}}" in str(error), error
            assert f"pip install 'ingot-tensors[{{error.name}}]'" in str(error), error
        else:
            raise AssertionError
"""
    assert in_a_fresh_process("-c", script) == "['a', 'b', 's'] ['a', 'b', 's'] {'format': 'pt'} [3, 4] F32"


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_listing_a_file_imports_no_framework(framework: str, path: Path) -> None:
    script = f"""
import sys, ingot.compat
ingot.compat.install()
from safetensors import safe_open
file = safe_open({str(path)!r}, {framework!r})
file.keys(), file.get_slice("b").get_shape()
print(sorted({{"numpy", "torch"}} & set(sys.modules)))
"""
    assert in_a_fresh_process("-c", script) == "[]"


def test_a_missing_file_is_a_file_not_found_error(compat: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nope") as caught:
        compat.top.safe_open(tmp_path / "nope", "pt")
    assert not isinstance(caught.value, RealError)


@pytest.mark.parametrize("bad", [{"a": 1}, {1: "a"}, [1]])
def test_metadata_that_is_no_text_is_a_type_error(compat: SimpleNamespace, bad: Any, tmp_path: Path) -> None:
    for save in (compat.torch.save_file, compat.numpy.save_file, compat.top.serialize_file):
        with pytest.raises(TypeError):
            save({}, tmp_path / "t", bad)
    with pytest.raises(TypeError):
        compat.torch.save({3: torch.ones(1)})
    assert not (tmp_path / "t").exists()
