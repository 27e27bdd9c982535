"""Merge adapters into a base, tensor by tensor and some rows at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy

from ingot import _native
from ingot import numpy as arrays
from ingot._base.checks import FLOATS, format_for
from ingot._base.options import Saving
from ingot._base.text import _escaped, _quoted, located, plural
from ingot._native import Checkpoint, TensorInfo
from ingot._read.kind import kind_of
from ingot._read.load import RAW
from ingot._read.select import Wanted
from ingot._write.cast import metadata_of, state_of
from ingot._write.rearrange import KEPT, united
from ingot._write.save import recorded, rendered
from ingot._write.shards import Place, index
from ingot._write.shards import write as write_shards
from ingot.errors import AdapterError

from ._change import Difference, Replacement, change_of, flat_shape
from ._names import Modules

if TYPE_CHECKING:
    from ingot.numpy import Array
    from ingot.typing import Format, Tell

    from ._adapter import Adapter, Module
    from ._change import Change

# The bytes of the rows that are computed at once, in the dtype of the computation. In memory are four arrays
# of this size, and the bytes of the rows in the dtype of the file.
_BLOCK_NBYTES = 16 << 20
# The bytes of unchanged tensors that are copied at once.
_COPY_NBYTES = 64 << 20
_FILES = (".safetensors", ".bt")


@dataclass(slots=True)
class Target:
    """A tensor of the new file."""

    info: TensorInfo
    changes: list[tuple[float, Adapter, Module | TensorInfo]] = field(default_factory=list)
    replaced: tuple[Adapter, TensorInfo] | None = None
    """The adapter's tensor that replaces the base's. It gets the dtype of the base's."""
    dtype: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.replaced[1].shape if self.replaced else self.info.shape

    @property
    def is_copied(self) -> bool:
        return not self.changes and self.replaced is None

    @property
    def nbytes(self) -> int:
        # Tensors that are computed are floats, of whole bytes.
        same = self.shape == self.info.shape and self.dtype == self.info.dtype
        return self.info.nbytes if same else prod(self.shape) * _NBYTES[self.dtype]


# Numbers from here on are rounded to infinity, or lack a value in the dtype.
_LIMITS = {
    "F64": math.inf,
    "F32": (2 - 2**-24) * 2.0**127,
    "BF16": (2 - 2**-8) * 2.0**127,
    "F16": 65520.0,
    "F8_E5M2": 61440.0,
    "F8_E5M2FNUZ": 61440.0,
    "F8_E4M3": 464.0,
    "F8_E4M3FNUZ": 248.0,
}
_NBYTES = {code: {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}.get(code, 1) for code in FLOATS}


class Weight:
    """A tensor of the base, read some rows at a time in the dtype of the computation."""

    def __init__(self, base: Checkpoint, info: TensorInfo, dtype: str) -> None:
        self._base, self._info, self.dtype = base, info, dtype
        self._last: tuple[tuple[int, int], Array] | None = None

    def rows(self, begin: int, end: int) -> Array:
        """Return these rows. The last ones are kept, since several changes need them."""
        if self._last is None or self._last[0] != (begin, end):
            index = [(slice(begin, end),)] if self._info.shape else None
            self._last = None
            found = self._base.parts(Wanted([self._info.name], index, self.dtype), arrays.wrap)[0]
            self._last = (begin, end), found.reshape(end - begin, flat_shape(self._info.shape)[1])
        return self._last[1]


