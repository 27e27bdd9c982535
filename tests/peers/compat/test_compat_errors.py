"""`ingot.compat`: the errors that programs catch, pickle and search for words. See also test_messages.py."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from modules import REAL, RealError, in_a_fresh_process

import ingot
import ingot.compat
import ingot.torch
from ingot._base.frameworks import FRAMEWORKS
from peers.safetensors.givens import BROKEN


def test_errors_are_caught_by_both_classes(compat: SimpleNamespace, path: Path) -> None:
    file = compat.top.safe_open(path, "pt")
    for kind in (RealError, compat.top.SafetensorError, compat.rust.SafetensorError, ingot.SafetensorError):
        with pytest.raises(kind):
            file.get_tensor("nope")
        with pytest.raises(kind):
            # ingot's own error class, for a library that does not use compat.
            ingot.safe_open(path, "pt").get_tensor("nope")
    # A library that imported the wheel's function before `install` raises the wheel's class.
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


# Words of safetensors up to 0.5, which programs search for.
LOOKED_FOR = {
    "HeaderTooSmall": "three bytes",
    "HeaderTooLarge": "a long header",
    "InvalidHeaderLength": "a header past the end",
    "InvalidHeader": "no UTF-8",
    "InvalidHeaderDeserialization": "no JSON",
    "TensorInvalidInfo": "a shape too large",
    "InvalidOffset": "a hole",
    "ValidationOverflow": "an overflow",
    "MetadataIncompleteBuffer": "data cut short",
}


@pytest.mark.parametrize("old_name", LOOKED_FOR)
def test_load_names_the_fault_of_a_header(compat: SimpleNamespace, old_name: str, tmp_path: Path) -> None:
    data, path = BROKEN[LOOKED_FOR[old_name]], tmp_path / "broken"
    path.write_bytes(data)
    for module in (compat.torch, compat.numpy):
        with pytest.raises(ingot.HeaderError, match=rf"\[{old_name}\]"):
            module.load(data)
        with pytest.raises(ingot.HeaderError, match=rf"\[{old_name}\]") as caught:
            module.load_file(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("reach", "kind", "number"),
    [
        (lambda folder: folder / "nope", FileNotFoundError, errno.ENOENT),
        (lambda folder: folder / "file" / "nope", NotADirectoryError, errno.ENOTDIR),
        (lambda folder: folder / ("n" * 300), OSError, errno.ENAMETOOLONG),
    ],
)
def test_open_errors_keep_the_class_of_the_system(
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


def test_load_model_names_a_missing_shard(compat: SimpleNamespace, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(FileNotFoundError, match="model-00001-of-00001"):
        compat.torch.load_file(index)


def test_notes_have_ingots_own_words(compat: SimpleNamespace, path: Path) -> None:
    """If the message is exactly upstream's, ingot's own message is a note below it."""
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
def test_safe_open_lists_a_file_without_its_framework(framework: str, path: Path) -> None:
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
def test_safe_open_lists_a_file_and_imports_no_framework(framework: str, path: Path) -> None:
    script = f"""
import sys, ingot.compat
ingot.compat.install()
from safetensors import safe_open
file = safe_open({str(path)!r}, {framework!r})
file.keys(), file.get_slice("b").get_shape()
print(sorted({{"numpy", "torch"}} & set(sys.modules)))
"""
    assert in_a_fresh_process("-c", script) == "[]"
