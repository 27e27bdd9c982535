"""What the tensors of a file show: a LoRA and its rank, a language model and its size, a quantisation.

The rules are in one file, ``js/src/kinds.json``, which the viewer reads too. This module applies them to
names, dtypes and shapes; js/viewer/kind.js does the same, and tests compare both. Metadata and the
configuration beside a model only decide between possibilities that the tensors leave open.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any, NamedTuple, TypeAlias

from ingot._native import is_url
from ingot.errors import CheckpointError

from .config import CONFIG, file_beside

Shape: TypeAlias = "tuple[int | None, ...]"

ADAPTER_CONFIG = "adapter_config.json"
# Names of models differ mostly in numbers. The rules do not know files with more forms of names.
_MOST_FORMS = 5000
_NUMBER = re.compile(r"(?<![^._])[0-9]+(?![^._])")
# The share of the bytes that a dtype needs to be the dtype of a model.
_MAIN_SHARE = 0.9


class Kind(NamedTuple):
    """What a file is. Fields that the tensors do not show are None, and the text omits them."""

    kind: str | None
    base: str | None
    """The architecture. Of an adapter, the architecture that it adapts."""
    rank: tuple[int, int] | None
    """The least and the greatest rank of an adapter."""
    alpha: float | str | None
    """The alpha of an adapter in its metadata or configuration, or "stored" if only its tensors have it."""
    packing: str | None
    """The quantisation."""
    dtype: str | None
    """The dtype of nearly all bytes, if the tensors are not quantised."""
    text: str
    """All of it in one line."""


class Tensor(NamedTuple):
    """A tensor, or a weight that an adapter or a quantised module implies."""

    name: str
    dtype: str
    shape: Shape


def kind_of(
    tensors: Iterable[Any], metadata: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]]
) -> Kind:
    """Return what a file is.

    `tensors` have a name, a dtype and a shape. `beside` maps the names ``config.json`` and
    ``adapter_config.json`` to their contents, as far as these files exist.
    """
    rules = _rules()
    stored = [Tensor(one.name, one.dtype, tuple(one.shape)) for one in tensors if one.shape is not None]
    names = _Names(stored)
    texts = {**beside, "metadata": metadata}
    found = _first(rules["kinds"], names, rules, before_adapters=True)
    adapter = None if found else _adapter(names, rules)
    if adapter is not None:
        return _of_adapter(adapter, stored, names, texts, rules)
    packing, implied = _unpacked(names, stored, rules)
    found = found or _first(rules["kinds"], implied, rules)
    base, notes = _supported(found, texts, "model", rules)
    kind = _variant(found["kind"], implied, rules) if found else None
    shown = [] if kind in rules["silent"] and base[0] else [kind]
    details = _details(found, implied, rules) if found else []
    dtype = None if packing else _main_dtype(stored)
    parts = [*shown, base[1], *details, packing, *notes]
    return Kind(kind, base[0], None, None, packing, dtype, _joined(parts, dtype))


def configurations(path: str) -> dict[str, dict[str, Any]]:
    """Return the configurations beside a local model, by file name. Invalid ones are left out.

    A folder may hold several models, so only files with the standard names of libraries have them.
    """
    found: dict[str, dict[str, Any]] = {}
    if is_url(path) or not re.search(_rules()["ownsConfig"], os.path.basename(path)):
        return found
    for name in (CONFIG, ADAPTER_CONFIG):
        with suppress(OSError, ValueError, RecursionError, CheckpointError):
            file = file_beside(path, name)
            value = json.loads(file.data) if file is not None else None
            if isinstance(value, dict):
                found[name] = value
    return found


@cache
def _rules() -> dict[str, Any]:
    text = files("ingot").joinpath("web", "src", "kinds.json").read_text("utf-8")
    rules: dict[str, Any] = json.loads(text)
    return rules


def _joined(parts: Iterable[str | None], dtype: str | None) -> str:
    """Return the statement, which is empty if only the dtype is known."""
    said = [part for part in parts if part]
    return ", ".join([*said, dtype] if said and dtype else said)


# Names.


class _Names:
    """The names of tensors, searched by the patterns of the rules."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.forms: dict[str, list[Tensor]] = {}
        for one in tensors:
            form = _NUMBER.sub("#", one.name)
            self.forms.setdefault(form.replace("\n", " ") if "\n" in form else form, []).append(one)
        self._text = "\n" + "\n".join(self.forms) + "\n" if len(self.forms) <= _MOST_FORMS else ""
        self._tensors = tensors
        self._matches: dict[str, list[Tensor]] = {}

    def matching(self, pattern: str) -> list[Tensor]:
        """Return the tensors whose names match a pattern."""
        found = self._matches.get(pattern)
        if found is None:
            found = self._matches[pattern] = [*self._found(pattern)]
        return found

    def _found(self, pattern: str) -> Iterator[Tensor]:
        if not _has_number(pattern):
            for form in _in_text(pattern).findall(self._text):
                yield from self.forms[form]
        elif self._text and self.matching(_NUMBER.sub("#", pattern)):
            exact = _exact(pattern)
            yield from (one for one in self.matching(_NUMBER.sub("#", pattern)) if exact.fullmatch(one.name))

    def ending(self, suffix: str) -> Iterator[Tensor]:
        """Yield the tensors whose names end with a suffix."""
        form_suffix = _NUMBER.sub("#", suffix)
        for form, tensors in self.forms.items():
            if form.endswith(form_suffix):
                yield from (one for one in tensors if one.name.endswith(suffix))

    def satisfies(self, condition: str) -> bool:
        """Return whether a tensor fulfils a condition: a pattern, with a shape or a least number."""
        pattern, *more = condition.split(" ")
        found = self.matching(pattern)
        for one in more:
            if one.startswith("["):
                found = [tensor for tensor in found if _has_shape(tensor.shape, one)]
            else:
                least = int(one.removesuffix(".."))
                found = [tensor for tensor in found if (_number(pattern, tensor.name, 0) or 0) >= least]
        return bool(found)

    def numbers(self, pattern: str, place: int) -> int | None:
        """Return how many numbers the names have at a `#` of a pattern. None if one from 0 on is missing."""
        found = {_number(pattern, tensor.name, place) for tensor in self.matching(pattern)}
        return len(found) if found and found == {*range(len(found))} else None

    def length(self, pattern: str, axis: int) -> int | None:
        """Return the length along an axis, if all tensors of a pattern have the same."""
        found = {one.shape[axis] if axis < len(one.shape) else None for one in self.matching(pattern)}
        return found.pop() if len(found) == 1 else None