class Plan:
    """The tensors of the base that change, and their changes."""

    def __init__(self, base: Checkpoint, adapters: Sequence[tuple[Adapter, float]]) -> None:
        self.base = base
        self.path = base.path or "<buffer>"
        self.targets = {info.name: Target(info, dtype=info.dtype) for info in base.infos()}
        shared = base.shared()
        self._tied = {alias: name for alias, (name, _) in shared.items()}
        self._tied |= {name: alias for alias, (name, _) in shared.items()}
        self.unused: dict[str, tuple[Adapter, str]] = {}
        self._modules = Modules(
            name.removesuffix(".weight") for name in base.all_names() if name.endswith(".weight")
        )
        for adapter, scale in adapters:
            self._add(adapter, scale)

    def _add(self, adapter: Adapter, scale: float) -> None:
        owners: dict[str, str] = {}
        for module in adapter.modules.values():
            for suffix, parts in _by_tensor(module):
                names = [adapter_info.name for adapter_info in parts]
                name = self._target(adapter, module, suffix)
                if name is None:
                    self.unused |= dict.fromkeys(names, (adapter, module.path))
                    continue
                if name in owners:
                    reason = (
                        f"modules {_quoted(owners[name])} and {_quoted(module.name)} both change "
                        f"{_quoted(name)} of the base — keys= or drop= chooses one"
                    )
                    raise adapter.unfit(reason, "ambiguous-module", found=name)
                owners[name] = module.name
                change = module if suffix == ".weight" else parts[0]
                scaling = module.scaling if parts[0] is module.parts.get("up_bias") else 1.0
                self.targets[name].changes.append((scale * scaling, adapter, change))
        for name, info in adapter.whole.items():
            self._replace(adapter, scale, name, info)
        self.unused |= {name: (adapter, name) for name in adapter.others}

    def _target(self, adapter: Adapter, module: Module, suffix: str) -> str | None:
        """Return the tensor of the base that a module changes."""
        found = self._modules.find(module.path, module.is_flat)
        if len(found) > 1:
            names = ", ".join(map(_quoted, found[:3]))
            reason = f"module {_quoted(module.name)} may be {names} of the base"
            raise adapter.unfit(f"{reason} — keys= or drop= leaves it out", "ambiguous-module", found=found)
        name = f"{found[0]}{suffix}" if found else None
        return None if name is None else self._checked(adapter, module.name, name)

    def _checked(self, adapter: Adapter, of: str, name: str) -> str | None:
        other = self._tied.get(name)
        if other is not None:
            reason = (
                f"changes {_quoted(name)}, which shares its values with {_quoted(other)} in the base: both "
                "would change — store them separately first"
            )
            raise adapter.unfit(f"{_quoted(of)} {reason}", "tied-target", found=name)
        target = self.targets.get(name)
        if target is not None and (
            target.info.dtype not in FLOATS or (target.info.dtype.startswith("F8") and self._packing)
        ):
            packing = f", {self._packing}" if self._packing else ""
            reason = f"is quantised ({target.info.dtype}{packing}), and an adapter is added to floats"
            raise self._quantised(f"{reason} — dequantise the base first", name, found=target.info.dtype)
        return None if target is None else name

    def _quantised(self, reason: str, tensor: str | None, **facts: Any) -> AdapterError:
        return located(AdapterError, reason, code="quantised-base", path=self.path, tensor=tensor, **facts)

    @property
    def _packing(self) -> str | None:
        return kind_of(self.base.infos(), self.base.metadata() or {}, {}).packing

    def _replace(self, adapter: Adapter, scale: float, name: str, info: TensorInfo) -> None:
        """Add a tensor that was trained whole: a changed one, a resized one or a new one."""
        known = self._whole_name(name)
        if known is None:
            self.targets[name] = Target(info, replaced=(adapter, info), dtype=info.dtype)
            return
        self._checked(adapter, info.name, known)
        target = self.targets[known]
        if any(other is adapter for _, other, _ in target.changes):
            reason = f"replaces {_quoted(known)} of the base, which a module of the same adapter changes"
            raise adapter.unfit(f"{reason} — keys= or drop= chooses one", "ambiguous-module", info.name)
        if target.info.shape == info.shape and target.replaced is None:
            target.changes.append((scale, adapter, info))
        elif scale == 1.0 and target.is_copied:
            target.replaced = adapter, info
        else:
            reason = f"has the shape {list(info.shape)}, and the base {list(target.info.shape)}"
            hint = "one adapter with the scale 1 may replace it"
            raise adapter.unfit(
                f"{reason}: {hint}", "shape-mismatch", info.name, expected=target.info.shape, found=info.shape
            )

    def _whole_name(self, name: str) -> str | None:
        if name in self.targets or name in self._tied:
            return name
        module, dot, last = name.rpartition(".")
        found = self._modules.find(module, is_flat=False)
        names = [f"{one}{dot}{last}" for one in found]
        return names[0] if len(names) == 1 and names[0] in self.targets else None

    def check_used(self) -> None:
        """Raise if a tensor of an adapter changes nothing."""
        if not self.unused:
            return
        _name, (adapter, path) = next(iter(self.unused.items()))
        packing = self._packing
        if packing is not None and not any(target.changes for target in self.targets.values()):
            reason = f"is quantised ({packing}), and an adapter is added to floats"
            raise self._quantised(f"{reason} — dequantise the base first", None, found=packing)
        shown = ", ".join(map(_quoted, list(self.unused)[:3]))
        more = f" and {len(self.unused) - 3:,} more" if len(self.unused) > 3 else ""
        reason = (
            f"{plural(len(self.unused), 'tensor')} of the adapter match no module of {_escaped(self.path)}: "
            f"{shown}{more} — is it the right base? drop= leaves tensors out"
        )
        raise adapter.unfit(reason, "unused-tensors", expected=path, found=[*self.unused])

    def specs(self, names: Sequence[str]) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, self.targets[name].dtype, self.targets[name].shape) for name in names]

    @property
    def changed(self) -> tuple[str, ...]:
        return tuple(name for name, target in self.targets.items() if not target.is_copied)

    def nbytes(self, names: Sequence[str]) -> int:
        return sum(self.targets[name].nbytes for name in names)

    def fill(self, writer: _native.Writer, names: Sequence[str], moved: Callable[[int], None]) -> None:
        """Write these tensors, and report the bytes of each step."""
        copied = [self.targets[name].info for name in names if self.targets[name].is_copied]
        for info, begin, end in _pieces(copied):
            self._copy(writer, info, begin, end)
            moved(info.nbytes * (end - begin) // max(1, flat_shape(info.shape)[0]))
        for name in names:
            target = self.targets[name]
            if not target.is_copied:
                for begin, end, data in self._computed(target):
                    part: Any = slice(begin, end) if target.shape else ...
                    shape = (end - begin, *target.shape[1:]) if target.shape else ()
                    writer.write(name, (target.dtype, shape, data), part, lambda _, given: given)
                    moved(len(data))

    def _copy(self, writer: _native.Writer, info: TensorInfo, begin: int, end: int) -> None:
        height = flat_shape(info.shape)[0]
        row = info.nbytes // max(1, height)
        is_whole = (begin, end) == (0, height)
        part: Any = ... if is_whole else slice(begin, end)
        shape = info.shape if is_whole else (end - begin, *info.shape[1:])
        data = self.base.tensor_bytes(info.name, begin * row, end * row)
        writer.write(info.name, (info.dtype, shape, data), part, lambda _, given: given)

    def _computed(self, target: Target) -> Iterator[tuple[int, int, memoryview]]:
        """Yield the rows of a tensor that changes, in the dtype of the file."""
        # Twice as wide as the result, so that the only rounding that counts is the last one.
        dtype = "F64" if target.dtype in ("F32", "F64") else "F32"
        height, width = flat_shape(target.shape)
        block = max(1, _BLOCK_NBYTES // max(1, width * (8 if dtype == "F64" else 4)))
        replaced = target.replaced or _only_replacement(target)
        if replaced is not None:
            adapter, info = replaced
            stored = Difference(adapter, info, dtype)
            for begin, end in _spans(height, block):
                found = stored.rows(begin, end)
                _check_range(adapter, target, found, found)
                yield begin, end, rounded(found, target.dtype)
            return
        weight = Weight(self.base, target.info, dtype)
        changes = [
            (scale, _change(adapter, change, target.info, weight, block))
            for scale, adapter, change in target.changes
        ]
        for begin, end in _spans(height, block):
            found = _sum(changes, weight, begin, end)
            _check_range(target.changes[-1][1], target, found, weight.rows(begin, end))
            yield begin, end, rounded(found, target.dtype)


class Output:
    """The new file, or a folder with a file for each file of the base."""

    def __init__(self, destination: str, format: Format | None, how: Saving) -> None:
        self.path, self.how, self._format = destination, how, format
        self.is_file = destination.lower().endswith(_FILES)

    def check(self, base: Checkpoint) -> None:
        """Raise if a file exists that must not be replaced."""
        if self.is_file:
            self.how.existing.check(self.path)
        else:
            self._place(base).check(self.how.existing)

    def _place(self, base: Checkpoint) -> Place:
        ending = ".bt" if self._format == "bintensors" else ".safetensors"
        name = os.path.basename(base.path or "").removesuffix(".index.json") if base.is_sharded else ""
        stem = os.path.splitext(name)[0] or "model"
        return Place(self.path, f"{stem}{{suffix}}{ending}")

    def write(self, plan: Plan, metadata: Mapping[str, str] | None, tell: Tell | None) -> None:
        """Write all tensors of the plan."""
        pairs = united(metadata_of(plan.base)) if metadata is KEPT else metadata
        state, _ = state_of(plan.base)
        moved = _Moved(tell, plan.nbytes([*plan.targets]))
        if self.is_file:
            records = {**state, **rendered(recorded(plan.base.shared()))}
            self._one(plan, self.path, [*plan.targets], pairs, records, self.how, moved)
        else:
            self._several(plan, dict(pairs or {}), state, moved)

    def _one(
        self,
        plan: Plan,
        path: str,
        names: Sequence[str],
        pairs: Mapping[str, str] | None,
        records: Mapping[str, str],
        how: Saving,
        moved: Callable[[int], None],
    ) -> None:
        kind = format_for(path, self._format)
        options = how.of_new_file()
        writer = _native.Writer.create(path, plan.specs(names), pairs, kind, records=records, **options)
        with closing(writer):
            plan.fill(writer, names, moved)
            writer.commit()

    def _several(
        self, plan: Plan, pairs: dict[str, str], state: dict[str, str], moved: Callable[[int], None]
    ) -> None:
        place, groups = self._place(plan.base), _groups(plan)
        files = dict(zip(place.names(len(groups)), groups, strict=True))
        of_file = {"format": pairs.get("format", "pt")}
        whole = None
        if len(files) == 1:
            of_file |= pairs
        else:
            rest = {key: text for key, text in pairs.items() if key != "format"}
            whole = index(files, plan.nbytes([*plan.targets]), rest, state)
            state = {}
        shared = plan.base.shared()
        # Temporary names: the files with the final names are checked before.
        new = self.how._replace(overwrite=True)

        def save(path: str, names: list[str]) -> None:
            stored = {*names}
            aliases = {alias: view for alias, view in shared.items() if view[0] in stored}
            self._one(plan, path, names, of_file, {**state, **rendered(recorded(aliases))}, new, moved)

        write_shards(place, files, save, whole, self.how)


class _Moved:
    """Reports the bytes of all tensors."""

    def __init__(self, tell: Tell | None, total: int) -> None:
        self._tell, self._done, self._total = tell, 0, total

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        if self._tell is not None:
            self._tell(min(self._done, self._total), self._total)


def _groups(plan: Plan) -> list[list[str]]:
    """Return the names of the tensors of each file, as in the base. New tensors are in the last one."""
    groups: dict[str | None, list[str]] = {path: [] for path in plan.base.shards} or {None: []}
    last = [*groups][-1]
    for name, target in plan.targets.items():
        is_new = target.replaced is not None and name not in plan.base
        groups[last if is_new or not plan.base.is_sharded else plan.base.shard_of(name)].append(name)
    return [names for names in groups.values() if names] or [[]]


def _by_tensor(module: Module) -> Iterator[tuple[str, list[TensorInfo]]]:
    """Yield the ends of the names of the tensors that a module changes, with the tensors that change them."""
    biases = ("up_bias", "bias_difference")
    weights = [info for part, info in module.parts.items() if part not in biases]
    if [part for part in module.parts if part not in (*biases, "alpha")]:
        yield ".weight", weights
    for part in biases:
        if part in module.parts:
            yield ".bias", [module.parts[part]]


def _change(adapter: Adapter, change: Any, info: TensorInfo, weight: Weight, block: int) -> Change:
    if not isinstance(change, TensorInfo):
        return change_of(adapter, change, info, weight.dtype, weight.rows, block)
    stored = Difference(adapter, change, weight.dtype)
    if flat_shape(change.shape) != flat_shape(info.shape):
        reason = (
            f"has the shape {list(change.shape)}, and {_quoted(info.name)} of the base {list(info.shape)}"
        )
        facts = {"expected": info.shape, "found": change.shape}
        raise adapter.unfit(reason, "shape-mismatch", change.name, **facts)
    if change.name in {one.name for one in adapter.whole.values()}:
        return Replacement(stored, weight.rows)
    return stored


def _only_replacement(target: Target) -> tuple[Adapter, TensorInfo] | None:
    """Return the tensor that replaces a target of the same shape, if nothing else changes the target."""
    if len(target.changes) != 1:
        return None
    scale, adapter, change = target.changes[0]
    # The difference to the base, added to the base, would be rounded.
    if scale == 1.0 and isinstance(change, TensorInfo) and change in adapter.whole.values():
        return adapter, change
    return None


# Infinity and NaN are refused by `_check_range`, with names.
@numpy.errstate(over="ignore", invalid="ignore")
def _sum(changes: Sequence[tuple[float, Change]], weight: Weight, begin: int, end: int) -> Array:
    """Return rows of the base with all changes."""
    found = None
    for scale, change in changes:
        added = change.rows(begin, end)
        if scale != 1.0:
            added *= scale
        found = added if found is None else numpy.add(found, added, out=found)
    assert found is not None
    found += weight.rows(begin, end)
    return found


def _check_range(adapter: Adapter, target: Target, merged: Array, base: Array) -> None:
    """Raise `AdapterError` if numbers that were finite are not finite in the dtype of the result."""
    limit = _LIMITS[target.dtype]
    # Neither comparison holds for NaN. An empty tensor has no extremes.
    if not merged.size or (-limit < merged.min() and merged.max() < limit):
        return
    wrong = ~(numpy.abs(merged) < limit) & numpy.isfinite(base)
    if wrong.any():
        value = float(merged[wrong][0])
        reason = (
            f"would have {value:g}, which is no finite {target.dtype}: are the adapter and its scale right?"
        )
        raise adapter.unfit(reason, "not-finite", target.info.name, expected=target.dtype, found=value)


def _spans(height: int, block: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, height, block):
        yield begin, min(begin + block, height)


def _pieces(infos: Sequence[TensorInfo]) -> Iterator[tuple[TensorInfo, int, int]]:
    """Yield the rows of tensors that are copied at once."""
    for info in infos:
        height = flat_shape(info.shape)[0]
        row = info.nbytes // max(1, height)
        # A row of elements that are smaller than a byte may end inside of one.
        is_packed = info.nbytes % max(1, prod(info.shape)) != 0
        if info.nbytes <= _COPY_NBYTES or is_packed:
            yield info, 0, height
            continue
        for begin, end in _spans(height, max(1, _COPY_NBYTES // row)):
            yield info, begin, end


def rounded(array: Array, code: str) -> memoryview:
    """Return the bytes of an array in the dtype of a file, with the values of PyTorch's ``to``."""
    checkpoint = Checkpoint.from_buffer(arrays.save({"array": array}))
    found: memoryview = checkpoint.parts(Wanted(["array"], None, code), RAW)[0]
    return found[: array.size * _NBYTES[code]]
