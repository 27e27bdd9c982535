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


class CutCache(Cut):
    """Load a file into a cache. A load after the cut returns right bytes; without the store, or an error."""

    def __init__(self, name: str) -> None:
        super().__init__(name, write=lambda: self.loaded(self.url()))
        self.right = self.loaded(self.url())
        restore(self.before)

    @staticmethod
    def url() -> str:
        return f"{os.environ['STORED_URL']}/model.safetensors"

    def loaded(self, url: str, **more: object) -> bytes:
        return ingot.numpy.load_file(url, storage_options={**CACHE, **more})["a"].tobytes()

    def judge_files(self, outcome: Outcome) -> None:
        restore(outcome.files)
        try:
            if self.loaded(self.url(), offline=True) != self.right:
                self.note(str(outcome), "wrong bytes without the store")
        except (ingot.SafetensorError, OSError):
            pass
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
    """Make the files as old as those of a machine that was off for a day."""
    for path in Path(directory).rglob("*"):
        os.utime(path, (time.time() - 86400,) * 2)
