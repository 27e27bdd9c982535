"""Imports by `import ingot`, and errors for missing frameworks."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, distribution
from itertools import combinations
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ingot
from ingot._base.frameworks import FRAMEWORKS

PACKAGE = Path(ingot.__file__).parent


def in_a_fresh_process(script: str) -> object:
    """Return the `answer` of `script`, without the site module, so that nothing was imported before."""
    installed = [entry for entry in sys.path if "site-packages" in entry]
    lines = [
        "import sys",
        f"sys.path[:0] = {[str(PACKAGE.parent), *installed]!r}",
        script,
        "import json",
        "print(json.dumps(answer))",
    ]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_import_ingot_imports_nothing_else() -> None:
    # Neither numpy nor torch, nor what costs time in the standard library: typing, dataclasses, enum, re.
    new = in_a_fresh_process(
        "import os; before = set(sys.modules); import ingot; answer = sorted(set(sys.modules) - before)"
    )
    assert isinstance(new, list)
    assert [name for name in new if name.partition(".")[0] != "ingot"] in ([], ["__future__"])
    assert "ingot._native" in new
    assert "ingot.numpy" not in new
    assert "ingot.torch" not in new


def test_import_rejects_big_endian_machines() -> None:
    script = """
sys.byteorder = "big"
try:
    import ingot
except ImportError as fault:
    answer = [str(fault), "ingot._native" in sys.modules]
"""
    said, loaded = in_a_fresh_process(script)  # type: ignore[misc]
    assert "big-endian" in said
    assert not loaded


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_import_loads_a_framework_when_it_is_named(framework: str) -> None:
    script = f"import ingot; ingot.{framework}.load_file; answer = 'ingot.{framework}' in sys.modules"
    assert in_a_fresh_process(script) is True


def test_dir_lists_a_module_once_its_framework_is_imported() -> None:
    script = "import ingot; before = dir(ingot); import numpy; answer = [before, dir(ingot)]"
    before, after = in_a_fresh_process(script)  # type: ignore[misc]
    assert set(after) - set(before) == {"lora", "numpy"}
    assert "typing" in before


@pytest.mark.parametrize("name", ["typing.StorageOptions", "dcp.Reader", "modelspec.read"])
def test_import_loads_a_module_when_it_is_named(name: str) -> None:
    assert in_a_fresh_process(f"import ingot; answer = ingot.{name} is not None") is True


PACKAGES = [
    ("numpy", "numpy"),
    ("torch", "torch"),
    ("flax", "jax"),
    ("tensorflow", "tensorflow"),
    ("mlx", "mlx"),
    ("paddle", "paddle"),
]


@pytest.mark.parametrize(("framework", "package"), PACKAGES)
@pytest.mark.parametrize(
    ("use", "kinds"),
    [
        ("import ingot.{}", ["ModuleNotFoundError"]),
        ("from ingot import {}", ["ModuleNotFoundError"]),
        ("import ingot; ingot.safe_open('x', '{}')", ["ModuleNotFoundError"]),
        ("import ingot; ingot.{}", ["AttributeError", "ModuleNotFoundError"]),
    ],
)
def test_import_names_a_missing_framework(framework: str, package: str, use: str, kinds: list[str]) -> None:
    script = f"""
sys.modules[{package!r}] = None
try:
    {use.format(framework)}
except (AttributeError, ImportError) as error:
    kinds = [type(fault).__name__ for fault in (error, error.__cause__) if fault is not None]
    answer = [kinds[:{len(kinds)}], error.name, str(error)]
