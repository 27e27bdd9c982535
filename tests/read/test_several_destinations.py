"""Ranges in a list of places, and several destinations for parts of one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ingot
import ingot.numpy
import ingot.torch
from ingot import OptionError, SliceError

WHOLE = np.arange(240, dtype=np.float32).reshape(12, 20)
FRAMEWORKS = {"numpy": (ingot.numpy.load_file, np.array), "torch": (ingot.torch.load_file, torch.tensor)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ingot.numpy.save_file({"fused": WHOLE, "other": WHOLE[:2]}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(params=FRAMEWORKS, scope="module")
def framework(request):
    return FRAMEWORKS[request.param]


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize(
    ("index", "rows", "columns"),
    [
        ([range(2, 4), range(8, 10)], [2, 3, 8, 9], None),
        ((slice(None), [range(0, 20, 5), 3, range(9, 6, -1)]), None, [0, 5, 10, 15, 3, 9, 8, 7]),
        ([range(0), -1, range(-3, -1)], [11, 9, 10], None),
        ([range(4, 4)], [], None),
    ],
    ids=["rows", "columns", "negative", "nothing"],
)
def test_ranges_stand_for_their_places(path, framework, backend, index, rows, columns):
    load, _ = framework
    expected = WHOLE[rows] if columns is None else WHOLE[:, columns]
    found = load(path, slices={"fused": index}, backend=backend)["fused"]
    np.testing.assert_array_equal(np.asarray(found), expected.reshape(-1, *expected.shape[1:]))
    with ingot.safe_open(path, "np", backend=backend) as file:
        np.testing.assert_array_equal(file.get_slice("fused")[index], expected)


def test_a_range_past_the_end_is_refused(path):
    with pytest.raises(SliceError, match="index 12 is out of range for dimension 0 of size 12"):
        ingot.numpy.load_file(path, slices={"fused": [range(10, 14)]})


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_parts_of_one_tensor_go_to_several_destinations(path, framework, backend):
    load, make = framework
    qkv = make(np.zeros((12, 10), np.float32))
    other = make(np.zeros((2, 20), np.float32))
    # As a rank of two takes its half of each of three that are stored as one.
    out = {"fused": [qkv[:4], qkv[4:8], qkv[8:]], "other": other}
    parts = [(slice(at, at + 4), slice(10, 20)) for at in (0, 4, 8)]
    found = load(path, slices={"fused": parts}, out=out, backend=backend)
    assert list(found) == ["other", "fused"] or list(found) == ["fused", "other"]
    assert all(one is given for one, given in zip(found["fused"], out["fused"], strict=True))
    np.testing.assert_array_equal(np.asarray(qkv), WHOLE[:, 10:])
    np.testing.assert_array_equal(np.asarray(other), WHOLE[:2])


@pytest.mark.parametrize(
    ("slices", "keys", "message"),
    [
        ({"fused": [0]}, None, "`fused`: out has a list of 2 .* found a list of 1"),
        ({"fused": slice(0, 1)}, None, "`fused`: out has a list of 2 .* found slice"),
        ({"other": 0}, None, "`fused`: out has a list of 2 .* found NoneType"),
        ({"fused": [0, 1]}, ["other"], "slices has tensor `fused`, which keys"),
    ],
)
def test_destinations_and_indices_have_to_pair_up(path, framework, slices, keys, message):
    load, make = framework
    out = {"fused": [make(np.zeros(20, np.float32)) for _ in range(2)]}
    with pytest.raises(OptionError, match=message):
        load(path, slices=slices, out=out, keys=keys)


def test_a_list_without_slices_is_no_destination(path, framework):
    load, make = framework
    with pytest.raises(
        TypeError, match=r"`fused`: .* found list: several destinations need a list of as many indices"
    ):
        load(path, out={"fused": [make(np.zeros(20, np.float32))]})


def test_names_that_share_a_tensor_have_parts_of_it(tmp_path):
    whole = torch.tensor(WHOLE)
    path = tmp_path / "shared.safetensors"
    ingot.torch.save_file({"a": whole, "alias": whole, "view": whole[2:4]}, path, shared="alias")
    out = [torch.empty(2, 20), torch.empty(3, 20)]
    parts = [slice(0, 2), slice(5, 8)]
    ingot.torch.load_file(path, keys=["alias"], slices={"alias": parts}, out={"alias": out})
    assert torch.equal(torch.cat(out), torch.cat([whole[:2], whole[5:8]]))
    rows = [torch.empty(20), torch.empty(20)]
    ingot.torch.load_file(path, keys=["view"], slices={"view": [0, 1]}, out={"view": rows})
    assert torch.equal(torch.stack(rows), whole[2:4])


def test_destinations_that_overlap_are_refused_before_anything_is_read(path, framework):
    load, make = framework
    memory = make(np.zeros((3, 20), np.float32))
    out = {"fused": [memory[:2], memory[1:]]}
    with pytest.raises(ingot.DestinationError, match="`fused`"):
        load(path, slices={"fused": [slice(0, 2), slice(2, 4)]}, out=out)
    assert not np.asarray(memory).any()


# What several destinations for one of these are called in messages is the name of another.
NAMES = ["w", "w[0]", "w[1]", "w[0][0]", "w[0][1]", "w.0", "[0]", ""]


@given(data=st.data(), backend=st.sampled_from(["mmap", "pread"]))
def test_load_file_keeps_tensors_named_like_destinations(
    named: Path, framework: Any, data: Any, backend: str
) -> None:
    load, make = framework
    out: dict[str, Any] = {}
    slices: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for number, name in enumerate(NAMES):
        whole = WHOLE + number
        how = data.draw(st.sampled_from(["several", "one", "slice", "sliced into one", "whole"]), name)
        expected[name] = [whole]
        if how in ("several", "slice", "sliced into one"):
            rows = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=3), name)
            slices[name] = rows if how == "several" else rows[0]
            expected[name] = [whole[row] for row in (rows if how == "several" else rows[:1])]
        if how in ("several", "one", "sliced into one"):
            memory = [make(np.zeros(part.shape, np.float32)) for part in expected[name]]
            out[name] = memory if how == "several" else memory[0]
    found = load(named, slices=slices, out=out, backend=backend)
    assert sorted(found) == sorted(NAMES)
    for name, parts in expected.items():
        several = found[name] if isinstance(found[name], list) else [found[name]]
        assert out.get(name) is None or isinstance(found[name], list) or found[name] is out[name]
        for one, part in zip(several, parts, strict=True):
            np.testing.assert_array_equal(np.asarray(one), part, strict=True)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("named") / "model.safetensors"
    ingot.numpy.save_file({name: WHOLE + number for number, name in enumerate(NAMES)}, path)
    return path


def test_load_file_names_a_destination_that_does_not_fit(path, framework):
    load, make = framework
    out = {"fused": [make(np.zeros(20, np.float32)), make(np.zeros(7, np.float32))]}
    with pytest.raises(ingot.DestinationError, match="`fused`") as caught:
        load(path, slices={"fused": [0, 1]}, out=out)
    assert caught.value.tensor == "fused"
