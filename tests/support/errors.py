"""A check for the errors of calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raises(
    kind: type[Exception] | tuple[type[Exception], ...], match: str | None = None, **attributes: Any
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Check that the block raises `kind`, with a message that matches and with these attributes."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert {name: getattr(caught.value, name) for name in attributes} == attributes
