"""A handle is a `collections.abc.Mapping`, and a slice has the attributes of an array."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ingot
import ingot.compat.safetensors
import ingot.numpy
import ingot.torch

TENSORS = {
    "layers.0.w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "layers.1.w": torch.arange(4, dtype=torch.bfloat16),
    "scale": torch.tensor(2.5, dtype=torch.float64),
}

every_handle = pytest.mark.parametrize(
    "opens", [ingot.safe_open, ingot.compat.safetensors.safe_open], ids=["ingot", "compat"]
)


@pytest.fixture
def path(path: Path) -> Path:
    ingot.torch.save_file(TENSORS, path)
    return path


@every_handle
def test_handle_behaves_like_a_mapping(path: Path, opens: Any) -> None:
    file = opens(path, "pt")
    assert isinstance(file, Mapping)
    match file:
        case {"scale": scale}:
            assert scale == 2.5
        case _:
            pytest.fail("a mapping matches the pattern of one")
    assert file.keys() == sorted(TENSORS)
    assert len(file.items()) == len(file.values()) == 3
    assert {name: tensor.tolist() for name, tensor in {**file}.items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }
    assert torch.equal(file.get("layers.0.w"), TENSORS["layers.0.w"])
    assert file.get("nope") is None
    assert file.get("nope", default=3) == file.get(7, 3) == 3
    # Like upstream's handles, a handle equals only itself, and is hashable.
    other = opens(path, "pt")
    assert [file].index(file) == 0
    assert file != other
    assert len({file, other}) == 2
    model = torch.nn.Module()
    for name, tensor in file.items():
        model.register_buffer(name.replace(".", "_"), tensor)
    assert model.layers_0_w.shape == (2, 3)


def test_handle_raises_tensor_errors_that_are_no_key_errors(tmp_path: Path) -> None:
    path = tmp_path / "f6"
    ingot.serialize_file({"t": {"dtype": "F6_E2M3", "shape": [4], "data": b"abc"}}, path)
    file = ingot.safe_open(path, "np")
    with pytest.raises(ingot.DtypeError):
        file.get("t")
    file.close()
    with pytest.raises(ingot.ClosedError):
        file.get("t")


def test_handle_completes_names_in_ipython(path: Path) -> None:
    assert ingot.safe_open(path, "pt")._ipython_key_completions_() == sorted(TENSORS)


@pytest.mark.parametrize("framework", ["np", "pt"])
@pytest.mark.parametrize("name", TENSORS)
@every_handle
def test_slice_has_array_attributes(path: Path, opens: Any, name: str, framework: str, backend: str) -> None:
    file = opens(path, framework, backend=backend)
    part, whole = file.get_slice(name), file[name]
    assert part.shape == tuple(whole.shape) == tuple(part.get_shape())
    assert part.ndim == whole.ndim
    assert part.dtype == whole.dtype
    expected = TENSORS[name].float().numpy()
    array = np.asarray(part)
    assert array.shape == part.shape
    assert np.array_equal(array.astype("f4"), expected)
    assert np.asarray(part, dtype="f8").dtype == np.float64
    assert np.array_equal(np.asarray(part, dtype="f8"), expected)
    again = pickle.loads(pickle.dumps(part))
    assert (again.shape, again.dtype, again.ndim) == (part.shape, part.dtype, part.ndim)


def test_slice_array_copies_on_request(path: Path, backend: str) -> None:
    part = ingot.safe_open(path, "np", backend=backend).get_slice("layers.0.w")
    copied = part.__array__(copy=True)
    copied[:] = -1
    assert np.array_equal(part, TENSORS["layers.0.w"].numpy())
    if backend == "mmap":
        viewed = part.__array__(copy=False)
        assert np.shares_memory(viewed, part.__array__(copy=False))
        refused = "f8"
    else:
        refused = "f4"
    with pytest.raises(ValueError, match=r"`layers\.0\.w`.*copy"):
        part.__array__(dtype=np.dtype(refused), copy=False)


def test_slice_array_has_values_on_every_device(path: Path) -> None:
    part = ingot.safe_open(path, "pt", device="meta").get_slice("layers.1.w")
    assert part.dtype == torch.bfloat16
    assert np.asarray(part).astype("f4").tolist() == [0, 1, 2, 3]


def test_slice_dtype_names_a_dtype_that_the_framework_lacks(tmp_path: Path) -> None:
    path = tmp_path / "f6"
    ingot.serialize_file({"t": {"dtype": "F6_E2M3", "shape": [4], "data": b"abc"}}, path)
    part = ingot.safe_open(path, "np").get_slice("t")
    assert (part.shape, part.ndim, part.get_dtype()) == ((4,), 1, "F6_E2M3")
    with pytest.raises(ingot.DtypeError):
        _ = part.dtype
    with pytest.raises(ingot.DtypeError):
        np.asarray(part)
