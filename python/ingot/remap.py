"""Rules that change the layout of tensors while they are read.

The rules are passed as ``remap=[…]`` to `load_file`, `load_into`, `ingot.open`, `ingot.safe_open` and
`ingot.rewrite`. The first argument of each rule is the new name. They apply one after the other: each sees
the names that the rules before it made. Bytes are read from the file to their place in the result.

>>> rules = [ingot.remap.rename("embed", "wte"), ingot.remap.select("*")]
>>> list(ingot.numpy.load_file("model.safetensors", remap=rules))
['embed', 'lm_head.weight']
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Unpack

from ._base.layouts import (
    Cast,
    Drop,
    Join,
    Rename,
    Rule,
    Rules,
    Select,
    Split,
    Stack,
    Transpose,
    Unwrap,
    Wrapper,
)
from ._base.options import Loading, checked, takes
from ._base.rules import (
    cast,
    concat,
    drop,
    interleave,
    rename,
    select,
    split,
    stack,
    transpose,
    unwrap,
)
from ._read.door import open_checkpoint
from ._read.remap import Described, applied
from .errors import OptionError
from .typing import HeaderOptions, Path, Source

__all__ = [
    "Cast",
    "Described",
    "Drop",
    "Join",
    "Plan",
    "Rename",
    "Rule",
    "Rules",
    "Select",
    "Split",
    "Stack",
    "Transpose",
    "Unwrap",
    "Wrapper",
    "cast",
    "concat",
    "drop",
    "interleave",
    "plan",
    "read",
    "rename",
    "select",
    "split",
    "stack",
    "transpose",
    "unwrap",
]


@dataclass(frozen=True)
class Plan:
    """The tensors that rules make of a source. `plan` returns one.

    Attributes
    ----------
    tensors : list of Described
        The name, the dtype and the shape of each tensor of the result.
    unmatched : list of rules
        The rules that matched no tensor.
    untaken : list of str
        The tensors that no rule took, which stay as they are.
    """

    tensors: list[Described]
    unmatched: list[Rule]
    untaken: list[str]


@takes(HeaderOptions)
def plan(source: Source, remap: Rules | Iterable[Rule], **options: Unpack[HeaderOptions]) -> Plan:
    """Return the tensors that rules make of a source, without reading any.

    Parameters
    ----------
    source : ingot.typing.Source
        As for `ingot.open`.
    remap : list of rules of `ingot.remap`, or ingot.remap.Rules
        The rules. With ``Rules(…, strict=False)`` the result lists the rules that matched nothing and the
        tensors that no rule took; otherwise these are errors.
    **options
        How the headers are read: `ingot.typing.HeaderOptions`.

    Returns
    -------
    Plan
        The tensors of the result, and the lists.

    Raises
    ------
    RemapError
        The rules do not fit the tensors.
    OSError, HeaderError, CheckpointError, StorageError, OptionError, TypeError
        As `ingot.open` does.

    Examples
    --------
    >>> rules = ingot.remap.Rules([ingot.remap.rename("embed", "wte")], strict=False)
    >>> ingot.remap.plan("model.safetensors", rules).untaken
    ['lm_head.weight']
    """
    given = checked(plan, locals())
    rules = given.pop("remap")
    if rules is None:
        raise TypeError("remap must be a list of rules of ingot.remap, found None")
    with closing(open_checkpoint(given["source"], Loading.among(given))) as checkpoint:
        found = applied(checkpoint, rules)
    tensors = [Described(name, one.dtype, one.shape) for name, one in found.tensors.items()]
    return Plan(tensors, found.unmatched, found.untaken)


# The functions by which a file names the rules.
_FUNCTIONS: dict[str, Callable[..., Rule]] = {
    function.__name__: function
    for function in (rename, stack, concat, interleave, split, transpose, cast, select, drop)
}


def read(path: Path) -> Rules:
    """Read rules from a JSON file, as ``ingot rewrite --remap`` does.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A JSON file with a list of objects, one for each rule. The first key is the name of the function,
        whose value is its first argument. The other keys are its other parameters:
        ``[{"stack": "experts.w1", "old": "experts.{e}.w1.weight", "dim": 0}, {"select": "*"}]``. An object
        ``{"rules": […], "strict": false}`` has the rules and the attribute of `Rules`.

    Returns
    -------
    Rules
        The rules, for ``remap=``.

    Raises
    ------
    OSError
        The file cannot be opened.
    OptionError
        The file is not JSON of this form. The message names the rule.

    Examples
    --------
    >>> with open("rules.json", "w") as file:
    ...     _ = file.write('[{"rename": "embed", "old": "wte"}, {"select": "*"}]')
    >>> list(ingot.numpy.load_file("model.safetensors", remap=ingot.remap.read("rules.json")))
    ['embed', 'lm_head.weight']
    """
    name = os.fsdecode(path)
    with open(path, encoding="utf-8") as file:
        try:
            given: Any = json.load(file)
        except ValueError as fault:
            raise _malformed(name, f"not JSON: {fault}") from None
    strict = True
    if isinstance(given, Mapping):
        unknown = [*{*given} - {"rules", "strict"}]
        if unknown or not isinstance(given.get("strict", True), bool):
            raise _malformed(name, 'expected {"rules": […], "strict": true or false}')
        given, strict = given.get("rules"), given.get("strict", True)
    if not isinstance(given, list):
        raise _malformed(name, f"expected a list of rules, found {type(given).__name__}")
    return Rules([_rule(name, number, one) for number, one in enumerate(given)], strict)


def _rule(path: str, number: int, given: Any) -> Rule:
    place = f"rule {number}"
    if not isinstance(given, Mapping) or not given:
        raise _malformed(path, f"{place}: expected an object, found {type(given).__name__}")
    (kind, first), *others = given.items()
    try:
        if kind == "unwrap" and not others:
            wrappers: Any = (first,) if isinstance(first, str) else first
            return unwrap(*wrappers)
        if kind not in _FUNCTIONS:
            raise OptionError(f"expected one of {', '.join((*_FUNCTIONS, 'unwrap'))}, found {kind!r}")
        return _FUNCTIONS[kind](first, **dict(others))
    except (TypeError, OptionError) as fault:
        raise _malformed(path, f"{place}: {fault}") from None


def _malformed(path: str, reason: str) -> OptionError:
    return OptionError(f"{path}: {reason}", code="invalid-rule")
