"""Every installed framework accepts a device for each tensor name, in `load_file` and in `safe_open`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
import ingot.numpy

TENSORS = {"head": np.ones(3, "f4"), "layers.0.w": np.ones((2, 3), "f4"), "layers.1.w": np.ones((2, 3), "f4")}
# In the order of their imports: paddle ends the process that has imported tensorflow before.
FRAMEWORKS = ["paddle", "numpy", "flax", "tensorflow", "mlx", "torch"]


@pytest.fixture
def path(path: Path) -> Path:
    ingot.numpy.save_file(TENSORS, path)
    return path


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest, path: Path) -> str:
    framework: str = request.param
    try:
        ingot.safe_open(path, framework)
    except ImportError as error:
        pytest.skip(str(error))
    return framework


def test_safe_open_takes_devices_by_name(path: Path, framework: str) -> None:
    file = ingot.safe_open(path, framework, {"layers.*": "cpu"})
    assert tuple(file["layers.0.w"].shape) == (2, 3)
    with pytest.raises(ingot.OptionError, match="no pattern"):
        file["head"]
    with pytest.raises(ingot.OptionError, match="nope"):
        ingot.safe_open(path, framework, {"*": "nope"})


@pytest.mark.parametrize(
    "device", [{"layers.*": "cpu", "*": "cpu"}, lambda info: "cpu"], ids=["dict", "callable"]
)
def test_load_file_takes_devices_by_name(path: Path, framework: str, device: Any) -> None:
    if framework == "numpy":
        # NumPy has no devices.
        with pytest.raises(TypeError, match="positional"):
            ingot.numpy.load_file(path, device)
        return
    module = getattr(ingot, framework)
    assert module.load_file(path, device).keys() == TENSORS.keys()
    if framework != "torch":
        assert module.load(path.read_bytes(), device).keys() == TENSORS.keys()
    with pytest.raises(ingot.OptionError, match="no pattern") as caught:
        module.load_file(path, {"layers.*": "cpu"})
    assert caught.value.tensor == "head"


def test_slice_has_array_attributes(path: Path, framework: str) -> None:
    file = ingot.safe_open(path, framework)
    for name, array in TENSORS.items():
        part = file.get_slice(name)
        assert (part.shape, part.ndim) == (array.shape, array.ndim)
        assert part.dtype == file[name].dtype
        assert np.array_equal(np.asarray(part), array)