def _has_number(pattern: str) -> bool:
    return _NUMBER.search(pattern) is not None


@cache
def _in_text(pattern: str) -> re.Pattern[str]:
    return re.compile(f"(?<=\n)(?:{_expression(pattern, '#')})(?=\n)")


@cache
def _exact(pattern: str) -> re.Pattern[str]:
    return re.compile(_expression(pattern, "([0-9]+)"))


def _expression(pattern: str, number: str) -> str:
    signs = {"*": "[^\n]*", "#": number, ".": "[._]", "|": "|"}
    return "".join(signs.get(one) or (one if one.isalnum() or one == "_" else f"\\{one}") for one in pattern)


def _number(pattern: str, name: str, place: int) -> int | None:
    found = _exact(pattern).fullmatch(name)
    numbers = [one for one in found.groups() if one is not None] if found else []
    return int(numbers[place]) if place < len(numbers) else None


def _has_shape(shape: Shape, wanted: str) -> bool:
    return any(_is_shape(shape, one.strip("[]").split(",")) for one in wanted.split("]|["))


def _is_shape(shape: Shape, wanted: Sequence[str]) -> bool:
    if len(shape) != len(wanted):
        return False
    return all(
        text == "?" or str(length) in text.split("|") for length, text in zip(shape, wanted, strict=True)
    )


# Rules.


def _first(
    kinds: Sequence[dict[str, Any]], names: _Names, rules: dict[str, Any], before_adapters: bool = False
) -> dict[str, Any] | None:
    """Return the first rule that applies."""
    for rule in kinds:
        if before_adapters and rule["kind"] not in rules["beforeAdapters"]:
            continue
        if _applies(rule, names) and ("same" not in rule or _applies(rules["same"][rule["same"]], names)):
            return rule
    return None


def _applies(rule: Mapping[str, Any], names: _Names) -> bool:
    if not all(_any(one, names) for one in rule["all"]) or any(
        names.satisfies(one) for one in rule.get("none", ())
    ):
        return False
    if "only" not in rule:
        return True
    known = {tensor.name for pattern in rule["only"] for tensor in names.matching(pattern)}
    return len(known) == sum(map(len, names.forms.values()))


def _any(condition: str | Sequence[str], names: _Names) -> bool:
    return any(map(names.satisfies, [condition] if isinstance(condition, str) else condition))


