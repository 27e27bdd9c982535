"""Where a conversion writes to, without harm to what is there before the new file is whole."""

from __future__ import annotations

import os
from contextlib import contextmanager
from errno import EEXIST
from typing import TYPE_CHECKING, Literal, NamedTuple

from ingot._base.checks import Existing, checked_shard_size
from ingot._base.text import _escaped
from ingot._write.directory.hidden import called
from ingot._write.shards import Place
from ingot.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    Kind = Literal["safetensors", "bintensors", "npz"]

KINDS = ("safetensors", "bintensors", "npz")
_ENDINGS = {"safetensors": ".safetensors", "bintensors": ".bt", "npz": ".npz"}
# What transformers writes, so that it is read without more being said.
_DEFAULT_SHARD_NBYTES = "5GB"


def _kind(path: str) -> str | None:
    """Return the format that the ending of a name says, or None."""
    return next((kind for kind, ending in _ENDINGS.items() if path.lower().endswith(ending)), None)


class Destination(NamedTuple):
    """A file, or a folder of shards."""

    path: str
    kind: str
    place: Place | None
    """None for a file."""
    shard_nbytes: int

    @classmethod
    def of(cls, path: str, format: str | None, max_shard_size: int | str | None) -> Destination:
        """Return the destination of this name. Its ending decides the format if `format` is None."""
        is_folder = max_shard_size is not None or path.endswith(("/", os.sep)) or os.path.isdir(path)
        if is_folder:
            kind = format or "safetensors"
            if kind == "npz":
                raise OptionError(
                    "convert(): max_shard_size is for safetensors and bintensors, and an .npz is one file",
                    code="npz-shards",
                )
            is_new_folder = path.endswith(("/", os.sep)) or not (_kind(path) or os.path.exists(path))
            if not is_new_folder and not os.path.isdir(path):
                raise OptionError(
                    f"convert(): max_shard_size writes several files: destination must be a folder, found "
                    f"{_escaped(path)}, the name of a file",
                    code="unknown-destination",
                    expected="a folder",
                    found=path,
                )
            limit = checked_shard_size(_DEFAULT_SHARD_NBYTES if max_shard_size is None else max_shard_size)
            return cls(path, kind, Place(path, "model{suffix}" + _ENDINGS[kind]), limit)
        found = format or _kind(path)
        if found is not None:
            return cls(path, found, None, 0)
        raise OptionError(
            f"{_escaped(path)}: the name does not say what to write: expected "
            f"{', '.join(_ENDINGS.values())}, or a folder with max_shard_size=… — format=… says it",
            code="unknown-destination",
            expected=KINDS,
            found=path,
        )

    def check(self, existing: Existing) -> None:
        """Raise where something would be replaced that has to stay."""
        if self.place is not None:
            self.place.check(existing)
            return
        existing.check(self.path)
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise FileExistsError(EEXIST, "it is no regular file, and is not replaced", self.path)


@contextmanager
def drafted(path: str, draft: str) -> Iterator[str]:
    """Give `draft`, the temporary file for `path`. Errors that name it name `path` instead."""
    # Messages have the escaped name only.
    with called(os.path.basename(draft), os.path.basename(path)), called(draft, path):
        yield draft
