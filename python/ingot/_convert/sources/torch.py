"""PyTorch's checkpoints, by `torch.load(weights_only=True)` of a torch that keeps what it promises.

Of a file that `torch.save` writes today only the pickle is loaded, onto the meta device: it says where in the
file each storage lies, and tensors are read from there one by one. Older files, and those that were packed,
are loaded whole.
"""

from __future__ import annotations

import pickle
import re
from contextlib import contextmanager
from io import BytesIO
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy

from ingot._convert.flatten import flatten
from ingot._convert.pickles import Bounded
from ingot._convert.positions import Region, size_of
from ingot._convert.refusal import lacks, reading, refused
from ingot._convert.source import Contents, Entry, Options, possible
from ingot._convert.trial import Trial
from ingot._convert.values import dtype_of, no_dtype
from ingot._convert.zipped import Member, contents, members
from ingot._dtypes import CODES, F4_PACKED
from ingot._text import _escaped, _quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot._convert.limits import Budget
    from ingot.numpy import Array

TITLE = "a PyTorch checkpoint"
# Before it, weights_only could be got round (CVE-2025-32434, CVE-2026-24747).
OLDEST = (2, 10)
_LONGEST_REASON = 200
# The pickle of an archive, and where its storages are.
_PICKLE, _DATA = "data.pkl", "data/"
# Of older files: a number, a version, the system, the objects, the keys of the storages, which follow.
_OLD_PICKLES = 5


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The tensors of nested dicts, named as `ingot._convert.flatten` says."""
    records = _records(path, options.budget)
    _refuse_programs(path, records)
    whole = records is None or not _lies_open(path, records)
    _torch()
    if records is None:
        objects = _try_old(path, options.budget)
        source = path if options.values else _without_storages(path, objects)
        tree = _load(path, source, "cpu" if options.values else "meta")
    else:
        _try(path, records, whole, options.budget)
        tree = _load(path, path, "cpu" if whole and options.values else "meta")
    tensors, left_out = flatten(path, tree, _is_tensor, options.budget)
    places = None if whole or records is None else {one.position: one for one in records.values()}
    entries = [
        possible(_in_memory, path, name, tensor)
        if places is None
        else possible(_in_file, path, name, tensor, places)
        for name, tensor in tensors.items()
    ]
    yield Contents(entries, left_out, {"format": "pt"})


def _load(path: str, source: str | BytesIO, device: Literal["cpu", "meta"]) -> Any:
    """What `source` holds, the file at `path` or a part of it. For "meta", nothing of a storage is read."""
    torch = _torch()
    with reading(path, TITLE):
        try:
            mmap = device == "meta" and source is path
            return torch.load(source, map_location=device, weights_only=True, mmap=mmap)
        except Exception as error:
            if "weights_only" not in str(error) and "Weights only" not in str(error):
                raise
            raise refused(
                path,
                f"the pickle in it asks for more than tensors, and is not run: "
                f"{_escaped(_asked_for(str(error)))}",
                code="unsafe-pickle",
                expected="tensors, numbers, text, lists and dicts",
                found=_asked_for(str(error)),
            ) from error


def _asked_for(message: str) -> str:
    """What was refused, out of torch's advice on how to admit it."""
    named = re.search(r"GLOBAL ([\w.]+)", message)
    if named:
        return named[1].rstrip(".")
    words = " ".join(message.split())
    return (words.partition("WeightsUnpickler error: ")[2] or words)[:_LONGEST_REASON]


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise lacks("torch", TITLE, "torch") from error
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        raise ModuleNotFoundError(
            f"converting {TITLE} needs torch {OLDEST[0]}.{OLDEST[1]} or newer, found {torch.__version__}: "
            "older ones can be made to run code from the file",
            name="torch",
        )
    return torch


def _is_tensor(value: Any) -> bool:
    return isinstance(value, _torch().Tensor)


def _records(path: str, budget: Budget) -> dict[str, Member] | None:
    """The files in the archive, without the folder that all of them are in; None where it is no archive."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\3\4":
            return None
    found = members(path, budget)
    folders = {name.partition("/")[0] for name in found}
    if len(folders) > 1:
        # torch takes the first for all there is.
        raise refused(
            path,
            f"an archive of {len(folders)} folders: expected {TITLE}, which has one",
            code="unreadable",
            expected=1,
            found=len(folders),
        )
    return {name.partition("/")[2]: member for name, member in found.items()}


def _try(path: str, records: dict[str, Member], whole: bool, budget: Budget) -> None:
    """Refuse an archive whose pickle would make too much or, loaded `whole`, more than is there."""
    budget.hold(sum(member.nbytes for name, member in records.items() if not name.startswith(_DATA)))

    def storage(key: str, nbytes: int) -> None:
        # Bytes that are not there would be those of other memory.
        record = records.get(_DATA + key)
        there = 0 if record is None else record.nbytes
        if whole and nbytes > there:
            raise refused(
                path,
                f"a storage is not in the file: expected {nbytes} bytes, found {there}",
                code="truncated",
                expected=nbytes,
                found=there,
            )

    with reading(path, TITLE):
        pickled = contents(path, records[_PICKLE])
        Trial(Bounded(path, BytesIO(pickled), len(pickled)), budget, storage).load()


def _without_storages(path: str, nbytes: int) -> BytesIO:
    """A file from before there were archives, of which only the objects are there: `nbytes` of it."""
    with reading(path, TITLE), open(path, "rb") as file:
        # The last pickle, which lists the storages that follow, lists none.
        return BytesIO(file.read(nbytes) + pickle.dumps([], 2))


def _try_old(path: str, budget: Budget) -> int:
    """Refuse a file from before there were archives whose pickles would make too much.

    Gives the bytes before the last pickle, which is that of the keys of the storages.
    """
    seen: set[str] = set()

    def storage(key: str, nbytes: int) -> None:
        if key not in seen:
            seen.add(key)
            budget.unpack(nbytes)

    objects, keys = 0, None
    with reading(path, TITLE), open(path, "rb") as file:
        source = Bounded(path, file, size_of(path))
        for _ in range(_OLD_PICKLES):
            objects = file.tell()
            keys = Trial(source, budget, storage).load()
    # torch fills those that are listed; the others would be of other memory.
    listed = {_text(key) for key in keys} if isinstance(keys, list) else set()
    if lost := sorted(seen - listed):
        raise refused(
            path,
            f"a storage is not in the file: expected one with the key {_quoted(lost[0])}",
            code="truncated",
            expected=lost[0],
        )
    return objects


def _text(key: object) -> object:
    """A key as torch has it: of Python 2's text too."""
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else key


