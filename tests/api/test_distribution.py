"""What the installed distribution says of itself."""

from __future__ import annotations

from importlib.metadata import Distribution, distribution

import pytest


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
