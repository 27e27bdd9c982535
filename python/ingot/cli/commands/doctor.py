"""``ingot doctor``: the installed packages, and the backend for reading files."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

from ingot import __version__
from ingot._base.frameworks import DISTRIBUTION, installing
from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, printing, shown
from ingot.cli.sources import opened

_VARIABLES = ("INGOT_BACKEND", "INGOT_DURABLE", "INGOT_COMPAT", "NO_COLOR")
_COLUMNS = (Column("what"), Column("found"), Column("note"))
# Packages besides the extras that affect ingot and its peers.
_OTHERS = ("safetensors", "bintensors", "huggingface_hub", "tqdm")


@arguments.command(short_help="Print versions, missing extras and the backend.")
@arguments.place("path", required=False)
@printing
def command(screen: Screen, path: str | None) -> int:
    """Print the versions of ingot and its extras, and the backend that reads PATH, with the reason."""
    rows = [
        ("ingot", __version__, os.path.dirname(os.path.dirname(__file__))),
        ("python", platform.python_version(), sys.executable),
        ("system", platform.platform(), f"{os.cpu_count()} processors"),
        *((name, os.environ[name], "environment") for name in _VARIABLES if name in os.environ),
        *_packages(),
    ]
    if path is not None:
        source = opened(path)
        rows.append(("file", source.path, f"{source.handle.format}, {len(source.handle)} tensors"))
        rows.append(("backend", source.handle.backend, source.handle.why))
    screen.answer({what: {"found": found, "note": note} for what, found, note in rows})
    if screen.is_terminal:
        _print(screen, rows)
    else:
        screen.table(_COLUMNS, rows)
    return 0


def _print(screen: Screen, rows: list[tuple[str, str, str]]) -> None:
    """Print the rows for a terminal without cutting paths and reasons."""
    width = max(len(what) for what, _, _ in rows)
    for what, found, note in rows:
        screen.say(
            f"{shown(what):<{width}}  {shown(found)}{screen.faint(f'  {shown(note)}') if note else ''}"
        )


def _packages() -> list[tuple[str, str, str]]:
    """Return the packages of the extras, with the version or the install command of each."""
    rows = []
    for package, extra in _extras().items():
        version = _version(package)
        rows.append((package, version or "missing", "" if version else installing(extra)))
    return rows + [(package, version, "") for package in _OTHERS if (version := _version(package))]


def _extras() -> dict[str, str]:
    """Return the packages that extras install, each with its extra, from the metadata of the wheel."""
    import re

    found: dict[str, str] = {}
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return found
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+).*extra *== *['\"]([^'\"]+)['\"]", requirement)
        if match and match[1] != DISTRIBUTION:
            found.setdefault(match[1], match[2])
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
