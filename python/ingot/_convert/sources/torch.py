"""PyTorch's checkpoints, without torch: the pickle says where in the file each tensor has its bytes.

Only bytes of the file become tensors. What a pickle asks for besides them is never called (see `pickles`).
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy

from ingot._base.dtypes import CODES, F4_PACKED
from ingot._convert import pickles
from ingot._convert.flatten import flatten
from ingot._convert.limits import reading, refused
from ingot._convert.pickles import ARRAY_CALLS, ArrayMachine, Bounded, Named, PickledArray
from ingot._convert.report import Plain, Unusable
from ingot._convert.source import Contents, Entry, Options, Region, size_of
from ingot._convert.values import dtype_of, elements, no_dtype
from ingot._convert.zipped import Member, contents, members

if TYPE_CHECKING:
    from ingot._convert.limits import Budget
    from ingot.numpy import Array

TITLE = "a PyTorch checkpoint"
# The pickle of an archive, and where its storages are.
_PICKLE, _DATA = "data.pkl", "data/"
_LONGEST_WORD = 200
# What begins a file from before there were archives, and its version.
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001

# The dtypes of storages, by the names of their classes.
_STORED = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Untyped": "uint8",
    "QInt8": "qint8",
    "QUInt8": "quint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
}
_STORAGE = re.compile(r"torch\.(?:cuda\.|storage\.)?(\w+)Storage")
# Bytes of an element of the dtypes that no file of tensors has.
_WIDTHS = {"complex128": 16, "complex32": 4, "qint32": 4, "bits16": 2}
# Names that are values, or arguments of calls.
_CLASSES = re.compile(
    r"torch\.(Tensor|nn\.parameter\.(Parameter|Buffer)|per_\w+"
    r"|bool|u?int\d+|b?float\d+\w*|complex\d+|quint\w+|qint\d+|bits\w+)"
)


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """Yield the tensors of nested dicts, named as `ingot._convert.flatten` says."""
    with open(path, "rb") as file:
        is_archive = file.read(4) == b"PK\3\4"
    tree = _archive(path, options.budget) if is_archive else _old(path, options.budget)

    def entry(name: str, value: Any) -> Entry:
        if isinstance(value, PickledArray):
            return pickles.entry(path, name, value)
        return _entry(path, name, value)

    entries, left_out = flatten(path, tree, _is_tensor, entry, options.budget)
    yield Contents(entries, left_out, {"format": "pt"})


@dataclass
class _Root:
    """A storage that the file should hold."""

    word: str
    nbytes: int
    held: _Held | None = None


class _Storage(Plain):
    """A run of elements of a storage."""

    def __init__(self, key: str, word: str, root: _Root, begin: int, nbytes: int) -> None:
        super().__init__("storage", f"{nbytes} bytes of {word}")
        self.key, self.word, self.root, self.begin, self.nbytes = key, word, root, begin, nbytes


class _Held(NamedTuple):
    """The bytes of a storage in the file."""

    nbytes: int
    region: Region | None
    """None if they are packed."""
    read: Callable[[int, int, str], Array]
    """Returns the bytes between two positions, for the tensor of that name."""
    is_little: bool = True


class _Tensor(NamedTuple):
    storage: _Storage
    begin: int
    """Of the first element, in elements."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    word: str
    is_conj: bool
    is_neg: bool

    def nbytes_used(self, width: int) -> int:
        """Return the bytes of the storage up to the end of the last element."""
        if not elements(self.shape):
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (self.begin + last + 1) * width

    def is_contiguous(self) -> bool:
        expected = 1
        for size, step in zip(self.shape[::-1], self.stride[::-1], strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, _Tensor) or pickles.is_array(value)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(type(size) is int and size >= 0 for size in value):
        raise pickle.UnpicklingError("a tensor without sizes")
    return tuple(value)


