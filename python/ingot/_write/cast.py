"""A copy of a file with floats in another dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from os import fsdecode
from typing import TYPE_CHECKING, Any, Unpack

from ingot import _native
from ingot._base.batches import batches
from ingot._base.checks import CONVERTED, FLOATS, float_code, format_for
from ingot._base.dtypes import PACKED
from ingot._base.keys import checked_keys, select
from ingot._base.options import Loading, Saving, checked, takes
from ingot._base.progress import reporting_on
from ingot._base.report import Report
from ingot._base.text import located
from ingot._native import STATE_KEY, Checkpoint, TensorInfo
from ingot._read.door import open_source
from ingot._read.load import RAW
from ingot._read.select import Wanted
from ingot.errors import CheckpointError, DtypeError
from ingot.typing import CastOptions, Dtype, Format, Keys, Path, Source

from .rearrange import KEPT, of_one, united
from .save import recorded, rendered
from .states import tensors_of

if TYPE_CHECKING:
    from ingot._base.keys import Selector

# The number of bytes of tensors that are in memory at once. A larger tensor is processed alone.
_BATCH_NBYTES = 256 << 20
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}


@dataclass(frozen=True, slots=True, repr=False)
class Cast(Report):
    """A copy with floats in another dtype. `cast` returns one.

    Attributes
    ----------
    destination : str
        The path of the file.
    dtype : str
        The code of the dtype, such as ``"BF16"``.
    cast : tuple of str
        The tensors whose dtype changed.
    tensors : int
        The number of tensors in the file.
    nbytes : int
        Bytes of their values.

    Examples
    --------
    >>> report = ingot.cast("model.safetensors", "half.safetensors", "BF16")
    >>> report.tensors, report.nbytes, report.cast
    (2, 128, ('lm_head.weight', 'wte'))
    """

    destination: str
    dtype: str
    cast: tuple[str, ...]
    tensors: int
    nbytes: int


@takes(CastOptions)
def cast(
    source: Source,
    destination: Path,
    dtype: Dtype,
    *,
    keys: Keys | None = None,
    metadata: Mapping[str, str] | None = KEPT,
    format: Format | None = None,
    **options: Unpack[CastOptions],
) -> Cast:
    """Write a copy of a file with its floating-point tensors in another dtype.

    Parameters
    ----------
    source : ingot.typing.Source
        A file, a sharded checkpoint, a URL, an open file or a buffer, as for `ingot.safe_open`.
    destination : str, bytes or os.PathLike
        Where to write one file. It may be `source`, which stays until the new file is complete.
    dtype : ingot.typing.Dtype
        The dtype to convert to, as for `load_file`. The values equal PyTorch's ``tensor.to(dtype)``.
        Integers, bools and complex numbers keep their dtypes.
    keys : ingot.typing.Keys, optional
        Which tensors to convert, all by default, as for `load_file`. The others are copied unchanged. An
        alias selects its tensor.
    metadata : dict of str to str or None, optional
        The text to store. By default the source's, without digests of values that change.
    format : {"safetensors", "bintensors"}, optional
        As for `save_file`.
    **options
        How the source is read and the file is written: `ingot.typing.CastOptions`.

    Returns
    -------
    Cast
        With ``cast``, the names of the tensors whose dtype changed.

    Raises
    ------
    FileExistsError
        The destination exists, and `overwrite` is False.
    TensorNotFoundError
        A name or a pattern of `keys` matches no tensor.
    DtypeError
        A tensor of `keys` is packed: F4 or F6.
    SaveError
        The format lacks a dtype, or files of a checkpoint have different texts for one key of their metadata.
    OSError, HeaderError, CheckpointError, StorageError
        As for `ingot.safe_open`, or writing failed.
    TypeError, OptionError
        An argument has a wrong type or value.

    Notes
    -----
    At most 256 MiB of tensors, or one tensor, are in memory. Names that share a tensor
    (``save_file(..., shared="alias")``) share it in the new file too. A training state (`save_state`) stays,
    whatever `metadata` has. Its lists of numbers keep their dtype.

    Examples
    --------
    >>> ingot.cast("model.safetensors", "half.safetensors", "BF16").cast
    ('lm_head.weight', 'wte')
    """
    given: Any = checked(cast, locals(), dtype=float_code)
    how, reading = Saving.among(cast, given), Loading.among(given)
    path = fsdecode(given["destination"])
    with closing(open_source(source, reading)) as checkpoint:
        state, numbers = state_of(checkpoint)
        chosen = _chosen(checkpoint, given["keys"]) - numbers
        plan = _Plan(checkpoint, given["dtype"], chosen, reading.threads)
        how.existing.check(path)
        pairs = united(metadata_of(checkpoint)) if metadata is KEPT else how.metadata
        records, kind = {**state, **rendered(recorded(checkpoint.shared()))}, format_for(path, format)
        writer = _native.Writer.create(path, plan.specs(), pairs, kind, records=records, **how.of_new_file())
        with closing(writer), reporting_on(how.progress, "Casting", path) as tell:
            done, total = 0, sum(info.nbytes for info in plan.infos)
            for info in plan.write(writer):
                done += info.nbytes
                if tell is not None:
                    tell(done, total)
            writer.commit()
    return plan.report(path)


def planned(source: Source, destination: Path, dtype: Dtype, *, keys: Keys | None = None) -> Cast:
    """Return the result of `cast`, without writing."""
    with closing(open_source(source, Loading())) as checkpoint:
        names = _chosen(checkpoint, checked_keys("keys", keys)) - state_of(checkpoint)[1]
        path = fsdecode(_native.local_path(destination))
        return _Plan(checkpoint, float_code(dtype), names).report(path)


def _chosen(checkpoint: Checkpoint, keys: Selector | None) -> set[str]:
    """Return the stored tensors that `keys` selects. An alias selects the tensor that it is a name of."""
    shared = checkpoint.shared()
    return {shared[name][0] if name in shared else name for name in select(checkpoint, keys)}


def state_of(checkpoint: Checkpoint) -> tuple[dict[str, str], set[str]]:
    """Return the record of a training state, and the tensors that are its lists of numbers.

    A list keeps its dtype, by which `load_state` knows the type of its numbers. A broken state is left out.
    """
    text = (checkpoint.metadata() or {}).get(STATE_KEY)
    if not isinstance(text, str):
        return {}, set()
    try:
        named = tensors_of(checkpoint, text)
    except CheckpointError:
        return {}, set()
    return {STATE_KEY: text}, {name for tag, name in named if tag == "$numbers"}


class _Plan:
    """Which tensors of a file are converted to `dtype`."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, chosen: set[str], threads: int | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.threads = threads
        self.dtype = dtype
        self.infos = checkpoint.infos()
        floats = [info for info in self.infos if info.name in chosen and info.dtype != dtype]
        self.changed = {info.name for info in floats if info.dtype in CONVERTED}
        for info in floats:
            if info.dtype in PACKED:
                raise self._fault(info)

    def _fault(self, info: TensorInfo) -> DtypeError:
        reason = f"{info.dtype} is not converted to {self.dtype} — leave the tensor out of keys"
        facts: Any = {"expected": FLOATS, "found": info.dtype}
        path = self.checkpoint.path
        return located(DtypeError, reason, path=path, tensor=info.name, code="no-conversion", **facts)

    def specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(info.name, self.dtype_of(info), info.shape) for info in self.infos]

    def dtype_of(self, info: TensorInfo) -> str:
        return self.dtype if info.name in self.changed else info.dtype

    def nbytes_of(self, info: TensorInfo) -> int:
        if info.name not in self.changed:
            return info.nbytes
        return prod(info.shape) * _BITS.get(self.dtype, 8) // 8

    def report(self, path: str) -> Cast:
        names = tuple(info.name for info in self.infos if info.name in self.changed)
        size = sum(map(self.nbytes_of, self.infos))
        return Cast(path, self.dtype, names, len(self.infos), size)

    def write(self, writer: _native.Writer) -> Iterator[TensorInfo]:
        """Write the tensors, and yield each name after its tensor."""
        for batch in batches(self.infos, attrgetter("nbytes"), _BATCH_NBYTES):
            names = [info.name for info in batch if info.name in self.changed]
            parts = self.checkpoint.parts(Wanted(names, None, self.dtype), RAW, threads=self.threads)
            converted = dict(zip(names, parts, strict=True))
            for info in batch:
                size = self.nbytes_of(info)
                if info.name in converted:
                    data = converted[info.name][:size]
                else:
                    data = self.checkpoint.tensor_bytes(info.name, 0, size)
                writer.write(info.name, (self.dtype_of(info), info.shape, data), ..., lambda name, data: data)
                yield info


# The bytes of tensors in memory form.


def metadata_of(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the metadata of each file and of the index, each with its path."""
    index = checkpoint.metadata() if checkpoint.is_sharded else None
    return of_one(checkpoint.path or "<buffer>", checkpoint.shard_metadata(), index)
