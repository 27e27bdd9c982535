"""PyTorch's checkpoints, without torch: the pickle has the position of each tensor's bytes in the file.

Only bytes of the file become tensors. Other calls in a pickle are never made (see `pickles`).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from ingot._base.dtypes import CODES, F4_PACKED
from ingot._convert import pickles
from ingot._convert.flatten import flatten
from ingot._convert.limits import refused
from ingot._convert.pickles import Foreign, Machine, Named, PickledArray
from ingot._convert.report import Placeholder, Plain, Unusable
from ingot._convert.source import Contents, Entry, Region, Stream, size_of
from ingot._convert.values import dtype_of, elements, itemsize, no_dtype, unpacked
from ingot._convert.zipped import Member, contents, members

if TYPE_CHECKING:
    from ingot._convert.limits import Budget
    from ingot.numpy import Array

# The pickle of an archive. The folder of its storages has the same name, without the ending.
_PICKLE = "data.pkl"
# A program of TorchScript has the tensors of its functions in a second pickle, its code, and other files.
_CONSTANTS, _CODE, _EXTRA = "constants.pkl", "code/", "extra/"
_LONGEST_WORD = 200
# The first values of a file from before torch wrote archives: a mark, and its version.
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001

# The dtypes of storages, by the names of their classes.
_PAIRS = (
    "Double=float64 Float=float32 Half=float16 BFloat16=bfloat16 Long=int64 Int=int32 Short=int16 Char=int8 "
    "Byte=uint8 Bool=bool ComplexFloat=complex64 ComplexDouble=complex128 Untyped=uint8 QInt8=qint8 "
    "QUInt8=quint8 QInt32=qint32 QUInt4x2=quint4x2 QUInt2x4=quint2x4"
)
_STORED = {name: code for name, _, code in (pair.partition("=") for pair in _PAIRS.split())}
_STORAGE = re.compile(rf"torch\.(?:cuda\.|storage\.)?({'|'.join(_STORED)})Storage")
# Bytes of an element of the dtypes that no file of tensors has.
_WIDTHS = {"complex128": 16, "complex32": 4, "qint32": 4, "bits16": 2}


def read(found: Contents) -> None:
    """Add the tensors of nested dicts, named as `ingot._convert.flatten` documents.

    A program of TorchScript has the names of its module's `state_dict`, and tensors in its code as constants.
    """
    whole = Region(found.path, 0, size_of(found.path))
    found.metadata["format"] = "pt"
    if not _is_archive(whole):
        add(found, _old(found, whole))
        return
    records = _records(found, whole)
    add(found, _archive(found, whole, records))
    if _CONSTANTS in records:
        if constants := _archive(found, whole, records, _CONSTANTS):
            add(found, constants, ("constants",))
        files = [name for name in records if name.startswith(_CODE)]
        found.leave_out("code", "program", f"{len(files)} files")
    for name in records:
        if name.startswith(_EXTRA):
            found.leave_out(name, "file", f"{records[name].nbytes} bytes")


def loaded(found: Contents, region: Region) -> Any:
    """Return the objects in the part of a file that `torch.save` wrote. No value is read."""
    if _is_archive(region):
        return _archive(found, region, _records(found, region))
    return _old(found, region)


def _is_archive(region: Region) -> bool:
    with open(region.path, "rb") as file:
        file.seek(region.position)
        return file.read(4) == b"PK\3\4"


def add(found: Contents, tree: Any, below: tuple[str, ...] = ()) -> None:
    """Add the tensors of `loaded`, named as `flatten` documents."""

    def made(name: str, value: Any) -> Entry:
        if isinstance(value, PickledArray):
            return pickles.entry(found.path, name, value)
        return entry(found.path, name, value)

    flatten(
        found, tree, lambda value: isinstance(value, StoredTensor) or pickles.is_array(value), made, below
    )


@dataclass
class _Root:
    """A storage that the file should hold."""

    word: str
    nbytes: int
    there: int = 0
    """Bytes that the file has."""
    region: Region | None = None
    unpack: Callable[[], bytes] = bytes
    """Returns all bytes if they are compressed."""
    is_little: bool = True

    def read(self, begin: int, end: int, name: str) -> Array:
        """Return the bytes between two positions, for tensor `name`."""
        if self.region is not None:
            return Region(self.region.path, self.region.position + begin, end - begin).read(name)
        return numpy.frombuffer(self.unpack(), numpy.uint8)[begin:end]


class _Storage(Plain):
    """A run of elements of a storage."""

    def __init__(self, key: str, word: str, root: _Root, begin: int, nbytes: int) -> None:
        super().__init__("storage", f"{nbytes} bytes of {word}")
        self.key, self.word, self.root, self.begin, self.nbytes = key, word, root, begin, nbytes


class StoredTensor(NamedTuple):
    """A tensor of a pickle."""

    storage: _Storage
    begin: int
    """The position of the first element, in elements."""
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


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(type(size) is int and size >= 0 for size in value):
        raise pickle.UnpicklingError("a tensor without sizes")
    return tuple(value)


def _rebuilt(
    storage: Any, begin: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, metadata: Any = None
) -> StoredTensor:
    if not isinstance(storage, _Storage) or type(begin) is not int or begin < 0:
        raise pickle.UnpicklingError("a tensor without a storage")
    shape, stride = _sizes(shape), _sizes(stride)
    if len(shape) != len(stride):
        raise pickle.UnpicklingError("a tensor with other strides than dimensions")
    flags = metadata if isinstance(metadata, dict) else {}
    is_conj, is_neg = bool(flags.get("conj")), bool(flags.get("neg"))
    return StoredTensor(storage, begin, shape, stride, storage.word, is_conj, is_neg)


def _rebuilt_first(storage: Any, begin: Any, shape: Any, stride: Any) -> StoredTensor:
    return _rebuilt(storage, begin, shape, stride, False, None)


def _rebuilt_with_dtype(*arguments: Any) -> StoredTensor:
    *described, dtype = arguments[:7]
    return _rebuilt(*described, *arguments[7:])._replace(word=_word(dtype))


def _word(dtype: Any) -> str:
    if not isinstance(dtype, Named):
        raise pickle.UnpicklingError("a tensor without a dtype")
    return dtype.name.removeprefix("torch.")


def _itself(tensor: Any, *others: object) -> Any:
    return tensor


def _from_other(tensor: Any, dtype: Any, *others: object) -> Any:
    """Return a tensor of a device without storages. torch pickles it as a host tensor or an array."""
    kept = tensor.word if isinstance(tensor, StoredTensor) else getattr(tensor.dtype, "name", None)
    return tensor if kept == _word(dtype) else _odd(f"{_word(dtype)}, stored as {kept}")


def _odd(what: str, *arguments: object) -> Unusable:
    named = next((one.name for one in arguments if isinstance(one, Named)), None)
    word = what if named is None else f"{what}, {named}"
    reason = f"files of tensors cannot store {word} — drop=[…] leaves it out"
    return Unusable(reason, "unsupported-dtype", word)


class _Module(dict[str, Any]):
    """An object of a program of TorchScript: its parameters, its buffers and other objects in it."""

    def build(self, state: Any) -> None:
        """Set the attributes, except numbers, text and empty modules, which belong to the program."""
        if not isinstance(state, (dict, tuple)):
            raise pickle.UnpicklingError(f"a module with a {type(state).__name__} for its attributes")
        attributes = state if isinstance(state, dict) else {str(at): one for at, one in enumerate(state)}
        self.update((name, one) for name, one in attributes.items() if not _is_setting(one))


def _is_setting(value: Any) -> bool:
    if isinstance(value, (list, tuple)) and not isinstance(value, StoredTensor):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (bool, int, float, str)) or value == {}


# The package of the classes of a program.
_SCRIPT = "__torch__"
_PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_CALLS: dict[str, Callable[..., Any]] = {
    _SCRIPT: lambda *arguments: _Module(),
    **dict.fromkeys(
        (f"torch.jit._pickle.build_{kind}list" for kind in ("int", "double", "bool", "tensor")), list
    ),
    "torch.jit._pickle.restore_type_tag": _itself,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.device": lambda *words: Plain("device", ":".join(map(str, words))),
    "torch.serialization._get_layout": lambda name: Named(f"{name}"),
    "torch.nn.parameter.Parameter": _itself,
    "torch._utils._rebuild_tensor": _rebuilt_first,
    "torch._utils._rebuild_tensor_v2": _rebuilt,
    "torch._utils._rebuild_tensor_v3": _rebuilt_with_dtype,
    "torch._utils._rebuild_parameter": _itself,
    "torch._utils._rebuild_parameter_with_state": _itself,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_other,
    "torch._utils._rebuild_device_tensor_from_numpy": _from_other,
    "torch._utils._rebuild_xla_tensor": _from_other,
    "torch._utils._rebuild_qtensor": partial(_odd, "quantised tensors"),
    "torch._utils._rebuild_sparse_tensor": partial(_odd, "sparse tensors"),
    "torch._utils._rebuild_nested_tensor": partial(_odd, "nested tensors"),
    "torch._utils._rebuild_meta_tensor_no_storage": partial(_odd, "tensors without values"),
    "torch._utils._rebuild_wrapper_subclass": partial(_odd, "tensors of other classes"),
}


class TorchMachine(Machine):
    expected = "tensors"
    classes = re.compile(
        rf"{Machine.classes.pattern}|{_STORAGE.pattern}|torch\.(Tensor|nn\.parameter\.(Parameter|Buffer)|per_\w+"
        r"|bool|u?int\d+|b?float\d+\w*|complex\d+|quint\w+|qint\d+|bits\w+)"
    )

    def __init__(self, source: Stream, budget: Budget) -> None:
        super().__init__(source, budget)
        self.storages: dict[str, _Root] = {}
        kinds = ("torch._tensor._rebuild_from_type_v2", "torch.tensor._rebuild_from_type_v2")
        self.calls |= _CALLS | dict.fromkeys(kinds, self._from_type)

    def find_class(self, module: str, name: str) -> Named | Foreign | Placeholder:
        if module.partition(".")[0] == _SCRIPT:
            return Named(_SCRIPT)
        return super().find_class(module, name)

    def _from_type(self, function: Any, kind: Any, arguments: Any, *state: object) -> Any:
        made = self.called(function, arguments)
        return _odd(kind.name) if isinstance(made, StoredTensor) and kind.name not in _PLAIN_TYPES else made

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise pickle.UnpicklingError("a persistent value that is not a storage")
        kind, key, count = pid[1], pid[2], pid[4]
        match = _STORAGE.fullmatch(kind.name) if isinstance(kind, Named) else None
        if match is None or not isinstance(key, str) or type(count) is not int or count < 0:
            raise pickle.UnpicklingError("a storage without a type, a key and a size")
        word = _STORED[match[1]]
        root = self.storages.setdefault(key, _Root(word, count * _width(word)))
        view = (0, count) if len(pid) == 5 or pid[5] is None else pid[5][1:]
        begin, count = _sizes(view)
        return _Storage(key, word, root, begin * _width(word), count * _width(word))


def _width(word: str) -> int:
    """Return the bytes of an element."""
    code = CODES.get(word)
    return itemsize(code) if code is not None else _WIDTHS.get(word, 1)


def _archive(found: Contents, region: Region, records: dict[str, Member], file: str = _PICKLE) -> Any:
    """Load a pickle of an archive, which `torch.save` writes since 1.6."""
    # torch writes no checksums after `set_crc32_options(False)`. The last decompressed storage is cached.
    unpacked = lru_cache(maxsize=1)(partial(contents, region.path, may_lack_checksum=True))
    with found.reading():
        found.budget.hold(records[file].nbytes)
        pickled = contents(region.path, records[file], may_lack_checksum=True)
        stream = Stream(region.path, BytesIO(pickled), end=len(pickled), has_spans=False)
        machine = TorchMachine(stream, found.budget.part(region.path, len(pickled)))
        tree = machine.load()
        machine.expect_end()
        is_little = _is_little(region.path, records.get("byteorder"))
    for key, root in machine.storages.items():
        member = records.get(f"{file.removesuffix('.pkl')}/{key}")
        if member is not None:
            root.there, root.is_little = member.nbytes, is_little
            root.region = None if member.is_packed else Region(region.path, member.position, member.nbytes)
            root.unpack = partial(unpacked, member)
    return tree


def _is_little(path: str, member: Member | None) -> bool:
    if member is None:
        return True
    if member.nbytes > _LONGEST_WORD:
        raise ValueError("the byte order is too long")
    word = contents(path, member, may_lack_checksum=True).strip()
    if word not in (b"little", b"big"):
        raise ValueError(f"the byte order is {word!r}")
    return word == b"little"


def _records(found: Contents, region: Region) -> dict[str, Member]:
    """Return the files in the archive, without the folder that all of them are in."""
    files = members(region.path, found.budget, region)
    folders = {name.partition("/")[0] for name in files}
    if len(folders) > 1:
        # torch reads the first only.
        reason = f"an archive of {len(folders)} folders: expected {found.title}, which has one"
        raise found.refusal(reason, "unreadable", expected=1, found=len(folders))
    return {name.partition("/")[2]: member for name, member in files.items()}


def _old(found: Contents, region: Region) -> Any:
    """Load a file from before 1.6, which has pickles and the storages after them."""
    with found.reading(), open(region.path, "rb") as file:
        stream = Stream(region.path, file, region.position, region.position + region.nbytes)

        def load() -> tuple[Any, dict[str, _Root]]:
            machine = TorchMachine(stream, found.budget)
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
            root = storages[key]
            count = stream.number("<q")
            if count * _width(root.word) != root.nbytes:
                raise ValueError(f"a storage of {root.nbytes} bytes has {count} elements of {root.word}")
            root.there, root.region = root.nbytes, stream.span(root.nbytes)
        stream.expect_end()
    return tree


def entry(path: str, name: str, tensor: StoredTensor) -> Entry:
    """Return the entry of a tensor, or raise the reason why it has none."""
    code = "F4" if tensor.word == F4_PACKED else CODES.get(tensor.word)
    if code is None:
        raise no_dtype(path, name, tensor.word)
    width = itemsize(code)
    storage, root = tensor.storage, tensor.storage.root
    end = tensor.nbytes_used(width)
    there = min(storage.nbytes, root.there - storage.begin) if root.there else 0
    if end > there:
        reason = f"its storage is not in the file: expected {end} bytes, found {there}"
        raise refused(path, reason, "truncated", name, end, there)
    shape = (*tensor.shape[:-1], tensor.shape[-1] * 2) if code == "F4" and tensor.shape else tensor.shape
    if not elements(tensor.shape):
        return Entry(name, code, shape, lambda: numpy.empty(shape, dtype_of(code)))
    begin, end = storage.begin + tensor.begin * width, storage.begin + end
    # Records of one file may have equal keys. A packed storage lives as long as its entry.
    place = id(root) if root.region is None else (root.region.path, root.region.position)
    memory = (place, begin, *tensor[2:])
    is_plain = root.is_little and tensor.is_contiguous() and not (tensor.is_conj or tensor.is_neg)
    # F4 is read, because torch and the file may pack its halves in another order.
    if root.region is not None and is_plain and code != "F4":
        region = Region(root.region.path, root.region.position + begin, end - begin)
        return Entry(name, code, shape, memory=memory, region=region)

    def read() -> Array:
        raw = numpy.dtype("u1") if code == "F4" else dtype_of(code)
        stored = raw.newbyteorder("<" if root.is_little else ">")
        strides = tuple(step * width for step in tensor.stride)
        values: Array = numpy.ndarray(tensor.shape, stored, root.read(begin, end, name), strides=strides)
        values = values.conj() if tensor.is_conj else values
        values = -values if tensor.is_neg else values
        return unpacked(values) if code == "F4" else values

    return Entry(name, code, shape, read, memory)
