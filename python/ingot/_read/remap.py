"""Apply rules of `ingot.remap` to the tensors of a checkpoint.

Each tensor of the result is a list of boxes of stored tensors. Every rule maps such lists to such lists, so
that any sequence of rules is read in one pass.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot._base import layouts as kinds
from ingot._base.checks import CONVERTED
from ingot._base.dtypes import PACKED
from ingot._base.keys import NamedTensors
from ingot._base.keys import select as selected
from ingot._base.text import _escaped, _quoted, brief
from ingot._native import STALE_KEYS, Checkpoint
from ingot.errors import RemapError, TensorNotFoundError

if TYPE_CHECKING:
    from ingot._base.layouts import Rule, Rules


class Side(NamedTuple):
    """A box along one dimension of a tensor, in elements."""

    begin: int
    size: int
    # The distance between its elements in the tensor, and in the stored tensor.
    step: int
    stride: int


class Box(NamedTuple):
    """Elements of a stored tensor, and their place in a tensor."""

    source: str
    # The first element in the stored tensor.
    begin: int
    sides: tuple[Side, ...]
    # The dtypes that the elements are converted to, one after the other.
    casts: tuple[str, ...] = ()

    def along(self, dim: int, side: Side, skipped: int = 0) -> Box:
        """Return the box with another side, whose first element is `skipped` elements further in the file."""
        sides = (*self.sides[:dim], side, *self.sides[dim + 1 :])
        return self._replace(begin=self.begin + skipped, sides=sides)

    def cut(self, dim: int, low: int, high: int, to: int) -> Iterator[Box]:
        """Yield the part from `low` to `high` along a dimension, moved such that `low` becomes `to`."""
        begin, count, step, stride = self.sides[dim]
        first = max(0, -(-(low - begin) // step))
        last = min(count, -(-(high - begin) // step))
        if first < last:
            side = Side(begin + first * step - low + to, last - first, step, stride)
            yield self.along(dim, side, first * stride)


class Virtual(NamedTuple):
    """A tensor of the result: its dtype, its shape and its boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    # The dimension along which ranks slice each of several parts, and the sizes of the parts.
    parts: tuple[int, tuple[int, ...]] | None = None

    @classmethod
    def stored(
        cls, name: str, dtype: str, shape: Iterable[int], strides: Iterable[int] | None = None, begin: int = 0
    ) -> Virtual:
        """Return a stored tensor, or a part of it."""
        sizes = (*shape,)
        sides = _sides(sizes, None if strides is None else (*strides,))
        return cls(dtype, sizes, () if 0 in sizes else (Box(name, begin, sides),))


