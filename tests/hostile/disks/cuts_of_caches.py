"""Cuts of the power while a remote file is loaded through the cache, which flushes nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from cuts import Cut
from faults import restore

import ingot
import ingot.numpy
from support.power_loss import Outcome

CACHE: dict[str, Any] = {"cache_dir": "cache", "retries": 0}
# Less than two of the files, and room for one and the rest of an unfinished block.
SIZE = 800_000


class CutCache(Cut):
    """Load a file into an empty or a full cache. Later loads return right bytes, or fail if offline."""

    def __init__(self, name: str, is_full: bool = False) -> None:
        self.options = {**CACHE, "cache_size": SIZE} if is_full else CACHE
        if is_full:
            self.loaded(self.url("other"))
        super().__init__(name, write=lambda: self.loaded(self.url()))
        self.right = self.loaded(self.url())
        restore(self.before)

    @staticmethod
    def url(name: str = "model") -> str:
        return f"{os.environ['STORED_URL']}/{name}.safetensors"

    def loaded(self, url: str, **more: object) -> bytes:
        return ingot.numpy.load_file(url, storage_options={**self.options, **more})["a"].tobytes()

    def judge_files(self, outcome: Outcome) -> None:
        restore(outcome.files)
        for name in ("model", "other"):
            try:
                found = self.loaded(self.url(name), offline=True)
            except (ingot.SafetensorError, OSError):
                continue
            if found != self.right:
                self.note(str(outcome), f"wrong bytes of {name} without the store")
        age("cache")
        if self.loaded(self.url()) != self.right:
            self.note(str(outcome), "wrong bytes")
        try:
            self.loaded(self.url(), offline=True)
        except (ingot.SafetensorError, OSError) as error:
            self.note(str(outcome), f"the next load has cached nothing: {error}")
        restore(self.before)

    def judge_next(self, outcome: Outcome) -> None:
        """Do nothing: the next load follows each outcome."""


def age(directory: str) -> None:
    """Make the files a day old, as after a day without power."""
    for path in Path(directory).rglob("*"):
        os.utime(path, (time.time() - 86400,) * 2)
