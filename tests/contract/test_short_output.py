"""The repr of every result and the message of every error is short, however large the file is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot import modelspec
from ingot._base.report import Report

LONGEST = 2000
NAMES = [f"model.layers.{number}.self_attn.q_proj.weight" for number in range(2000)]
INFO = ingot.TensorInfo("a" * 1000, "F32", (1,), 0, 4)


def reports(of: type = Report) -> list[type]:
    """Return every class of results."""
    for name in ingot.__all__:
        getattr(ingot, name)
    return [each for one in of.__subclasses__() for each in (one, *reports(one))]


def large(hint: Any) -> Any:
    """Return a long value of a type."""
    text = str(hint)
    if "dict" in text or "Mapping" in text:
        return {name: large(text.partition(", ")[2]) for name in NAMES}
    if "list" in text or "tuple" in text:
        return tuple(NAMES)
    return 10**15 if "int" in text else "x" * 20_000


@pytest.mark.parametrize(
    "kind", {one.__name__: one for one in reports()}.values(), ids=lambda one: one.__name__
)
def test_repr_of_a_result_is_short(kind: Any) -> None:
    found = kind(**{one.name: large(one.type) for one in dataclasses.fields(kind)})
    assert len(repr(found)) <= LONGEST + 10
    assert f"{kind.__name__}(" in repr(found)
    if kind is ingot.Verification:
        many = ingot.Verification(False, bad=[ingot.Mismatch(name, "0" * 64, "1" * 64) for name in NAMES])
        assert len(str(many)) <= LONGEST
        assert "… and 1,991 more" in str(many)


def test_repr_of_a_spec_with_a_picture_is_short() -> None:
    spec = modelspec.read({"modelspec.title": "x", "modelspec.thumbnail": "data:" + "A" * 200_000})
    assert repr(spec) == (
        "ModelSpec(title='x', thumbnail='data:" + "A" * 55 + "'… (200,005 characters), other={})"
    )
    findings = modelspec.validate({"modelspec.date": "x" * 200_000, "modelspec.resolution": "y" * 200_000})
    assert all(len(repr(finding)) < LONGEST for finding in findings)


def test_repr_of_incompatible_keys_is_short() -> None:
    torch = pytest.importorskip("ingot.torch")
    found = torch.IncompatibleKeys(NAMES, [])
    assert repr(found) == (
        "IncompatibleKeys(missing_keys=['model.layers.0.self_attn.q_proj.weight', "
        "'model.layers.1.self_attn.q_proj.weight', 'model.layers.2.self_attn.q_proj.weight', … 1,997 more], "
        "unexpected_keys=[])"
    )
    assert found == (NAMES, [])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "large.safetensors"
    value = numpy.zeros(1, "f4")
    metadata = {f"key {number}": "x" * 1000 for number in range(100)}
    ingot.numpy.save_file(dict.fromkeys(NAMES, value), path, metadata, checksums=True)
    return path


def test_repr_of_results_for_a_large_file_is_short(path: Path, tmp_path: Path) -> None:
    file = ingot.safe_open(path, "np")
    out = tmp_path / "out.safetensors"
    made = [
        file,
        file.get_slice(NAMES[0]),
        file.info(NAMES[0]),
        ingot.verify(path),
        ingot.stats(path),
        ingot.diff(path, path),
        ingot.check(path),
        ingot.cast(path, tmp_path / "cast", "F16"),
        ingot.convert(path, out, dtype="F16", drop="*.1.*"),
        ingot.repair(path, tmp_path / "repaired"),
    ]
    for one in made:
        assert len(repr(one)) <= LONGEST, type(one)
        assert len(str(one)) <= LONGEST, type(one)


FAULTS: dict[str, Callable[[Path], Any]] = {
    "unknown name": lambda path: ingot.numpy.load_file(path, keys=["x" * 10_000]),
    "names of a destination": lambda path: ingot.numpy.load_file(path, out=dict.fromkeys(NAMES, None)),
    "overlapping names": lambda path: ingot.merge([path, path], path.with_name("m.safetensors")),
    "wrong rename": lambda path: ingot.rewrite(
        path, path.with_name("r"), rename={name + "x": "y" for name in NAMES}
    ),
    "one new name": lambda path: ingot.rewrite(path, path.with_name("r"), rename=lambda name: "same"),
    "device map": lambda path: ingot.safe_open(path, "np", {name + "x": "cpu" for name in NAMES})[NAMES[0]],
    "never filled": lambda path: ingot.Writer(
        path.with_name("w"), {name: ("F32", [1]) for name in NAMES}
    ).commit(),
    "unknown algorithm": lambda path: ingot.hash(path, "x" * 1000),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_message_about_many_names_is_short(fault: str, path: Path) -> None:
    with pytest.raises((Exception,)) as caught:
        FAULTS[fault](path)
    assert 0 < len(str(caught.value)) <= LONGEST
    assert len(repr(caught.value)) <= LONGEST + 100
