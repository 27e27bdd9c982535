"""Fixtures of the tests of disks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.servers import good, serving


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve the file that `writers` downloads at the URL in the environment."""
    from writers import SERVED

    with serving(good(SERVED)) as server:
        monkeypatch.setenv("URL", server.url("/model.safetensors"))
        yield


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve the file that loads fetch into a cache, at each path below the URL in the environment."""
    from writers import STORED

    with serving(good(STORED)) as server:
        monkeypatch.setenv("STORED_URL", server.url(""))
        yield
