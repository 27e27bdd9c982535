"""HDF5 datasets, as Keras and others store weights: .h5 and .hdf5.

What would make the library open other files or load other code cannot be converted: external links, external
storage, virtual datasets, and filters that are plugins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from ingot._base.dtypes import CODES
from ingot._base.text import _quoted
from ingot._convert.flatten import MAX_DEPTH
from ingot._convert.limits import RECORD_NBYTES, lacks, reading, refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Options, faulty, possible
from ingot._convert.values import code_of, dtype_of
from ingot.errors import ConversionError

if TYPE_CHECKING:
    from ingot._convert.limits import Budget
    from ingot.numpy import Array

TITLE = "an HDF5 file"
MAGIC = b"\x89HDF\r\n\x1a\n"
# By the version of the block that begins a file: where it has the width of positions, and the file's end.
_END_OF_FILE = {0: (13, 40), 1: (13, 44), 2: (9, 28), 3: (9, 28)}
_SUPERBLOCK_NBYTES, _END_NBYTES = 64, 8
# Those of the library itself, and h5py's lzf. Any other is a plugin, which is code.
_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The datasets, named by their paths in the file without the first slash."""
    with datasets(path, path, options.budget) as contents:
        yield contents


@contextmanager
def datasets(path: str, file: Any, budget: Budget) -> Iterator[Contents]:
    """The datasets of `file`, which is a path or an open file. `path` is for messages."""
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise lacks("h5py", TITLE, "convert") from error
    with reading(path, TITLE):
        archive = h5py.File(file, "r")
    with archive:
        with reading(path, TITLE):
            _expect_end(file, archive.userblock_size)
            walk = _Walk(path, h5py, archive, budget)
            if archive.userblock_size:
                walk.left_out.append(LeftOut("user block", "bytes", f"{archive.userblock_size} bytes"))
            walk.attributes("", archive)
            walk.group("", archive, 0)
        yield Contents(walk.entries, walk.left_out)


def _expect_end(file: Any, begin: int) -> None:
    """Raise if bytes follow the file that starts at `begin`. The library ignores them."""
    with nullcontext(file) if hasattr(file, "read") else open(file, "rb") as opened_file:
        opened_file.seek(begin)
        head = opened_file.read(_SUPERBLOCK_NBYTES)
        width_at, end_at = _END_OF_FILE.get(head[len(MAGIC)], (0, 0))
        if head[width_at] != _END_NBYTES:
            return
        following = opened_file.seek(0, os.SEEK_END) - int.from_bytes(
            head[end_at : end_at + _END_NBYTES], "little"
        )
    if following > 0:
        raise ValueError(f"{following} bytes follow the file")


class _Walk:
    """The way through all groups, which leaves the file by no link."""

    def __init__(self, path: str, h5py: Any, archive: Any, budget: Budget) -> None:
        self._path = path
        self._archive = archive
        self._budget = budget
        self._h5py = h5py
        self._groups: set[Any] = set()
        self.entries: list[Entry] = []
        self.left_out: list[LeftOut] = []

    def group(self, prefix: str, group: Any, depth: int) -> None:
        """Go through a group. No link leaves the file."""
        place = self._h5py.h5o.get_info(group.id).addr
        # A group may be linked into itself.
        if place in self._groups:
            self.left_out.append(LeftOut(prefix, "group that was met before"))
            return
        self._groups.add(place)
        if depth > MAX_DEPTH:
            raise self._refusal(prefix, f"more than {MAX_DEPTH} levels", "too-deep")
        for key in group:
            name = f"{prefix}/{key}" if prefix else key
            # Names grow with the depth: one long name of a group stands in those of all that is in it.
            self._budget.hold(RECORD_NBYTES + len(name))
            link = group.get(key, getlink=True)
            if isinstance(link, self._h5py.ExternalLink):
                fault = self._refusal(name, f"a link into the file {_quoted(link.filename)}", "outside")
                self.entries.append(faulty(name, fault))
                continue
            if isinstance(link, self._h5py.SoftLink):
                self.left_out.append(LeftOut(name, "soft link", link.path))
                continue
            self._object(name, group[key], depth)

    def _object(self, name: str, found: Any, depth: int) -> None:
        self.attributes(name, found)
        if isinstance(found, self._h5py.Group):
            self.group(name, found, depth + 1)
        elif isinstance(found, self._h5py.Dataset):
            self._dataset(name, found)
        else:
            self.left_out.append(LeftOut(name, "named type"))

    def attributes(self, name: str, found: Any) -> None:
        """Leave out the attributes of a group or a dataset."""
        for key in found.attrs:
            self._budget.hold(RECORD_NBYTES + len(name) + len(key))
            kind = found.attrs.get_id(key)
            self.left_out.append(
                LeftOut(f"{name}@{key}", f"attribute of {kind.dtype}", f"shape {kind.shape}")
            )

    def _dataset(self, name: str, dataset: Any) -> None:
        entry = possible(name, self._entry, name, dataset)
        if entry is None:
            self.left_out.append(LeftOut(name, f"dataset of {dataset.dtype}", f"shape {dataset.shape}"))
        else:
            self.entries.append(entry)

    def _check_storage(self, name: str, dataset: Any) -> None:
        if dataset.is_virtual or dataset.external:
            raise self._refusal(name, "values that are in other files", "outside")
        properties = dataset.id.get_create_plist()
        for number in range(properties.get_nfilters()):
            kind = properties.get_filter(number)[0]
            if kind not in _FILTERS:
                raise self._refusal(name, f"a filter that is a plugin (number {kind})", "plugin")

    def _entry(self, name: str, dataset: Any) -> Entry | None:
        self._check_storage(name, dataset)
        shape: tuple[int, ...] | None = dataset.shape
        dtype = _named(dataset) or dataset.dtype
        code = None if shape is None else code_of(self._path, name, dtype)
        if shape is None or code is None:
            return None
        memory = self._h5py.h5o.get_info(dataset.id).addr
        return Entry(name, code, shape, partial(self._values, name, dtype), memory)

    def _values(self, name: str, dtype: numpy.dtype[Any]) -> Array:
        with reading(self._path, TITLE, name):
            # Opened again: h5py may crash when a dataset outlives its file.
            dataset = self._archive[name]
            found = numpy.asarray(dataset[()])
        # h5py returns a value without dimensions in the byte order of this machine.
        return found.view(dtype) if dtype != dataset.dtype else found

    def _refusal(self, name: str, what: str, code: str) -> ConversionError:
        return refused(
            self._path,
            f"{what}: expected values in this file",
            code=code,
            tensor=name,
        )


def _named(dataset: Any) -> numpy.dtype[Any] | None:
    """Return the dtype that Keras names for opaque bytes, which hold dtypes unknown to HDF5."""
    word = dataset.attrs.get("dtype") if dataset.dtype.kind == "V" and dataset.dtype.names is None else None
    code = CODES.get(word) if isinstance(word, str) else None
    dtype = None if code is None else dtype_of(code)
    return dtype if dtype is not None and dtype.itemsize == dataset.dtype.itemsize else None
