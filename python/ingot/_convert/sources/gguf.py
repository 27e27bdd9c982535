"""GGUF, the format of llama.cpp: plain tensors unchanged, quantised ones as F32 if the caller chose a dtype.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is read here, because every number in it
has to be checked against the file before it is used; the package gguf decodes blocks of quantised values.
"""

from __future__ import annotations

import os
import re
import struct
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from ingot._base.text import _quoted
from ingot._convert.formats import PART
from ingot._convert.limits import OBJECT_NBYTES
from ingot._convert.source import Contents, Entry, Region, Stream, truncated
from ingot._convert.values import nbytes
from ingot.errors import ConversionError

if TYPE_CHECKING:
    from ingot.numpy import Array

MAGIC = b"GGUF"
# The numbers of the plain types in GGUF.
_PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
# The numbers of the kinds of values, with their formats.
_FORMS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", "<Q", "<q", "<d")
_VALUES = dict(zip((*range(8), *range(10, 13)), _FORMS, strict=True))
_TEXT, _LIST = 8, 9
_ALIGNMENT = "general.alignment"
# Keys that gguf-split writes in each part: its number from 0, the number of parts, and of all their tensors.
_SPLIT = ("split.no", "split.count", "split.tensors.count")
# The most that five digits can count.
_MOST_PARTS = 99_999
# Bytes of the shortest pair and of the shortest tensor: no file has room for more of them.
_PAIR_NBYTES, _TENSOR_NBYTES = 13, 24
# GGML's own limit.
_MAX_DIMS = 4