def _rebuilt(
    _: _Machine,
    storage: Any,
    begin: Any,
    shape: Any,
    stride: Any,
    requires_grad: object,
    hooks: object,
    metadata: Any = None,
) -> _Tensor:
    if not isinstance(storage, _Storage) or type(begin) is not int or begin < 0:
        raise pickle.UnpicklingError("a tensor without a storage")
    shape, stride = _sizes(shape), _sizes(stride)
    if len(shape) != len(stride):
        raise pickle.UnpicklingError("a tensor with other strides than dimensions")
    flags = metadata if isinstance(metadata, dict) else {}
    return _Tensor(
        storage, begin, shape, stride, storage.word, bool(flags.get("conj")), bool(flags.get("neg"))
    )


def _rebuilt_first(machine: _Machine, storage: Any, begin: Any, shape: Any, stride: Any) -> _Tensor:
    return _rebuilt(machine, storage, begin, shape, stride, False, None)


def _rebuilt_with_dtype(
    machine: _Machine,
    storage: Any,
    begin: Any,
    shape: Any,
    stride: Any,
    requires_grad: object,
    hooks: object,
    dtype: Any,
    metadata: Any = None,
) -> _Tensor:
    tensor = _rebuilt(machine, storage, begin, shape, stride, requires_grad, hooks, metadata)
    return tensor._replace(word=_word(dtype))


def _word(dtype: Any) -> str:
    if not isinstance(dtype, Named):
        raise pickle.UnpicklingError("a tensor without a dtype")
    return dtype.name.removeprefix("torch.")


def _itself(_: _Machine, tensor: Any, *others: object) -> Any:
    return tensor


def _from_other(machine: _Machine, tensor: Any, dtype: Any, *others: object) -> Any:
    """Return a tensor that a device without storages keeps on the host, or as an array."""
    kept = tensor.word if isinstance(tensor, _Tensor) else getattr(tensor.dtype, "name", None)
    return tensor if kept == _word(dtype) else _odd(f"{_word(dtype)}, stored as {kept}")(machine)


def _from_type(machine: _Machine, function: Any, kind: Any, arguments: Any, *state: object) -> Any:
    made = machine.called(function, arguments)
    if isinstance(made, _Tensor) and kind.name not in _PLAIN_TYPES:
        return _odd(kind.name)(machine)
    return made


def _size(_: _Machine, sizes: Any = ()) -> tuple[Any, ...]:
    return tuple(sizes)


def _device(_: _Machine, *words: object) -> Plain:
    return Plain("device", ":".join(map(str, words)))


def _odd(what: str) -> Callable[..., Unusable]:
    def make(_: _Machine, *arguments: object) -> Unusable:
        named = next((one.name for one in arguments if isinstance(one, Named)), None)
        word = what if named is None else f"{what}, {named}"
        reason = f"no file of tensors has a place for {word} — drop=[…] leaves it out"
        return Unusable(reason, "unsupported-dtype", word)

    return make


_PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_CALLS: dict[str, Callable[..., Any]] = {
    **ARRAY_CALLS,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": lambda _, name: Named(f"{name}"),
    "torch.nn.parameter.Parameter": _itself,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.tensor._rebuild_from_type_v2": _from_type,
    "torch._utils._rebuild_tensor": _rebuilt_first,
    "torch._utils._rebuild_tensor_v2": _rebuilt,
    "torch._utils._rebuild_tensor_v3": _rebuilt_with_dtype,
    "torch._utils._rebuild_parameter": _itself,
    "torch._utils._rebuild_parameter_with_state": _itself,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_other,
    "torch._utils._rebuild_device_tensor_from_numpy": _from_other,
    "torch._utils._rebuild_xla_tensor": _from_other,
    "torch._utils._rebuild_qtensor": _odd("quantised tensors"),
    "torch._utils._rebuild_sparse_tensor": _odd("sparse tensors"),
    "torch._utils._rebuild_nested_tensor": _odd("nested tensors"),
    "torch._utils._rebuild_meta_tensor_no_storage": _odd("tensors without values"),
    "torch._utils._rebuild_wrapper_subclass": _odd("tensors of other classes"),
}


