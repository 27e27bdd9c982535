"""Nested dicts and lists with unusual keys.

The conversion writes each tensor once, under the documented name, or its error names the tensor and it writes
nothing.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import ingot
import ingot.numpy

# Keys that differ from a name, or from a part of a name, in one character.
KEYS = st.sampled_from(
    ["", ".", "a", "b", "a.b", "a.", ".a", "0", "1", "-1", "tensor", "True", "None", "format", 0, 1, -1, True]
) | st.sampled_from([None, 1.5, (1, 2), b"a", "\ud800", "\0", 1 << 200])
TREES = st.recursive(
    st.just("tensor") | st.integers(0, 3) | st.just("text") | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
# The codes of valid rejections: equal names, an invalid key, no tensors, and names that no file can store.
REFUSED = {"duplicate-tensor", "key", "no-tensors", "unreadable", "invalid-unicode", "unsafe-name"}


class Numbered:
    """Replaces each ``"tensor"`` in a tree by a tensor with values of its own."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self.values: list[int] = []

    def __call__(self, tree: Any) -> Any:
        if tree == "tensor":
            self.values.append(len(self.values) + 1)
            return self._make(numpy.full(2, self.values[-1], numpy.int64))
        if isinstance(tree, list):
            return [self(one) for one in tree]
        if isinstance(tree, dict):
            return {key: self(value) for key, value in tree.items()}
        return tree


def naive_names(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names by the documented rule."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from naive_names(value, (*keys, str(key)))
    elif isinstance(tree, list):
        for position, value in enumerate(tree):
            yield from naive_names(value, (*keys, str(position)))
    elif tree == "tensor":
        yield ".".join(keys) if keys else "tensor"


def by_torch(tree: Any) -> tuple[str, list[int]]:
    number = Numbered(torch.from_numpy)
    torch.save(number(tree), "in.pt")
    return "in.pt", number.values


def by_paddle(tree: Any) -> tuple[str, list[int]]:
    number = Numbered(lambda array: array)
    # The tree is a dict: paddle's files have no single arrays.
    Path("in.pdparams").write_bytes(pickle.dumps(number(tree), 4))
    return "in.pdparams", number.values


def by_flax(tree: Any) -> tuple[str, list[int]]:
    number = Numbered(
        lambda array: msgpack.ExtType(1, msgpack.packb((array.shape, "int64", array.tobytes())))
    )
    options: Any = {"use_bin_type": True, "unicode_errors": "surrogatepass"}
    Path("in.msgpack").write_bytes(msgpack.packb(number(tree), **options))
    return "in.msgpack", number.values


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("out", ["out.safetensors", "out.npz"])
@pytest.mark.parametrize("write", [by_torch, by_paddle, by_flax])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(KEYS, TREES, min_size=1, max_size=3))
@example(tree={"tensor": "tensor", "": "tensor"})
@example(tree={"": {"a": "tensor"}, "a": "tensor"})
@example(tree={"": {"": "tensor"}, ".": "tensor"})
@example(tree={1: "tensor", "1": "tensor"})
@example(tree={"a": {"b": "tensor"}, "a.b": "tensor"})
@example(tree={"a": ["tensor", "tensor"], "a.0": "tensor"})
@example(tree={"a": "tensor", "a.npy": "tensor"})
def test_flatten_keeps_or_rejects_every_tensor(write: Any, out: str, tree: Any) -> None:
    Path(out).unlink(missing_ok=True)
    try:
        path, values = write(tree)
    except (TypeError, OverflowError, ValueError):
        # The format itself does not support such a key.
        return
    source = {by_torch: "torch", by_paddle: "paddle", by_flax: "flax"}[write]
    names = list(naive_names(tree))
    try:
        report = ingot.convert(path, out, source_format=source)
    except (ingot.ConversionError, ingot.SaveError) as error:
        refused: Any = error
    else:
        refused = None
    if refused is not None:
        assert refused.code in REFUSED, refused
        assert refused.code != "duplicate-tensor" or Counter(names)[refused.tensor] > 1
        assert refused.code != "no-tensors" or not names
        assert not Path(out).exists()
        return
    assert max(Counter(names).values()) == 1, "two had one name, and none was refused"
    found: Any = numpy.load(out) if out.endswith(".npz") else ingot.numpy.load_file(out)
    assert sorted(found) == sorted(names)
    assert [int(found[name][0]) for name in names] == values
    assert report.tensors == len(values)


def test_flatten_names_a_lone_tensor_and_keeps_empty_keys() -> None:
    torch.save(torch.ones(1), "lone.pt")
    ingot.convert("lone.pt", "lone.safetensors")
    assert list(ingot.numpy.load_file("lone.safetensors")) == ["tensor"]
    torch.save({"tensor": torch.ones(1), "": torch.zeros(1)}, "two.pt")
    ingot.convert("two.pt", "two.safetensors")
    found = ingot.numpy.load_file("two.safetensors")
    assert {name: array.tolist() for name, array in found.items()} == {"tensor": [1.0], "": [0.0]}


WEIGHT = numpy.arange(6, dtype=numpy.float32)


class Named:
    """An object that is pickled as a call."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced[0], reduced[1:]

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    "tree",
    [
        # paddle split a tensor in slices. Another tensor has the same name.
        {
            "w": WEIGHT,
            "w@@.0": WEIGHT,
            "UnpackBigParamInfor@@": {"w": {"OriginShape": (6,), "slices": ["w@@.0"]}},
        },
        # paddle's form of a single tensor, with two tensors.
        {"w": Named(tuple, (WEIGHT, WEIGHT + 1))},
        {"w": Named(eval, "data", {"data": WEIGHT, "other": WEIGHT})},
        # The table of names is a tensor.
        {"StructuredToParameterName@@": WEIGHT, "w": WEIGHT + 1},
        {"StructuredToParameterName@@": {"x": WEIGHT}, "w": WEIGHT + 1},
        {"UnpackBigParamInfor@@": WEIGHT, "w": WEIGHT + 1},
    ],
)
def test_flatten_hides_nothing_beside_a_paddle_tensor(tree: Any) -> None:
    Path("in.pdparams").write_bytes(pickle.dumps(tree, 4))
    try:
        report = ingot.convert("in.pdparams", "out.safetensors")
    except ingot.ConversionError:
        return
    assert report.tensors == 2


def test_flatten_hides_nothing_beside_parts_of_a_flax_array() -> None:
    array = msgpack.ExtType(1, msgpack.packb(((6,), "float32", WEIGHT.tobytes())))
    cut = {"__msgpack_chunked_array__": True, "shape": {"0": 6}, "chunks": {"0": array}, "other": array}
    Path("in.msgpack").write_bytes(msgpack.packb({"w": cut}, use_bin_type=True))
    with pytest.raises(ingot.ConversionError, match="1 other keys"):
        ingot.convert("in.msgpack", "out.safetensors")