def _refuse_programs(path: str, records: dict[str, Member] | None) -> None:
    if records is not None and (
        "constants.pkl" in records or any(name.startswith("code/") for name in records)
    ):
        raise refused(
            path,
            f"a TorchScript archive, which holds a program: expected {TITLE} — "
            "save the state_dict of the module",
            code="torchscript",
            expected=TITLE,
            found="TorchScript",
        )


def _lies_open(path: str, records: dict[str, Member]) -> bool:
    """Whether the bytes of storages stand in the file as they are."""
    order = records.get("byteorder")
    if order is not None and (order.nbytes > _LONGEST_REASON or contents(path, order).strip() != b"little"):
        return False
    return not any(member.is_packed for name, member in records.items() if name.startswith(_DATA))


def _in_file(path: str, name: str, tensor: Any, places: dict[int, Member]) -> Entry:
    """A tensor of the meta device, whose values stand in the file."""
    code, width = _code(path, name, tensor)
    storage = tensor.untyped_storage()
    record = places.get(getattr(storage, "_checkpoint_offset", -1))
    begin = tensor.storage_offset() * tensor.itemsize
    spans = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    end = begin + (sum(spans) + 1) * tensor.itemsize if tensor.numel() else begin
    if tensor.numel() and (record is None or end > record.nbytes):
        raise refused(
            path,
            f"its storage is not in the file: expected {end} bytes, found "
            f"{0 if record is None else record.nbytes}",
            code="truncated",
            tensor=name,
            expected=end,
            found=0 if record is None else record.nbytes,
        )
    position = 0 if record is None else record.position
    region = Region(path, position + begin, end - begin)
    shape, strides = tuple(tensor.shape), tuple(stride * tensor.itemsize for stride in tensor.stride())
    raw = numpy.dtype(f"u{width}") if code == "F4" else dtype_of(code)

    def read() -> Array:
        if not prod(shape):
            return _unpacked(numpy.empty(shape, raw), code)
        held = numpy.ndarray(shape, raw, region.read(name), strides=strides)
        if tensor.is_conj():
            held = held.conj()
        return _unpacked(-held if tensor.is_neg() else held, code)

    memory = (path, position, begin, shape, strides, code, *_views(tensor)) if tensor.numel() else None
    # F4 is read, because torch and the file may pack its halves in another order.
    stands = not any(_views(tensor)) and tensor.is_contiguous() and tensor.numel() and code != "F4"
    return Entry(name, code, _elements(shape, code), read, memory, region if stands else None)


def _in_memory(path: str, name: str, tensor: Any) -> Entry:
    """A tensor that was loaded."""
    torch = _torch()
    code, width = _code(path, name, tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()

    def read() -> Array:
        if code == "BOOL" or code == "C64":
            found: Array = plain.numpy()
            return found
        integers = getattr(torch, f"int{8 * width}" if width > 1 else "uint8")
        raw: Array = plain.view(integers).numpy()
        return _unpacked(raw if code == "F4" else raw.view(dtype_of(code)), code)

    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    memory = (tensor.data_ptr(), shape, strides, code, *_views(tensor)) if tensor.numel() else None
    return Entry(name, code, _elements(shape, code), read, memory)


def _views(tensor: Any) -> tuple[bool, bool]:
    """Whether the values are the conjugates, and whether they are the negatives, of those in memory."""
    return tensor.is_conj(), tensor.is_neg()


def _code(path: str, name: str, tensor: Any) -> tuple[str, int]:
    """The code of the dtype, and the bytes of an element."""
    word = str(tensor.dtype).removeprefix("torch.")
    if type(tensor).__name__ not in ("Tensor", "Parameter") or tensor.layout is not _torch().strided:
        raise no_dtype(path, name, f"{type(tensor).__name__}, {tensor.layout}")
    code = "F4" if word == F4_PACKED else CODES.get(word)
    if code is None:
        raise no_dtype(path, name, word)
    return code, tensor.itemsize


def _elements(shape: tuple[int, ...], code: str) -> tuple[int, ...]:
    """The shape of the header. torch counts bytes of F4, which hold two elements each."""
    return (*shape[:-1], shape[-1] * 2) if code == "F4" and shape else shape


def _unpacked(raw: Array, code: str) -> Array:
    """For F4 one element to a byte, as NumPy has it."""
    if code != "F4":
        return raw
    halves = numpy.stack([raw & 15, raw >> 4], -1)
    return halves.reshape(_elements(raw.shape, code)).view(dtype_of(code))