class _Machine(ArrayMachine):
    calls = _CALLS
    expected = "tensors"

    def __init__(self, source: Bounded, budget: Budget) -> None:
        super().__init__(source, budget)
        self.storages: dict[str, _Root] = {}

    def knows(self, name: str) -> bool:
        return super().knows(name) or bool(_CLASSES.fullmatch(name)) or _stored(name) is not None

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise pickle.UnpicklingError("a persistent value that is no storage")
        kind, key, count = pid[1], pid[2], pid[4]
        word = _stored(kind.name) if isinstance(kind, Named) else None
        if word is None or not isinstance(key, str) or type(count) is not int or count < 0:
            raise pickle.UnpicklingError("a storage without a type, a key and a size")
        nbytes = count * _width(word)
        root = self.storages.setdefault(key, _Root(word, nbytes))
        if len(pid) == 5 or pid[5] is None:
            return _Storage(key, word, root, 0, nbytes)
        _, begin, count = pid[5]
        begin, count = _sizes((begin, count))
        return _Storage(key, word, root, begin * _width(word), count * _width(word))


def _stored(name: str) -> str | None:
    """Return the dtype of a class of storages."""
    match = _STORAGE.fullmatch(name)
    return None if match is None else _STORED.get(match[1])


def _width(word: str) -> int:
    """Return the bytes of an element."""
    code = CODES.get(word)
    return dtype_of(code).itemsize if code is not None else _WIDTHS.get(word, 1)


def _archive(path: str, budget: Budget) -> Any:
    """Load an archive, which `torch.save` writes since 1.6."""
    records = _records(path, budget)
    _refuse_programs(path, records)
    with reading(path, TITLE):
        budget.hold(records[_PICKLE].nbytes)
        # torch writes no checksums after `set_crc32_options(False)`.
        pickled = contents(path, records[_PICKLE], may_lack_checksum=True)
        machine = _Machine(Bounded(path, BytesIO(pickled), len(pickled), has_spans=False), budget)
        tree = machine.load()
        machine.expect_end()
        order = records.get("byteorder")
        is_little = order is None or _word_in(path, order) == b"little"
    unpacked = _Unpacked(path)
    for key, storage in machine.storages.items():
        member = records.get(_DATA + key)
        if member is not None:
            storage.held = unpacked.held(member, is_little)
    return tree


def _word_in(path: str, member: Member) -> bytes:
    if member.nbytes > _LONGEST_WORD:
        raise ValueError("the order of bytes has too many of them")
    word = contents(path, member, may_lack_checksum=True).strip()
    if word not in (b"little", b"big"):
        raise ValueError(f"the order of bytes is {word!r}")
    return word


