"""The names of converted tensors: selection by `keys` and `drop`, prefixes, and `root`."""

from __future__ import annotations

import numpy
import pytest

import ingot
from ingot.numpy import load_file


@pytest.fixture(autouse=True)
def _folder(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    arrays = {"model.a": numpy.ones((4, 2), "f4"), "model.b": numpy.zeros(3, "f2"), "ema.a": numpy.ones(1)}
    numpy.savez("in.npz", **arrays)


def converted(**options: object) -> tuple[set[str], ingot.Conversion]:
    report = ingot.convert("in.npz", "out.safetensors", overwrite=True, **options)  # type: ignore[arg-type]
    return set(load_file("out.safetensors")), report


def test_convert_strip_prefix_removes_it_from_all_names() -> None:
    names, report = converted(keys="model.*", strip_prefix="model.")
    assert names == {"a", "b"}
    assert (report.prefix, report.dropped) == ("", ("ema.a",))
    names, report = converted(root="model", strip_prefix="")
    assert names == {"a", "b"}


def test_convert_strip_prefix_rejects_a_name_without_it() -> None:
    with pytest.raises(
        ingot.OptionError, match=r"`ema\.a`: the name does not begin with `model\.`"
    ) as caught:
        converted(strip_prefix="model.")
    assert (caught.value.code, caught.value.tensor, caught.value.expected) == ("prefix", "ema.a", "model.")
    for wrong in (True, None, b"model."):
        with pytest.raises(TypeError, match="strip_prefix must be a str, found"):
            converted(strip_prefix=wrong)


def test_convert_reports_a_prefix_of_all_names() -> None:
    assert converted()[1].prefix == ""
    report = converted(drop="ema.*")[1]
    assert report.prefix == "model."
    assert "prefix: model." in report._repr_html_()
    numpy.savez(
        "in.npz", **{"state_dict.module._orig_mod.a": numpy.ones(1), "state_dict.module.x": numpy.ones(1)}
    )
    assert converted()[1].prefix == "state_dict.module."
    numpy.savez("in.npz", **{"encoder.a": numpy.ones(1), "encoder.b": numpy.ones(1)})
    assert converted()[1].prefix == ""


def test_convert_calls_a_selector_with_the_facts_of_tensors() -> None:
    seen: list[ingot.TensorInfo] = []

    def is_small(info: ingot.TensorInfo) -> bool:
        seen.append(info)
        return info.nbytes < 10

    assert converted(keys=is_small)[0] == {"model.b", "ema.a"}
    assert {(one.name, one.dtype, one.shape, one.nbytes, one.parameter_count) for one in seen} == {
        ("model.a", "F32", (4, 2), 32, 8),
        ("model.b", "F16", (3,), 6, 3),
        ("ema.a", "F64", (1,), 8, 1),
    }


def test_convert_keys_match_names_below_root() -> None:
    names, report = converted(root="model", keys="a")
    assert names == {"a"}
    assert {*report.dropped} == {"ema.a", "b"}
    with pytest.raises(ingot.TensorNotFoundError, match=r"`model\.a`: the file has no such tensor"):
        converted(root="model", keys="model.a")


def test_convert_calls_a_selector_with_entries_that_it_cannot_convert() -> None:
    numpy.savez("in.npz", good=numpy.ones(1), bad=numpy.array([None, {}]))
    report = converted(keys=lambda info: info.name == "good")[1]
    assert report.tensors == 1
