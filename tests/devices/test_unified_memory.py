"""GPUs that share memory with the host: no second copy of a loaded file stays in the page cache."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.residency import dropped, resident_pages

from .simulator import Gpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing else says what is in memory")

RANDOM = np.random.default_rng(4)
ARRAYS = {f"{number}": RANDOM.integers(0, 255, (700 + number, 3001)).astype("u1") for number in range(8)}
PAGES = sum(array.nbytes for array in ARRAYS.values()) // 4096
#: `CU_DEVICE_ATTRIBUTE_INTEGRATED`.
INTEGRATED = 18
# The header, and the group of pages that it is in.
FEW = PAGES // 20


@pytest.fixture
def path(path: Path) -> Path:
    ingot.numpy.save_file(ARRAYS, path)
    if not dropped(path):
        pytest.skip("this file system has nothing but memory")
    return path


def are_right(found: dict[str, object]) -> bool:
    return all(np.array_equal(found[name].numpy(), array) for name, array in ARRAYS.items())  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_load_file_leaves_no_second_copy(
    framework: ModuleType, gpus: Gpus, path: Path, backend: str, is_warm: bool
) -> None:
    gpus.library.fake_cuda_attribute(0, INTEGRATED, 1)
    if is_warm:
        ingot.warm(path)
        assert resident_pages(path) >= PAGES
    assert are_right(framework.load_file(path, 0, backend=backend))
    assert resident_pages(path) <= FEW


def test_handles_and_prefetch_leave_no_second_copy(gpus: Gpus, path: Path, backend: str) -> None:
    gpus.library.fake_cuda_attribute(0, INTEGRATED, 1)
    with ingot.safe_open(path, "simulated", 0, backend=backend) as file:
        assert are_right({name: file[name] for name in file})
        assert resident_pages(path) <= FEW
        assert are_right(dict(file.prefetch()))
    assert resident_pages(path) <= FEW


def test_load_file_keeps_the_cache(framework: ModuleType, gpus: Gpus, path: Path, backend: str) -> None:
    ingot.warm(path)
    before = resident_pages(path)
    assert before >= PAGES
    assert are_right(framework.load_file(path, 0, backend=backend))
    assert resident_pages(path) >= before