class _Unpacked:
    """Storages in an archive. Of those that are packed, the last that was read stays in memory."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._last: tuple[Member, bytes] | None = None

    def held(self, member: Member, is_little: bool) -> _Held:
        """Return the bytes of a member."""
        if member.is_packed:
            return _Held(member.nbytes, None, partial(self._read, member), is_little)
        return _in_region(Region(self._path, member.position, member.nbytes), is_little)

    def _read(self, member: Member, begin: int, end: int, name: str) -> Array:
        if self._last is None or self._last[0] != member:
            self._last = (member, contents(self._path, member, may_lack_checksum=True))
        return numpy.frombuffer(self._last[1], numpy.uint8)[begin:end]


def _in_region(region: Region, is_little: bool = True) -> _Held:
    def read(begin: int, end: int, name: str) -> Array:
        return Region(region.path, region.position + begin, end - begin).read(name)

    return _Held(region.nbytes, region, read, is_little)


def _records(path: str, budget: Budget) -> dict[str, Member]:
    """Return the files in the archive, without the folder that all of them are in."""
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


def _refuse_programs(path: str, records: dict[str, Member]) -> None:
    if "constants.pkl" in records or any(name.startswith("code/") for name in records):
        raise refused(
            path,
            f"a TorchScript archive, which holds a program: expected {TITLE} — "
            "save the state_dict of the module",
            code="torchscript",
            expected=TITLE,
            found="TorchScript",
        )


def _old(path: str, budget: Budget) -> Any:
    """Load a file from before 1.6, which has pickles and the storages behind them."""
    nbytes = size_of(path)
    with reading(path, TITLE), open(path, "rb") as file:

        def load() -> tuple[Any, dict[str, _Root]]:
            machine = _Machine(Bounded(path, file, nbytes), budget)
            return machine.load(), machine.storages

        if (load()[0], load()[0]) != (_MAGIC, _PROTOCOL):
            raise ValueError("it does not begin as one")
        load()
        tree, storages = load()
        keys = load()[0]
        if not isinstance(keys, list) or len(set(keys)) != len(keys):
            raise ValueError("it does not list its storages")
        for key in keys:
            if key not in storages:
                raise ValueError(f"it lists the storage {key!r}, which no tensor has")
            _place(path, file, nbytes, storages[key])
        if file.tell() != nbytes:
            raise ValueError(f"{nbytes - file.tell()} bytes follow its storages")
    return tree


def _place(path: str, file: IO[bytes], nbytes: int, storage: _Root) -> None:
    """Find the bytes of a storage, which begin here with their number."""
    (count,) = struct.unpack("<q", file.read(8))
    if count * _width(storage.word) != storage.nbytes:
        raise ValueError(f"a storage of {storage.nbytes} bytes has {count} elements of {storage.word}")
    region = Region(path, file.tell(), storage.nbytes)
    if region.position + region.nbytes > nbytes:
        raise ValueError("the file is cut short")
    storage.held = _in_region(region)
    file.seek(region.nbytes, 1)


def _entry(path: str, name: str, tensor: _Tensor) -> Entry:
    code = "F4" if tensor.word == F4_PACKED else CODES.get(tensor.word)
    if code is None:
        raise no_dtype(path, name, tensor.word)
    raw = numpy.dtype("u1") if code == "F4" else dtype_of(code)
    storage, held = tensor.storage, tensor.storage.root.held
    end = tensor.nbytes_used(raw.itemsize)
    there = 0 if held is None else min(storage.nbytes, held.nbytes - storage.begin)
    if end > there:
        raise refused(
            path,
            f"its storage is not in the file: expected {end} bytes, found {there}",
            code="truncated",
            tensor=name,
            expected=end,
            found=there,
        )
    shape = (*tensor.shape[:-1], tensor.shape[-1] * 2) if code == "F4" and tensor.shape else tensor.shape
    if held is None or not elements(tensor.shape):
        return Entry(name, code, shape, lambda: numpy.empty(shape, dtype_of(code)))
    begin = storage.begin + tensor.begin * raw.itemsize
    stored = raw.newbyteorder("<" if held.is_little else ">")
    strides = tuple(step * raw.itemsize for step in tensor.stride)

    def read() -> Array:
        values = numpy.ndarray(
            tensor.shape,
            stored,
            held.read(begin, storage.begin + end, name),
            strides=strides,
        )
        values = values.conj() if tensor.is_conj else values
        return _unpacked(-values if tensor.is_neg else values, code)

    memory = (path, storage.key, begin, *tensor[2:])
    stands = held.region is not None and held.is_little and tensor.is_contiguous()
    # F4 is read, because torch and the file may pack its halves in another order.
    stands = stands and code != "F4" and not (tensor.is_conj or tensor.is_neg)
    if not stands or held.region is None:
        return Entry(name, code, shape, read, memory)
    return Entry(
        name,
        code,
        shape,
        read,
        memory,
        Region(path, held.region.position + begin, storage.begin + end - begin),
    )


def _unpacked(raw: Array, code: str) -> Array:
    """Return F4 with one element to a byte, as NumPy has it."""
    if code != "F4":
        return raw
    halves = numpy.stack([raw & 15, raw >> 4], -1)
    return halves.reshape((*raw.shape[:-1], raw.shape[-1] * 2)).view(dtype_of(code))
