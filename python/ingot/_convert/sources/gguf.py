"""GGUF, of llama.cpp: tensors of plain dtypes as they are, quantised ones as F32 where the caller says so.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is read here, because every number in it
has to be checked against the file before it is used; what a block of quantised values means, the package gguf
knows.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy

from ingot._base.text import _quoted
from ingot._convert.formats import PART
from ingot._convert.limits import OBJECT_NBYTES, RECORD_NBYTES, lacks, reading, refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Options, Region, possible, size_of
from ingot._convert.values import dtype_of, nbytes
from ingot.errors import ConversionError

if TYPE_CHECKING:
    from ingot._convert.limits import Budget
    from ingot.numpy import Array

TITLE = "a GGUF file"
MAGIC = b"GGUF"
# The numbers of the plain types in GGUF.
_PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
# The numbers of the kinds of values, with their formats.
_VALUES = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT, _LIST = 8, 9
_ALIGNMENT = "general.alignment"
# What llama.cpp's gguf-split writes into each part: its number from 0, how many there are, and how many
# tensors all of them have.
_SPLIT = ("split.no", "split.count", "split.tensors.count")
# As many as five digits say.
_MOST_PARTS = 99_999
# Bytes of the shortest pair and of the shortest tensor: no file can claim more of them than have room in it.
_PAIR_NBYTES, _TENSOR_NBYTES = 13, 24
# GGML's own limit.
_MAX_DIMS = 4


class _Info(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    begin: int


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """Yield the tensors of all parts. Single values become metadata, and lists are left out."""
    headers = _headers(path, options)
    entries = [
        replace(possible(info.name, _entry, header, info, options), file=header.path)
        for header in headers
        for info in header.tensors
    ]
    for header in headers:
        header.expect_end()
    left_out = [one for header in headers for one in header.left_out]
    # The other parts repeat some of it.
    yield Contents(entries, left_out, headers[0].metadata)


def _headers(path: str, options: Options) -> list[_Header]:
    """Return the headers of all parts of the model at `path`, in their order."""
    budget = options.budget
    first = _header(path, budget)
    count = first.part[1]
    if count == 1:
        return [first]
    name = PART.fullmatch(os.path.basename(path))
    if name is None or int(name["count"]) != count:
        raise first.refusal(
            f"part {first.part[0] + 1} of {count} of a model, and its name is not that of such a part: "
            f"expected …-{first.part[0] + 1:05}-of-{count:05}.gguf",
            "part",
        )
    paths = [
        os.path.join(os.path.dirname(path), f"{name['stem']}-{number:05}-of-{count:05}.{name['ending']}")
        for number in range(1, count + 1)
    ]
    missing = next((other for other in paths if not os.path.isfile(other)), None)
    if missing is not None:
        if not options.values:
            # One part may be looked into.
            return [first]
        raise first.refusal(
            f"part of a model of {count} files: there is no {_quoted(missing)}", "missing-file"
        )
    headers = [_header(other, budget) for other in paths]
    for number, header in enumerate(headers):
        if header.part != (number, count):
            found = f"part {header.part[0] + 1} of {header.part[1]}"
            raise header.refusal(
                f"by its name part {number + 1} of {count}, and by its header {found}", "part"
            )
    expected, found_tensors = first.split_tensors, sum(len(header.tensors) for header in headers)
    if expected is not None and expected != found_tensors:
        raise first.refusal(
            f"a model of {expected} tensors: found {found_tensors} in its {count} files", "part"
        )
    return headers


def _header(path: str, budget: Budget) -> _Header:
    with reading(path, TITLE), open(path, "rb") as file:
        return _Header(path, file, budget)


class _Header:
    def __init__(self, path: str, file: IO[bytes], budget: Budget) -> None:
        self.path = path
        self.nbytes = size_of(path)
        self._file = file
        self.metadata: dict[str, str] = {}
        self.left_out: list[LeftOut] = []
        self._alignment = 32
        self.part = (0, 1)
        """Which part of a model it is, from 0, and how many there are."""
        self.split_tensors: int | None = None
        """How many tensors all parts have."""
        self._take(len(MAGIC))
        version = self._number("<I")
        if version not in (2, 3):
            raise self.refusal(f"a GGUF file of version {version}: expected 2 or 3", "gguf-version")
        tensors = self._count(_TENSOR_NBYTES, "tensors")
        pairs = self._count(_PAIR_NBYTES, "values")
        budget.hold(RECORD_NBYTES * tensors + OBJECT_NBYTES * pairs)
        for _ in range(pairs):
            self._pair()
        self._take_part()
        self.tensors = [self._info() for _ in range(tensors)]
        self.data = -(-file.tell() // self._alignment) * self._alignment

    def refusal(self, reason: str, code: str, tensor: str | None = None) -> ConversionError:
        return refused(self.path, reason, code=code, tensor=tensor)

    def expect_end(self) -> None:
        """Raise if bytes follow the tensors, such as another file. Types of an unknown size end anywhere."""
        sizes = [_stored_nbytes(info) for info in self.tensors]
        if None in sizes:
            return
        ends = [info.begin + (size or 0) for info, size in zip(self.tensors, sizes, strict=True)]
        end = self.data + -(-max(ends, default=0) // self._alignment) * self._alignment
        if end < self.nbytes:
            raise self.refusal(f"{self.nbytes - end} bytes follow the tensors", "trailing")

    def _take_part(self) -> None:
        """Take out the values that describe the file as one of several, which the new file is not."""
        number, count, tensors = (self.metadata.pop(key, None) for key in _SPLIT)
        for text in (number, count, tensors):
            if text is not None and not re.fullmatch(r"\d{1,9}", text):
                raise self.refusal(f"a part of a model by {_quoted(text)}: expected a number", "part")
        self.part = (int(number or 0), max(int(count or 1), 1))
        if self.part[1] > _MOST_PARTS:
            raise self.refusal(f"a model of {count} files: expected {_MOST_PARTS} or fewer", "part")
        self.split_tensors = None if tensors is None else int(tensors)

    def _pair(self) -> None:
        key, kind = self._text(), self._number("<I")
        value = self._value(kind, 0)
        if key == _ALIGNMENT:
            if not isinstance(value, int) or value < 8 or value % 8 or value > 1 << 20:
                raise self.refusal(f"an alignment of {value!r}: expected a multiple of 8", "gguf-alignment")
            self._alignment = value
        if key in self.metadata:
            raise self.refusal(f"key {_quoted(key)} stands there twice", "duplicate-key")
        if isinstance(value, _Skipped):
            self.left_out.append(LeftOut(key, "list", f"{value.items} items"))
        else:
            self.metadata[key] = str(value).lower() if isinstance(value, bool) else str(value)

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _LIST:
            return self._skip_list(depth)
        if kind not in _VALUES:
            raise self.refusal(f"a value of the unknown kind {kind}", "gguf-kind")
        return self._number(_VALUES[kind])

    def _skip_list(self, depth: int) -> _Skipped:
        if depth > 4:
            raise self.refusal("lists stand in each other more than 4 levels deep", "too-deep")
        kind, count = self._number("<I"), self._number("<Q")
        if kind in _VALUES:
            self._skip(count * struct.calcsize(_VALUES[kind]))
            return _Skipped(count)
        self._check(count * 8)
        for _ in range(count):
            if kind == _TEXT:
                self._skip(self._number("<Q"))
            else:
                self._value(kind, depth + 1)
        return _Skipped(count)

    def _info(self) -> _Info:
        name, dims = self._text(), self._number("<I")
        if dims > _MAX_DIMS:
            raise self.refusal(f"{dims} dimensions: expected {_MAX_DIMS} or fewer", "gguf-dimensions", name)
        # The last dimension of an array stands first.
        shape = tuple(self._number("<Q") for _ in range(dims))[::-1]
        return _Info(name, shape, self._number("<I"), self._number("<Q"))

    def _count(self, least: int, what: str) -> int:
        count: int = self._number("<Q")
        there = self.nbytes - self._file.tell()
        if count * least > there:
            raise self.refusal(f"claims {count} {what}, which do not fit in {there} bytes", "gguf-count")
        return count

    def _text(self) -> str:
        return self._take(self._number("<Q")).decode()

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _skip(self, nbytes: int) -> None:
        self._check(nbytes)
        self._file.seek(nbytes, 1)

    def _take(self, nbytes: int) -> bytes:
        self._check(nbytes)
        return self._file.read(nbytes)

    def _check(self, nbytes: int) -> None:
        there = self.nbytes - self._file.tell()
        if nbytes > there:
            raise self.refusal(
                f"the header is cut short: expected {nbytes} more bytes, found {there}", "truncated"
            )


def _stored_nbytes(info: _Info) -> int | None:
    """Return the bytes of a tensor in the file, or None if its type is unknown."""
    plain = _PLAIN.get(info.kind)
    if plain is not None:
        return nbytes(plain, info.shape)
    try:
        import gguf

        block, block_nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.kind)]
    except (ModuleNotFoundError, ValueError):
        return None
    return prod(info.shape) // block * block_nbytes


class _Skipped(NamedTuple):
    """A list, of which only the length is kept: vocabularies are long."""

    items: int


def _entry(header: _Header, info: _Info, options: Options) -> Entry:
    plain = _PLAIN.get(info.kind)
    if plain is not None:
        region = _region(header, info, nbytes(plain, info.shape))
        read = partial(region.array, info.name, dtype_of(plain), info.shape)
        return Entry(info.name, plain, info.shape, read, region=region)
    return _quantized(header, info, options)


def _quantized(header: _Header, info: _Info, options: Options) -> Entry:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise lacks("gguf", "quantised tensors of a GGUF file", "convert") from error
    try:
        kind = gguf.GGMLQuantizationType(info.kind)
    except ValueError:
        raise header.refusal(f"type {info.kind} is unknown", "unsupported-dtype", info.name) from None
    block, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    if not info.shape or info.shape[-1] % block:
        raise header.refusal(
            f"shape {list(info.shape)}: expected rows of blocks of {block}", "gguf-blocks", info.name
        )
    region = _region(header, info, prod(info.shape) // block * block_nbytes)
    fault = _undecided(header, info, kind.name)
    if options.dequantize:
        fault = None if _can_dequantize(kind) else _unknown_blocks(header, info, kind.name)

    def read() -> Array:
        rows = region.read(info.name).reshape(*info.shape[:-1], -1)
        with reading(header.path, TITLE):
            values: Array = gguf.dequantize(rows, kind)
        return values.reshape(info.shape)

    stored = (kind.name, region.nbytes)
    return Entry(info.name, "F32", info.shape, read, fault=fault, stored=stored)


@cache
def _can_dequantize(kind: Any) -> bool:
    """Return whether the package gguf computes the values of this type."""
    import gguf

    _, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(numpy.zeros((1, block_nbytes), numpy.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _unknown_blocks(header: _Header, info: _Info, kind: str) -> ConversionError:
    from importlib.metadata import version

    return header.refusal(
        f"quantised as {kind}, which gguf {version('gguf')} cannot dequantise — drop=[…] leaves it out",
        "unsupported-dtype",
        info.name,
    )


def _undecided(header: _Header, info: _Info, kind: str) -> ConversionError:
    return header.refusal(
        f"quantised as {kind}, which no file has a dtype for — dtype='F32' makes F32 of it",
        "quantized",
        info.name,
    )


def _region(header: _Header, info: _Info, size: int) -> Region:
    position = header.data + info.begin
    if position + size > header.nbytes:
        raise header.refusal(
            f"the file is cut short: expected {position + size} bytes, found {header.nbytes}",
            "truncated",
            info.name,
        )
    return Region(header.path, position, size)