"""
    found, name, message = in_a_fresh_process(script)  # type: ignore[misc]
    assert found == kinds
    assert name == (framework if kinds[0] == "AttributeError" else package)
    assert f"pip install 'ingot-tensors[{package}]'" in message


# Tools that look at every name that a module lists.
LOOKS = {
    "help": "import pydoc; answer = len(pydoc.plain(pydoc.render_doc(ingot))) > 1000",
    "star": "names = {}; exec('from ingot import *', names); answer = set(ingot.__all__) <= set(names)",
    "members": "import inspect; answer = set(dict(inspect.getmembers(ingot))) >= set(ingot.__all__)",
    "all of dir": "answer = all(hasattr(ingot, name) for name in dir(ingot))",
    "hasattr": "answer = not any(hasattr(ingot, name) for name in HIDDEN)",
    "what installs it": """
def words(name):
    try:
        getattr(ingot, name)
    except AttributeError as error:
        return str(error)
answer = all("pip install 'ingot-tensors[" in words(name) for name in HIDDEN)
""",
    "getattr": "answer = all(getattr(ingot, name, None) is None for name in HIDDEN)",
    "mock": "from unittest import mock; answer = mock.create_autospec(ingot).safe_open is not None",
}


@pytest.mark.parametrize("look", LOOKS)
def test_package_can_be_inspected_without_frameworks(look: str) -> None:
    hidden = [name for name, _ in PACKAGES]
    script = f"HIDDEN = {hidden!r}\nsys.modules.update(dict.fromkeys({[name for _, name in PACKAGES]!r}))\n"
    assert in_a_fresh_process(f"{script}import ingot\n{LOOKS[look]}") is True


@pytest.mark.parametrize("name", ["errors", "modelspec", "typing", "compat"])
def test_modules_without_frameworks_can_be_inspected(name: str) -> None:
    hidden = [package for _, package in PACKAGES]
    script = f"""
sys.modules.update(dict.fromkeys({hidden!r}))
import inspect, pydoc
import ingot.{name} as module
names = {{}}
exec("from ingot.{name} import *", names)
answer = [
    len(pydoc.plain(pydoc.render_doc(module))) > 1000,
    set(module.__all__) <= set(names) & set(dict(inspect.getmembers(module))),
    all(hasattr(module, public) for public in module.__all__),
]
"""
    assert in_a_fresh_process(script) == [True, True, True]


@pytest.mark.parametrize("look", ["help", "star", "members", "all of dir"])
def test_inspecting_the_package_imports_no_framework(look: str) -> None:
    """A framework takes seconds to import, and some crash a process that has imported another one."""
    # `ingot.convert` computes with numpy.
    known = [name for _, name in PACKAGES if name != "numpy"]
    script = f"import ingot\n{LOOKS[look]}\nanswer = sorted(set({known!r}) & set(sys.modules))"
    assert in_a_fresh_process(script) == []


def test_convert_names_a_missing_package_when_called() -> None:
    script = """
sys.modules["numpy"] = None
import ingot
try:
    ingot.convert("a.bin", "b.safetensors")
except ModuleNotFoundError as error:
    answer = [error.name, str(error)]
"""
    name, message = in_a_fresh_process(script)  # type: ignore[misc]
    assert name == "numpy"
    assert "ingot.convert needs numpy" in message
    assert "ingot-tensors[convert]" in message


def test_load_file_needs_ml_dtypes_for_some_tensors_only(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    tensors = {
        "half": {"dtype": "BF16", "shape": [1], "data": b"\0\0"},
        "single": {"dtype": "F32", "shape": [1], "data": bytes(4)},
    }
    ingot.serialize_file(tensors, path)
    script = f"""
sys.modules["ml_dtypes"] = None
import ingot.numpy
file = ingot.safe_open({str(path)!r}, "np")
answer = [file["single"].tolist()]
for read in (lambda: file["half"], lambda: ingot.numpy.load_file({str(path)!r})):
    try:
        read()
    except ingot.DtypeError as error:
        answer.append([error.tensor, error.found, str(error)])