# Models have many tensors and few shapes.
@lru_cache(maxsize=4096)
def _sides(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[Side, ...]:
    """Return the sides of the box that is a whole tensor."""
    given = _strides(shape) if strides is None else strides
    return tuple(Side(0, size, 1, stride) for size, stride in zip(shape, given, strict=True))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the distances between neighbours in C order."""
    found = [*accumulate(reversed(shape[1:]), lambda product, size: product * max(size, 1), initial=1)]
    return tuple(reversed(found[: len(shape)]))


class Found(NamedTuple):
    """The tensors of the result, the rules that matched nothing, and the tensors that no rule took."""

    tensors: dict[str, Virtual]
    unmatched: list[Rule]
    untaken: list[str]


def applied(checkpoint: Checkpoint, given: Rules) -> Found:
    """Return the tensors that the rules make of stored ones.

    Raises
    ------
    RemapError
        The rules do not fit the tensors.
    """
    table = _Table(checkpoint)
    unmatched = []
    for rule in given.rules:
        try:
            if not _RULES[type(rule)](table, rule):
                unmatched.append(rule)
        except TensorNotFoundError as fault:
            if given.strict:
                raise table.error(rule, str(fault), "rule-unmatched") from None
            unmatched.append(rule)
    if given.strict:
        _check_complete(table, unmatched)
    return Found(table.tensors, unmatched, table.untaken())


def _check_complete(table: _Table, unmatched: list[Rule]) -> None:
    if unmatched:
        raise table.error(unmatched[0], "it matches no tensor", "rule-unmatched")
    untaken = table.untaken()
    if untaken:
        count = "a tensor" if len(untaken) == 1 else f"{len(untaken):,} tensors"
        message = f"no rule takes {count}: {brief(untaken)} — end the rules with select('*') to keep them"
        raise table.error(None, message, "rule-untaken", untaken[0])


def remapped(checkpoint: Checkpoint, given: Rules, proof: tuple[bool, str | None]) -> Checkpoint:
    """Return what the rules make of a checkpoint, whose tensors are first compared with digests."""
    found = applied(checkpoint, given)
    tensors = [_described(*pair) for pair in _in_file_order(checkpoint, found.tensors)]
    metadata = [*_metadata(checkpoint).items()]
    joins = {name: one.parts for name, one in found.tensors.items() if one.parts is not None}
    if proof != (False, None):
        sources = (box.source for one in found.tensors.values() for box in one.boxes)
        checkpoint = checkpoint.proven_copy(dict.fromkeys(sources), *proof)
    return checkpoint.remapped(tensors, metadata, joins)


def _described(name: str, one: Virtual) -> tuple[str, str, tuple[int, ...], tuple[Box, ...]]:
    return name, one.dtype, one.shape, one.boxes


def _in_file_order(checkpoint: Checkpoint, tensors: Mapping[str, Virtual]) -> list[tuple[str, Virtual]]:
    """Return the tensors in the order in which the files have their first elements."""
    numbers = {name: number for number, name in enumerate(checkpoint.offset_names())}

    def first(pair: tuple[str, Virtual]) -> int:
        return min((numbers.get(box.source, 0) for box in pair[1].boxes), default=0)

    return sorted(tensors.items(), key=first)


def _metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the metadata on which all files that have it agree, without entries that describe tensors."""
    values: dict[str, set[str]] = defaultdict(set)
    for pairs in checkpoint.shard_metadata().values():
        for key, value in (pairs or {}).items():
            values[key].add(value)
    return {key: found.pop() for key, found in values.items() if len(found) == 1 and key not in STALE_KEYS}


class _Table:
    """The tensors by their names, as the rules so far have made them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        self.tensors = {
            info.name: Virtual.stored(info.name, info.dtype, info.shape) for info in checkpoint.infos()
        }
        for name, (of, part) in checkpoint.shared().items():
            whole = self.tensors[of]
            if part is None:
                self.tensors[name] = whole
            else:
                shape, strides, begin = part
                self.tensors[name] = Virtual.stored(of, whole.dtype, shape, strides, begin)
        self._taken: set[str] = set()

    def untaken(self) -> list[str]:
        """Return the names that no rule took."""
        return [name for name in self.tensors if name not in self._taken]

    def take(self, rule: Rule, old: Iterable[str], new: Mapping[str, Virtual]) -> None:
        """Replace tensors by those that a rule makes of them."""
        for name in old:
            del self.tensors[name]
        twice = next((name for name in new if name in self.tensors), None)
        if twice is not None:
            raise self.twice(rule, twice)
        self.tensors |= new
        self._taken |= new.keys()

    def twice(self, rule: Rule, name: str) -> RemapError:
        """Return the error for a second tensor of one name."""
        return self.error(rule, "two tensors would have this name", "rule-duplicate", name)

    def select(self, keys: Any) -> list[str]:
        """Return the names that `keys` selects."""
        infos = (Described(name, one.dtype, one.shape) for name, one in self.tensors.items())
        tensors = NamedTensors(None, self.tensors, lambda: infos)  # type: ignore[arg-type, return-value]
        return selected(tensors, keys)

    def error(self, rule: Rule | None, reason: str, code: str, tensor: str | None = None) -> RemapError:
        """Return the error of a rule."""
        where = "" if self.path is None else f"{_escaped(self.path)}: "
        about = "" if tensor is None or rule is None else f"tensor {_quoted(tensor)}: "
        by = "" if rule is None else f"{brief(rule)}: "
        return RemapError(f"{where}{by}{about}{reason}", code=code, path=self.path, tensor=tensor)


class Described(NamedTuple):
    """The name, the dtype and the shape of a tensor, for a callable of `keys`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


# Patterns with placeholders.

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}")


