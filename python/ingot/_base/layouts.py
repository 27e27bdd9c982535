"""Rules that change the layout of tensors: other names, stacked, joined, split, permuted or converted.

Functions of `ingot.remap` return them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

Wrapper = Literal["torch.compile", "ddp", "fsdp"]


@dataclass(frozen=True)
class Rename:
    """The rule of `rename`."""

    new: str
    old: str


@dataclass(frozen=True)
class Stack:
    """The rule of `stack`."""

    new: str
    old: str
    dim: int = 0


@dataclass(frozen=True)
class Join:
    """The rule of `concat` and `interleave`."""

    new: str
    old: tuple[str, ...]
    dim: int = 0
    # Groups of rows that take turns; 1 joins whole tensors.
    groups: int = 1
    shard: Literal["each"] | None = None


@dataclass(frozen=True)
class Split:
    """The rule of `split`."""

    new: tuple[str, ...]
    old: str
    dim: int = 0
    sizes: tuple[int, ...] | None = None
    groups: int = 1


@dataclass(frozen=True)
class Transpose:
    """The rule of `transpose`."""

    keys: Any
    dims: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Cast:
    """The rule of `cast`."""

    keys: Any
    dtype: str


@dataclass(frozen=True)
class Select:
    """The rule of `select`."""

    keys: Any


@dataclass(frozen=True)
class Drop:
    """The rule of `drop`."""

    keys: Any


@dataclass(frozen=True)
class Unwrap:
    """The rule of `unwrap`."""

    wrappers: tuple[Wrapper, ...]


Rule: TypeAlias = Rename | Stack | Join | Split | Transpose | Cast | Select | Drop | Unwrap


@dataclass(frozen=True)
class Rules:
    """Rules, and whether they must match everything.

    Attributes
    ----------
    rules : tuple of rules
        They apply one after the other: each sees the names that the rules before it made.
    strict : bool
        If True, a rule that matches no tensor and a tensor that no rule takes raise `RemapError`. If False,
        such a rule does nothing, and such a tensor stays as it is; `ingot.remap.plan` lists both.

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
