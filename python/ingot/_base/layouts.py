"""Rules that change the layout of tensors: other names, stacked, joined, split, permuted or converted.

Functions of `ingot.remap` return them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

Wrapper = Literal["torch.compile", "ddp", "fsdp"]


class _Call:
    """A rule that prints as the call that returns it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__.lower()}({', '.join(self._arguments())})"

    def _arguments(self) -> Iterator[str]:
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            text = repr([*value] if isinstance(value, tuple) else value)
            if one.default is MISSING:
                yield text
            elif value != one.default:
                yield f"{one.name}={text}"


@dataclass(frozen=True, repr=False)
class Rename(_Call):
    """The rule of `rename`."""

    new: str
    old: str


@dataclass(frozen=True, repr=False)
class Stack(_Call):
    """The rule of `stack`."""

    new: str
    old: str
    dim: int = 0


@dataclass(frozen=True, repr=False)
class Join(_Call):
    """The rule of `concat` and `interleave`."""

    new: str
    old: tuple[str, ...]
    dim: int = 0
    # Groups of rows that take turns; 1 joins whole tensors.
    groups: int = 1
    shard: Literal["each"] | None = None

    def __repr__(self) -> str:
        name = "concat" if self.groups == 1 else "interleave"
        return f"{name}({', '.join(self._arguments())})"


@dataclass(frozen=True, repr=False)
class Split(_Call):
    """The rule of `split`."""

    new: tuple[str, ...]
    old: str
    dim: int = 0
    sizes: tuple[int, ...] | None = None
    groups: int = 1


@dataclass(frozen=True, repr=False)
class Transpose(_Call):
    """The rule of `transpose`."""

    keys: Any
    dims: tuple[int, ...] | None = None


@dataclass(frozen=True, repr=False)
class Cast(_Call):
    """The rule of `cast`."""

    keys: Any
    dtype: str


@dataclass(frozen=True, repr=False)
class Select(_Call):
    """The rule of `select`."""

    keys: Any


@dataclass(frozen=True, repr=False)
class Drop(_Call):
    """The rule of `drop`."""

    keys: Any


@dataclass(frozen=True, repr=False)
class Unwrap(_Call):
    """The rule of `unwrap`."""

    wrappers: tuple[Wrapper, ...]

    def __repr__(self) -> str:
        return f"unwrap({', '.join(map(repr, self.wrappers))})"


Rule: TypeAlias = Rename | Stack | Join | Split | Transpose | Cast | Select | Drop | Unwrap


@dataclass(frozen=True)
class Rules:
    """Rules, and whether they must match everything.

    Attributes
    ----------
    rules : tuple of rules
        They apply one after the other: each sees the names that the rules before it made.
    strict : bool
        If True, `RemapError` is raised for a rule that matches no tensor and for a tensor that no rule takes.
        If False, such a rule does nothing, and such a tensor stays as it is; `ingot.remap.plan` lists both.

    Examples
    --------
    >>> rules = Rules([rename("embed", "wte")], strict=False)
    >>> list(ingot.torch.load_file("model.safetensors", remap=rules))
    ['embed', 'lm_head.weight']
    """

    rules: tuple[Rule, ...]
    strict: bool = True

    def __init__(self, rules: Iterable[Rule], strict: bool = True) -> None:
        listed = (*rules,)
        wrong = next((one for one in listed if not isinstance(one, get_args(Rule))), None)
        if wrong is not None:
            message = f"remap must be a list of rules of ingot.remap, found one of {type(wrong).__name__}"
            raise TypeError(message)
        object.__setattr__(self, "rules", listed)
        object.__setattr__(self, "strict", strict)
