"""Numbers of requests: slices and conversions of many tensors take hardly more than whole tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ingot
import ingot.numpy
from support import shards
from support.servers import good, serving

COUNT = 2000


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    values = np.random.default_rng(3).random((COUNT, 16, 16), np.float32)
    return {f"layers.{number:04}.weight": array for number, array in enumerate(values)}


def halves(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return slices of half of each tensor: alternately rows and columns."""
    indices = [np.s_[8:], np.s_[:, 4:12], np.s_[::2], np.s_[1:, ::2]]
    return {name: indices[number % 4] for number, name in enumerate(tensors)}


@pytest.mark.parametrize("what", ["dtype", "out", "slices", "slices and dtype", "every second"])
def test_slices_take_no_more_requests_than_whole_tensors(tensors: dict[str, np.ndarray], what: str) -> None:
    slices = halves(tensors)
    converted = {name: array.astype(np.float16) for name, array in tensors.items()}
    expected = {
        "dtype": converted,
        "out": tensors,
        "slices": {name: array[slices[name]] for name, array in tensors.items()},
        "slices and dtype": {name: array[slices[name]] for name, array in converted.items()},
        "every second": dict([*tensors.items()][::2]),
    }[what]
    options: dict[str, Any] = {
        "dtype": {"dtype": "F16"},
        "out": {"out": {name: np.empty_like(array) for name, array in tensors.items()}},
        "slices": {"slices": slices},
        "slices and dtype": {"slices": slices, "dtype": "F16"},
        "every second": {"keys": [*tensors][::2]},
    }[what]
    with serving(good(ingot.numpy.save(tensors))) as server:
        ingot.numpy.load_file(server.url())
        whole = len(server.requests)
        found = ingot.numpy.load_file(server.url(), **options)
        assert len(server.requests) - whole <= 2 * whole + 2
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_distant_slices_are_requested_at_once() -> None:
    table = np.random.default_rng(4).integers(0, 255, (64, 256 << 10), np.uint8)
    rows = [60, 3, 17, 18, 41]
    with serving(good(ingot.numpy.save({"table": table}))) as server:
        with ingot.safe_open(server.url(), "np") as file:
            found = file.get_slice("table")[rows]
        # One request for the header and four for rows, since rows 17 and 18 are adjacent. No other row is
        # fetched.
        assert len(server.requests) == 5
        assert sum(request.range[1] - request.range[0] for request in server.requests[1:]) == found.nbytes
    np.testing.assert_array_equal(found, table[rows])


def test_rows_of_a_sharded_model_take_three_requests() -> None:
    with serving(shards.folder(shards.checkpoint())) as server:
        with ingot.safe_open(server.url(f"/model/{shards.INDEX}"), "np") as file:
            found = file.get_slice("layers.1.weight")[300:310]
        assert len(server.requests) == 3
    np.testing.assert_array_equal(found, shards.tensors()["layers.1.weight"][300:310])
