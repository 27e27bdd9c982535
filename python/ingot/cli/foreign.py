"""What a user typed, where it may be a file of another format, of which only the header is read."""

from __future__ import annotations

import os
from math import prod
from typing import NamedTuple, TypeAlias

from ingot._native import in_natural_order, is_url
from ingot.errors import ConversionError, HeaderError

from .sources import Source, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._convert import LeftOut
    from ingot._convert.listing import Listed, Listing
    from ingot._native import TensorInfo

    Looked: TypeAlias = "Source | Foreign"
    Row: TypeAlias = "TensorInfo | Info"


class Info(NamedTuple):
    """A tensor of another format, as the `TensorInfo` of a header. None is what the format does not say."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int | None
    begin: None = None
    end: None = None


class Foreign:
    """A file of another format, or several. No value has been read."""

    def __init__(self, path: str, listing: Listing) -> None:
        self.path = path
        self.files = listing.files
        self.format = listing.format
        self._listing = listing
        self._file_names = {tensor.name: os.path.basename(tensor.file) for tensor in listing.tensors}

    def file_name_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._file_names[name]

    def nbytes_of_files(self) -> int:
        """The sizes of the files."""
        return sum(os.path.getsize(file) for file in self.files if os.path.isfile(file))

    def metadata(self) -> dict[str, str]:
        """The text beside the tensors."""
        return self._listing.metadata

    def others(self) -> tuple[LeftOut, ...]:
        """What is no tensor."""
        return self._listing.left_out

    def infos(self) -> list[Info]:
        """What is said of every tensor, in the order of the source."""
        return list(map(_info, self._listing.tensors))

    def in_natural_order(self) -> list[Info]:
        """The same, in natural order of the names."""
        infos = self.infos()
        ranks = {name: rank for rank, name in enumerate(in_natural_order([info.name for info in infos]))}
        # Nothing keeps a source from having a name twice.
        return sorted(infos, key=lambda info: ranks[info.name])


def looked_into(path: str) -> Source | Foreign:
    """Open what `opened` opens; else look into it by the reader that converts its format.

    Raises
    ------
    SafetensorError, OSError
        As `opened` does, for what is of no other format either.
    ConversionError
        It is of another format, and damaged, or refused.
    ModuleNotFoundError
        A package other than NumPy that reads it is not installed.
    """
    try:
        return opened(path)
    except (HeaderError, IsADirectoryError, FileNotFoundError) as error:
        # Files of TensorFlow are named by what their names begin with.
        if is_url(path) or not (os.path.exists(path) or os.path.exists(path + ".index")):
            raise
        # It brings NumPy, which files of this package do without.
        from ingot import _convert

        try:
            return Foreign(path, _convert.listed(path))
        except ConversionError as refusal:
            if refusal.code in ("unknown-format", "ambiguous"):
                raise error from None
            raise
        except ModuleNotFoundError as lacking:
            # Which format it is, is looked at with NumPy: without it, a damaged file of ours may be meant.
            if lacking.name == "numpy":
                raise error from None
            raise


def known_parameters(info: Row) -> int | None:
    """How many elements a tensor has. None where its format does not say."""
    return None if info.shape is None else prod(info.shape)


def _info(tensor: Listed) -> Info:
    return Info(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes)
