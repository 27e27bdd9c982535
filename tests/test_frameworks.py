"""The framework suite, bound to every framework that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frameworks import suite
from frameworks.suite import Binding, Layout

# The frameworks, each with the package that it is installed by. In the order of import: paddle dies behind tensorflow.
PACKAGES = {
    "paddle": "paddle",
    "numpy": "numpy",
    "torch": "torch",
    "flax": "jax",
    "tensorflow": "tensorflow",
    "mlx": "mlx",
}


def bound() -> dict[str, Binding]:
    """The bindings of those that are installed."""
    found = {}
    for name, package in PACKAGES.items():
        if importlib.util.find_spec(package):
            with warnings.catch_warnings():
                # What frameworks warn of as they are imported is between them and their own dependencies.
                warnings.simplefilter("ignore")
                found[name] = importlib.import_module(f"frameworks.with_{name}").BINDING
    return found


BINDINGS = bound()
Params = Callable[[Binding], Iterator[tuple[str, tuple[Any, ...]]]]


def each(params: Params) -> list[Any]:
    """The params for every binding, and for each framework that is missing one that is skipped."""
    there = [
        pytest.param(binding, *values, id="-".join([name, *filter(None, [title])]))
        for name, binding in BINDINGS.items()
        for title, values in params(binding)
    ]
    count = len(there[0].values)
    return there + [
        pytest.param(*[None] * count, id=name, marks=pytest.mark.skip(f"{package} is not installed"))
        for name, package in PACKAGES.items()
        if name not in BINDINGS
    ]


def cases(binding: Binding) -> Iterator[tuple[str, tuple[str, Layout]]]:
    for code in suite.BITS:
        if code not in binding.refused:
            for title, layout in suite.layouts_of(binding).items():
                yield f"{code}-{title}", (code, layout)


def refusals(binding: Binding) -> Iterator[tuple[str, tuple[str]]]:
    return ((code, (code,)) for code in binding.refused)


@pytest.mark.parametrize("format", suite.FORMATS)
@pytest.mark.parametrize(("binding", "code", "layout"), each(cases))
def test_bytes_round_trip(binding: Binding, code: str, layout: Layout, format: str) -> None:
    suite.check_bytes(binding, suite.case(binding, code, layout), format)


@pytest.mark.parametrize("format", suite.FORMATS)
@pytest.mark.parametrize(("binding", "code", "layout"), each(cases))
def test_files_round_trip(binding: Binding, code: str, layout: Layout, format: str, tmp_path: Path) -> None:
    suite.check_file(binding, suite.case(binding, code, layout), format, tmp_path)


@pytest.mark.parametrize(("binding", "code"), each(refusals))
def test_a_dtype_that_the_framework_lacks_blocks_only_its_tensor(
    binding: Binding, code: str, tmp_path: Path
) -> None:
    suite.check_refused(binding, code, tmp_path)


@pytest.mark.parametrize("binding", each(lambda binding: iter([("", ())])))
def test_tables_are_complete(binding: Binding) -> None:
    assert set(binding.table) | set(binding.refused) == set(suite.BITS)
    assert not set(binding.table) & set(binding.refused)
