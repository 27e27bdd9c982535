"""`safetensors.flax`, `.tensorflow`, `.mlx` and `.paddle` of `ingot.compat`, where they are installed."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

import ingot
import ingot.compat
import ingot.numpy
from support.compat import installed

# In the order of import: paddle crashes in a process that has imported tensorflow before.
NAMES = {"paddle": "paddle", "flax": "jax", "tensorflow": "tensorflow", "mlx": "mlx.core"}
PRIVATE = {
    "flax": {"_np2jnp", "_jnp2np"},
    "tensorflow": {"_np2tf", "_tf2np"},
    "mlx": {"_np2mx", "_mx2np"},
    "paddle": {
        "NPDTYPES",
        "_SIZE",
        "_TYPES",
        "_flatten",
        "_getdtype",
        "_np2paddle",
        "_paddle2np",
        "_to_ndarray",
        "_tobytes",
        "_view2paddle",
    },
}
# The dtypes that a framework lacks.
LACKS = {
    "flax": set[str](),
    "tensorflow": {"F8_E8M0"},
    "mlx": {"F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4"},
    "paddle": {"U16", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4"},
}
# The dtypes to which frameworks convert 64-bit dtypes by default.
NARROW = {"flax": {"F64": "float32", "I64": "int32", "U64": "uint32"}, "mlx": {"F64": "float32"}}
CONVERSIONS = {
    "flax": ("_np2jnp", "_jnp2np"),
    "tensorflow": ("_np2tf", "_tf2np"),
    "mlx": ("_np2mx", "_mx2np"),
    "paddle": ("_np2paddle", "_paddle2np"),
}
CODES = [*ingot.numpy.DTYPES, *ingot.numpy.ML_DTYPES]


@pytest.fixture(params=list(NAMES))
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(NAMES[request.param])
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def without_64_bits_in_jax() -> Iterator[None]:
    """Reset jax to its state at import. Other tests of this process may have changed it."""
    jax = sys.modules.get("jax")
    if jax is None:
        yield
        return
    with jax.enable_x64(False):
        yield


@pytest.fixture
def module(framework: str) -> Iterator[ModuleType]:
    with installed():
        yield importlib.import_module(f"safetensors.{framework}")


def array_of(code: str) -> Any:
    values = numpy.array([[1, 0], [1, 1]], numpy.uint8)
    if code in ingot.numpy.DTYPES:
        return values.astype(ingot.numpy.DTYPES[code])
    return values.astype(getattr(pytest.importorskip("ml_dtypes"), ingot.numpy.ML_DTYPES[code]))


def test_compat_has_every_name_and_signature(framework: str, module: ModuleType) -> None:
    assert {"load", "load_file", "save", "save_file", "safe_open", *PRIVATE[framework]} <= set(dir(module))
    ingot.compat.uninstall()
    real = importlib.import_module(f"safetensors.{framework}")
    functions = {
        name: value
        for name, value in vars(real).items()
        if inspect.isfunction(value) and value.__module__ == real.__name__
    }
    assert {"load", "load_file", "save", "save_file", *CONVERSIONS[framework]} <= set(functions)
    for name, function in functions.items():
        ours, theirs = (
            inspect.signature(one).parameters.values() for one in (getattr(module, name), function)
        )
        assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize("code", CODES)
def test_compat_round_trips_every_dtype(
    framework: str, module: ModuleType, code: str, tmp_path: Path
) -> None:
    data = ingot.numpy.save({"t": array_of(code)})
    path = tmp_path / "t.safetensors"
    path.write_bytes(data)
    reads = [
        lambda: module.load(data),
        lambda: module.load_file(path),
        lambda: module.load_file(path, backend="pread"),
        lambda: {"t": handle(path, framework).get_tensor("t")},
        lambda: {"t": handle(path, framework).get_slice("t")[:]},
    ]
    for read in reads:
        if code in LACKS[framework]:
            with pytest.raises(ingot.DtypeError, match=f"tensor `t`: .* has no dtype for {code}"):
                read()
            continue
        loaded = read()
        narrow = NARROW.get(framework, {}).get(code)
        if narrow is not None:
            # The framework decides, as in upstream.
            assert str(loaded["t"].dtype).endswith(narrow)
            continue
        assert module.save(loaded) == data
        module.save_file(loaded, path)
        assert path.read_bytes() == data


@pytest.mark.parametrize("code", NARROW["flax"])
def test_compat_flax_keeps_64_bits_if_enabled(code: str, tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    data = ingot.numpy.save({"t": array_of(code)})
    path = tmp_path / "t.safetensors"
    path.write_bytes(data)
    with installed():
        flax = importlib.import_module("safetensors.flax")
        with jax.enable_x64(True):
            whole = flax.load_file(path)
            assert handle(path, "flax").get_tensor("t").dtype == whole["t"].dtype == array_of(code).dtype
            assert flax.save(whole) == data


def handle(path: Path, framework: str) -> Any:
    return importlib.import_module("safetensors").safe_open(path, framework)


def test_compat_writes_the_files_of_the_wheel(framework: str, module: ModuleType) -> None:
    codes = [code for code in CODES if code not in LACKS[framework]]
    loaded = module.load(ingot.numpy.save({code: array_of(code) for code in codes}))
    ingot.compat.uninstall()
    real = importlib.import_module(f"safetensors.{framework}")
    known = {name: tensor for name, tensor in loaded.items() if saves(real, tensor)}
    assert {"F32", "F16", "I32", "U8", "BOOL"} <= set(known)
    assert module.save(known, {"format": framework}) == real.save(known, {"format": framework})


@pytest.mark.parametrize("table", ["_TYPES", "_SIZE", "NPDTYPES"])
def test_compat_tables_have_the_keys_of_the_wheels(table: str) -> None:
    pytest.importorskip("paddle")
    with installed():
        ours = getattr(importlib.import_module("safetensors.paddle"), table)
    assert ours.keys() == getattr(importlib.import_module("safetensors.paddle"), table).keys()


def saves(real: ModuleType, tensor: Any) -> bool:
    try:
        real.save({"t": tensor})
    except Exception:  # The wheel raises the framework's error.
        return False
    return True


@pytest.mark.parametrize("code", ["BF16", "F32", "F8_E4M3", "BOOL", "I64"])
def test_compat_private_names_use_numpy(framework: str, module: ModuleType, code: str) -> None:
    if code in LACKS[framework] or code in NARROW.get(framework, {}):
        return
    there, back = CONVERSIONS[framework]
    arrays = {name: array_of(code) for name in ("z", "a")}
    converted = getattr(module, back)(getattr(module, there)(arrays))
    assert list(converted) == ["z", "a"]
    for name, array in arrays.items():
        assert converted[name].dtype == array.dtype
        assert converted[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
def test_compat_round_trips_every_shape(module: ModuleType, shape: tuple[int, ...]) -> None:
    data = ingot.numpy.save({"t": numpy.ones(shape, numpy.float32)}, {"format": "any"})
    assert module.save(module.load(data), {"format": "any"}) == data
