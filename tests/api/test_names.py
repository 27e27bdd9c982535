"""docs/reference/names.md has every public name, and each says what it does and what it raises."""

from __future__ import annotations

import builtins
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot import errors
from support.scripts import script

# Its functions are on the page too.
pytest.importorskip("torch")


NAMES = script("names")
ROWS = {f"{module}.{row.called}": row for module in NAMES.MODULES for row in NAMES.public(module)}
ROWS |= {f"the other frameworks: {row.called}": row for row in NAMES.alike()}

# What raises nothing of its own. The methods of `safe_open` raise `ClosedError`, which the class says once.
SILENT = {
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
    # What a caller's own object raises comes through.
    "ingot.typing.Writable.write",
}


def test_the_page_is_what_the_package_has() -> None:
    assert NAMES.PAGE.read_text("utf-8") == NAMES.rendered(), "run scripts/names"


@pytest.mark.parametrize("name", ROWS)
def test_a_public_name_says_what_it_is_in_a_sentence(name: str) -> None:
    said = ROWS[name].says
    assert said.endswith((".", "``.", ":")), said
    assert len(said.split()) > 2, said


def test_a_function_lists_what_it_raises() -> None:
    silent = {name for name, row in ROWS.items() if row.is_function and not row.raises}
    # What torch calls, not users: the class says what comes of them.
    of_torch = {name for name in silent if name.startswith(("ingot.dcp.Reader.", "ingot.dcp.Writer."))}
    assert silent - of_torch == SILENT


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.raises])
def test_what_a_function_raises_is_an_error_that_callers_can_catch(name: str) -> None:
    for raised in ROWS[name].raises:
        found = getattr(errors, raised, None) or getattr(builtins, raised, None)
        assert isinstance(found, type), raised
        assert issubclass(found, Exception), raised


METHODS = sorted(
    name for name, row in ROWS.items() if name.startswith("ingot.safe_open.") and row.is_function
)


@pytest.mark.parametrize("name", [name for name in METHODS if not name.endswith(".close")])
def test_every_method_of_a_closed_file_raises_as_the_page_says(name: str, path: Path) -> None:
    ingot.numpy.save_file({"a": np.zeros(3)}, path)
    file = ingot.safe_open(path, "np")
    file.close()
    file.close()
    needed = ["a"] if ROWS[name].arguments.split(", ")[0] == "name" else []
    with pytest.raises(ingot.ClosedError) as caught:
        # What some of them give reads when it is asked.
        list(getattr(file, ROWS[name].called.partition(".")[2])(*needed))
    assert caught.value.path == str(path)


def test_the_script_finds_every_line_of_raises() -> None:
    notes = "Notes\n-----\nSentence\n"
    doc = f"Do it.\n\nRaises\n------\nOSError\n    One.\nHeaderError, SaveError\n    Two.\n\n{notes}"
    assert NAMES.raises(doc) == ["OSError", "HeaderError", "SaveError"]
    assert NAMES.raises(f"Do it.\n\n{notes}") == []
