"""The ``config.json`` beside a model."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ingot._base.text import _escaped, located
from ingot._native import fetch_beside, is_url
from ingot.errors import CheckpointError

if TYPE_CHECKING:
    from ingot.typing import StorageOptions

Config: TypeAlias = Mapping[str, Any]

CONFIG = "config.json"
# The most bytes of the configuration that are read; the limit of the Hub's own reader.
CONFIG_NBYTES = 10_000_000
# The end of an error about an invalid configuration.
_WITHOUT = 'pass config= or count="stored" to count without it'


class ConfigFile(NamedTuple):
    """A ``config.json``, which may be invalid."""

    #: The path or URL, without secrets.
    path: str
    #: At most `CONFIG_NBYTES`, and one more of a larger file.
    data: bytes


def config_beside(
    path: str,
    storage_options: StorageOptions | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> ConfigFile | None:
    """Read ``config.json`` beside the model at `path`, a path or a URL. Return None if it does not exist.

    A URL is requested with `storage_options`. `progress` may raise to stop the request.
    """
    if is_url(path):
        try:
            return ConfigFile(*fetch_beside(path, CONFIG, CONFIG_NBYTES, storage_options, progress=progress))
        except (FileNotFoundError, PermissionError):
            # Stores that do not allow listing answer with this status if the file does not exist.
            return None
    return file_beside(path, CONFIG)


def file_beside(path: str, name: str) -> ConfigFile | None:
    """Read a local file of JSON beside the model at `path`. Return None if it does not exist."""
    path = os.path.join(os.path.dirname(path), name)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _unusable(path, "is not a regular file")
        with open(path, "rb", opener=_without_waiting) as file:
            return ConfigFile(path, file.read(CONFIG_NBYTES + 1))
    except FileNotFoundError:
        return None


def _without_waiting(path: str, flags: int) -> int:
    """Open a file that may have become a FIFO, which would wait for its writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


# Settings of a quantisation, also in the part for text of a model of several parts.
_SETTINGS = ("quantization_config", "compression_config")


def plain(config: Config) -> dict[str, Any]:
    """Return a configuration without the settings of a quantisation."""
    kept = {key: value for key, value in config.items() if key not in _SETTINGS}
    return kept | {
        key: plain(value)
        for key, value in kept.items()
        if key == "text_config" and isinstance(value, Mapping)
    }


def parsed(file: ConfigFile | None, remedy: str = _WITHOUT) -> Config | None:
    """Return the contents of the configuration. An error about it ends with `remedy`."""
    if file is None:
        return None
    path, data = file
    if len(data) > CONFIG_NBYTES:
        raise _unusable(path, f"is too large: expected at most {CONFIG_NBYTES} bytes", remedy)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as fault:
        raise _unusable(path, f"is not JSON: {_escaped(str(fault))}", remedy) from fault
    if not isinstance(config, dict):
        raise _unusable(path, f"is not a JSON object: found {type(config).__name__}", remedy)
    return config


def _unusable(path: str, why: str, remedy: str = _WITHOUT) -> CheckpointError:
    reason = f"the configuration {why} — it describes the quantisation; {remedy}"
    return located(CheckpointError, reason, code="invalid-config", path=path)
