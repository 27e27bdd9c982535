"""Tools find the types, the source and the signature of every public function and class."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from contextlib import closing
from pathlib import Path
from typing import Any

import jedi
import numpy
import pydantic
import pytest

import ingot
import ingot.numpy
import ingot.typing
from ingot import delta, lora, modelspec
from ingot._base.report import Report
from ingot._convert.formats import FORMATS
from support.doors import public_functions

FUNCTIONS = public_functions()
# `TensorInfo` has no source in Python.
CLASSES = {
    name: found
    for name in ingot.__all__
    if isinstance(found := getattr(ingot, name), type) and found is not ingot.TensorInfo
}
PARTS = {
    name: getattr(ingot, name) for name in ("Compared", "Distance", "Mismatch", "Problem", "TensorStats")
}
INFO = ingot.TensorInfo("a", "F32", (1,), 0, 4)
CHANGED = delta.ChangedTensor("F32", (1,), "gaps", 1, 6)
RESULTS: list[Any] = [
    ingot.Verification(False, bad=[ingot.Mismatch("a", "0", "1")]),
    ingot.FileMetadata({"k": "v"}, {"a": INFO}, {"F32": 1}),
    ingot.RepoMetadata(None, False, {"a": "f"}, {}, {"F32": 1}, 1),
    ingot.StateReport({"config": "Config"}, ["best"]),
    ingot.Stats({}, {"a": "F6_E2M3"}),
    ingot.Diff({"a": (INFO, None)}, {"k": ("v", None)}, {"b": ingot.Distance(1, 2, 0.5, 0.5)}),
    ingot.Check("path", 1, (ingot.Problem("nan", "a", "1 of 2 values"),)),
    ingot.Cast("path", "F16", ("a",), 1, 2),
    ingot.Download("path", 1, 1, None),
    ingot.Upload("url", 1),
    modelspec.ModelSpec(title="t"),
    delta.Delta("1", "2", "3", "4", "5", 7, {"a": CHANGED}, [], [], []),
    lora.Merged("path", ("a",), (), 1, 4),
    lora.Adapter("path", "LoRA", "peft", (4,), (8.0,), None, ("a",), (), 8),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_type_hints_of_functions_are_resolved(name: str) -> None:
    function = FUNCTIONS[name]
    hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    assert "options" not in hints
    for option, parameter in inspect.signature(function).parameters.items():
        if parameter.annotation is not inspect.Parameter.empty:
            assert option in hints


def test_convert_formats_are_those_of_the_types() -> None:
    assert {*typing.get_args(ingot.typing.SourceFormat)} == {*FORMATS}


@pytest.mark.parametrize("name", [*CLASSES, *PARTS])
def test_type_hints_of_classes_are_resolved(name: str) -> None:
    kind = getattr(ingot, name)
    assert isinstance(typing.get_type_hints(kind), dict)
    members = inspect.getmembers_static(kind)
    for found in [value for key, value in members if not key.startswith("_") and inspect.isfunction(value)]:
        typing.get_type_hints(found)


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES, *PARTS])
def test_inspect_finds_the_source(name: str) -> None:
    found = FUNCTIONS[name] if name in FUNCTIONS else getattr(ingot, name)
    source = inspect.getsource(found)
    kind = "class" if isinstance(found, type) else "def"
    assert f"{kind} {found.__name__}" in source


@pytest.mark.parametrize("found", RESULTS, ids=lambda one: type(one).__name__)
def test_results_are_checked_pickled_and_copied(found: Any) -> None:
    assert pydantic.TypeAdapter(type(found)).validate_python(found) == found
    for again in (pickle.loads(pickle.dumps(found)), copy.copy(found), copy.deepcopy(found)):
        assert again == found
        assert type(again) is type(found)


@pytest.mark.parametrize("kind", ["PrefetchLoader", "TensorStream", "SaveFuture", "View", "Writer"])
def test_objects_of_this_process_say_what_to_pickle(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    done = ingot.numpy.save_file({"a": numpy.ones(4)}, path, background=True)
    done.result(60)
    named = "PrefetchLoader" if kind == "TensorStream" else kind
    with (
        ingot.open(path) as file,
        file.prefetch() as loader,
        ingot.view(path, how="page") as view,
        closing(ingot.Writer(tmp_path / "other", {"a": ("F32", (4,))})) as writer,
    ):
        made = (loader, iter(loader), done, view, writer)
        (found,) = (one for one in made if type(one).__name__ == kind)
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=f"a {named} cannot be pickled"):
                way(found)


def test_results_are_all_tested() -> None:
    tried = {type(one) for one in RESULTS}
    # Results of conversions and repairs have tests there.
    others = {"Conversion", "LeftOut", "Repair", "TensorStats"}
    assert {one.__name__ for one in Report.__subclasses__()} - others == {
        one.__name__ for one in tried if issubclass(one, Report)
    }


CALLED = [
    name
    for name in FUNCTIONS
    if name.startswith(("ingot.numpy.", "ingot.lora.", "ingot.modelspec.")) or name.count(".") == 1
]


@pytest.mark.parametrize("name", CALLED)
def test_signatures_are_found_without_running_code(name: str) -> None:
    module = name.rpartition(".")[0]
    (found,) = jedi.Script(f"import {module}\n{name}(").get_signatures()[:1]
    options = {one.name for one in found.params} - {"options", "keys", "args", "kwargs"}
    assert options <= set(inspect.signature(FUNCTIONS[name]).parameters)
    assert found.docstring().strip()
