"""The options of loading: declared and documented once, in the signature and the help of every function."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot._base.frameworks import FRAMEWORKS
from ingot._base.options import Loading
from ingot.remap import rename
from ingot.typing import FillOptions, LoadOptions
from support.changed_package import said_by
from support.doors import public_functions

MODULES = sorted(set(FRAMEWORKS.values()))
NAMES = [f"ingot.{name}.load_file" for name in MODULES]
FUNCTIONS = {
    name: function
    for name, function in public_functions().items()
    if name in (*NAMES, "ingot.torch.load_model", "ingot.torch.load_into")
}


def options_of(name: str) -> list[str]:
    """Return the options of a function in order."""
    return list((FillOptions if name == "ingot.torch.load_into" else LoadOptions).__annotations__)


def documented(name: str) -> dict[str, str]:
    """Return the help of a function for each option."""
    text = inspect.cleandoc(FUNCTIONS[name].__doc__ or "").partition("Returns\n")[0]
    entries: dict[str, str] = {}
    option = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            option = line.partition(" : ")[0]
        entries[option] = entries.get(option, "") + line.strip() + "\n"
    return {option: entries[option].strip() for option in options_of(name)}


def test_load_options_have_one_description() -> None:
    expected = documented("ingot.numpy.load_file")
    assert all(len(text.splitlines()) > 1 for text in expected.values())
    for name in FUNCTIONS:
        found = documented(name)
        assert found == {option: expected[option] for option in found}


def arrays(found: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the values of the tensors of any framework."""
    return {
        name: numpy.asarray(tensor.float() if hasattr(tensor, "float") else tensor, "f4").tolist()
        for name, tensor in found.items()
    }


@pytest.fixture
def path(path: Path) -> Path:
    """Return the path at which `saved` writes a file with two matrices."""
    return path


def saved(path: Path) -> Path:
    tensors = {name: numpy.arange(12, dtype="f4").reshape(4, 3) for name in ("x.a", "x.b")}
    ingot.numpy.save_file(tensors, path, {"k": "v"}, checksums=True)
    return path


ROWS = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
# The result of each option for the file that `saved` writes.
GIVES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "backend": (lambda: "pread", {"x.a": ROWS, "x.b": ROWS}),
    "threads": (lambda: 2, {"x.a": ROWS, "x.b": ROWS}),
    "progress": (lambda: None, {"x.a": ROWS, "x.b": ROWS}),
    "storage_options": (lambda: {"retries": 1}, {"x.a": ROWS, "x.b": ROWS}),
    "max_header_size": (lambda: 10_000, {"x.a": ROWS, "x.b": ROWS}),
    "keys": (lambda: iter(["x.b"]), {"x.b": ROWS}),
    "drop": (lambda: iter(["x.b"]), {"x.a": ROWS}),
    "slices": (lambda: {"x.a": slice(1, 3)}, {"x.a": ROWS[1:3], "x.b": ROWS}),
    "dtype": (lambda: "F16", {"x.a": ROWS, "x.b": ROWS}),
    "verify": (lambda: True, {"x.a": ROWS, "x.b": ROWS}),
    "dequantize": (lambda: True, {"x.a": ROWS, "x.b": ROWS}),
    "remap": (lambda: [rename("y.{n}", "x.{n}")], {"y.a": ROWS, "y.b": ROWS}),
}


@pytest.mark.parametrize("option", [*GIVES, "expected_sha256"])
@pytest.mark.parametrize("name", [name for name in NAMES if name in FUNCTIONS])
def test_load_options_hold_in_every_framework(name: str, option: str, path: Path) -> None:
    saved(path)
    if option == "expected_sha256":
        value, expected = ingot.hash(path), {"x.a": ROWS, "x.b": ROWS}
        with pytest.raises(ingot.IntegrityError):
            FUNCTIONS[name](path, expected_sha256="0" * 64)
    else:
        made, expected = GIVES[option]
        value = made()
    found = FUNCTIONS[name](path, **{option: value})
    assert list(found) == list(expected)
    assert arrays(found) == expected
    if option == "dtype":
        assert all("float16" in str(tensor.dtype) for tensor in found.values())


def test_load_options_are_all_tested() -> None:
    assert {*GIVES, "expected_sha256"} == LoadOptions.__annotations__.keys()
    assert list(LoadOptions.__annotations__) == list(Loading._fields)


def test_load_model_takes_the_load_options(path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    ingot_torch: Any = import_module("ingot.torch")
    saved(path)

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_module("x", torch.nn.Module())
            for name in "ab":
                self.x.register_buffer(name, torch.zeros(4, 3, dtype=torch.float16))

    told: list[tuple[int, int]] = []
    model = Model()
    with warnings.catch_warnings():
        # No warning about a conversion: the tensors have the dtype of the module.
        warnings.simplefilter("error")
        given = {"dtype": torch.float16, "threads": 2, "verify": False, "backend": "pread"}
        done = ingot_torch.load_model(model, path, **given, progress=lambda *now: told.append(now))
    assert done == (set(), [])
    assert model.x.a.tolist() == model.x.b.tolist() == ROWS
    assert told[-1][0] == told[-1][1] > 0
    assert ingot_torch.load_model(Model(), path, strict=False, keys=["x.a"], dtype="F16") == ({"x.b"}, [])
    with pytest.raises(ingot.IntegrityError):
        ingot_torch.load_model(Model(), path, expected_sha256="0" * 64)


# The change that would add `load_file(longest_header=...)`: for each file, existing lines and the lines to
# add before them.
NEW_OPTION = {
    "typing.py": [
        (
            "    verify : bool\n        Compare the tensors with",
            "    longest_header : int, optional\n        Longer headers are rejected.\n",
        ),
        ("    verify: bool\n    expected_sha256", "    longest_header: int | None\n"),
    ],
    "_base/options.py": [
        ("    verify: bool = False\n    expected_sha256", "    longest_header: int | None = None\n"),
    ],
    "_read/door.py": [
        (
            "    if headers is None:\n        return open_checkpoint(source, how)",
            "    if headers is None:\n        how = how._replace(max_header_size=how.longest_header)\n",
        ),
    ],
}
TRY_IT = """
import inspect, json, sys
from importlib import import_module
import ingot
answer = {}
for name in sys.argv[2:]:
    module, _, function = name.rpartition(".")
    try:
        load = getattr(import_module(module), function)
    except ImportError:
        continue
    given = (sys.argv[1],)
    if function != "load_file":
        given = (import_module("torch").nn.Module(), *given)
    refused = False
    try:
        load(*given, longest_header=8)
    except ingot.HeaderError:
        refused = True
    shown = "longest_header" in inspect.signature(load).parameters
    answer[name] = refused and shown and "Longer headers are rejected." in load.__doc__
print(json.dumps(answer))
"""


def test_load_options_grow_in_three_files_at_most(tmp_path: Path, path: Path) -> None:
    assert len(NEW_OPTION) <= 3
    loads = [name for name in FUNCTIONS if name != "ingot.torch.load_into"]
    answer = said_by(TRY_IT, NEW_OPTION, tmp_path, str(saved(path)), *loads)
    assert answer == dict.fromkeys(loads, True)
