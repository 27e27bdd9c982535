"""One rule for `dtype`: every function accepts every spelling of every framework."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot._base.checks import FLOATS
from ingot._base.dtypes import F4_LOOSE, F4_PACKED, IN_FILES, NAMES, TYPE_STRINGS, code_of
from support.doors import parameters, public_functions
from support.dtypes import BITS
from support.processes import python

TENSOR = np.arange(4, dtype=np.float32)


def words(code: str) -> list[str]:
    """Return the spellings of a dtype as text."""
    names = [NAMES[code]] if code in NAMES else [F4_LOOSE, F4_PACKED] if code == "F4" else []
    found = [code, *names, *(name.upper() for name in names)]
    # In lower case these are NumPy's names of other dtypes: "i8" has 8 bytes.
    found += [code.lower()] if code not in ("F4", "I8", "U8") else []
    found += [TYPE_STRINGS[code]] if code in TYPE_STRINGS else []
    return found + [f"{module}.{name}" for module in ("torch", "paddle", "mlx.core", "jnp") for name in names]


def objects(code: str) -> list[Any]:
    """Return NumPy's dtypes and scalar types, the types of ml_dtypes, and torch's dtype."""
    found: list[Any] = []
    if code in TYPE_STRINGS:
        little = np.dtype(TYPE_STRINGS[code])
        found += [little, little.newbyteorder(">"), little.type]
    for name in words(code):
        if scalar := getattr(ml_dtypes, name, None):
            found += [scalar, np.dtype(scalar)]
        if "torch" in sys.modules and hasattr(sys.modules["torch"], name):
            found.append(getattr(sys.modules["torch"], name))
    return found


# Conversion of floats ----------------------------------------------------------------------------------


@pytest.fixture
def path(path: Path) -> Path:
    ingot.numpy.save_file({"a": TENSOR}, path)
    return path


def stored(path: Path) -> str:
    """The dtype of the tensor in a file."""
    with ingot.safe_open(path, "np") as file:
        return file.info("a").dtype


def by_load_file(function: Callable[..., Any], path: Path, new: Path, dtype: Any) -> str | None:
    return code_of(function(path, dtype=dtype)["a"].dtype)


def by_load_model(function: Callable[..., Any], path: Path, new: Path, dtype: Any) -> str | None:
    import torch

    class Typed(torch.nn.Module):
        """A module that records its arguments."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(4))
            self.code: str | None = None

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            self.code = code_of(state_dict["a"].dtype)
            return super().load_state_dict(state_dict, *args, **kwargs)

    model = Typed()
    with warnings.catch_warnings():
        # The warning about the conversion to the module's dtype.
        warnings.simplefilter("ignore")
        function(model, path, dtype=dtype)
    return model.code


def by_convert(function: Callable[..., Any], path: Path, new: Path, dtype: Any) -> str | None:
    function(path, new, dtype=dtype)
    return stored(new)


def by_cast(function: Callable[..., Any], path: Path, new: Path, dtype: Any) -> str | None:
    function(path, new, dtype)
    return stored(new)


def by_command(command: str, path: Path, new: Path, dtype: Any) -> str | None:
    from ingot.cli.program import run

    assert run([command, str(path), str(new), "--dtype", str(dtype), "--quiet"]) == 0
    return stored(new)


# For each function with `dtype`, by its last name: a call that returns the dtype of the resulting tensor.
BY = {"load_file": by_load_file, "load_model": by_load_model, "convert": by_convert, "cast": by_cast}
DOORS = {
    name: (BY[name.rpartition(".")[2]], function)
    for name, function in public_functions().items()
    # load_into keeps the dtype of its target: tests/read/test_reading_less_torch.py.
    if "dtype" in parameters(function) and name != "ingot.torch.load_into"
}
# Frameworks are tested where the command's libraries are not installed.
HAS_COMMAND = importlib.util.find_spec("click") is not None
COMMANDS = {f"ingot {name}": (by_command, name) for name in ("cast", "convert") if HAS_COMMAND}
# Not every framework has every dtype.
EVERYWHERE = ("F16", "BF16")


