"""Directories of torch.distributed.checkpoint, without torch: ``.metadata`` and files like ``__0_0.distcp``.

``.metadata`` is a pickle of plain records. It lists the boxes of each tensor, and the position of each box
in a file. The bytes there are a file of `torch.save` with one tensor or object. Nothing is called: classes
of records are known by name, and all others are placeholders (see `pickles`).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from ingot._base.dtypes import CODES, F4_PACKED
from ingot._base.text import _quoted
from ingot._convert.formats import inside
from ingot._convert.limits import VALUE_NBYTES, refused
from ingot._convert.pickles import Foreign, Named
from ingot._convert.report import Placeholder, Plain
from ingot._convert.source import Contents, Entry, Region, Stream, size_of
from ingot._convert.sources import torch
from ingot._convert.values import dtype_of, elements, itemsize, no_dtype, stored, unpacked

if TYPE_CHECKING:
    from ingot._convert.limits import Budget
    from ingot.errors import ConversionError
    from ingot.numpy import Array

    Sizes = tuple[int, ...]
    # The name of a tensor, and the offsets of a box. None for other objects.
    _Key = tuple[str, Sizes | None]

METADATA = ".metadata"
_TITLE = "a record of torch.save"
# The classes of records. Versions of torch have them in different modules.
_KINDS = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
    *("TensorProperties", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"),
)
_RECORDS = re.compile(rf"torch\.distributed\.(?:\w+\.)+({'|'.join(_KINDS)})")


class _Record(Plain):
    """An object of torch.distributed.checkpoint: the name of its class, and its attributes."""

    __slots__ = ("state",)

    def __init__(self, kind: str, *arguments: object) -> None:
        super().__init__("record", kind)
        self.state: Any = {}

    def build(self, state: Any) -> None:
        """Set the attributes."""
        self.state = state


class _Machine(torch.TorchMachine):
    """Build the records of ``.metadata``."""

    def __init__(self, source: Stream, budget: Budget) -> None:
        super().__init__(source, budget)
        self.calls |= {kind: partial(_Record, kind) for kind in _KINDS}

    def find_class(self, module: str, name: str) -> Named | Foreign | Placeholder:
        match = _RECORDS.fullmatch(f"{module}.{name}")
        return super().find_class(module, name) if match is None else Named(match[1])


def _attributes(record: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of a record. Raises `ValueError` for any other value."""
    if isinstance(record, (Foreign, Placeholder)):
        name = record.name if isinstance(record, Foreign) else record.text
        raise ValueError(f"an object of the class {name} where a {kind} is expected")
    if not isinstance(record, _Record) or record.text != kind or not isinstance(record.state, dict):
        raise ValueError(f"a {type(record).__name__} where a {kind} is expected")
    return record.state


def _sizes(value: Any) -> Sizes:
    if not isinstance(value, tuple) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError("a box without sizes")
    return value


class _Stored(NamedTuple):
    """A record of `torch.save`, as ``.metadata`` describes it: unchecked."""

    file: Any
    position: int
    nbytes: int
    transforms: object

    @property
    def end(self) -> int:
        """The position after its last byte."""
        return self.position + self.nbytes

    @classmethod
    def of(cls, record: Any) -> _Stored:
        found = _attributes(record, "_StorageInfo")
        position, size = found.get("offset"), found.get("length")
        if type(position) is not int or type(size) is not int or min(position, size) < 0:
            raise ValueError("a record without a position and a length")
        return cls(found.get("relative_path"), position, size, found.get("transform_descriptors"))


class _Described(NamedTuple):
    """A tensor, as ``.metadata`` describes it: unchecked. Without a dtype it is another object."""

    word: str
    shape: Sizes
    boxes: list[tuple[Sizes, Sizes]]
    """The offsets and the sizes of each box."""