class _Info(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    begin: int


def read(contents: Contents) -> None:
    """Add the tensors of all parts. Single values become metadata, and lists are left out."""
    headers = _headers(contents)
    # The other parts repeat some of the metadata.
    contents.metadata = headers[0].contents.metadata
    for header in headers:
        for info in header.tensors:
            header.contents.add(info.name, _entry, header, info)
        header.expect_end()


def _headers(contents: Contents) -> list[_Header]:
    """Return the headers of all parts of a model, in their order."""
    first = _Header(contents)
    number, count = first.part
    if count == 1:
        return [first]
    name = PART.fullmatch(os.path.basename(contents.path))
    if name is None or int(name["count"]) != count:
        expected = f"…-{number + 1:05}-of-{count:05}.gguf"
        reason = f"part {number + 1} of {count} of a model, but not named like a part: expected {expected}"
        raise contents.refusal(reason, "part")
    stem, ending = os.path.join(os.path.dirname(contents.path), name["stem"]), name["ending"]
    paths = [f"{stem}-{part:05}-of-{count:05}.{ending}" for part in range(1, count + 1)]
    missing = next((path for path in paths if not os.path.isfile(path)), None)
    if missing is not None:
        if not contents.options.values:
            # Listing also works for one part alone.
            return [first]
        reason = f"part of a model of {count} files: there is no {_quoted(missing)}"
        raise contents.refusal(reason, "missing-file")
    contents.left_out.clear()
    headers = [_Header(contents.part(path)) for path in paths]
    for part, header in enumerate(headers):
        if header.part != (part, count):
            found = f"part {header.part[0] + 1} of {header.part[1]}"
            reason = f"by its name part {part + 1} of {count}, and by its header {found}"
            raise header.contents.refusal(reason, "part")
    tensors = sum(len(header.tensors) for header in headers)
    if first.split_tensors not in (None, tensors):
        reason = f"a model of {first.split_tensors} tensors: found {tensors} in its {count} files"
        raise contents.refusal(reason, "part")
    return headers


class _Header:
    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self._alignment = 32
        with contents.reading(), open(contents.path, "rb") as file:
            self._stream = Stream(contents.path, file)
            self._stream.read(len(MAGIC))
            version = self._number("<I")
            if version not in (2, 3):
                raise self._refusal(f"a GGUF file of version {version}: expected 2 or 3", "gguf-version")
            tensors = self._count(_TENSOR_NBYTES, "tensors")
            pairs = self._count(_PAIR_NBYTES, "values")
            contents.budget.hold(OBJECT_NBYTES * (tensors + pairs))
            for _ in range(pairs):
                self._pair()
            self.part, self.split_tensors = self._take_part()
            self.tensors = [self._info() for _ in range(tensors)]
            self.data = self._aligned(self._stream.tell())

    def expect_end(self) -> None:
        """Raise if bytes follow the tensors, such as another file. Types of an unknown size end anywhere."""
        sizes = [_stored_nbytes(info) for info in self.tensors]
        ends = [info.begin + size for info, size in zip(self.tensors, sizes, strict=True) if size is not None]
        follow = self._stream.end - self.data - self._aligned(max(ends, default=0))
        if None not in sizes and follow > 0:
            raise self._refusal(f"{follow} bytes follow the tensors", "trailing")

    def region(self, info: _Info, size: int) -> Region:
        """Return the bytes of a tensor."""
        position = self.data + info.begin
        if position + size > self._stream.end:
            raise truncated(self.contents.path, position + size, self._stream.end, info.name)
        return Region(self.contents.path, position, size)

    def _refusal(self, reason: str, code: str, tensor: str | None = None) -> ConversionError:
        return self.contents.refusal(reason, code, tensor)

    def _aligned(self, position: int) -> int:
        return -(-position // self._alignment) * self._alignment

    def _take_part(self) -> tuple[tuple[int, int], int | None]:
        """Remove the values that describe the file as one of several parts.

        Returns its number from 0 and the number of parts, and the number of tensors in all parts.
        """
        number, count, tensors = (self.contents.metadata.pop(key, None) for key in _SPLIT)
        for text in (number, count, tensors):
            if text is not None and not re.fullmatch(r"\d{1,9}", text):
                raise self._refusal(f"a part of a model by {_quoted(text)}: expected a number", "part")
        parts = max(int(count or 1), 1)
        if parts > _MOST_PARTS:
            raise self._refusal(f"a model of {count} files: expected {_MOST_PARTS} or fewer", "part")
        return (int(number or 0), parts), None if tensors is None else int(tensors)

    def _pair(self) -> None:
        key, kind = self._text(), self._number("<I")
        value = self._value(kind, 0)
        if key == _ALIGNMENT:
            if not isinstance(value, int) or value < 8 or value % 8 or value > 1 << 20:
                raise self._refusal(f"an alignment of {value!r}: expected a multiple of 8", "gguf-alignment")
            self._alignment = value
        if key in self.contents.metadata:
            raise self._refusal(f"key {_quoted(key)} is there twice", "duplicate-key")
        if isinstance(value, _Skipped):
            self.contents.leave_out(key, "list", f"{value.items} items")
        else:
            self.contents.metadata[key] = str(value).lower() if isinstance(value, bool) else str(value)

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _LIST:
            return self._skip_list(depth)
        if kind not in _VALUES:
            raise self._refusal(f"a value of the unknown kind {kind}", "gguf-kind")
        return self._number(_VALUES[kind])

    def _skip_list(self, depth: int) -> _Skipped:
        if depth > 4:
            raise self._refusal("lists are nested more than 4 levels deep", "too-deep")
        kind, count = self._number("<I"), self._number("<Q")
        if kind in _VALUES:
            self._stream.skip(count * struct.calcsize(_VALUES[kind]))
            return _Skipped(count)
        self._stream.check(count * 8)
        for _ in range(count):
            if kind == _TEXT:
                self._stream.skip(self._number("<Q"))
            else:
                self._value(kind, depth + 1)
        return _Skipped(count)

    def _info(self) -> _Info:
        name, dims = self._text(), self._number("<I")
        if dims > _MAX_DIMS:
            raise self._refusal(f"{dims} dimensions: expected {_MAX_DIMS} or fewer", "gguf-dimensions", name)
        # GGUF lists the dimensions in reverse order.
        shape = tuple(self._number("<Q") for _ in range(dims))[::-1]
        return _Info(name, shape, self._number("<I"), self._number("<Q"))

    def _count(self, least: int, what: str) -> int:
        count: int = self._number("<Q")
        there = self._stream.left()
        if count * least > there:
            raise self._refusal(f"claims {count} {what}, which do not fit in {there} bytes", "gguf-count")
        return count

    def _text(self) -> str:
        return self._stream.read(self._number("<Q")).decode()

    def _number(self, form: str) -> Any:
        return self._stream.number(form)


class _Skipped(NamedTuple):
    """A list, reduced to its length: vocabularies are long."""

    items: int


def _stored_nbytes(info: _Info) -> int | None:
    """Return the bytes of a tensor in the file, or None if its type is unknown."""
    if info.kind in _PLAIN:
        return nbytes(_PLAIN[info.kind], info.shape)
    try:
        import gguf

        block, block_nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.kind)]
    except (ModuleNotFoundError, ValueError):
        return None
    return prod(info.shape) // block * block_nbytes


def _entry(header: _Header, info: _Info) -> Entry:
    contents, name, shape = header.contents, info.name, info.shape
    size = _stored_nbytes(info)
    if info.kind in _PLAIN:
        return Entry(name, _PLAIN[info.kind], shape, region=header.region(info, size or 0))
    gguf = contents.library("gguf", "quantised tensors of a GGUF file")
    if size is None:
        raise contents.refusal(f"type {info.kind} is unknown", "unsupported-dtype", name)
    kind = gguf.GGMLQuantizationType(info.kind)
    block, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        reason = f"shape {list(shape)}: expected rows of blocks of {block}"
        raise contents.refusal(reason, "gguf-blocks", name)
    region = header.region(info, size)

    def values() -> Array:
        rows = region.read(name).reshape(*shape[:-1], shape[-1] // block * block_nbytes)
        found: Array = gguf.dequantize(rows, kind)
        return found.reshape(shape)

    fault = None
    if not contents.options.dequantize:
        reason = f"quantised as {kind.name}, which no file has a dtype for — dtype='F32' makes F32 of it"
        fault = contents.refusal(reason, "quantized", name)
    elif not _can_dequantize(kind):
        from importlib.metadata import version

        reason = f"quantised as {kind.name}, which gguf {version('gguf')} cannot dequantise"
        fault = contents.refusal(f"{reason} — drop=[…] leaves it out", "unsupported-dtype", name)
    return Entry(name, "F32", shape, values, fault=fault, stored=(kind.name, size))


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