@pytest.mark.parametrize("code", FLOATS)
@pytest.mark.parametrize("door", [*DOORS, *COMMANDS])
def test_dtype_spellings_are_equal_everywhere(door: str, code: str, path: Path, tmp_path: Path) -> None:
    by, function = {**DOORS, **COMMANDS}[door]
    if code not in EVERYWHERE and door.startswith(
        ("ingot.flax", "ingot.tensorflow", "ingot.mlx", "ingot.paddle")
    ):
        code = "F32"
    # The dtype of a command is text.
    given = [*words(code), *([] if door in COMMANDS else objects(code))]
    found = [
        by(function, path, tmp_path / f"{number}.safetensors", dtype) for number, dtype in enumerate(given)
    ]
    assert found == [code] * len(given), given


@pytest.mark.parametrize(
    "dtype", ["F32x", "float8_e4m3", "I32", "int64", "f4", "float", "fp16", "", 32, ("F32",), int]
)
@pytest.mark.parametrize("door", [*DOORS, *COMMANDS])
def test_dtype_rejects_non_floats_with_one_message(
    door: str, dtype: Any, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = (
        f"is not one that floats are converted to: expected one of {', '.join(FLOATS)}, or a framework's name"
    )
    new = tmp_path / "new.safetensors"
    if door in COMMANDS:
        from ingot.cli.program import run

        assert run([door.split()[1], str(path), str(new), "--dtype", str(dtype)]) == 2
        assert expected in capsys.readouterr().err
    else:
        by, function = DOORS[door]
        with pytest.raises(ingot.OptionError) as caught:
            by(function, path, new, dtype)
        assert str(caught.value).rpartition("(): ")[2].startswith(f"dtype {dtype!r} {expected}")
        assert (caught.value.code, caught.value.expected, caught.value.found) == (
            "no-conversion",
            FLOATS,
            dtype,
        )
    assert not new.exists()


@pytest.mark.parametrize("door", DOORS)
def test_dtype_converts_scales_everywhere(door: str, path: Path, tmp_path: Path) -> None:
    ingot.numpy.save_file({"a": (2**TENSOR).astype(ml_dtypes.float8_e8m0fnu)}, path, overwrite=True)
    by, function = DOORS[door]
    assert by(function, path, tmp_path / "new.safetensors", "BF16") == "BF16"


@pytest.mark.parametrize("door", DOORS)
def test_dtype_refuses_packed_tensors_everywhere(door: str, path: Path, tmp_path: Path) -> None:
    ingot.numpy.save_file({"a": TENSOR.astype(ml_dtypes.float4_e2m1fn)}, path, overwrite=True)
    by, function = DOORS[door]
    with pytest.raises(ingot.SafetensorError, match="tensor `a`: F4 is not converted to BF16") as caught:
        by(function, path, tmp_path / "new.safetensors", "BF16")
    assert (caught.value.code, caught.value.tensor) == ("no-conversion", "a")
    assert not (tmp_path / "new.safetensors").exists()


@pytest.mark.parametrize(
    "dtype",
    [*IN_FILES, *NAMES.values(), "fp8", "fp16", "fp32", "fp64", "bfp16", "i4", "f8", "torch.int8", np.int16],
    ids=repr,
)
def test_load_file_suggests_only_what_it_converts_to(dtype: Any, path: Path) -> None:
    try:
        ingot.numpy.load_file(path, dtype=dtype)
    except ingot.OptionError as error:
        suggested = re.search("did you mean '(.*)'", str(error))
        if suggested:
            ingot.numpy.load_file(path, dtype=suggested[1])


# Stored dtypes ---------------------------------------------------------------------------------------


def by_writer(path: Path, dtype: Any, shape: list[int]) -> None:
    with ingot.Writer(path, {"a": (dtype, shape)}, overwrite=True) as writer:
        writer.commit()


def by_serialize(path: Path, dtype: Any, shape: list[int]) -> None:
    path.write_bytes(ingot.serialize({"a": {"dtype": dtype, "shape": shape, "data": b""}}))


def by_serialize_file(path: Path, dtype: Any, shape: list[int]) -> None:
    ingot.serialize_file({"a": {"dtype": dtype, "shape": shape, "data": b""}}, path)


STORE = [by_writer, by_serialize, by_serialize_file]


@pytest.mark.parametrize("code", BITS)
@pytest.mark.parametrize("store", STORE)
def test_save_stores_every_spelling_of_a_dtype(
    store: Callable[[Path, Any, list[int]], None], code: str, tmp_path: Path
) -> None:
    new = tmp_path / "new.safetensors"
    for dtype in [*words(code), *objects(code)]:
        # The tensor is empty. A packed dtype stores two elements in one, which doubles the last dimension.
        store(new, dtype, [0, 4])
        packed = str(dtype).lower().endswith(F4_PACKED)
        with ingot.safe_open(new, "np") as file:
            info = file.info("a")
        assert (info.dtype, list(info.shape)) == (code, [0, 8 if packed else 4]), dtype


AMBIGUOUS = {
    "f4": "F4 in a file and float32 to NumPy",
    "i8": "I8 in a file and int64 to NumPy",
    "u8": "U8 in a file and uint64 to NumPy",
    "float": "float32 to torch and float64 to NumPy",
    "int": "int32 to torch and int64 to NumPy",
}


@pytest.mark.parametrize("store", STORE)
@pytest.mark.parametrize(
    ("dtype", "hint"),
    [
        ("F99", ""),
        ("fp16", ": did you mean 'F16'?"),
        ("float8_e4m3", ""),
        ("complex128", ""),
        (np.dtype("datetime64[s]"), ""),
        (str, ""),
        *((word, f": {word!r} is {means}") for word, means in AMBIGUOUS.items()),
    ],
)
def test_save_rejects_a_dtype_that_files_lack(
    store: Callable[[Path, Any, list[int]], None], dtype: Any, hint: str, tmp_path: Path
) -> None:
    new = tmp_path / "new.safetensors"
    with pytest.raises(ingot.SaveError) as caught:
        store(new, dtype, [0])
    expected = hint or f": expected one of {', '.join(IN_FILES)}"
    assert str(caught.value) == f"tensor `a`: unknown dtype `{dtype}`{expected}"
    assert (caught.value.code, caught.value.tensor, caught.value.found) == ("unknown-dtype", "a", dtype)
    assert not new.exists()


# The table -----------------------------------------------------------------------------------------------


def test_dtypes_table_is_complete() -> None:
    assert set(IN_FILES) == set(BITS)
    assert all(code_of(code) == code for code in BITS)


@pytest.mark.parametrize("python", [bool, int, float])
def test_dtypes_read_python_types_as_numpy_does(python: type) -> None:
    assert code_of(python) == code_of(np.dtype(python))


@pytest.mark.parametrize("kind", sorted(set(np.sctypeDict.values()), key=repr))
def test_dtypes_read_scalar_types_of_numpy(kind: type[np.generic]) -> None:
    assert code_of(kind) == code_of(np.dtype(kind))


# Dtypes with other names in frameworks.
OTHERWISE = {("mlx.core", "BOOL"): "bool_", ("jax.numpy", "BOOL"): "bool_"}


@pytest.mark.parametrize("module", ["torch", "jax.numpy", "tensorflow", "mlx.core", "paddle"])
def test_dtypes_know_every_framework_dtype(module: str) -> None:
    framework = pytest.importorskip(module)
    known = {
        code: getattr(framework, OTHERWISE.get((module, code), name))
        for code, name in {**NAMES, "F4": F4_PACKED}.items()
        if hasattr(framework, OTHERWISE.get((module, code), name))
    }
    if module == "paddle":
        # Paddle has bfloat16 under this name too.
        assert code_of(known.pop("U16")) == "BF16"
    assert len(known) > 10
    assert {code: code_of(dtype) for code, dtype in known.items()} == {code: code for code in known}


@pytest.mark.parametrize("name", ["qint8", "quint8", "complex128", "int4", "uint4", "float8_e4m3", "int1"])
def test_dtypes_know_torch_dtypes_that_files_lack(name: str) -> None:
    torch = pytest.importorskip("torch")
    assert code_of(getattr(torch, name, f"torch.{name}")) is None


def test_dtypes_import_no_framework() -> None:
    program = """
import sys
import warnings
from ingot._base.dtypes import code_of
from ingot._base.checks import float_code
assert float_code("torch.bfloat16") == float_code("bf16") == float_code("jnp.bfloat16") == "BF16"
assert code_of(float) == code_of("<f8") == "F64"
frameworks = {"numpy", "ml_dtypes", "torch", "jax", "tensorflow", "mlx", "paddle"}
assert not frameworks & set(sys.modules)
"""
    done = python("-c", program)
    assert (done.code, done.err) == (0, "")
