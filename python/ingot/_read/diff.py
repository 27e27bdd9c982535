"""Differences between two files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

from ingot import _native
from ingot._base.keys import NamedTensors, select
from ingot._base.options import Loading, checked, takes
from ingot._base.progress import reporting_on
from ingot._base.report import Report, reduced
from ingot._native import Checkpoint, TensorInfo
from ingot.typing import Keys, ReadOptions, Source

from .door import open_source


class Distance(NamedTuple):
    """The distance between two tensors of one shape whose values are not all equal. A NaN equals every other.

    All are None for bytes whose values have no settled layout (dtypes of 6 bits).

    Attributes
    ----------
    different : int or None
        The number of values that are not equal. A complex number has two values.
    max_abs : int, float or None
        The greatest absolute difference, exact for integers.
    relative_l2 : float or None
        The L2 norm of the difference relative to the first tensor's norm; None if that is zero.
    cosine : float or None
        The cosine of the angle between the two; None if one is zero.
    """

    different: int | None
    max_abs: int | float | None
    relative_l2: float | None
    cosine: float | None

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


@dataclass(frozen=True, slots=True, repr=False)
class Diff(Report):
    """The differences between two files. `diff` returns one.

    Attributes
    ----------
    tensors : dict of str to (TensorInfo or None, TensorInfo or None)
        Tensors that have different dtypes or shapes in the two, or are only in one, which are None in the
        other. By name, in natural order.
    metadata : dict of str to (str or None, str or None)
        Keys of the metadata that have different texts, or are only in one. A value of an index that is not
        text is compared as JSON.
    values : dict of str to Distance or None
        Tensors of one shape whose values differ; None if values were not compared.

    Examples
    --------
    >>> report = ingot.diff("model.safetensors", "tuned.safetensors", values=True)
    >>> report.equal, report.tensors, report.values["wte"].max_abs
    (False, {}, 1.0)
    """

    tensors: dict[str, tuple[TensorInfo | None, TensorInfo | None]]
    metadata: dict[str, tuple[str | None, str | None]]
    values: dict[str, Distance] | None = None

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.tensors or self.metadata or self.values)


@takes(ReadOptions)
def diff(
    source: Source,
    other: Source,
    *,
    values: bool = False,
    keys: Keys | None = None,
    drop: Keys | None = None,
    **options: Unpack[ReadOptions],
) -> Diff:
    """Compare the names, dtypes, shapes and metadata of two files, and the values if requested.

    Parameters
    ----------
    source, other : ingot.typing.Source
        Two files, sharded checkpoints, URLs, open files or buffers, as for `ingot.safe_open`.
    values : bool
        Also compare the values of tensors that both have with one shape. The files are read in parallel, at
        most a few MiB at a time.
    keys, drop : ingot.typing.Keys, optional
        Which tensors to compare, all by default, as for `load_file`. A name or a pattern has to match a
        tensor of either file. A tensor that one file stores is compared with an alias of its name in the
        other. The metadata is compared in any case.
    **options
        How to read both.

    Returns
    -------
    Diff

    Raises
    ------
    TensorNotFoundError
        A name or a pattern of `keys` or `drop` matches no tensor.
    OSError, HeaderError, CheckpointError, StorageError
        As for `ingot.safe_open`.
    TypeError, OptionError
        An argument has a wrong type or value.

    Examples
    --------
    >>> ingot.diff("model.safetensors", "tuned.safetensors", values=True).equal
    False
    """
    given = checked(diff, locals())
    how, chosen, dropped = Loading.among(given), given["keys"], given["drop"]
    with closing(open_source(source, how)) as one, closing(open_source(other, how)) as two:
        ours, theirs = _infos(one), _infos(two)
        # By name, for callables as selectors and for the hints of misses.
        infos = theirs | ours
        stored = dict.fromkeys([*two.offset_names(), *one.offset_names()])
        both = NamedTensors(one.path, stored, infos.values, aliases=infos)
        names = _native.in_natural_order(select(both, chosen, dropped))
        pairs = ((name, (ours.get(name), theirs.get(name))) for name in names)
        tensors = {name: pair for name, pair in pairs if _header(pair[0]) != _header(pair[1])}
        metadata = _metadata(one, two)
        if not values:
            return Diff(tensors, metadata)
        alike = [name for name in names if _shape(ours.get(name)) == _shape(theirs.get(name))]
        with reporting_on(how.progress, "Comparing", one.path or "") as tell:
            found = _native.distances(one, two, alike, threads=how.threads, progress=tell)
        measured = zip(alike, found, strict=True)
        distances = {name: Distance(*apart) for name, apart in measured if apart is not None}
        return Diff(tensors, metadata, distances)


def _infos(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """Return the dtype, shape and position of each tensor and each alias, by name."""
    aliases = map(checkpoint.info, checkpoint.shared())
    return {info.name: info for info in (*checkpoint.infos(), *aliases)}


def _header(info: TensorInfo | None) -> tuple[str, tuple[int, ...]] | None:
    return None if info is None else (info.dtype, info.shape)


def _shape(info: TensorInfo | None) -> tuple[int, ...] | None:
    return None if info is None else info.shape


def _metadata(one: Checkpoint, two: Checkpoint) -> dict[str, tuple[str | None, str | None]]:
    ours, theirs = map(_texts, (one.metadata(), two.metadata()))
    keys = _native.in_natural_order([*ours.keys() | theirs.keys()])
    pairs = {key: (ours.get(key), theirs.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    pairs = (metadata or {}).items()
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in pairs}
