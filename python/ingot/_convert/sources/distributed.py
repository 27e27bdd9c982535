"""Directories of torch.distributed.checkpoint, without torch: ``.metadata`` and files like ``__0_0.distcp``.

``.metadata`` is a pickle of plain records. It lists the boxes of each tensor, and the position of each box
in a file. The bytes there are a file of `torch.save` with one tensor or object. Nothing is called: classes
of records are known by name, and all others are placeholders (see `pickles`).
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy

from ingot._base.dtypes import CODES, F4_PACKED
from ingot._base.text import _escaped, _quoted
from ingot._convert.formats import inside
from ingot._convert.limits import VALUE_NBYTES, refused
from ingot._convert.pickles import Foreign, Named
from ingot._convert.report import Placeholder, Plain, left_out
from ingot._convert.source import Contents, Entry, Region, Stream, size_of
from ingot._convert.sources import torch
from ingot._convert.values import dtype_of, elements, itemsize, no_dtype, stored, unpacked
from ingot.errors import ConversionError

if TYPE_CHECKING:
    from ingot._convert.limits import Budget
    from ingot.numpy import Array

    Sizes = tuple[int, ...]
    # The name of a tensor, and the offsets of a box. None for other objects.
    _Key = tuple[str, Sizes | None]

METADATA = ".metadata"
# The versions of `.metadata`, which torch before 2.7 does not write.
_VERSION = re.compile(r"1(\.\d+)*")
# The most dimensions: NumPy's, and one for the bytes of an element.
_MOST_DIMENSIONS = 63
# The largest size and position that files of tensors have.
_LARGEST = (1 << 63) - 1
_TITLE = "a record of torch.save"
# The classes of records. Versions of torch have them in different modules.
_KINDS = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
    *("TensorProperties", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"),
)
_RECORDS = re.compile(rf"torch\.distributed\.(?:\w+\.)+({'|'.join(_KINDS)})")
# Megatron's class adds an attribute.
_MEGATRON = re.compile(r"megatron\.core\.dist_checkpointing\.(?:\w+\.)+MCore(Metadata)")


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
        full = f"{module}.{name}"
        match = _RECORDS.fullmatch(full) or _MEGATRON.fullmatch(full)
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
    if not isinstance(value, tuple) or not all(map(_is_size, value)):
        raise ValueError("a box without sizes")
    if len(value) > _MOST_DIMENSIONS:
        raise ValueError(f"a box of {len(value)} dimensions: expected {_MOST_DIMENSIONS} or fewer")
    return value


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _LARGEST


class _Stored(NamedTuple):
    """A record of `torch.save`, as ``.metadata`` describes it: unchecked."""

    file: str
    position: int
    nbytes: int
    transforms: list[str]

    @property
    def end(self) -> int:
        """The position after its last byte."""
        return self.position + self.nbytes

    @classmethod
    def of(cls, record: Any) -> _Stored:
        found = _attributes(record, "_StorageInfo")
        file, position, size = found.get("relative_path"), found.get("offset"), found.get("length")
        if not isinstance(file, str) or not _is_size(position) or not _is_size(size):
            raise ValueError("a record without a file, a position and a length")
        return cls(file, position, size, _words(found.get("transform_descriptors")))


def _words(transforms: Any) -> list[str]:
    """Return the names of the extensions that transform a record."""
    if not transforms:
        return []
    is_known = isinstance(transforms, list) and all(isinstance(one, str) for one in transforms)
    return transforms if is_known else ["an unknown extension"]


class _Described(NamedTuple):
    """A tensor, as ``.metadata`` describes it: unchecked."""

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
    budget = contents.budget.part(contents.path, size_of(contents.path))
    with contents.reading(), open(contents.path, "rb") as file:
        machine = _Machine(Stream(contents.path, file), budget)
        root = _attributes(machine.load(), "Metadata")
        machine.expect_end()
        version, listed, places = map(root.get, ("version", "state_dict_metadata", "storage_data"))
        if version is not None and not (isinstance(version, str) and _VERSION.fullmatch(version)):
            raise ValueError(f"its version is {left_out('version', version).value}: expected 1.0.0")
        if not isinstance(listed, dict) or not isinstance(places, dict):
            raise ValueError("it does not list tensors and their positions")
        if not all(isinstance(name, str) for name in listed):
            raise ValueError("a name that is not text")
        described, index = _describe(contents, listed), _index(contents, places)
    folder = _Folder(contents, index, budget)
    for name, tensor in described.items():
        if tensor is not None:
            contents.add(name, folder.tensor, name, tensor)
        elif contents.options.objects:
            _add_object(contents, folder, name)
    for name in dict.fromkeys(name for name, _ in index if name not in described):
        contents.leave_out(name, "record", "without a description")
    contents.metadata["format"] = "pt"


def _describe(contents: Contents, listed: dict[str, Any]) -> dict[str, _Described | None]:
    """Return the descriptions of all tensors, and None for other objects."""
    described = {}
    for name, record in listed.items():
        with contents.reading(name):
            described[name] = _described(record)
    return described


def _index(contents: Contents, places: dict[Any, Any]) -> dict[_Key, _Stored]:
    """Return the record of each box and object."""
    index: dict[_Key, _Stored] = {}
    for place, record in places.items():
        key = _key(place)
        with contents.reading(key[0]):
            if key in index:
                raise ValueError("two positions of one box")
            index[key] = _Stored.of(record)
    return index


def _key(record: Any) -> _Key:
    found = _attributes(record, "MetadataIndex")
    name, offsets = found.get("fqn"), found.get("offset")
    if not isinstance(name, str):
        raise ValueError("a position without a name")
    return name, None if offsets is None else _sizes(offsets)


def _overlapping(index: dict[_Key, _Stored]) -> set[_Key]:
    """Return the records that overlap others. They could make a small file hold any number of tensors."""
    found: set[_Key] = set()
    last: tuple[_Key, _Stored] | None = None
    for item in sorted(index.items(), key=lambda item: (item[1].file, item[1].position)):
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
        with _naming(name):
            tree = torch.loaded(folder.part(region), region)
    except Exception as error:
        if getattr(error, "code", None) == "too-large":
            raise
        contents.add(name, _raise, error)
        return
    with _naming(name):
        torch.add(contents, tree, (name,))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the name of a tensor or an object to errors of its record."""
    try:
        yield
    except ConversionError as error:
        if error.tensor is not None or error.path is None:
            raise
        reason = str(error).removeprefix(f"{_escaped(error.path)}: ")
        path = os.fsdecode(error.path)
        raise refused(path, reason, error.code, name, error.expected, error.found) from error


