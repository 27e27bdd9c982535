"""Ranks: simulated one after the other in this process, or as separate processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.ranks import Ranks

Pretend = Callable[[int, int], AbstractContextManager[None]]


@contextmanager
def _pretended(rank: int, size: int) -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def as_rank() -> Pretend:
    """Return a context: within `as_rank(1, 4)` this process is rank 1 of 4."""
    return _pretended


# One set for each module: a mesh is a process group, and gloo keeps a polling thread for each group in every
# rank. With one set for the session each rank had 600 threads, which used most of a processor.
@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks, for the tests of a module."""
    ranks = Ranks(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks, likewise."""
    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Eight ranks, for the tests of a module."""
    ranks = Ranks(8, tmp_path_factory.mktemp("eight"))
    yield ranks
    ranks.close()


@pytest.fixture
def some(tmp_path: Path) -> Iterator[Ranks]:
    """Three ranks for one test, which may kill them."""
    ranks = Ranks(3, tmp_path)
    yield ranks
    ranks.close()