def _details(rule: Mapping[str, Any], names: _Names, rules: dict[str, Any]) -> list[str]:
    say = rule.get("say", ())
    found = []
    for text, fact in rules[say] if isinstance(say, str) else say:
        value = _value(fact, names, rules)
        if value is not None:
            found.append((text.removesuffix("s") if value == "1" else text).replace("{}", value))
    return found


def _value(fact: Mapping[str, Any], names: _Names, rules: dict[str, Any]) -> str | None:
    """Return the value of a fact as text, or None if the text should omit the fact."""
    for word, given in fact.items():
        if word in ("if", "unless") and _any(given, names) != (word == "if"):
            return None
        if word == "count":
            pattern, place = (given, 0) if isinstance(given, str) else given
            number = names.numbers(pattern, place)
            return None if number is None else str(number)
        if word == "length":
            length = names.length(*given)
            return None if length is None else str(length)
        if word == "ratio":
            return _ratio(names, given, rules["ratios"])
    return ""


def _ratio(names: _Names, parts: Sequence[str], words: Mapping[str, str]) -> str | None:
    one, all_of = (names.length(part, 0) for part in parts)
    if not one or not all_of or all_of % one or one == all_of:
        return None
    return words.get(str(all_of // one), f"1/{all_of // one}")


# Weights that groups of tensors imply: of adapters, and of quantised modules.


class _Adapter(NamedTuple):
    kind: str
    ranks: list[int]
    implied: _Names


def _adapter(names: _Names, rules: dict[str, Any]) -> _Adapter | None:
    for rule in rules["adapters"]:
        groups = _groups(rule["parts"], names)
        implied, ranks, is_convolutional = [], [], False
        for module, parts in groups.items():
            shape = tuple(_computed(one, parts) for one in rule["shape"])
            if None in shape or not _are_equal(rule, parts):
                continue
            implied.append(Tensor(f"{module}.weight", "", shape))
            ranks += [rank for rank in [_computed(rule["rank"], parts)] if rank is not None]
            is_convolutional |= (_computed(rule.get("kernel"), parts) or 1) > 1
        if implied:
            kind = _variant(rule["kind"], names, rules)
            if is_convolutional:
                kind = rules["convolutional"].get(kind, kind)
            rest = [tensor for group in names.forms.values() for tensor in group]
            return _Adapter(kind, ranks, _Names([*implied, *rest]))
    return None


def _variant(kind: str, names: _Names, rules: dict[str, Any]) -> str:
    """Return the name of a kind with further tensors."""
    for rule in rules["variants"]:
        if rule["of"] == kind and _applies(rule, names):
            return str(rule["kind"])
    return kind


def _of_adapter(
    adapter: _Adapter,
    stored: Sequence[Tensor],
    names: _Names,
    texts: Mapping[str, Mapping[str, Any]],
    rules: dict[str, Any],
) -> Kind:
    found = _first(rules["bases"], adapter.implied, rules)
    base, notes = _supported(found, texts, "adapter", rules)
    rank = (min(adapter.ranks), max(adapter.ranks)) if adapter.ranks else None
    dtype = _main_dtype(stored)
    alpha, alpha_text = _alpha(names, texts, rules)
    parts = [
        adapter.kind,
        None if rank is None else f"rank {rank[0]}" if rank[0] == rank[1] else f"rank {rank[0]} to {rank[1]}",
        base[1] or "base unknown",
        alpha_text,
        *notes,
    ]
    return Kind(adapter.kind, base[0], rank, alpha, None, dtype, _joined(parts, dtype))


def _alpha(
    names: _Names, texts: Mapping[str, Mapping[str, Any]], rules: dict[str, Any]
) -> tuple[float | str | None, str]:
    """Return the alpha of an adapter and its text."""
    for file, key in rules["alpha"]:
        value = texts.get(file, {}).get(key)
        if isinstance(value, (str, int, float)) and re.fullmatch(r"[0-9]+(\.[0-9]+)?", str(value)):
            return float(value), f"alpha {value} ({file if file != 'metadata' else key})"
    return ("stored", "alpha stored") if _any(rules["alphas"], names) else (None, "alpha not stored")


def _unpacked(names: _Names, stored: Sequence[Tensor], rules: dict[str, Any]) -> tuple[str | None, _Names]:
    """Return the quantisation, and the names with the weights before it."""
    for rule in rules["packings"]:
        implied, bits = [], set()
        for module, parts in _groups(rule["parts"], names).items():
            if len(parts) < len(rule["parts"]) or not _are_equal(rule, parts):
                continue
            shape = tuple(None if one is None else _computed(one, parts) for one in rule["shape"])
            implied.append(Tensor(f"{module}.weight", "", shape))
            bits.add(_computed(rule.get("bits"), parts))
        if implied and (None not in bits or "bits" not in rule):
            told = {one.name for one in implied}
            rest = [tensor for tensor in stored if tensor.name not in told]
            return _bits(rule["say"], bits), _Names([*implied, *rest])
    return None, names


def _bits(text: str, bits: set[int | None]) -> str:
    known = sorted(one for one in bits if one is not None)
    if not known:
        return text
    return text.replace("{}", str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}")


def _are_equal(rule: Mapping[str, Any], parts: Mapping[str, Tensor]) -> bool:
    return "equal" not in rule or len({_computed(one, parts) for one in rule["equal"]}) == 1


def _groups(parts: Mapping[str, str | list[str]], names: _Names) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each module by the names of their parts."""
    found: dict[str, dict[str, Tensor]] = {}
    for part, suffixes in parts.items():
        for suffix in [suffixes] if isinstance(suffixes, str) else suffixes:
            ending, _, dtypes = suffix.partition(" ")
            for one in names.ending(ending):
                if not dtypes or one.dtype in dtypes.split("|"):
                    found.setdefault(one.name[: -len(ending)], {})[part] = one
    return found


def _computed(expression: str | None, parts: Mapping[str, Tensor]) -> int | None:
    """Return the value of an expression such as ``zeros.1 * 32 / scales.1``, from left to right."""
    if expression is None:
        return None
    first, *rest = expression.split(" ")
    value = _operand(first, parts)
    for sign, text in zip(rest[::2], rest[1::2], strict=True):
        other = _operand(text, parts)
        if value is None or other is None or (sign == "/" and (other == 0 or value % other)):
            return None
        value = value * other if sign == "*" else value // other
    return value


def _operand(text: str, parts: Mapping[str, Tensor]) -> int | None:
    if text.isdecimal():
        return int(text)
    for one in text.split("|"):
        part, _, axis = one.partition(".")
        if part in parts and int(axis) < len(parts[part].shape):
            return parts[part].shape[int(axis)]
    return None


# What metadata and configurations add.


def _supported(
    found: Mapping[str, Any] | None, texts: Mapping[str, Mapping[str, Any]], role: str, rules: dict[str, Any]
) -> tuple[tuple[str | None, str | None], list[str]]:
    """Return the base, its text with the source, and notes on sources that name another base."""
    base = shown = found.get("base") if found else None
    candidates = ["*"] if base is None else (found or {}).get("candidates", [])
    notes = []
    for source in rules["sources"]:
        value = texts.get(source["file"], {}).get(source["key"])
        if source.get("for", role) != role or not isinstance(value, str) or not value:
            continue
        where = source["key"] if source["file"] == "metadata" else source["file"]
        told, is_known = _stated(source, value)
        if told is None or (
            found is None and not is_known and "bases" in source and not texts.get("config.json")
        ):
            continue
        if candidates == ["*"] or told in candidates:
            label = "" if "bases" in source else "base model: "
            base, shown, candidates = told, f"{label}{told} ({where})", []
        elif "bases" not in source:
            notes.append(f"trained on {told} ({where})")
        elif not _agree(base, told):
            notes.append(f"{where} says {value}")
    return (base, shown), notes


def _stated(source: Mapping[str, Any], value: str) -> tuple[str | None, bool]:
    """Return the base that a value names, and whether the rules know the value."""
    if "bases" not in source:
        return value, True
    for pattern, base in source["bases"].items():
        if _exact(pattern).fullmatch(value):
            return base or value, bool(base)
    return None, False


def _agree(base: str | None, told: str) -> bool:
    """Return whether one name begins with the other: ``qwen2_5_vl`` is "Qwen 2.5 VL"."""
    one, other = (re.sub(r"[^a-z0-9]", "", name.lower()) for name in (base or "", told))
    return base is not None and (one.startswith(other) or other.startswith(one))


def _main_dtype(tensors: Sequence[Tensor]) -> str | None:
    """Return the dtype of nearly all elements."""
    sizes: dict[str, int] = {}
    for one in tensors:
        sizes[one.dtype] = sizes.get(one.dtype, 0) + prod(length or 0 for length in one.shape)
    whole = sum(sizes.values())
    return next((dtype for dtype, size in sizes.items() if size >= _MAIN_SHARE * whole > 0), None)
