"""docs/reference/names.md has every public name, with its purpose and its exceptions."""

from __future__ import annotations

import builtins
import pickle
import pickletools
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
import ingot.delta
import ingot.lora
import ingot.numpy
from ingot import errors
from ingot._base.frameworks import FRAMEWORKS
from support.scripts import script

# Its functions are on the page too.
pytest.importorskip("torch")


NAMES = script("names")
ROWS = {f"{module}.{row.called}": row for module in NAMES.MODULES for row in NAMES.public(module)}
ROWS |= {f"the other frameworks: {row.called}": row for row in NAMES.alike()}

# Names without exceptions. The methods of `safe_open` raise `ClosedError`, which the class documents once.
SILENT = {
    "ingot.Checkpoints.stopping",
    "ingot.PrefetchLoader.close",
    "ingot.PrefetchLoader.names",
    "ingot.TensorSlice.get_dtype",
    "ingot.TensorSlice.get_shape",
    "ingot.View.close",
    "ingot.Writer.close",
    "ingot.compat.install",
    "ingot.compat.uninstall",
    "ingot.errors.SafetensorError",
    "ingot.safe_open.close",
    "ingot.safe_open.keys",
    "ingot.safe_open.metadata",
    "ingot.safe_open.offset_keys",
    "ingot.torch.DeltaWriter.reset",
    # Errors of a caller's own object pass through.
    "ingot.typing.Writable.write",
}


def test_names_page_agrees_with_the_package() -> None:
    assert NAMES.PAGE.read_text("utf-8") == NAMES.rendered(), "run scripts/names"


@pytest.mark.parametrize("name", ROWS)
def test_public_names_have_a_summary(name: str) -> None:
    said = ROWS[name].says
    assert said.endswith((".", "``.", ":")), said
    assert len(said.split()) > 2, said


def test_docstrings_list_the_exceptions() -> None:
    silent = {name for name, row in ROWS.items() if row.is_function and not row.raises}
    # torch calls these, not users. The docstring of the class lists their exceptions.
    of_torch = ("ingot.dcp.Reader.", "ingot.dcp.Writer.", "ingot.torch.RNG.")
    silent = {name for name in silent if not name.startswith(of_torch)}
    assert silent == SILENT


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.raises])
def test_docstrings_list_catchable_exceptions(name: str) -> None:
    for raised in ROWS[name].raises:
        found = getattr(errors, raised, None) or getattr(builtins, raised, None)
        assert isinstance(found, type), raised
        assert issubclass(found, Exception), raised


METHODS = sorted(
    name for name, row in ROWS.items() if name.startswith("ingot.safe_open.") and row.is_function
)


@pytest.mark.parametrize("name", [name for name in METHODS if not name.endswith(".close")])
def test_closed_files_raise_the_documented_exceptions(name: str, path: Path) -> None:
    ingot.numpy.save_file({"a": np.zeros(3)}, path)
    file = ingot.safe_open(path, "np")
    file.close()
    file.close()
    needed = ["a"] if ROWS[name].arguments.split(", ")[0] == "name" else []
    with pytest.raises(ingot.ClosedError) as caught:
        # Some methods return an iterator, which reads the file when it is used.
        list(getattr(file, ROWS[name].called.partition(".")[2])(*needed))
    assert caught.value.path == str(path)


def test_names_script_finds_every_raise() -> None:
    notes = "Notes\n-----\nSentence\n"
    doc = f"Do it.\n\nRaises\n------\nOSError\n    One.\nHeaderError, SaveError\n    Two.\n\n{notes}"
    assert NAMES.raises(doc) == ["OSError", "HeaderError", "SaveError"]
    assert NAMES.raises(f"Do it.\n\n{notes}") == []


PRIVATE = re.compile(r"ingot\.(\w+\.)*_")


def named_in(pickled: bytes) -> list[str]:
    """Return every module that unpickling `pickled` would import."""
    return [text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str) and "ingot" in text]


@pytest.fixture
def path(path: Path) -> Path:
    ingot.numpy.save_file({"a": np.arange(6.0).reshape(2, 3)}, path)
    return path


class Store:
    """A store whose files nothing reads."""

    def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[bytes]:
        raise NotImplementedError


