"""Select the tensors of a load: names, parts, dtypes and destinations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ingot._base.keys import select
from ingot._base.text import _quoted
from ingot.errors import OptionError

if TYPE_CHECKING:
    from ingot._base.keys import Selector
    from ingot._base.options import Loading
    from ingot._native import Checkpoint

Tensor = TypeVar("Tensor")


class Label(str):
    """The name of a destination in messages. It equals only itself, since any text may be a tensor's name."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    __ne__ = object.__ne__
    __hash__ = object.__hash__


# Takes the place of dtypes: each tensor is converted to the dtype of its destination.
OF_DESTINATIONS = "destinations"


class Wanted(NamedTuple):
    """The wanted parts, in columns, since an object for each of many tensors would take time."""

    # The names in the file.
    names: list[str]
    # The index into each tensor; None if all are wanted whole.
    indices: list[Any] | None = None
    # The dtype of all or of each, or `OF_DESTINATIONS`; None for the stored dtypes.
    dtypes: str | list[str] | None = None

    def some(self, ranks: list[int]) -> Wanted:
        """Return the part of these tensors, given by their positions."""
        names = [self.names[rank] for rank in ranks]
        indices = None if self.indices is None else [self.indices[rank] for rank in ranks]
        dtypes = [self.dtypes[rank] for rank in ranks] if isinstance(self.dtypes, list) else self.dtypes
        return Wanted(names, indices, dtypes)


class Selected(NamedTuple, Generic[Tensor]):
    """The selection of a load: names, parts, dtypes and destinations."""

    keys: Selector | None = None
    drop: Selector | None = None
    slices: Mapping[str, Any] | None = None
    dtype: str | None = None
    out: Mapping[str, Tensor] | None = None
    # The labels in `slices` and `out` of the several destinations of a tensor.
    several: Mapping[str, list[Label]] | None = None

    @classmethod
    def by(cls, how: Loading, out: Mapping[str, Tensor | list[Tensor]] | None) -> Selected[Any]:
        """Return the selection that the options of a load describe."""
        # Several destinations have as many slices. Looking at each of many takes time.
        if out is None or not how.slices or list not in set(map(type, out.values())):
            single: Any = out
            return cls(how.keys, how.drop, how.slices, how.dtype, single)
        slices, own, several = _apart(dict(how.slices), out)
        return cls(how.keys, how.drop, slices, how.dtype, own, several)

    def names(self, checkpoint: Checkpoint, *, aliases: bool = False) -> dict[str, str]:
        """Return the selected tensors: in the order of an iterable of `keys`, else of the file.

        Each comes with its name in the file. Without `keys`, aliases are included if `aliases` is True.
        """
        keys = tuple(checkpoint.all_names()) if aliases and self.keys is None else self.keys
        # There may be many, so no Python code runs for each.
        if keys is None and self.drop is None:
            names = checkpoint.offset_names([*(self.out or ())])
        else:
            names = select(checkpoint, keys, self.drop)
        found = dict(zip(names, names, strict=True))
        for name, labels in (self.several or {}).items():
            if name in found:
                found |= dict.fromkeys(labels, found.pop(name))
        for option, mapping in (("slices", self.slices), ("out", self.out)):
            self._refuse_unselected(checkpoint, option, mapping or {}, found)
        return found

    def grouped(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors by the caller's names: a list for a tensor with several destinations."""
        if self.several is None:
            return found
        lists = {name: [found.pop(label) for label in labels] for name, labels in self.several.items()}
        return found | lists

    def _refuse_unselected(
        self,
        checkpoint: Checkpoint,
        option: str,
        mapping: Mapping[str, Any],
        names: Collection[str],
    ) -> None:
        if not mapping or [*mapping] == [*names]:
            # Names are compared faster than they are looked up.
            return
        given: dict[str, str] = {
            label: name for name, labels in (self.several or {}).items() for label in labels
        }
        for label in filterfalse(names.__contains__, mapping):
            name = given.get(label, label)
            # Raises if the file has no such tensor.
            checkpoint.info(name)
            raise OptionError(
                f"{option} has tensor {_quoted(name)}, which keys and drop leave out",
                code="not-selected",
                path=checkpoint.path,
                tensor=name,
            )

    def of(self, name: str) -> Any:
        """Return the index into the tensor `name`, or None for all of it."""
        if self.slices is None or name not in self.slices:
            return None
        index = self.slices[name]
        # An index that adds a dimension: `(None,)` has this meaning in brackets too.
        return (None,) if index is None else index

    def is_plain(self) -> bool:
        """Return whether tensors are loaded whole and unconverted."""
        return self.slices is None and self.dtype is None and self.out is None

    def only_fills(self, names: Mapping[str, str]) -> bool:
        """Return whether each of `names` is read whole into memory of the caller."""
        return self.slices is None and self.out is not None and len(self.out) == len(names)


def _apart(
    slices: dict[str, Any], out: Mapping[str, Tensor | list[Tensor]]
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, list[Label]]]:
    """Return `slices` and `out` with a label for each of several destinations, and the labels."""
    own: dict[str, Any] = {}
    several: dict[str, list[Label]] = {}
    for name, given in out.items():
        if not isinstance(given, list):
            own[name] = given
            continue
        indices = slices.pop(name, None)
        if not isinstance(indices, list) or len(indices) != len(given):
            found = f"a list of {len(indices)}" if isinstance(indices, list) else type(indices).__name__
            raise OptionError(
                f"tensor {_quoted(name)}: out has a list of {len(given)} destinations, so slices needs a "
                f"list of as many indices: found {found}",
                code="slices-and-out",
                tensor=name,
                expected=len(given),
                found=indices,
            )
        several[name] = [Label(f"{name}[{number}]") for number in range(len(given))]
        own |= zip(several[name], given, strict=True)
        slices |= zip(several[name], indices, strict=True)
    return slices, own, several


def wanted(
    checkpoint: Checkpoint, selected: Selected[Any], some: Iterable[str], names: Mapping[str, str]
) -> Wanted:
    """Return the wanted parts of `some` of `names`, which maps to names in the file.

    Tensors with an index that files do not support are read whole.
    """
    chosen = list(some)
    # All are in the order of `names`.
    sources = list(map(names.__getitem__, chosen)) if len(chosen) < len(names) else list(names.values())
    whole = Wanted(sources, None, selected.dtype)
    if selected.slices is None:
        return whole
    indices = list(map(selected.of, chosen))
    distinct = {id(index): index for index in indices}
    found = whole._replace(indices=indices)
    if all(map(_is_basic, distinct.values())) or is_read(checkpoint, found):
        return found
    each = zip(whole.names, indices, strict=True)
    read = [is_read(checkpoint, Wanted([name], [index], selected.dtype)) for name, index in each]
    return whole._replace(
        indices=[index if is_read else None for index, is_read in zip(indices, read, strict=True)]
    )


def _is_basic(index: Any) -> bool:
    """Return whether an index has only parts by which every file is read, as nearly all have."""
    parts = index if type(index) is tuple else (index,)
    return set(map(type, parts)) <= {int, slice, type(None), type(...)}


def is_read(checkpoint: Checkpoint, wanted: Wanted) -> bool:
    """Return whether files are read by all of these indices."""
    try:
        checkpoint.parts_nbytes(wanted)
    except NotImplementedError:
        return False
    return True
