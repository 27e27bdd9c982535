"""Reading less than a whole file, or into memory that is there already."""

from __future__ import annotations

from itertools import filterfalse, islice
from typing import Generic, NamedTuple, TypeVar

from ._open import indexed, moved, tensors
from .errors import DestinationError, OptionError, SliceError, TensorNotFoundError, _escaped, _quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping
    from typing import Any, TypedDict

    from ._native import Checkpoint, Destinations, TensorInfo, Wrap
    from ._progress import Progress
    from ._reads import Reads
    from .typing import StorageOptions

    # The code of the dtype, a capsule or a buffer, and whether the buffer is of a tensor without dimensions.
    Memory = tuple[str, Any, bool]
    # What fills tensors of a framework.
    Into = Callable[[Checkpoint, "Wanted", Mapping[str, Any], Reads], None]
    # `tensor[index]` by the rules of a framework.
    At = Callable[[Any, Any], Any]

    class LoadOptions(TypedDict, total=False):
        """What every framework's `load_file` takes, but for what decides what it returns."""

        backend: str
        keys: Iterable[str] | None
        prefix: str | tuple[str, ...] | None
        where: Callable[[TensorInfo], object] | None
        slices: Mapping[str, Any] | None
        threads: int | None
        progress: Progress
        verify: bool
        expected_sha256: str | None
        storage_options: StorageOptions | None


Tensor = TypeVar("Tensor")

# Codes of the dtypes that floats are converted to.
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


class Wanted(NamedTuple):
    """What is to be read, a column for each question: of many tensors no object is made for each."""

    # In the file.
    names: list[str]
    # Into each; None where all are wanted whole.
    indices: list[Any] | None = None
    # What to convert to, all or each; None for what is stored.
    dtypes: str | list[str] | None = None

    def some(self, ranks: list[int]) -> Wanted:
        """What is wanted of the tensors at these places."""
        names = [self.names[rank] for rank in ranks]
        indices = None if self.indices is None else [self.indices[rank] for rank in ranks]
        dtypes = [self.dtypes[rank] for rank in ranks] if isinstance(self.dtypes, list) else self.dtypes
        return Wanted(names, indices, dtypes)


class Selected(NamedTuple, Generic[Tensor]):
    """What `load_file` was asked for: which tensors, how much of each, as what and to where."""

    keys: Iterable[str] | None = None
    prefix: str | tuple[str, ...] | None = None
    where: Callable[[TensorInfo], object] | None = None
    slices: Mapping[str, Any] | None = None
    dtype: str | None = None
    out: Mapping[str, Tensor] | None = None

    def is_everything(self) -> bool:
        """Whether it is the whole file as it is."""
        return all(option is None for option in self)

    def names(self, checkpoint: Checkpoint, others: Mapping[str, str] | None = None) -> dict[str, str]:
        """The tensors that `keys`, `prefix` and `where` all admit: in the order of `keys`, else of the file.

        Each with its name in the file. `others` are more names that tensors of the file have, with that one.
        """
        others = {} if others is None else others
        names = self._asked(checkpoint, others)
        if self.prefix is not None:
            names = self._below(checkpoint, self.prefix, names)
        if self.where is not None:
            names = [name for name in names if self.where(checkpoint.info(others.get(name, name)))]
        # There may be many of these, so that no Python code runs for each.
        found = dict(zip(names, map(others.get, names, names), strict=True))
        for option, mapping in (("slices", self.slices), ("out", self.out)):
            self._refuse_unselected(checkpoint, option, mapping or {}, found, others)
        return found

    def _asked(self, checkpoint: Checkpoint, others: Mapping[str, str]) -> list[str]:
        if self.keys is None:
            return [*checkpoint.offset_names(), *others]
        if isinstance(self.keys, str):
            # A str is an iterable of str, so it would be taken for the names of its letters.
            raise TypeError("keys must be an iterable of str, not a str")
        names = list(dict.fromkeys(self.keys))
        for name in names:
            if name not in others and name not in checkpoint:
                checkpoint.info(name)
        return names

    @staticmethod
    def _below(checkpoint: Checkpoint, prefix: str | tuple[str, ...], names: list[str]) -> list[str]:
        prefixes = prefix if isinstance(prefix, tuple) else (prefix,)
        for one in prefixes:
            if not isinstance(one, str):
                raise TypeError(f"prefix must be a str or a tuple of str, found {type(one).__name__}")
        found = [name for name in names if name.startswith(prefixes)]
        if names and prefixes and not found:
            tops = dict.fromkeys(name.partition(".")[0] for name in names)
            some = ", ".join(map(_quoted, islice(tops, 3))) + (", …" if len(tops) > 3 else "")
            where = "" if checkpoint.path is None else f"{_escaped(checkpoint.path)}: "
            raise TensorNotFoundError(
                f"{where}no tensor has a name that begins with {' or '.join(map(_quoted, prefixes))}: "
                f"names begin with {some}",
                code="unknown-prefix",
                path=checkpoint.path,
                expected=tuple(tops),
                found=prefix,
            )
        return found

    def _refuse_unselected(
        self,
        checkpoint: Checkpoint,
        option: str,
        mapping: Mapping[str, Any],
        names: Container[str],
        others: Container[str],
    ) -> None:
        for name in filterfalse(names.__contains__, mapping):
            if name not in others:
                # Says so where there is no such tensor at all.
                checkpoint.info(name)
            raise OptionError(
                f"{option} has tensor {_quoted(name)}, which keys, prefix and where leave out",
                code="not-selected",
                path=checkpoint.path,
                tensor=name,
            )

    def of(self, name: str) -> Any:
        """The index into the tensor `name`; None for all of it."""
        if self.slices is None or name not in self.slices:
            return None
        index = self.slices[name]
        # One that adds a dimension, as `(None,)` does and as it means the same between brackets.
        return (None,) if index is None else index

    def is_plain(self) -> bool:
        """Whether tensors come whole and as they are."""
        return self.slices is None and self.dtype is None and self.out is None


