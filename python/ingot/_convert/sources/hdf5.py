"""HDF5 datasets, as Keras and others store weights, in .h5 and .hdf5 files and in .keras archives.

Everything that would make the library open other files or load code cannot be converted: external links,
external storage, virtual datasets, and filters that are plugins.
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

import numpy

from ingot._base.dtypes import CODES
from ingot._base.text import _quoted
from ingot._convert.flatten import MAX_DEPTH
from ingot._convert.limits import RECORD_NBYTES
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry
from ingot._convert.values import code_of, dtype_of
from ingot._convert.zipped import Member, Window, members
from ingot._convert.zipped import opened as opened_member
from ingot.errors import ConversionError

if TYPE_CHECKING:
    from ingot.numpy import Array

MAGIC = b"\x89HDF\r\n\x1a\n"
# For each version of the superblock, two positions in it: of the size of addresses, and of the end-of-file
# address.
_END_OF_FILE = {0: (13, 40), 1: (13, 44), 2: (9, 28), 3: (9, 28)}
_SUPERBLOCK_NBYTES, _END_NBYTES = 64, 8
# The library's own filters, and h5py's lzf. Any other is a plugin, which is code.
_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
# The member of a .keras archive with the weights.
WEIGHTS = "model.weights.h5"
_PIECE_NBYTES = 1 << 20


def read(contents: Contents) -> None:
    """Add the datasets, named by their paths in the file without the first slash."""
    _datasets(contents, contents.path)


def keras(contents: Contents) -> None:
    """Add the weights of an archive, named by their paths in the HDF5 file. Other members are left out."""
    found = members(contents.path, contents.budget)
    weights = found.pop(WEIGHTS, None)
    if weights is None:
        reason = f"not {contents.title} that can be read: it has no member `{WEIGHTS}`"
        raise contents.refusal(reason, "unreadable", expected=WEIGHTS)
    _datasets(contents, _weights(contents, weights))
    for name, member in found.items():
        contents.leave_out(name, "file", f"{member.nbytes} bytes")
    contents.metadata["format"] = "tf"


def _weights(contents: Contents, member: Member) -> IO[bytes] | Window:
    """Open a member for random access. If values are needed, its checksum is compared."""
    beside = contents.options.beside
    with contents.reading(), opened_member(contents.path, member) as stream:
        if member.is_packed:
            # Unpacked into a file in the folder of the new one, or into memory within the budget.
            if beside is None:
                contents.budget.hold(member.nbytes)
            file = BytesIO() if beside is None else TemporaryFile(dir=beside)  # noqa: SIM115
            contents.enter_context(file)
            shutil.copyfileobj(stream, file, _PIECE_NBYTES)
            file.seek(0)
            return file
        while contents.options.values and stream.read(_PIECE_NBYTES):
            pass
    archive = open(contents.path, "rb")  # noqa: SIM115
    return Window(contents.enter_context(archive), member)


def _datasets(contents: Contents, file: Any) -> None:
    """Add the datasets of `file`, which is a path or an open file."""
    h5py = contents.library("h5py")
    with contents.reading():
        archive = contents.enter_context(h5py.File(file, "r"))
        _expect_end(file, archive.userblock_size)
        walk = _Walk(contents, h5py, archive)
        if archive.userblock_size:
            contents.leave_out("user block", "bytes", f"{archive.userblock_size} bytes")
        walk.attributes("", archive)
        walk.group("", archive, 0)


def _expect_end(file: Any, begin: int) -> None:
    """Raise if bytes follow the file that starts at `begin`. The library ignores them."""
    with nullcontext(file) if hasattr(file, "read") else open(file, "rb") as opened_file:
        opened_file.seek(begin)
        head = opened_file.read(_SUPERBLOCK_NBYTES)
        width_at, end_at = _END_OF_FILE.get(head[len(MAGIC)], (0, 0))
        if head[width_at] != _END_NBYTES:
            return
        end = int.from_bytes(head[end_at : end_at + _END_NBYTES], "little")
        following = opened_file.seek(0, os.SEEK_END) - end
    if following > 0:
        raise ValueError(f"{following} bytes follow the file")


class _Walk:
    """A walk through all groups, which follows no link out of the file."""

    def __init__(self, contents: Contents, h5py: Any, archive: Any) -> None:
        self._contents = contents
        self._archive = archive
        self._h5py = h5py
        self._groups: set[Any] = set()

    def group(self, prefix: str, group: Any, depth: int) -> None:
        """Go through a group."""
        place = self._h5py.h5o.get_info(group.id).addr
        # A group may be linked into itself.
        if place in self._groups:
            self._contents.leave_out(prefix, "group that was met before")
            return
        self._groups.add(place)
        if depth > MAX_DEPTH:
            raise self._refusal(prefix, f"more than {MAX_DEPTH} levels", "too-deep")
        for key in group:
            name = f"{prefix}/{key}" if prefix else key
            link = group.get(key, getlink=True)
            if isinstance(link, self._h5py.ExternalLink):
                self._contents.add(name, self._outside, name, link)
            elif isinstance(link, self._h5py.SoftLink):
                self._contents.leave_out(name, "soft link", link.path)
            else:
                self._object(name, group[key], depth)

    def _outside(self, name: str, link: Any) -> Entry:
        raise self._refusal(name, f"a link into the file {_quoted(link.filename)}", "outside")

    def _object(self, name: str, found: Any, depth: int) -> None:
        self.attributes(name, found)
        if isinstance(found, self._h5py.Group):
            # Names grow with the depth: the name of a group is in the names of everything in it.
            self._contents.budget.hold(RECORD_NBYTES + len(name))
            self.group(name, found, depth + 1)
        elif isinstance(found, self._h5py.Dataset):
            self._contents.add(name, self._entry, name, found)
        else:
            self._contents.leave_out(name, "named type")

    def attributes(self, name: str, found: Any) -> None:
        """Leave out the attributes of a group or a dataset."""
        for key in found.attrs:
            kind = found.attrs.get_id(key)
            self._contents.leave_out(f"{name}@{key}", f"attribute of {kind.dtype}", f"shape {kind.shape}")

    def _entry(self, name: str, dataset: Any) -> Entry | LeftOut:
        if dataset.is_virtual or dataset.external:
            raise self._refusal(name, "values that are in other files", "outside")
        properties = dataset.id.get_create_plist()
        for number in range(properties.get_nfilters()):
            kind = properties.get_filter(number)[0]
            if kind not in _FILTERS:
                raise self._refusal(name, f"a filter that is a plugin (number {kind})", "plugin")
        dtype = _named(dataset) or dataset.dtype
        shape: tuple[int, ...] | None = dataset.shape
        code = None if shape is None else code_of(self._contents.path, name, dtype)
        if shape is None or code is None:
            return LeftOut(name, f"dataset of {dataset.dtype}", f"shape {shape}")
        memory = self._h5py.h5o.get_info(dataset.id).addr
        return Entry(name, code, shape, partial(self._values, name, dtype), memory)

    def _values(self, name: str, dtype: numpy.dtype[Any]) -> Array:
        # Opened again: h5py may crash if a dataset outlives its file.
        dataset = self._archive[name]
        found = numpy.asarray(dataset[()])
        # h5py returns a value without dimensions in the byte order of this machine.
        return found.view(dtype) if dtype != dataset.dtype else found

    def _refusal(self, name: str, what: str, code: str) -> ConversionError:
        return self._contents.refusal(f"{what}: expected values in this file", code, name)


def _named(dataset: Any) -> numpy.dtype[Any] | None:
    """Return the dtype that Keras names for opaque bytes, which hold dtypes unknown to HDF5."""
    word = dataset.attrs.get("dtype") if dataset.dtype.kind == "V" and dataset.dtype.names is None else None
    code = CODES.get(word) if isinstance(word, str) else None
    dtype = None if code is None else dtype_of(code)
    return dtype if dtype is not None and dtype.itemsize == dataset.dtype.itemsize else None
