"""Limits for the number of distinct parameter names in the public Python API, and in one function.

The page of names (docs/reference/names.md) once listed 102 distinct names, in functions, methods and classes
with documented parameters, and `convert` had 18 of them. This count leaves out parameters that torch's and
Lightning's interfaces define (9 of the 102), and those of
the constructors of errors and results (8), which users do not call. 85 remained.
"""

from __future__ import annotations

import pytest

from ingot import typing as groups
from support.public_api import parameters, public_api

MOST_NAMES = 80
MOST_OWN = 6
OPTIONS = {
    option
    for group in (
        groups.ReadOptions,
        groups.SelectOptions,
        groups.CheckOptions,
        groups.LayoutOptions,
        groups.SaveOptions,
        groups.ShardOptions,
    )
    for option in group.__annotations__
} | {"metadata", "background"}
# A folder of checkpoints has a vocabulary of its own: steps, metrics, and which steps stay. Patches have a
# step too. Programs that save single files do not meet these names.
OF_CHECKPOINTS = {"directory", "keep", "keep_every", "best", "step", "metrics", "signal"}
# Adapters are added to a base, and are renamed for a library.
OF_ADAPTERS = {"base", "adapter", "scale", "to"}
# A patch is applied to a version, in a new file or in the files of the version.
OF_PATCHES = {"patch", "in_place"}
# Functions for one library, which have its object and a directory of its own files.
OF_LIBRARIES = {"accelerator"}
API = public_api()
# Functions with upstream's parameters, which are too many.
UPSTREAMS: dict[str, int] = {}


def test_parameter_names_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    names = {name for function in API.values() for name in parameters(function)}
    names -= OF_CHECKPOINTS | OF_ADAPTERS | OF_PATCHES | OF_LIBRARIES
    total = sum(len(parameters(function)) for function in API.values())
    keys = ", ".join(groups.WriteOptions.__annotations__)
    with capsys.disabled():
        print(
            f"\n{len(names)} distinct names of {total} parameters, beside the keys {keys} of write_options: ",
            end="",
        )
        print(", ".join(sorted(names)))
    assert len(names) <= MOST_NAMES


def test_names_of_checkpoints_are_theirs_alone() -> None:
    takers = {
        name: [one for one, function in API.items() if name in parameters(function)]
        for name in OF_CHECKPOINTS
    }
    assert all(takers.values())
    homes = ("ingot.Checkpoints", "ingot.delta", "ingot.engines.accelerate", "ingot.torch.DeltaWriter")
    assert all(one.startswith(homes) for found in takers.values() for one in found)


def test_parameters_of_one_call_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    own = {
        name: [one for one in parameters(function) if one not in OPTIONS] for name, function in API.items()
    }
    most = sorted(own, key=lambda name: -len(own[name]))[:5]
    with capsys.disabled():
        print("\nmost own parameters: " + "; ".join(f"{name} {len(own[name])}" for name in most))
    many = {name: names for name, names in own.items() if len(names) > MOST_OWN}
    assert {name: len(names) for name, names in many.items()} == UPSTREAMS
