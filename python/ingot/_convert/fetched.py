"""A source behind a URL, which is here for as long as it is read."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from ingot._download import download
from ingot._native import shown_url
from ingot.errors import ConversionError, _escaped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot._progress import Progress
    from ingot._remote import StorageOptions


@contextmanager
def fetched(
    url: str, beside: str, progress: Progress, storage_options: StorageOptions | None
) -> Iterator[str]:
    """Give the path of a copy, in a folder of its own beside a destination, which is gone in the end."""
    folder = os.path.dirname(os.path.realpath(beside))
    # There is room for what comes of it; where the system keeps temporary files, there may be none.
    hidden = mkdtemp(prefix=".ingot-", suffix=".fetched", dir=folder)
    try:
        copy = download(
            url, hidden + os.sep, progress=progress, durable=False, storage_options=storage_options
        )
        yield copy.path
    except ConversionError as error:
        error.add_note(f"fetched from {_escaped(shown_url(url))}, and no other file with it")
        raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
