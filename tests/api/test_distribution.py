"""What the installed distribution says of itself."""

from __future__ import annotations

import tomllib
from importlib.metadata import Distribution, distribution
from itertools import combinations
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# `convert` asks for libraries that are tried at their newest only.
EXTRAS_TRIED = ("numpy", "torch", "jax", "tensorflow", "mlx", "paddle", "cli")


@pytest.fixture(scope="module")
def installed() -> Distribution:
    return distribution("ingot-tensors")


def test_it_has_the_licence_texts_of_what_it_is_made_of(installed: Distribution) -> None:
    texts = {file.name: file.read_text() for file in installed.files or () if "licenses" in file.parts}
    assert set(texts) == {"LICENSE", "THIRD-PARTY.txt"}
    assert texts["LICENSE"].lstrip().startswith("Apache License")
    # Those that ask for it most strictly: a text each.
    for name, words in (("ring", "ISC"), ("subtle", "Redistributions in binary"), ("xxhash-rust", "Boost")):
        assert f"\n{name} " in texts["THIRD-PARTY.txt"]
        assert words in texts["THIRD-PARTY.txt"]
    assert "(its package has no text)" not in texts["THIRD-PARTY.txt"]


def test_it_says_which_pythons_and_who_made_it(installed: Distribution) -> None:
    said = installed.metadata
    versions = [line.rpartition(" ")[2] for line in said.get_all("Classifier") if ":: Python :: 3." in line]
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
    assert said["Requires-Python"] == ">=3.11"
    assert said["Author"] == "The ingot authors"
    assert said["License-Expression"] == "Apache-2.0"


def test_the_oldest_versions_that_are_tried_are_those_that_the_extras_ask_for() -> None:
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


def test_the_pythons_that_are_tried_are_those_that_the_package_names(installed: Distribution) -> None:
    table = tomllib.loads((ROOT / "requirements" / "versions.toml").read_text("utf-8"))
    named = installed.metadata.get_all("Classifier")
    assert all(
        f"Programming Language :: Python :: {version}" in named for version in table["python"]["versions"]
    )


def test_a_package_has_one_version_in_all_environments_that_share_it() -> None:
    """Those of the clients and of the engines see the packages of the tests, which pip has to keep."""
    pins = {name: pinned(name) for name in ("test", "clients", "engines")}
    assert {"torch", "torchvision", "transformers"} <= pins["clients"].keys() & pins["engines"].keys()
    for left, right in combinations(pins.values(), 2):
        assert {name: left[name] for name in left.keys() & right.keys() if left[name] != right[name]} == {}


def pinned(file: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{file}.txt").read_text("utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {one.name: str(one.specifier) for one in wanted}
