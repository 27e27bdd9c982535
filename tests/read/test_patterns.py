"""Patterns of tensor names in device maps, and in the arguments that keep or drop tensors."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.torch
from ingot.numpy import load_file, save_file

NAMES = ("blocks[0].norm", "blocks0.norm", "['norm']['scale']", "n", "LayerNorm.weight", "a*b", "axb")


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_file({name: numpy.ones(2, numpy.float32) for name in NAMES}, tmp_path / "in.safetensors")
    return str(tmp_path / "in.safetensors")


def kept_by_rewrite(path: str, pattern: str) -> set[str]:
    out = path + ".out.safetensors"
    ingot.rewrite(path, out, keys=pattern, overwrite=True)
    return set(load_file(out))


def kept_by_convert(path: str, pattern: str) -> set[str]:
    out = path + ".bt"
    ingot.convert(path, out, keys=pattern, overwrite=True)
    return set(load_file(out))


def kept_by_cast(path: str, pattern: str) -> set[str]:
    out = path + ".out.safetensors"
    command = [sys.executable, "-m", "ingot", "cast", path, out, "--dtype", "F16", "--except", pattern]
    ended = subprocess.run([*command, "--overwrite"], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ingot.TensorNotFoundError(ended.stderr, code="unknown-tensor")
    return {name for name, array in load_file(out).items() if array.dtype == numpy.float32}


WAYS: tuple[Callable[[str, str], set[str]], ...] = (kept_by_rewrite, kept_by_convert, kept_by_cast)


@pytest.mark.parametrize("kept", WAYS)
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("blocks[0].norm", {"blocks[0].norm"}),
        ("['norm']*", {"['norm']['scale']"}),
        ("blocks*", {"blocks[0].norm", "blocks0.norm"}),
        ("blocks?.norm", {"blocks0.norm"}),
        ("[n]", None),
        ("a*b", {"a*b"}),
    ],
)
def test_keys_pattern_treats_brackets_literally(
    path: str, kept: Callable[[str, str], set[str]], pattern: str, expected: set[str] | None
) -> None:
    if expected is None:
        with pytest.raises(ingot.TensorNotFoundError):
            kept(path, pattern)
    else:
        assert kept(path, pattern) == expected


def test_device_map_treats_brackets_literally_and_finds_typos(path: str) -> None:
    devices: dict[str, Any] = {"blocks[0].*": "cpu", "*": "cpu"}
    assert ingot.torch.load_file(path, device=devices).keys() == set(NAMES)
    with pytest.raises(ingot.TensorNotFoundError, match=r"did you mean `LayerNorm\.weight`"):
        ingot.torch.load_file(path, device={"LayreNorm.*": "cpu", "*": "cpu"})
    with pytest.raises(ingot.TensorNotFoundError, match=r"`\[n\]`"):
        ingot.torch.load_file(path, device={"[n]": "cpu", "*": "cpu"})


def test_matcher_equals_regular_expressions() -> None:
    from ingot._base.keys import matcher

    chance = random.Random(0)
    for _ in range(2000):
        pattern = "".join(chance.choices("ab[]*?.!-\n", k=chance.randrange(6)))
        name = "".join(chance.choices("ab[]*?.!-\n", k=chance.randrange(6)))
        expected = re.escape(pattern).replace(r"\*", "(?s:.*)").replace(r"\?", "(?s:.)")
        assert (matcher(pattern)(name) is not None) == (re.fullmatch(expected, name) is not None), (
            pattern,
            name,
        )