def _described(record: Any) -> _Described | None:
    if isinstance(record, _Record) and record.text == "BytesStorageMetadata":
        return None
    found = _attributes(record, "TensorStorageMetadata")
    properties, boxes = found.get("properties"), found.get("chunks")
    state = properties.state if isinstance(properties, _Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Named) or not isinstance(boxes, list):
        raise ValueError("a tensor without a dtype and boxes")
    parts = [_attributes(box, "ChunkStorageMetadata") for box in boxes]
    sizes = [(_sizes(part.get("offsets")), _sizes(part.get("sizes"))) for part in parts]
    return _Described(dtype.name.removeprefix("torch."), _sizes(found.get("size")), sizes)


def read(contents: Contents) -> None:
    """Add the tensors by their flat names, and the values of other objects."""
    with contents.reading(), open(contents.path, "rb") as file:
        machine = _Machine(Stream(contents.path, file), contents.budget)
        root = _attributes(machine.load(), "Metadata")
        machine.expect_end()
        listed, places = root.get("state_dict_metadata"), root.get("storage_data")
        if not isinstance(listed, dict) or not isinstance(places, dict):
            raise ValueError("it does not list tensors and their positions")
        if not all(isinstance(name, str) for name in listed):
            raise ValueError("a name that is not text")
        described = {name: _described(record) for name, record in listed.items()}
        index = {_key(key): _Stored.of(record) for key, record in places.items()}
    folder = _Folder(contents, index)
    for name, tensor in described.items():
        if tensor is not None:
            contents.add(name, folder.tensor, name, tensor)
        elif contents.options.objects:
            _add_object(contents, folder, name)
    contents.metadata["format"] = "pt"


def _key(record: Any) -> _Key:
    found = _attributes(record, "MetadataIndex")
    name, offsets = found.get("fqn"), found.get("offset")
    if not isinstance(name, str):
        raise ValueError("a position without a name")
    return name, None if offsets is None else _sizes(offsets)


def _overlapping(index: dict[_Key, _Stored]) -> set[_Key]:
    """Return the records that overlap another, by which a small file would hold any number of tensors."""
    found: set[_Key] = set()
    last: tuple[_Key, _Stored] | None = None
    for item in sorted(index.items(), key=lambda item: (str(item[1].file), item[1].position)):
        key, one = item
        if last is not None and last[1].file == one.file and one.position < last[1].end:
            found |= {key, last[0]}
        if last is None or last[1].file != one.file or last[1].end < one.end:
            last = item
    return found


def _add_object(contents: Contents, folder: _Folder, name: str) -> None:
    """Add the values of an object, which may contain tensors."""
    try:
        region = folder.region(name, None)
        tree = torch.loaded(folder.part(region), region)
    except Exception as error:
        if getattr(error, "code", None) == "too-large":
            raise
        contents.add(name, _raise, error)
        return
    torch.add(contents, tree, (name,))


def _raise(error: Exception) -> Entry:
    raise error


