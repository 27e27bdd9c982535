"""The framework suite, bound to every framework that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ingot
from frameworks import suite
from frameworks.suite import Binding, Layout
from ingot._base import frameworks

# The frameworks and their packages, in the order of import: paddle crashes in a process that has imported
# tensorflow before.
PACKAGES = {
    "paddle": "paddle",
    "numpy": "numpy",
    "torch": "torch",
    "flax": "jax",
    "tensorflow": "tensorflow",
    "mlx": "mlx",
}


def bound() -> dict[str, Binding]:
    """Return the bindings of the installed frameworks."""
    found = {}
    for name, package in PACKAGES.items():
        if importlib.util.find_spec(package):
            with warnings.catch_warnings():
                # Frameworks warn about their own dependencies when they are imported.
                warnings.simplefilter("ignore")
                found[name] = importlib.import_module(f"frameworks.with_{name}").BINDING
    return found


BINDINGS = bound()
Params = Callable[[Binding], Iterator[tuple[str, tuple[Any, ...]]]]


def each(params: Params) -> list[Any]:
    """Return the parameters of a test for every binding, and a skipped one for each missing framework."""
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


def cases(binding: Binding) -> Iterator[tuple[str, tuple[str, Layout, str]]]:
    """Yield every combination of a dtype, a layout and a file format, with an id."""
    for number, code in enumerate(code for code in suite.BITS if code not in binding.refused):
        for at, (title, layout) in enumerate(suite.layouts_of(binding).items(), number):
            format = suite.FORMATS[at % len(suite.FORMATS)]
            yield f"{code}-{title}-{format}", (code, layout, format)


def refusals(binding: Binding) -> Iterator[tuple[str, tuple[str]]]:
    return ((code, (code,)) for code in binding.refused)


@pytest.mark.parametrize(("binding", "code", "layout", "format"), each(cases))
def test_save_file_and_load_file_round_trip(
    binding: Binding, code: str, layout: Layout, format: str, tmp_path: Path
) -> None:
    suite.check_round_trip(binding, suite.case(binding, code, layout), format, tmp_path)


@pytest.mark.parametrize(("binding", "code"), each(refusals))
def test_load_file_rejects_only_the_tensor_of_a_missing_dtype(
    binding: Binding, code: str, tmp_path: Path
) -> None:
    suite.check_refused(binding, code, tmp_path)


@pytest.mark.parametrize(("binding", "code"), each(lambda binding: ((code, (code,)) for code in suite.BITS)))
def test_load_file_has_a_dtype_or_names_it(binding: Binding, code: str, tmp_path: Path) -> None:
    suite.check_cell(binding, code, PACKAGES[binding.name], tmp_path)


@pytest.mark.parametrize("binding", each(lambda binding: iter([("", ())])))
def test_dtypes_table_is_complete(binding: Binding) -> None:
    assert set(binding.table) | set(binding.refused) == set(suite.BITS)
    assert not set(binding.table) & set(binding.refused)


# The names that upstream accepts.
ALIASES = {
    "numpy": ["np", "numpy"],
    "torch": ["pt", "torch", "pytorch"],
    "flax": ["jax", "flax"],
    "tensorflow": ["tf", "tensorflow"],
    "mlx": ["mlx"],
    "paddle": ["paddle"],
}


@pytest.mark.parametrize("binding", each(lambda binding: iter([("", ())])))
def test_framework_names_are_all_accepted(binding: Binding, tmp_path: Path) -> None:
    names = ALIASES[binding.name]
    assert set(names) == {name for name, module in frameworks.FRAMEWORKS.items() if module == binding.name}
    path = tmp_path / "t.safetensors"
    expected = suite.case(binding, "F32", suite.LAYOUTS["cube"])
    binding.module.save_file({"t": expected.tensor}, path)
    for name in names:
        for device in ("cpu", None):
            with ingot.safe_open(path, name, device=device) as file:
                suite.check_same(binding, file["t"], expected)
                suite.check_same(binding, file.get_tensors()["t"], expected)


@pytest.mark.parametrize("binding", each(lambda binding: iter([("", ())])))
@pytest.mark.parametrize("device", ["nope", "nope:0", 3.5])
def test_load_file_rejects_an_unknown_device_before_opening(binding: Binding, device: Any) -> None:
    # torch itself rejects the float.
    with pytest.raises((ingot.OptionError, TypeError), match=r"cpu|device"):
        ingot.safe_open("no such file", binding.name, device)


@pytest.mark.parametrize("binding", each(lambda binding: iter([("", ())])))
@pytest.mark.parametrize(
    "value", [{"bias": 1}, [1.0, 2.0], 1.5, None, "text", object()], ids=lambda value: type(value).__name__
)
def test_save_file_names_a_value_that_is_no_tensor(binding: Binding, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    good = suite.case(binding, "F32", suite.LAYOUTS["vector"]).tensor
    # ValueError is what upstream raises for torch.
    with pytest.raises((TypeError, ValueError), match=f"tensor `odd`: expected an? .*{type(value).__name__}"):
        binding.module.save_file({"good": good, "odd": value}, path)
    for wrong in ({1: good}, [good]):
        with pytest.raises((TypeError, ValueError), match=r"expected a dict|must be str"):
            binding.module.save_file(wrong, path)
    with pytest.raises(TypeError, match="metadata"):
        binding.module.save_file({"good": good}, path, {"step": 1})
    assert not path.exists()