"""
    values, *refusals = in_a_fresh_process(script)  # type: ignore[misc]
    assert values == [0.0]
    assert len(refusals) == 2
    for tensor, found, message in refusals:
        assert (tensor, found) == ("half", "BF16")
        assert message.startswith(f"{path}: tensor `half`: ")
        assert "pip install 'ingot-tensors[numpy]'" in message


def test_package_has_the_promised_names() -> None:
    assert set(ingot.__all__) <= set(dir(ingot))
    for name in ingot.__all__:
        assert getattr(ingot, name) is not None
    assert not set(FRAMEWORKS.values()) & set(ingot.__all__)
    with pytest.raises(AttributeError, match="nope"):
        ingot.nope  # type: ignore[attr-defined]  # noqa: B018


def test_version_is_that_of_the_distribution() -> None:
    assert ingot.__version__ == importlib.metadata.version("ingot-tensors")


ROOT = Path(__file__).parents[2]
# Not `convert`: of its libraries only the newest versions are tested.
EXTRAS_TRIED = ("numpy", "torch", "jax", "tensorflow", "mlx", "paddle", "cli")


@pytest.fixture(scope="module")
def installed() -> Distribution:
    return distribution("ingot-tensors")


def test_distribution_has_the_licences_of_its_parts(installed: Distribution) -> None:
    texts = {file.name: file.read_text() for file in installed.files or () if "licenses" in file.parts}
    assert set(texts) == {"LICENSE", "THIRD-PARTY.txt"}
    assert texts["LICENSE"].lstrip().startswith("Apache License")
    # The strictest requirement of each package, as text.
    for name, words in (("ring", "ISC"), ("subtle", "Redistributions in binary"), ("xxhash-rust", "Boost")):
        assert f"\n{name} " in texts["THIRD-PARTY.txt"]
        assert words in texts["THIRD-PARTY.txt"]
    assert "(its package has no text)" not in texts["THIRD-PARTY.txt"]


def test_distribution_states_pythons_and_authors(installed: Distribution) -> None:
    said = installed.metadata
    versions = [line.rpartition(" ")[2] for line in said.get_all("Classifier") if ":: Python :: 3." in line]
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
    assert said["Requires-Python"] == ">=3.11"
    assert said["Author"] == "The ingot authors"
    assert said["License-Expression"] == "Apache-2.0"


def test_versions_table_has_the_oldest_versions_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    asked = {
        (wanted.name, spec.version)
        for extra in EXTRAS_TRIED
        for wanted in map(Requirement, extras[extra])
        if wanted.marker is None or wanted.marker.evaluate({"sys_platform": "linux"})
        for spec in wanted.specifier
    }
    table = tomllib.loads((ROOT / "requirements" / "versions.toml").read_text("utf-8"))
    tried = [Requirement(pin) for ends in table.values() for pin in ends.get("oldest", ())]
    assert len(asked) > 8
    for name, version in asked:
        pins = {str(pin.specifier) for pin in tried if pin.name.removesuffix("-cpu") == name}
        assert any(f"{pin}.".startswith(f"=={version}.") for pin in pins), (name, version, pins)


def test_versions_table_has_the_pythons_of_the_package(installed: Distribution) -> None:
    table = tomllib.loads((ROOT / "requirements" / "versions.toml").read_text("utf-8"))
    named = installed.metadata.get_all("Classifier")
    assert all(
        f"Programming Language :: Python :: {version}" in named for version in table["python"]["versions"]
    )


def test_requirements_pin_one_version_of_a_package() -> None:
    """The environments of clients and engines see the packages of the tests, which pip must keep."""
    pins = {name: pinned(name) for name in ("test", "clients", "engines")}
    assert {"torch", "torchvision", "transformers"} <= pins["clients"].keys() & pins["engines"].keys()
    for left, right in combinations(pins.values(), 2):
        assert {name: left[name] for name in left.keys() & right.keys() if left[name] != right[name]} == {}


def pinned(file: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{file}.txt").read_text("utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {one.name: str(one.specifier) for one in wanted}