class _Folder:
    """The files beside ``.metadata``."""

    def __init__(self, contents: Contents, index: dict[_Key, _Stored]) -> None:
        self._contents, self._index = contents, index
        self._overlapping = _overlapping(index)
        self._files: dict[str, tuple[str, int]] = {}

    def part(self, region: Region) -> Contents:
        """Return the contents of a file with records."""
        return Contents(region.path, _TITLE, self._contents.options)

    def region(self, name: str, offsets: Sizes | None) -> Region:
        """Return the bytes of a record, which are in a file of the directory."""
        one = self._index.get((name, offsets))
        if one is None:
            where = "" if offsets is None else f" at {list(offsets)}"
            raise self._fault(f"no file is listed for it{where}", "missing-chunk", name, found=offsets)
        if one.transforms:
            words = (
                ", ".join(map(str, one.transforms)) if isinstance(one.transforms, list) else "an extension"
            )
            reason = f"its bytes are transformed by {_quoted(words)}, which is not supported"
            raise self._fault(reason, "transformed", name, found=words)
        path, there = self._file(one.file, name)
        if one.end > there:
            reason = f"{_quoted(one.file)} is truncated: expected {one.end} bytes, found {there}"
            raise self._fault(reason, "truncated", name, one.end, there)
        if (name, offsets) in self._overlapping:
            reason = f"its record at {one.position} of {_quoted(one.file)} overlaps another"
            raise self._fault(reason, "overlap", name, found=one.position)
        return Region(path, one.position, one.nbytes)

    def _file(self, file: Any, name: str) -> tuple[str, int]:
        """Return the path and the size of a file."""
        if file not in self._files:
            path = inside(self._contents.path, file, name)
            self._files[file] = path, size_of(path)
        return self._files[file]

    def tensor(self, name: str, tensor: _Described) -> Entry:
        """Return the entry of a tensor whose boxes cover it."""
        is_packed = tensor.word == F4_PACKED
        code = "F4" if is_packed else CODES.get(tensor.word)
        if code is None:
            raise no_dtype(self._contents.path, name, tensor.word)
        self._check_cover(name, tensor)
        boxes = []
        for offsets, sizes in tensor.boxes:
            region = self.region(name, offsets)
            expected = elements(sizes) * itemsize(code)
            # Bytes that the file lacks are never allocated.
            if expected > region.nbytes:
                words = f"a box of {list(sizes)} of {code} needs {expected} bytes"
                reason = f"{words}, and its record has {region.nbytes}"
                raise self._fault(reason, "size-mismatch", name, expected, region.nbytes)
            boxes.append(_Box(offsets, sizes, region))
        joined = _Joined(self, name, code, tensor.shape, boxes)
        shape = (*tensor.shape[:-1], tensor.shape[-1] * 2) if is_packed and tensor.shape else tensor.shape
        file = boxes[0].region.path if boxes else None
        return Entry(name, code, shape, joined.read, file=file, span=joined.span)

    def _check_cover(self, name: str, tensor: _Described) -> None:
        """Raise unless each element is in exactly one box."""
        shape = tensor.shape
        for offsets, sizes in tensor.boxes:
            ends = [begin + size for begin, size in zip(offsets, sizes, strict=False)]
            if (len(offsets), len(sizes)) != (len(shape), len(shape)) or any(
                end > size for end, size in zip(ends, shape, strict=True)
            ):
                reason = f"a box of {list(sizes)} at {list(offsets)} is not inside of shape {list(shape)}"
                raise self._fault(reason, "chunks", name, shape, (offsets, sizes))
        boxes = [box for box in tensor.boxes if elements(box[1])]
        if not elements(shape):
            return
        for where, count in _uncovered(boxes, shape, self._contents.budget):
            words = "no box has" if count == 0 else f"{count} boxes have"
            reason = f"{words} the element at {list(where)} of shape {list(shape)}: expected one"
            raise self._fault(reason, "chunks", name, 1, count)

    def _fault(
        self, reason: str, code: str, name: str, expected: object = None, found: object = None
    ) -> ConversionError:
        return refused(self._contents.path, reason, code, name, expected, found)


def _uncovered(
    boxes: list[tuple[Sizes, Sizes]], shape: Sizes, budget: Budget, where: Sizes = ()
) -> Iterator[tuple[Sizes, int]]:
    """Yield an element of each part of the shape that is not in exactly one box, and the number of boxes.

    The shape is cut at the borders of the boxes, one dimension after the other.
    """
    # Crossing boxes are cut into any number of parts.
    budget.hold(VALUE_NBYTES * (1 + len(boxes)))
    axis = len(where)
    if axis == len(shape) or not boxes:
        if len(boxes) != 1:
            yield (*where, *(0,) * (len(shape) - axis)), len(boxes)
        return
    begins: dict[int, list[tuple[Sizes, Sizes]]] = {0: [], shape[axis]: []}
    for box in boxes:
        begins.setdefault(box[0][axis], []).append(box)
        begins.setdefault(box[0][axis] + box[1][axis], [])
    inside: list[tuple[Sizes, Sizes]] = []
    for at in sorted(begins)[:-1]:
        inside = [box for box in inside if box[0][axis] + box[1][axis] > at] + begins[at]
        yield from _uncovered(inside, shape, budget, (*where, at))


