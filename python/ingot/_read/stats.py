"""Statistics of the values of tensors."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Unpack

from ingot import _native
from ingot._base.keys import select
from ingot._base.options import Loading, checked, takes
from ingot._base.progress import reporting_on
from ingot._base.report import Report
from ingot._native import Checkpoint
from ingot.typing import Keys, ReadOptions, Source, Tell

from .door import open_source


@dataclass(frozen=True, slots=True, repr=False)
class TensorStats(Report):
    """Statistics of the values of one tensor. A complex number counts as two values.

    Attributes
    ----------
    dtype : str
        The code in the file, such as ``"BF16"``.
    count : int
        The number of values.
    min, max : int, float or None
        The least and the greatest finite value, an int if the dtype is one of integers. As `mean` and `std`,
        None if no value is finite.
    mean, std : float or None
        Mean and standard deviation of the finite values.
    zeros, nans, infinities : int
        The number of values that are zero, NaN or infinite.
    malformed : int
        The number of values of ``BOOL`` that are neither 0 nor 1.
    bins : tuple of int
        A histogram: the number of values in each of the equal parts of the range from `min` to `max`.
    """

    dtype: str
    count: int
    min: int | float | None
    max: int | float | None
    mean: float | None
    std: float | None
    zeros: int
    nans: int
    infinities: int
    malformed: int
    bins: tuple[int, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Stats(Report):
    """Statistics of the values of tensors. `stats` returns one.

    Attributes
    ----------
    tensors : dict of str to TensorStats
        By name, in the order of `keys` if that is an iterable of names, else in natural order (``layer.2``
        before ``layer.10``).
    unread : dict of str to str
        Tensors of dtypes whose values have no settled layout (6 bits), each with its dtype.

    Examples
    --------
    >>> wte = ingot.stats("model.safetensors").tensors["wte"]
    >>> wte.min, wte.max, wte.mean, wte.zeros
    (0.0, 31.0, 15.5, 1)
    """

    tensors: dict[str, TensorStats]
    unread: dict[str, str]

    def _repr_html_(self) -> str:
        """Return a table for notebooks, with a row for each tensor."""
        # Imported here: it is for notebooks.
        from ingot._base.html import page, table
        from ingot._base.text import plural

        columns = ("dtype", "min", "max", "mean", "std", "zeros", "nans", "infinities")
        rows = [("name", *columns)]
        rows += ((name, *(getattr(one, each) for each in columns)) for name, one in self.tensors.items())
        return page("ingot.Stats", [plural(len(self.tensors), "tensor")], table(rows))


@takes(ReadOptions)
def stats(
    source: Source,
    *,
    keys: Keys | None = None,
    drop: Keys | None = None,
    bins: int = 0,
    **options: Unpack[ReadOptions],
) -> Stats:
    """Return the range, mean and spread of values, and how many are zero, NaN or infinite.

    Parameters
    ----------
    source : ingot.typing.Source
        A file, a sharded checkpoint, a URL, an open file or a buffer, as for `ingot.safe_open`.
    keys, drop : ingot.typing.Keys, optional
        Which tensors to read, all by default, as for `load_file`.
    bins : int
        The number of parts of the histogram of each tensor, from 0 to 1,000. With 0 it is empty, and the
        tensors are read once instead of twice.
    **options
        How to read.

    Returns
    -------
    Stats

    Raises
    ------
    TensorNotFoundError
        A name or a pattern of `keys` or `drop` matches no tensor.
    OSError, HeaderError, CheckpointError, StorageError
        As for `ingot.safe_open`.
    TypeError, OptionError
        An argument has a wrong type or value.

    Notes
    -----
    The tensors are read in parallel, at most a few MiB at a time.

    Examples
    --------
    >>> found = ingot.stats("model.safetensors", keys="*.weight")
    >>> [name for name, tensor in found.tensors.items() if tensor.nans]
    []
    """
    given = checked(stats, locals())
    how, chosen, dropped = Loading.among(given), given["keys"], given["drop"]
    with closing(open_source(source, how)) as checkpoint:
        names = select(checkpoint, chosen, dropped)
        if not isinstance(chosen, tuple):
            names = _native.in_natural_order(names)
        with reporting_on(how.progress, "Reading", checkpoint.path or "") as tell:
            return measured(checkpoint, names, given["bins"], how.threads, tell)


def measured(
    checkpoint: Checkpoint, names: list[str], bins: int, threads: int | None, tell: Tell | None
) -> Stats:
    """Return the statistics of these tensors, in this order."""
    found = _native.statistics(checkpoint, names, bins=bins, threads=threads, progress=tell)
    tensors: dict[str, TensorStats] = {}
    unread: dict[str, str] = {}
    for name, values in zip(names, found, strict=True):
        dtype = checkpoint.info(name).dtype
        if values is None:
            unread[name] = dtype
        else:
            values["bins"] = tuple(values["bins"])
            tensors[name] = TensorStats(dtype, **values)
    return Stats(tensors, unread)
