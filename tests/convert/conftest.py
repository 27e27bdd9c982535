"""Fixtures of the tests of conversion."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Payload:
    """An object whose pickle contains a call. The call writes a mark, by which the test detects it."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._mark),)


@pytest.fixture
def payload(tmp_path: Path) -> Iterator[Payload]:
    """Return payloads that a pickle can run in its reader. The test fails if one ran."""
    mark = tmp_path / "mark"
    yield Payload(mark)
    assert not mark.exists(), "the payload ran"