class _Box(NamedTuple):
    """A part of a tensor, and its record."""

    offsets: Sizes
    sizes: Sizes
    region: Region


class _Joined:
    """A tensor whose boxes cover it. They are read into their places."""

    def __init__(self, folder: _Folder, name: str, code: str, shape: Sizes, boxes: Sequence[_Box]) -> None:
        self._folder, self._name, self._code, self._shape = folder, name, code, shape
        self._boxes = boxes
        # Bytes are copied, and NumPy's dtype may be in another package.
        self._dtype = numpy.dtype(f"u{itemsize(code)}")
        self._found: dict[int, Entry] = {}

    def read(self) -> Array:
        """Return the values."""
        rows = self._rows(0, self._shape[0] if self._shape else 1).reshape(self._shape)
        return unpacked(rows) if self._code == "F4" else rows.view(dtype_of(self._code))

    def span(self, begin: int, end: int) -> Array:
        """Return the bytes between two positions in the whole tensor in C order."""
        row = self._row_nbytes(self._shape)
        first, last = begin // row, -(-end // row)
        found = self._rows(first, last).reshape(-1).view(numpy.uint8)
        return found[begin - first * row : end - first * row]

    def _row_nbytes(self, shape: Sizes) -> int:
        return elements(shape[1:]) * self._dtype.itemsize

    def _rows(self, begin: int, end: int) -> Array:
        """Return a range of the first dimension. A number is one row."""
        found = numpy.empty((end - begin, *self._shape[1:]), self._dtype)
        for number, box in enumerate(self._boxes):
            if not self._shape:
                found[...] = self._rows_of(number, 0, 1)
                continue
            first, last = max(begin, box.offsets[0]), min(end, box.offsets[0] + box.sizes[0])
            if first < last and elements(box.sizes):
                sides = zip(box.offsets[1:], box.sizes[1:], strict=True)
                place = slice(first - begin, last - begin), *(slice(at, at + size) for at, size in sides)
                found[place] = self._rows_of(number, first - box.offsets[0], last - box.offsets[0])
        return found

    def _rows_of(self, number: int, begin: int, end: int) -> Array:
        """Return a range of the first dimension of a box."""
        sizes, entry = self._boxes[number].sizes, self._entry(number)
        shape, row = (end - begin, *sizes[1:]), self._row_nbytes(sizes)
        if entry.region is None:
            whole = numpy.frombuffer(stored(entry.read()), numpy.uint8)
            raw = whole[begin * row : end * row]
        else:
            region = entry.region
            raw = Region(region.path, region.position + begin * row, (end - begin) * row).read(self._name)
        return raw.view(self._dtype).reshape(shape)

    def _entry(self, number: int) -> Entry:
        """Return the tensor in the record of a box, which is opened once."""
        if number not in self._found:
            box = self._boxes[number]
            part = self._folder.part(box.region)
            with part.reading(self._name):
                tensor = torch.loaded(part, box.region)
                if not isinstance(tensor, torch.StoredTensor):
                    raise pickle.UnpicklingError("the record of a box is not a tensor")
                entry = torch.entry(part.path, self._name, tensor)
                code, shape = CODES.get(tensor.word, "F4"), tensor.shape
                if (code, shape) != (self._code, box.sizes):
                    expected = f"{self._code} {list(box.sizes)}"
                    raise ValueError(f"expected a box of {expected}, found {code} {list(shape)}")
            self._found[number] = entry
        return self._found[number]
