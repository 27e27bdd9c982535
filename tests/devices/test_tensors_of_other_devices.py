"""Destinations that torch must fill, like tensors on devices: ingot reads pieces and torch copies them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot._adapters import pieces
from ingot._native import Checkpoint
from ingot._read.door import Reads
from ingot._read.select import Wanted
from support.progress import Progress

torch = pytest.importorskip("torch")

RANDOM = np.random.default_rng(3)
ARRAYS = {
    "scalar": np.array(2.5, "f4"),
    "empty": np.ones((0, 3), "f4"),
    "rows": RANDOM.normal(size=(100, 30)).astype("f4"),
    "deep": RANDOM.normal(size=(3, 40, 50)).astype("f4"),
    "ints": RANDOM.integers(-9, 9, (17,)).astype("i4"),
}


@pytest.fixture
def checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 4096)
    ingot.numpy.save_file(ARRAYS, path, durable=False)
    return Checkpoint.open(path)


def test_load_file_fills_whole_tensors_in_pieces(checkpoint: Checkpoint) -> None:
    from ingot.torch._filling import Filling

    tensors = [
        torch.zeros(array.shape, dtype=torch.float64).mT.contiguous().mT
        for array in ARRAYS.values()
        if array.ndim > 1
    ]
    names = [name for name, array in ARRAYS.items() if array.ndim > 1]
    told = Progress()
    Filling(checkpoint, Wanted(names), tensors).read(None, Reads(tell=told))
    for name, tensor in zip(names, tensors, strict=True):
        assert np.array_equal(tensor.numpy(), ARRAYS[name])
    total = sum(tensor.nbytes for tensor in tensors)
    told.assert_complete(total)
    # More than one report: each tensor is larger than a piece.
    assert len(told) > 5


def test_load_file_groups_small_tensors(checkpoint: Checkpoint) -> None:
    from ingot.torch._filling import Filling

    tensors = [torch.zeros((), dtype=torch.float64), torch.zeros(17, dtype=torch.int64)]
    Filling(checkpoint, Wanted(["scalar", "ints"]), tensors).read(None, Reads())
    assert tensors[0].item() == 2.5
    assert np.array_equal(tensors[1].numpy(), ARRAYS["ints"])


def test_load_file_fills_slices_and_rejects_a_wrong_shape(checkpoint: Checkpoint) -> None:
    from ingot.torch._filling import Filling

    wanted = Wanted(["rows", "deep"], [(slice(5, 9),), (slice(None), slice(None), [3, 4])])
    tensors = [torch.zeros(4, 30), torch.zeros(3, 40, 2)]
    Filling(checkpoint, wanted, tensors).read(None, Reads())
    assert np.array_equal(tensors[0].numpy(), ARRAYS["rows"][5:9])
    assert np.array_equal(tensors[1].numpy(), ARRAYS["deep"][:, :, [3, 4]])
    # torch would repeat the one row.
    with pytest.raises(ingot.DestinationError, match=r"expected \[1, 30\], found \[4, 30\]"):
        Filling(checkpoint, Wanted(["rows"], [(slice(5, 6),)]), [torch.zeros(4, 30)]).read(None, Reads())