def chosen(
    checkpoint: Checkpoint,
    selected: Selected[Any],
    wrap: Wrap,
    move: Callable[[Any], Any] | None,
    reads: Reads,
    at: At,
    into: Into | None = None,
) -> dict[str, Any]:
    """The tensors that were asked for, on the device that `move` takes them to."""
    if selected.is_everything():
        return tensors(checkpoint, None, wrap, move, reads)
    names = selected.names(checkpoint)
    if selected.is_plain():
        return tensors(checkpoint, names, wrap, move, reads)
    refuse_unproven(checkpoint, reads)
    found = load(checkpoint, selected, names, wrap, reads, at, into)
    if move is not None:
        for name in found.keys() - (selected.out or {}).keys():
            found[name] = moved(checkpoint, name, found[name], move)
    return found


def refuse_unproven(checkpoint: Checkpoint, reads: Reads) -> None:
    """Raise `OptionError` if tensors shall be compared that do not come whole and as they are."""
    if reads.proves():
        option = "verify" if reads.proof[0] else "expected_sha256"
        raise OptionError(
            f"{option} is for whole tensors as they are: it goes with keys, prefix and where, not with "
            "slices, dtype or out — call ingot.verify first",
            code="not-provable",
            path=checkpoint.path,
        )


def load(
    checkpoint: Checkpoint,
    selected: Selected[Any],
    names: Mapping[str, str],
    wrap: Wrap,
    reads: Reads,
    at: At,
    into: Into | None = None,
) -> dict[str, Any]:
    """The tensors of `names`, each with its name in the file. `into` fills those that have a place.

    `at` is for the indices that files are not read by: masks, arrays, several lists. Then the whole tensor is
    read, as `TensorSlice` does.
    """
    out = selected.out or {}
    # There may be many of them, so that no Python code runs for each where it need not.
    places = wanted(checkpoint, selected, out, names)
    for name, index in zip(out, places.indices or (), strict=False):
        if index is None and selected.of(name) is not None:
            raise SliceError(
                f"tensor {_quoted(name)}: its index in slices is one that only frameworks know, which goes "
                "without a place in out: expected ints, slices, None, ... and one list of ints",
                code="index",
                path=checkpoint.path,
                tensor=name,
            )
    fresh = list(filterfalse(out.__contains__, names)) if len(out) < len(names) else []
    others = wanted(checkpoint, selected, fresh, names)
    filling, reading = reads.shares(
        lambda: checkpoint.parts_nbytes(places), lambda: checkpoint.parts_nbytes(others)
    )
    if out and into is not None:
        # First, because it may be refused.
        into(checkpoint, places, out, filling)
    read = dict(zip(fresh, checkpoint.parts(others, wrap, **reading.options()), strict=True))
    for name, index in zip(fresh, others.indices or (), strict=False):
        asked = selected.of(name)
        if index is None and asked is not None:
            read[name] = indexed(checkpoint, names[name], read[name], asked, at)
    # The first gives the order, the others all values.
    return {**names, **read, **out}


def wanted(
    checkpoint: Checkpoint, selected: Selected[Any], some: Iterable[str], names: Mapping[str, str]
) -> Wanted:
    """What is to be read of `some` tensors of `names`, each of which has its name in the file.

    All of those that have an index which files are not read by.
    """
    whole = Wanted(list(map(names.__getitem__, some)), None, selected.dtype)
    if selected.slices is None:
        return whole
    indices = list(map(selected.of, some))
    distinct = {id(index): index for index in indices}
    found = whole._replace(indices=indices)
    if all(map(_is_basic, distinct.values())) or _is_read(checkpoint, found):
        return found
    each = zip(whole.names, indices, strict=True)
    read = [_is_read(checkpoint, Wanted([name], [index], selected.dtype)) for name, index in each]
    return whole._replace(
        indices=[index if is_read else None for index, is_read in zip(indices, read, strict=True)]
    )


def _is_basic(index: Any) -> bool:
    """Whether it is made of what every file is read by, as nearly all are."""
    parts = index if type(index) is tuple else (index,)
    return set(map(type, parts)) <= {int, slice, type(None), type(...)}


def _is_read(checkpoint: Checkpoint, wanted: Wanted) -> bool:
    """Whether files are read by all of these indices."""
    try:
        checkpoint.parts_nbytes(wanted)
    except NotImplementedError:
        return False
    return True


def fill(
    checkpoint: Checkpoint,
    wanted: Wanted,
    destinations: Destinations,
    reads: Reads,
) -> None:
    """Read what is wanted into memory of others."""
    checkpoint.fill(wanted, destinations, **reads.options())


def float_code(code: str | None, dtype: object) -> str:
    """`code`, which is that of `dtype`, if floats are converted to it."""
    if code in FLOATS:
        return code
    near = str(dtype).upper().replace("FP", "F")
    hint = f": did you mean {near!r}?" if near in FLOATS else ""
    raise OptionError(
        f"dtype {dtype!r} is none that floats are converted to: expected one of {', '.join(FLOATS)}, "
        f"or what a framework calls one of them{hint}",
        code="no-conversion",
        expected=FLOATS,
        found=dtype,
    )


def misfit(name: str, reason: str, code: str = "destination") -> DestinationError:
    """The refusal to read the tensor `name` into memory of the caller."""
    return DestinationError(f"tensor {_quoted(name)}: {reason}", code=code, tensor=name)