@cache
def _pattern(text: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """Return the regular expression of a pattern, and its placeholders."""
    names: dict[str, None] = {}
    expression, at = "", 0
    for match in _PLACEHOLDER.finditer(text):
        name, is_long = match.groups()
        expression += re.escape(text[at : match.start()])
        expression += f"(?P={name})" if name in names else f"(?P<{name}>{'.+' if is_long else '[^.]+'})"
        names[name], at = None, match.end()
    return re.compile(expression + re.escape(text[at:]), re.DOTALL), tuple(names)


# A number in a stack. A longer one cannot be part of a stack without gaps.
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")

Values = tuple[tuple[str, str], ...]


def _matches(table: _Table, pattern: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the names that match a pattern, and the values of its placeholders."""
    expression, names = _pattern(pattern)
    if not names:
        if pattern in table.tensors:
            yield pattern, {}
        return
    for name in table.tensors:
        match = expression.fullmatch(name)
        if match:
            yield name, match.groupdict()


def _filled(pattern: str, values: Mapping[str, str]) -> str:
    """Return the pattern with values in place of its placeholders."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], pattern)


def _free(
    table: _Table, rule: kinds.Stack | kinds.Join, values: Mapping[str, str], new: Mapping[str, Virtual]
) -> str:
    """Return the name that `values` make, which different values can make too: a.bc and ab.c of {x}{y}."""
    name = _filled(rule.new, values)
    if name in new:
        raise table.twice(rule, name)
    return name


def _check_placeholders(table: _Table, rule: Rule, new: Iterable[str], old: Iterable[str]) -> None:
    """Raise `RemapError` unless all patterns have the same placeholders."""
    expected = {*_pattern(next(iter(old)))[1]}
    for pattern in (*new, *old):
        found = {*_pattern(pattern)[1]}
        if found != expected:
            reason = f"{_quoted(pattern)} has the placeholders {sorted(found)}, expected {sorted(expected)}"
            raise table.error(rule, reason, "invalid-rule")


# The rules. Each returns whether it matched a tensor.


def _rename(table: _Table, rule: kinds.Rename) -> bool:
    missing = {*_pattern(rule.new)[1]} - {*_pattern(rule.old)[1]}
    if missing:
        reason = f"{_quoted(rule.old)} lacks the placeholders {sorted(missing)}"
        raise table.error(rule, reason, "invalid-rule")
    pairs = [(name, _filled(rule.new, values)) for name, values in _matches(table, rule.old)]
    _replace_names(table, rule, pairs)
    return bool(pairs)


def _replace_names(table: _Table, rule: Rule, pairs: list[tuple[str, str]]) -> None:
    new: dict[str, Virtual] = {}
    for old, name in pairs:
        if name in new:
            raise table.twice(rule, name)
        new[name] = table.tensors[old]
    table.take(rule, [old for old, _ in pairs], new)


# The parts of names that wrappers add.
_PARTS = {"torch.compile": "_orig_mod.", "fsdp": "_fsdp_wrapped_module.", "ddp": "module."}


def _unwrap(table: _Table, rule: kinds.Unwrap) -> bool:
    new = {name: name for name in table.tensors}
    is_matched = False
    for wrapper in rule.wrappers:
        part = _PARTS[wrapper]
        before = dict(new)
        if wrapper != "ddp":
            middle = re.compile(rf"(^|\.){re.escape(part)}")
            new = {name: _without(middle, known) for name, known in new.items()}
        elif all(known.startswith(part) for known in new.values()):
            new = {name: known[len(part) :] for name, known in new.items()}
        is_matched |= new != before
    if is_matched:
        _replace_names(table, rule, [*new.items()])
    return is_matched


def _without(part: re.Pattern[str], name: str) -> str:
    while True:
        shorter = part.sub(r"\1", name)
        if shorter == name:
            return name
        name = shorter


def _stack(table: _Table, rule: kinds.Stack) -> bool:
    missing = {*_pattern(rule.old)[1]} ^ {*_pattern(rule.new)[1]}
    if len(missing) != 1 or missing <= {*_pattern(rule.new)[1]}:
        reason = f"{_quoted(rule.old)} must have one placeholder more than {_quoted(rule.new)}"
        raise table.error(rule, reason, "invalid-rule")
    (index,) = missing
    groups: dict[Values, dict[str, str]] = defaultdict(dict)
    for name, values in _matches(table, rule.old):
        number = values.pop(index)
        if not _NUMBER.fullmatch(number):
            reason = f"expected a number in place of {{{index}}}, found {_quoted(number)}"
            raise table.error(rule, reason, "rule-gap", name)
        groups[tuple(values.items())][number] = name
    new: dict[str, Virtual] = {}
    for pairs, numbered in groups.items():
        name = _free(table, rule, dict(pairs), new)
        new[name] = _stacked(table, rule, name, numbered)
    table.take(rule, [old for numbered in groups.values() for old in numbered.values()], new)
    return bool(groups)


def _stacked(table: _Table, rule: kinds.Stack, name: str, numbered: dict[str, str]) -> Virtual:
    """Return the stack of the tensors of these numbers."""
    for number in range(len(numbered)):
        if str(number) not in numbered:
            last = max(map(int, numbered))
            reason = f"number {number} of 0 to {last} is missing"
            raise table.error(rule, reason, "rule-gap", name)
    ordered = [numbered[str(number)] for number in range(len(numbered))]
    first = table.tensors[ordered[0]]
    for other in ordered[1:]:
        one = table.tensors[other]
        # A stack may have many tensors, so the slow check runs only for tensors that differ.
        if (one.dtype, one.shape, one.parts) != (first.dtype, first.shape, first.parts):
            _same(table, rule, ordered[0], other, one, first.shape)
            reason = "ranks cannot slice a stack of which some parts were joined with shard='each'"
            raise table.error(rule, reason, "rule-ranks", other)
    rank = len(first.shape) + 1
    dim = _dim(table, rule, rule.dim, rank, name)
    boxes = [
        Box(source, begin, (*sides[:dim], side, *sides[dim:]), casts)
        for side, old in zip(_numbered(len(ordered)), ordered, strict=True)
        for source, begin, sides, casts in table.tensors[old].boxes
    ]
    shape = (*first.shape[:dim], len(ordered), *first.shape[dim:])
    parts = first.parts and (first.parts[0] + (first.parts[0] >= dim), first.parts[1])
    return Virtual(first.dtype, shape, tuple(boxes), parts)


@lru_cache(maxsize=16)
def _numbered(count: int) -> tuple[Side, ...]:
    """Return the side of each tensor of a stack along the new dimension."""
    return tuple(Side(number, 1, 1, 0) for number in range(count))


def _same(
    table: _Table, rule: Rule, first: str, name: str, one: Virtual, shape: tuple[int | None, ...]
) -> None:
    """Raise `RemapError` unless a tensor has the dtype of `first` and this shape. None is any size."""
    expected = table.tensors[first]
    fits = len(one.shape) == len(shape) and all(
        size in (None, found) for size, found in zip(shape, one.shape, strict=True)
    )
    if one.dtype != expected.dtype or not fits:
        wanted = f"{expected.dtype} {[*expected.shape]} as {_quoted(first)}"
        reason = f"expected {wanted}, found {one.dtype} {[*one.shape]}"
        raise table.error(rule, reason, "rule-shapes", name)


def _dim(table: _Table, rule: Rule, dim: int, rank: int, name: str) -> int:
    if not -rank <= dim < rank:
        reason = f"dimension {dim} of {rank} dimensions"
        raise table.error(rule, reason, "rule-shapes", name)
    return dim % rank


def _join(table: _Table, rule: kinds.Join) -> bool:
    _check_placeholders(table, rule, [rule.new], rule.old)
    by_values: dict[Values, dict[int, str]] = defaultdict(dict)
    for number, pattern in enumerate(rule.old):
        for name, values in _matches(table, pattern):
            by_values[tuple(sorted(values.items()))][number] = name
    new: dict[str, Virtual] = {}
    old: list[str] = []
    for pairs, names in by_values.items():
        values = dict(pairs)
        for number, pattern in enumerate(rule.old):
            if number not in names:
                missing = _filled(pattern, values)
                present = brief([*names.values()])
                raise table.error(rule, f"the part is missing beside {present}", "rule-gap", missing)
        ordered = [names[number] for number in range(len(rule.old))]
        name = _free(table, rule, values, new)
        new[name] = _joined(table, rule, name, ordered)
        old += ordered
    if len(set(old)) < len(old):
        raise table.error(rule, "a part is used twice", "rule-duplicate", next(iter(new)))
    table.take(rule, old, new)
    return bool(new)


def _joined(table: _Table, rule: kinds.Join, name: str, ordered: list[str]) -> Virtual:
    parts = [table.tensors[old] for old in ordered]
    first = parts[0]
    dim = _dim(table, rule, rule.dim, len(first.shape), name)
    shape: tuple[int | None, ...] = (*first.shape[:dim], None, *first.shape[dim + 1 :])
    for old, part in zip(ordered, parts, strict=True):
        _same(table, rule, ordered[0], old, part, shape)
    sizes = tuple(part.shape[dim] for part in parts)
    for old, size in zip(ordered, sizes, strict=True):
        if size % rule.groups:
            reason = f"{size} rows along dimension {dim} are not {rule.groups} groups of one size"
            raise table.error(rule, reason, "rule-shapes", old)
    boxes: list[Box] = []
    period = sum(sizes) // rule.groups
    for at, size, part in zip(accumulate(sizes, initial=0), sizes, parts, strict=False):
        rows = Rows(size // rule.groups, at // rule.groups, period, rule.groups, first.dtype in PACKED)
        boxes += (new for box in part.boxes for new in rows.spread(box, dim, size))
    whole = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
    return Virtual(first.dtype, whole, tuple(boxes), _parts(table, rule, name, parts, dim, sizes))


def _parts(
    table: _Table, rule: kinds.Join, name: str, joined: list[Virtual], dim: int, sizes: tuple[int, ...]
) -> tuple[int, tuple[int, ...]] | None:
    """Return the parts that ranks slice one by one."""
    known = {one.parts for one in joined}
    if known == {None}:
        return (dim, sizes) if rule.shard == "each" else None
    (same,) = known if len(known) == 1 else (None,)
    if rule.shard is None and same is not None and same[0] != dim:
        return same
    reason = "ranks cannot slice parts that were joined with shard='each' and then joined or cut again"
    raise table.error(rule, reason, "rule-ranks", name)


class Rows(NamedTuple):
    """Rows of a part among the rows of several parts that take turns."""

    # The rows of the part in a group, the first of them in the group, and the rows of all parts in a group.
    size: int
    first: int
    period: int
    groups: int
    # A single row may be less than a byte, so whole groups are read.
    is_packed: bool

    @property
    def has_short_groups(self) -> bool:
        """Return whether one box for each row of a group makes fewer boxes than one for each group."""
        return self.size < self.groups and not self.is_packed

    def spread(self, box: Box, dim: int, rows: int) -> Iterator[Box]:
        """Yield a box of the part, which has `rows` rows, in the joined tensor."""
        begin, count, step, stride = box.sides[dim]
        if self.groups == 1:
            yield box.along(dim, Side(begin + self.first, count, step, stride))
        elif self.size == 1:
            yield box.along(dim, Side(begin * self.period + self.first, count, step * self.period, stride))
        elif self.has_short_groups and (begin, count, step) == (0, rows, 1):
            for row in range(self.size):
                side = Side(self.first + row, self.groups, self.period, stride * self.size)
                yield box.along(dim, side, row * stride)
        else:
            for group in range(self.groups):
                low = group * self.size
                yield from box.cut(dim, low, low + self.size, group * self.period + self.first)

    def gather(self, box: Box, dim: int) -> Iterator[Box]:
        """Yield the rows of the part in a box of the joined tensor."""
        begin, count, step, stride = box.sides[dim]
        is_whole = (begin, count, step) == (0, self.period * self.groups, 1)
        if is_whole and self.has_short_groups:
            for row in range(self.size):
                side = Side(row, self.groups, self.size, stride * self.period)
                yield box.along(dim, side, (self.first + row) * stride)
            return
        for group in range(self.groups):
            low = group * self.period + self.first
            yield from box.cut(dim, low, low + self.size, group * self.size)


def _split(table: _Table, rule: kinds.Split) -> bool:
    _check_placeholders(table, rule, rule.new, [rule.old])
    new: dict[str, Virtual] = {}
    old: list[str] = []
    for name, values in _matches(table, rule.old):
        names = [_filled(pattern, values) for pattern in rule.new]
        pairs = zip(names, _cut(table, rule, name), strict=True)
        for part, one in pairs:
            if part in new:
                raise table.twice(rule, part)
            new[part] = one
        old.append(name)
    table.take(rule, old, new)
    return bool(new)


def _cut(table: _Table, rule: kinds.Split, name: str) -> Iterator[Virtual]:
    """Yield the parts of a tensor."""
    one = table.tensors[name]
    dim = _dim(table, rule, rule.dim, len(one.shape), name)
    size, count = one.shape[dim], len(rule.new)
    sizes = rule.sizes or (size // count,) * count
    if sum(sizes) != size or any(part % rule.groups for part in sizes):
        reason = f"{size} rows along dimension {dim} are not {count} parts"
        given = f" of {[*rule.sizes]} rows" if rule.sizes else " of one size"
        groups = f" in {rule.groups} groups" if rule.groups > 1 else ""
        raise table.error(rule, reason + given + groups, "rule-shapes", name)
    if one.parts is not None and one.parts[0] == dim:
        reason = "ranks cannot slice parts that were joined with shard='each' and then cut again"
        raise table.error(rule, reason, "rule-ranks", name)
    for at, rows in zip(accumulate(sizes, initial=0), sizes, strict=False):
        rest = (at // rule.groups, size // rule.groups, rule.groups, one.dtype in PACKED)
        turns = Rows(rows // rule.groups, *rest)
        boxes = tuple(new for box in one.boxes for new in turns.gather(box, dim))
        shape = (*one.shape[:dim], rows, *one.shape[dim + 1 :])
        # An empty tensor has no boxes.
        yield Virtual(one.dtype, shape, () if 0 in shape else boxes, one.parts)


def _each(
    table: _Table, rule: kinds.Transpose | kinds.Cast, changed: Callable[[str, Virtual], Virtual]
) -> bool:
    """Replace the selected tensors in place."""
    names = table.select(rule.keys)
    for name in names:
        table.tensors[name] = changed(name, table.tensors[name])
    table._taken.update(names)
    return bool(names)


def _transpose(table: _Table, rule: kinds.Transpose) -> bool:
    def permuted(name: str, one: Virtual) -> Virtual:
        rank = len(one.shape)
        given = rule.dims if rule.dims is not None else tuple(range(rank))[::-1]
        if len(given) != rank:
            reason = f"dims has {len(given)} numbers for {rank} dimensions"
            raise table.error(rule, reason, "rule-shapes", name)
        dims = tuple(_dim(table, rule, dim, rank, name) for dim in given)
        if len(set(dims)) < rank:
            raise table.error(rule, f"dims has a dimension twice: {[*given]}", "rule-shapes", name)
        boxes = tuple(box._replace(sides=tuple(box.sides[dim] for dim in dims)) for box in one.boxes)
        parts = one.parts and (dims.index(one.parts[0]), one.parts[1])
        return Virtual(one.dtype, tuple(one.shape[dim] for dim in dims), boxes, parts)

    return _each(table, rule, permuted)


def _cast(table: _Table, rule: kinds.Cast) -> bool:
    def converted(name: str, one: Virtual) -> Virtual:
        if one.dtype in PACKED:
            reason = f"{one.dtype} is not converted to {rule.dtype} — leave the tensor out of keys"
            raise table.error(rule, reason, "no-conversion", name)
        if one.dtype not in CONVERTED or one.dtype == rule.dtype:
            return one
        boxes = tuple(box._replace(casts=(*box.casts, rule.dtype)) for box in one.boxes)
        return one._replace(dtype=rule.dtype, boxes=boxes)

    return _each(table, rule, converted)


def _select(table: _Table, rule: kinds.Select) -> bool:
    names = table.select(rule.keys)
    table.tensors = {name: table.tensors[name] for name in names}
    table._taken.update(names)
    return bool(names) or rule.keys == "*"


def _drop(table: _Table, rule: kinds.Drop) -> bool:
    names = table.select(rule.keys)
    table.take(rule, names, {})
    return bool(names)


_RULES: dict[type, Callable[[_Table, Any], bool]] = {
    kinds.Rename: _rename,
    kinds.Unwrap: _unwrap,
    kinds.Stack: _stack,
    kinds.Join: _join,
    kinds.Split: _split,
    kinds.Transpose: _transpose,
    kinds.Cast: _cast,
    kinds.Select: _select,
    kinds.Drop: _drop,
}
