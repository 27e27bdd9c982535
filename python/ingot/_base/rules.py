"""Functions that return the rules of `ingot.remap`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from ingot.errors import OptionError
from ingot.typing import Dtype, Keys

from .checks import checked_dtype
from .keys import checked_keys
from .layouts import (
    Cast,
    Drop,
    Join,
    Rename,
    Rules,
    Select,
    Split,
    Stack,
    Transpose,
    Unwrap,
    Wrapper,
)


def checked_rules(given: Any) -> Rules | None:
    """Return the rules of the option `remap`.

    Raises
    ------
    TypeError
        `given` is neither rules nor an iterable of rules.
    """
    if given is None or isinstance(given, Rules):
        return given
    if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise TypeError(f"remap must be a list of rules of ingot.remap, found {type(given).__name__}")
    return Rules(given)


def rename(new: str, old: str) -> Rename:
    """Rename tensors.

    Parameters
    ----------
    new, old : str
        A name, or a pattern with placeholders: ``{i}`` is any text without a dot, and ``{name*}`` any text.
        Each placeholder of `new` must be in `old`. Other braces are text.

    Returns
    -------
    Rename
        A rule for ``remap=[…]``.

    Raises
    ------
    TypeError
        `new` or `old` is not a str.

    Examples
    --------
    >>> rules = [rename("embed", "wte"), rename("head.{rest*}", "lm_head.{rest*}")]
    >>> list(ingot.numpy.load_file("model.safetensors", remap=rules))
    ['embed', 'head.weight']
    """
    return Rename(_text("new", new), _text("old", old))


def stack(new: str, old: str, dim: int = 0) -> Stack:
    """Stack tensors of one shape along a new dimension, as `torch.stack` does.

    Parameters
    ----------
    new, old : str
        Patterns as for `rename`. `old` has one placeholder more than `new`: the number of the tensor in the
        stack. The numbers must be 0, 1, 2 and so on, without gaps; the order is numeric.
    dim : int
        The position of the new dimension. Negative positions count from the end.

    Returns
    -------
    Stack
        A rule for ``remap=[…]``.

    Raises
    ------
    TypeError
        `new` or `old` is not a str, or `dim` is not an int.

    Examples
    --------
    >>> experts = {f"experts.{e}.w": numpy.full((2, 3), e) for e in range(4)}
    >>> ingot.numpy.save_file(experts, "experts.safetensors")
    >>> found = ingot.numpy.load_file("experts.safetensors", remap=[stack("w", "experts.{e}.w")])
    >>> found["w"].shape
    (4, 2, 3)
    """
    return Stack(_text("new", new), _text("old", old), _number("dim", dim))


def concat(new: str, old: Sequence[str], dim: int = 0, shard: Literal["each"] | None = None) -> Join:
    """Join tensors along a dimension, as `torch.cat` does.

    Parameters
    ----------
    new : str
        A pattern as for `rename`.
    old : sequence of str
        The parts in their order, as patterns with the same placeholders as `new`.
    dim : int
        The dimension that grows.
    shard : {"each"}, optional
        The part that a rank holds of a DTensor that is sharded along `dim`. By default the parts are joined
        first, and a rank holds a slice of the result. With ``"each"``, a rank holds its slice of each part,
        joined: the layout of fused ``qkv`` and ``gate_up`` under tensor parallelism.

    Returns
    -------
    Join
        A rule for ``remap=[…]``.

    Raises
    ------
    OptionError
        `old` is empty, or `shard` is something else.

    Examples
    --------
    >>> rules = [concat("both", ["wte", "lm_head.weight"])]
    >>> ingot.numpy.load_file("model.safetensors", remap=rules)["both"].shape
    (16, 4)
    """
    if shard not in (None, "each"):
        raise OptionError(f"shard must be 'each' or None, found {shard!r}", code="unknown-shard", found=shard)
    return Join(_text("new", new), _texts("old", old), _number("dim", dim), 1, shard)


def interleave(new: str, old: Sequence[str], groups: int, dim: int = 0) -> Join:
    """Join tensors group by group: the first group of each, then the second group of each, and so on.

    Parameters
    ----------
    new, old, dim
        As for `concat`.
    groups : int
        The number of groups that each tensor is cut into along `dim`, such as the number of heads.

    Returns
    -------
    Join
        A rule for ``remap=[…]``.

    Raises
    ------
    OptionError
        As for `concat`; `groups` is less than 1.

    Examples
    --------
    >>> rules = [interleave("both", ["wte", "lm_head.weight"], groups=8)]
    >>> ingot.numpy.load_file("model.safetensors", remap=rules)["both"].shape
    (16, 4)
    """
    return Join(_text("new", new), _texts("old", old), _number("dim", dim), _number("groups", groups, 1))


def split(
    new: Sequence[str], old: str, dim: int = 0, sizes: Sequence[int] | None = None, groups: int = 1
) -> Split:
    """Cut a tensor into parts along a dimension: the inverse of `concat` and `interleave`.

    Parameters
    ----------
    new : sequence of str
        The names of the parts in their order, as patterns as for `rename`.
    old : str
        The pattern of the tensor.
    dim : int
        The dimension that is cut.
    sizes : sequence of int, optional
        The size of each part along `dim`. By default all are equal.
    groups : int
        The number of groups, as for `interleave`. Each group has a piece of each part.

    Returns
    -------
    Split
        A rule for ``remap=[…]``.

    Raises
    ------
    OptionError
        `new` is empty; `sizes` and `new` differ in length; `groups` is less than 1.

    Examples
    --------
    >>> rules = [split(["first", "second"], "wte"), drop("lm_head.weight")]
    >>> ingot.numpy.load_file("model.safetensors", remap=rules)["first"].shape
    (4, 4)
    """
    names = _texts("new", new)
    counts = None if sizes is None else tuple(_number("sizes", size, 0) for size in sizes)
    if counts is not None and len(counts) != len(names):
        message = f"sizes has {len(counts)} numbers for {len(names)} parts"
        raise OptionError(message, code="invalid-rule", expected=len(names), found=len(counts))
    return Split(names, _text("old", old), _number("dim", dim), counts, _number("groups", groups, 1))


def transpose(keys: Keys, dims: Sequence[int] | None = None) -> Transpose:
    """Permute the dimensions of tensors.

    Parameters
    ----------
    keys : str, ingot.typing.Glob, iterable of str or callable
        Which tensors, as the option `keys` of `load_file`.
    dims : sequence of int, optional
        The old position of each new dimension, as in `numpy.transpose`. By default they are reversed.

    Returns
    -------
    Transpose
        A rule for ``remap=[…]``.

    Raises
    ------
    TypeError
        `keys` is of another type.

    Examples
    --------
    >>> rules = [transpose("*")]
    >>> ingot.numpy.load_file("model.safetensors", remap=rules)["wte"].shape
    (4, 8)
    """
    positions = None if dims is None else tuple(_number("dims", dim) for dim in dims)
    return Transpose(checked_keys("keys", keys), positions)


def cast(keys: Keys, dtype: Dtype) -> Cast:
    """Convert tensors to another floating-point dtype.

    Parameters
    ----------
    keys : str, ingot.typing.Glob, iterable of str or callable
        Which tensors, as the option `keys` of `load_file`. Tensors that are not floats stay as they are. F4
        and F6 are not converted: loading raises `RemapError`.
    dtype : ingot.typing.Dtype
        The new dtype.

    Returns
    -------
    Cast
        A rule for ``remap=[…]``.

    Raises
    ------
    TypeError, OptionError
        `keys` or `dtype` is not one of the choices.

    Examples
    --------
    >>> rules = [cast("*", "F64")]
    >>> ingot.numpy.load_file("model.safetensors", remap=rules)["wte"].dtype
    dtype('float64')
    """
    code = checked_dtype(dtype)
    if code is None:
        raise TypeError("dtype must be a dtype, found None")
    return Cast(checked_keys("keys", keys), code)


def select(keys: Keys) -> Select:
    """Keep these tensors, and leave out all others.

    Parameters
    ----------
    keys : str, ingot.typing.Glob, iterable of str or callable
        Which tensors, as the option `keys` of `load_file`. ``"*"`` keeps all: at the end of a list of rules
        it means that tensors without a rule stay as they are.

    Returns
    -------
    Select
        A rule for ``remap=[…]``.

    Raises
    ------
    TypeError
        `keys` is of another type.

    Examples
    --------
    >>> rules = [rename("embed", "wte"), select("*")]
    >>> list(ingot.numpy.load_file("model.safetensors", remap=rules))
    ['embed', 'lm_head.weight']
    """
    return Select(checked_keys("keys", keys))


def drop(keys: Keys) -> Drop:
    """Leave out these tensors.

    Parameters
    ----------
    keys : str, ingot.typing.Glob, iterable of str or callable
        Which tensors, as the option `keys` of `load_file`.

    Returns
    -------
    Drop
        A rule for ``remap=[…]``.

    Raises
    ------
    TypeError
        `keys` is of another type.

    Examples
    --------
    >>> rules = [drop("lm_head.weight"), select("*")]
    >>> list(ingot.numpy.load_file("model.safetensors", remap=rules))
    ['wte']
    """
    return Drop(checked_keys("keys", keys))


def unwrap(*wrappers: Wrapper) -> Unwrap:
    """Remove the prefixes that wrappers of modules add to names.

    Parameters
    ----------
    *wrappers : {"torch.compile", "ddp", "fsdp"}
        ``"torch.compile"`` removes each part ``_orig_mod`` of a name, ``"fsdp"`` each part
        ``_fsdp_wrapped_module``, and ``"ddp"`` the part ``module`` at the start, which all names must have.

    Returns
    -------
    Unwrap
        A rule for ``remap=[…]``.

    Raises
    ------
    OptionError
        No wrapper is passed, or one is not among the choices.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    >>> ingot.torch.save_file(torch.compile(model).state_dict(), "compiled.safetensors")
    >>> list(ingot.torch.load_file("compiled.safetensors", remap=[unwrap("torch.compile")]))
    ['0.weight']
    """
    wrong = [one for one in wrappers if one not in get_args(Wrapper)]
    if wrong or not wrappers:
        message = (
            f"unwrap takes {', '.join(get_args(Wrapper))}: found {', '.join(map(repr, wrong)) or 'none'}"
        )
        raise OptionError(message, code="invalid-rule", found=wrong)
    return Unwrap(wrappers)


def _text(name: str, given: object) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{name} must be a str, found {type(given).__name__}")
    return given


def _texts(name: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a list of str, found {type(given).__name__}")
    found = tuple(_text(name, one) for one in given)
    if not found:
        raise OptionError(f"{name} is empty: expected a name or more", code="invalid-rule", found=0)
    return found


def _number(name: str, given: Any, least: int | None = None) -> int:
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"{name} must be an int, found {type(given).__name__}")
    number = int(given.__index__())
    if least is not None and number < least:
        message = f"{name} must be {least} or more, found {number}"
        raise OptionError(message, code="invalid-rule", expected=least, found=number)
    return number
