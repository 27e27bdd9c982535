"""`safetensors.flax`, `.tensorflow`, `.mlx` and `.paddle` of `ingot.compat`, where they are installed."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

import ingot
import ingot.compat
import ingot.numpy

NAMES = {"flax": "jax", "tensorflow": "tensorflow", "mlx": "mlx.core", "paddle": "paddle"}
PRIVATE = {
    "flax": {"_np2jnp", "_jnp2np"},
    "tensorflow": {"_np2tf", "_tf2np"},
    "mlx": {"_np2mx", "_mx2np"},
    "paddle": {
        "NPDTYPES", "_SIZE", "_TYPES", "_flatten", "_getdtype", "_np2paddle", "_paddle2np", "_to_ndarray",
        "_tobytes", "_view2paddle",
    },
}  # fmt: skip
# The dtypes that a framework lacks, or does not take from NumPy.
LACKS = {
    "flax": set[str](),
    "tensorflow": {"F8_E8M0"},
    "mlx": {"F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4"},
    "paddle": {"U16", "U32", "U64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4"},
}
CODES = [*ingot.numpy.DTYPES, *ingot.numpy.ML_DTYPES]


@pytest.fixture(params=list(NAMES))
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(NAMES[request.param])
    name: str = request.param
    return name


@pytest.fixture
def module(framework: str) -> Iterator[ModuleType]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ingot.compat.install()
    try:
        yield importlib.import_module(f"safetensors.{framework}")
    finally:
        ingot.compat.uninstall()


def array_of(code: str) -> Any:
    values = numpy.array([[1, 0], [1, 1]], numpy.uint8)
    if code in ingot.numpy.DTYPES:
        return values.astype(ingot.numpy.DTYPES[code])
    return values.astype(getattr(pytest.importorskip("ml_dtypes"), ingot.numpy.ML_DTYPES[code]))


def test_every_name_is_there_with_the_wheels_signature(framework: str, module: ModuleType) -> None:
    assert {"load", "load_file", "save", "save_file", "safe_open", *PRIVATE[framework]} <= set(dir(module))
    ingot.compat.uninstall()
    real = importlib.import_module(f"safetensors.{framework}")
    for name in ("load", "load_file", "save", "save_file", *PRIVATE[framework]):
        if callable(getattr(module, name)) and hasattr(real, name):
            ours, theirs = (inspect.signature(getattr(one, name)).parameters for one in (module, real))
            assert [(p.name, p.kind, p.default) for p in ours.values()] == [
                (p.name, p.kind, p.default) for p in theirs.values()
            ]


@pytest.mark.filterwarnings("ignore:.*requested in .* is not available")  # jax without 64 bits
@pytest.mark.parametrize("code", CODES)
def test_every_dtype_goes_there_and_back(
    framework: str, module: ModuleType, code: str, tmp_path: Path
) -> None:
    data = ingot.numpy.save({"t": array_of(code)})
    path = tmp_path / "t.safetensors"
    path.write_bytes(data)
    if code in LACKS[framework]:
        for load, source in ((module.load, data), (module.load_file, path)):
            with pytest.raises(Exception, match=r"dtype|numpy type"):
                load(source)
        return
    for loaded in (module.load(data), module.load_file(path), module.load_file(path, backend="pread")):
        module.save_file(loaded, path)
        if framework == "flax" and code in ("F64", "I64", "U64"):
            continue  # 32 bits, as upstream, unless jax is told to keep 64.
        if framework == "mlx" and code == "F64":
            continue  # 32 bits, as upstream.
        assert module.save(loaded) == path.read_bytes() == data


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
def test_every_shape_goes_there_and_back(module: ModuleType, shape: tuple[int, ...]) -> None:
    data = ingot.numpy.save({"t": numpy.ones(shape, numpy.float32)}, {"format": "any"})
    assert module.save(module.load(data), {"format": "any"}) == data