def _raise(error: Exception) -> Entry:
    raise error


class _Folder:
    """The files beside ``.metadata``."""

    def __init__(self, contents: Contents, index: dict[_Key, _Stored], budget: Budget) -> None:
        self._contents, self._index, self._budget = contents, index, budget
        self._overlapping = _overlapping(index)
        self._files: dict[str, tuple[str, int]] = {}
        self._whole: tuple[Entry, Array] | None = None

    def part(self, region: Region) -> Contents:
        """Return the contents of a file with records."""
        return Contents(region.path, _TITLE, self._contents.options)

    def whole(self, entry: Entry) -> Array:
        """Return the bytes of a tensor that is not stored in C order, in C order. The last one is cached."""
        last = self._whole
        if last is None or last[0] is not entry:
            last = self._whole = entry, numpy.frombuffer(stored(entry.read()), numpy.uint8)
        return last[1]

    def region(self, name: str, offsets: Sizes | None) -> Region:
        """Return the bytes of a record, which are in a file of the directory."""
        one = self._index.get((name, offsets))
        if one is None:
            where = "" if offsets is None else f" at {list(offsets)}"
            raise self._fault(f"no file is listed for it{where}", "missing-chunk", name, found=offsets)
        if one.transforms:
            words = ", ".join(one.transforms)
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

    def _file(self, file: str, name: str) -> tuple[str, int]:
        """Return the path and the size of a file."""
        if file not in self._files:
            path = inside(self._contents.path, file, name)
            self._contents.files.add(path)
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
        for where, count in _uncovered(boxes, shape, self._budget):
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
        self._width = itemsize(code)
        self._found: dict[int, Entry] = {}

    def read(self) -> Array:
        """Return the values."""
        whole = self.span(0, elements(self._shape) * self._width)
        if self._code == "F4":
            return unpacked(whole.reshape(self._shape))
        return whole.view(dtype_of(self._code)).reshape(self._shape)

    def span(self, begin: int, end: int) -> Array:
        """Return the bytes between two positions in the whole tensor in C order."""
        found = numpy.empty(end - begin, numpy.uint8)
        if len(found):
            self._fill(found, begin, end, ())
        return found

    def _fill(self, out: Array, begin: int, end: int, at: Sizes) -> None:
        """Fill `out` with bytes of the part of the tensor below the first indices `at`.

        Only the rows that are cut by a border of the range are divided further.
        """
        if len(at) == len(self._shape):
            # The range begins or ends inside of an element.
            out[:] = self._rows(at, None).reshape(-1)[begin:end]
            return
        row = elements(self._shape[len(at) + 1 :]) * self._width
        first, last = -(-begin // row), end // row
        if first > last:
            self._fill(out, begin - last * row, end - last * row, (*at, last))
            return
        head, tail = first * row - begin, last * row - begin
        if head:
            self._fill(out[:head], row - head, row, (*at, first - 1))
        if first < last:
            out[head:tail] = self._rows(at, (first, last)).reshape(-1)
        if tail < len(out):
            self._fill(out[tail:], 0, len(out) - tail, (*at, last))

    def _rows(self, at: Sizes, rows: tuple[int, int] | None) -> Array:
        """Return the bytes of rows below the first indices `at`, or of one element."""
        rest = () if rows is None else (rows[1] - rows[0], *self._shape[len(at) + 1 :])
        found = numpy.empty((*rest, self._width), numpy.uint8)
        for number, box in enumerate(self._boxes):
            inner = tuple(one - offset for one, offset in zip(at, box.offsets, strict=False))
            if not all(0 <= one < size for one, size in zip(inner, box.sizes, strict=False)):
                continue
            offsets, sizes = box.offsets[len(at) :], box.sizes[len(at) :]
            if rows is None:
                found[...] = self._stored(number, inner, 0, 1).reshape(self._width)
                continue
            first, last = max(rows[0], offsets[0]), min(rows[1], offsets[0] + sizes[0])
            if first < last and elements(sizes):
                sides = zip(offsets[1:], sizes[1:], strict=True)
                place = (
                    slice(first - rows[0], last - rows[0]),
                    *(slice(one, one + size) for one, size in sides),
                )
                raw = self._stored(number, inner, first - offsets[0], last - offsets[0])
                found[place] = raw.reshape(last - first, *sizes[1:], self._width)
        return found

    def _stored(self, number: int, at: Sizes, first: int, last: int) -> Array:
        """Return the bytes of rows of a box below its first indices `at`. They follow each other."""
        sizes, entry, position = self._boxes[number].sizes, self._entry(number), 0
        for one, size in zip(at, sizes, strict=False):
            position = position * size + one
        row = elements(sizes[len(at) + 1 :]) * self._width
        # A box without further dimensions is one row.
        position = (position * sizes[len(at)] if len(at) < len(sizes) else position) * row
        begin, end = position + first * row, position + last * row
        if entry.region is None:
            return self._folder.whole(entry)[begin:end]
        return Region(entry.region.path, entry.region.position + begin, end - begin).read(self._name)

    def _entry(self, number: int) -> Entry:
        """Return the tensor in the record of a box, which is opened once."""
        if number not in self._found:
            box = self._boxes[number]
            part = self._folder.part(box.region)
            with part.reading(self._name), _naming(self._name):
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