def objects(path: Path) -> dict[str, Any]:
    """Return an object of each public class that can be pickled."""
    file = ingot.safe_open(path, "np")
    converted = path.with_name("b.safetensors")
    changed = ingot.delta.ChangedTensor("F32", (1,), "gaps", 1, 6)
    return {
        "safe_open": file,
        "slice": file.get_slice("a"),
        "Verification": ingot.verify(path, raises=False),
        "Mismatch": ingot.Mismatch("a", "0", "1"),  # type: ignore[attr-defined]
        "Stats": ingot.stats(path),
        "Diff": ingot.diff(path, path, values=True),
        "Check": ingot.check(path),
        "Cast": ingot.cast(path, path.with_name("cast"), "F16", overwrite=True),
        "Repair": ingot.repair(path, path.with_name("repaired"), overwrite=True),
        "Ranges": ingot.Ranges(Store(), "a"),
        "ModelSpec": ingot.modelspec.ModelSpec(title="a"),
        "Delta": ingot.delta.Delta("1", "2", "3", "4", "5", None, {"a": changed}, [], [], []),
        "Merged": ingot.lora.Merged("path", ("a",), (), 1, 4),
        "inspect": ingot.inspect(path),
        "TensorInfo": file.info("a"),
        "Conversion": ingot.convert(path, converted),
        "Download": ingot.Download("index", 1, 0, None, (ingot.Download("a", 1, 0, None),)),
        "Upload": ingot.Upload("index", 1, (ingot.Upload("a", 1),)),
        "error": ingot.OptionError("no", code="none"),
    }


KINDS = [
    "safe_open",
    "slice",
    "Verification",
    "Mismatch",
    "Stats",
    "Diff",
    "Check",
    "Cast",
    "Repair",
    "Ranges",
    "ModelSpec",
    "Delta",
    "Merged",
    "inspect",
    "TensorInfo",
    "Conversion",
    "Download",
    "Upload",
    "error",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_name_public_modules(path: Path, kind: str, protocol: int) -> None:
    given = objects(path)[kind]
    pickled = pickle.dumps(given, protocol)
    assert not [name for name in named_in(pickled) if PRIVATE.match(name)]
    loaded = pickle.loads(pickled)
    assert type(loaded) is type(given)
    if kind == "slice":
        assert np.array_equal(loaded[:], given[:])
    elif kind == "safe_open":
        assert loaded.keys() == given.keys()
    else:
        assert repr(loaded) == repr(given)


@pytest.mark.parametrize("name", [name for name in ingot.__all__ if callable(getattr(ingot, name))])
def test_functions_have_public_modules(name: str) -> None:
    found = getattr(ingot, name)
    # `inspect` searches for the source of a class in its stated module.
    assert isinstance(found, type) or not PRIVATE.match(found.__module__ + "."), found.__module__
    assert pickle.loads(pickle.dumps(found)) is found


PUBLIC = ["delta", "errors", "lora", "modelspec", "typing", *sorted(set(FRAMEWORKS.values()))]


@pytest.mark.parametrize("name", PUBLIC)
def test_modules_show_public_names_only(name: str) -> None:
    try:
        module = import_module(f"ingot.{name}")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


def test_package_shows_public_names_only() -> None:
    assert {*dir(ingot)} - {*ingot.__all__} <= {*ingot._MODULES}
    assert {*ingot.__all__} <= {*dir(ingot)}
    assert not [name for name in dir(ingot) if name.startswith("_") and name != "__version__"]


@pytest.mark.parametrize("name", ["load_file", "save_file", "load_model", "save_sharded", "IncompatibleKeys"])
def test_torch_names_have_the_public_module(name: str) -> None:
    torch = pytest.importorskip("ingot.torch")
    found = getattr(torch, name)
    assert found.__module__ == "ingot.torch" or isinstance(found, type)
    assert pickle.loads(pickle.dumps(found)) is found


def test_type_hints_are_resolved() -> None:
    from typing import get_type_hints

    from ingot import typing

    for name in ("LoadOptions", "ReadOptions", "SaveOptions", "StorageOptions"):
        assert get_type_hints(getattr(typing, name))
