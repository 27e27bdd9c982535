"""The version of safetensors that this package replaces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from os import PathLike

# The newest version whose names and behaviour are all supported here. Programs require a version or later.
VERSION = "0.8.0"


def version() -> str:
    """Return the version of the installed safetensors, or `VERSION` if that is newer or none is installed."""
    try:
        installed = distribution("safetensors").version
    except PackageNotFoundError:
        return VERSION
    return installed if _release(installed) >= _release(VERSION) else VERSION


def _release(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


class _StandIn(Distribution):
    """The parts of an installed distribution that a version check reads."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of the one file."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: safetensors\nVersion: {VERSION}\n"

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Return the path that a file of the distribution would have."""
        return Path(__file__).parent / path


def stand_in(context: DistributionFinder.Context) -> Iterable[Distribution]:
    """Return the distribution if none is installed."""
    return () if any(PathFinder.find_distributions(context)) else (_StandIn(),)
