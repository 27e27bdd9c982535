"""Which version of safetensors this stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from os import PathLike

# The newest version all of whose names and behaviour are here. Programs ask for a version at least.
VERSION = "0.8.0"


def version() -> str:
    """The version of the safetensors that is installed, or `VERSION` where that is newer or none is."""
    try:
        installed = distribution("safetensors").version
    except PackageNotFoundError:
        return VERSION
    return installed if _release(installed) >= _release(VERSION) else VERSION


def _release(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


class _StandIn(Distribution):
    """As much of an installed distribution as a version check looks at."""

    def read_text(self, filename: str) -> str | None:
        """Give the one file that there is."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: safetensors\nVersion: {VERSION}\n"

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Say where a file of it would be."""
        return Path(__file__).parent / path


def stand_in(context: DistributionFinder.Context) -> Iterable[Distribution]:
    """One distribution where none is installed, else none."""
    return () if any(PathFinder.find_distributions(context)) else (_StandIn(),)
