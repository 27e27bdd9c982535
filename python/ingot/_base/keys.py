"""Select tensors by a name, a pattern, several patterns, a list of names, or a callable.

In a pattern ``*`` is any text and ``?`` one character. Everything else is literal, because names have
brackets too. The name of a tensor matches only that tensor, even if it has a ``*``.

Names and patterns also select aliases (the metadata key ``ingot.shared``). Without `keys` the stored tensors
are selected, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import filterfalse, islice
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ingot.errors import TensorNotFoundError
from ingot.typing import Glob

from .text import _quoted, located

if TYPE_CHECKING:
    from ingot._native import TensorInfo

    # The result of `checked_keys` for a value that is not None.
    Selector: TypeAlias = str | Glob | tuple[str, ...] | Callable[[TensorInfo], object]

    class Tensors(Protocol):
        """Tensors to select from, such as an open file."""

        @property
        def path(self) -> str | None: ...
        def __contains__(self, name: object, /) -> bool: ...
        def offset_names(self) -> list[str]: ...
        def all_names(self) -> list[str]: ...
        def info(self, name: str) -> TensorInfo: ...


# Prefixes that programs put before the names of a module's tensors.
_WRAPPERS = ("state_dict.", "module.", "_orig_mod.", "model.")
# The most names that are compared with a name that matches nothing.
_MOST_COMPARED = 10_000


def glob(*patterns: str) -> Glob:
    """Return a selector of several patterns, for `keys`, `drop` and maps of devices.

    Parameters
    ----------
    *patterns : str
        Names of tensors, or patterns of names: ``*`` is any text and ``?`` one character. Everything else is
        literal, brackets too. Each has to match a tensor.

    Returns
    -------
    ingot.typing.Glob
        Which can be pickled and hashed.

    Raises
    ------
    TypeError
        There is no pattern, or one is not a str.

    Examples
    --------
    >>> ingot.glob("encoder.*", "*.bias")
    ingot.glob('encoder.*', '*.bias')
    """
    return Glob(*patterns)


class NamedTensors:
    """Tensors to select from, by lists of their names. `infos` is only called if a callable selects."""

    __slots__ = ("_infos", "_known", "_names", "_stored", "path")

    def __init__(
        self,
        path: str | None,
        names: Iterable[str],
        infos: Callable[[], Iterable[TensorInfo]],
        aliases: Iterable[str] = (),
    ) -> None:
        self.path = path
        self._stored = [*names]
        self._names = dict.fromkeys((*self._stored, *aliases))
        self._infos = infos
        self._known: dict[str, TensorInfo] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def offset_names(self) -> list[str]:
        """Return the names without aliases, in the order of the list."""
        return self._stored

    def all_names(self) -> list[str]:
        """Return the names, and then the aliases."""
        return [*self._names]

    def info(self, name: str) -> TensorInfo:
        """Return the dtype, shape and size of a tensor."""
        if not self._known:
            self._known = {info.name: info for info in self._infos()}
        return self._known[name]


def checked_keys(option: str, given: Any) -> Selector | None:
    """Return a selector that can be used many times.

    Raises
    ------
    TypeError
        `given` is not a selector, or contains something other than names.
    """
    if given is None or isinstance(given, str | Glob) or callable(given):
        return given  # type: ignore[no-any-return]
    found = type(given).__name__
    if not hasattr(given, "__iter__") or isinstance(given, bytes | bytearray | memoryview):
        raise _wrong_type(option, found)
    names = [*given]
    # No Python code runs for each of many names.
    if not {*map(type, names)} <= {str}:
        wrong = [type(name).__name__ for name in names if not isinstance(name, str)]
        if wrong:
            raise _wrong_type(option, f"{found} of {wrong[0]}")
    return (*names,)


def _wrong_type(option: str, found: str) -> TypeError:
    return TypeError(
        f"{option} takes a str (the name of a tensor, or a pattern with * and ?), ingot.glob(...), an "
        f"iterable of names, or a callable: found {found}"
    )


def select(tensors: Tensors, keys: Selector | None, drop: Selector | None = None) -> list[str]:
    """Return the names that `keys` selects, or all stored names, without the names that `drop` selects.

    They are in the order of `keys` if that is an iterable, else in the order of the file.

    Raises
    ------
    TensorNotFoundError
        A name or a pattern matches nothing. The message has the nearest name.
    """
    names = tensors.offset_names() if keys is None else _selected(tensors, keys)
    if drop is None:
        return names
    if callable(drop):
        return [name for name in names if not drop(tensors.info(name))]
    return [*filterfalse({*_selected(tensors, drop)}.__contains__, names)]


def _selected(tensors: Tensors, keys: Selector) -> list[str]:
    if isinstance(keys, tuple):
        distinct = dict.fromkeys(keys)
        missed = next(filterfalse(tensors.__contains__, distinct), None)
        if missed is not None:
            raise not_found(tensors.all_names(), missed, tensors.path, is_exact=True)
        return [*distinct]
    if isinstance(keys, str | Glob):
        # A name alone needs no list of all names.
        if isinstance(keys, str) and keys in tensors:
            return [keys]
        names = dict.fromkeys(tensors.all_names())
        return [*filter(matching(names, keys, tensors.path).__contains__, names)]
    return [name for name in tensors.all_names() if keys(tensors.info(name))]


def matching(names: Collection[str], keys: str | Glob, path: str | None) -> set[str]:
    """Return the names that match a pattern or one of several. Lookups in `names` are fast.

    Raises
    ------
    TensorNotFoundError
        A pattern matches no name, and is not ``*``. The message has the nearest name.
    """
    found: set[str] = set()
    for pattern in (keys,) if isinstance(keys, str) else keys.patterns:
        if pattern in names:
            found.add(pattern)
            continue
        matched = {*filter(matcher(pattern), names)}
        # The pattern ``*`` is valid even if there are no tensors.
        if not matched and pattern != "*":
            raise not_found(names, pattern, path)
        found |= matched
    return found


def matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that returns something true for a name that matches."""
    # Imported here: few loads have patterns.
    import re

    parts = (".*" if part == "*" else "." if part == "?" else re.escape(part) for part in pattern)
    return re.compile("".join(parts), re.DOTALL).fullmatch


def shared_prefix(names: Iterable[str]) -> str:
    """Return the prefix that training programs put before all names, such as ``module._orig_mod.``, or ''."""
    names = [*names]
    prefix = ""
    while names:
        longer = next((prefix + one for one in _WRAPPERS if names[0].startswith(prefix + one)), None)
        if longer is None or not all(name.startswith(longer) for name in names):
            break
        prefix = longer
    return prefix


def not_found(
    names: Collection[str], missed: str, path: str | None, *, is_exact: bool = False
) -> TensorNotFoundError:
    """Return the error for a name or a pattern that matches nothing; `is_exact` if it cannot be a pattern."""
    may_match = not is_exact and is_pattern(missed)
    reason = "no name in the file matches this pattern" if may_match else "the file has no such tensor"
    hints = " ".join(_hints(names, missed, is_exact))
    reason = f"{reason} — {hints}" if hints else reason
    return located(TensorNotFoundError, reason, code="unknown-tensor", path=path, tensor=missed)


def is_pattern(text: str) -> bool:
    """Return whether a text has a `*` or a `?`."""
    return "*" in text or "?" in text


def _hints(names: Collection[str], missed: str, is_exact: bool) -> Iterator[str]:
    near = _nearest(names, missed)
    if near is not None:
        yield f"did you mean {_quoted(near)}?"
    if is_pattern(missed):
        if is_exact:
            yield f"an iterable has exact names: use {_quoted(f'ingot.glob({missed!r})')} for a pattern"
    elif missed and any(name.startswith(missed) for name in names):
        pattern = missed + "*"
        way = f"ingot.glob({pattern!r})" if is_exact else pattern
        yield f"use {_quoted(way)} for the names that begin with it"


def _nearest(names: Collection[str], missed: str) -> str | None:
    from difflib import get_close_matches

    compared = list(islice(names, _MOST_COMPARED))
    # A pattern is often one word of a name.
    whole = {name.lower(): name for name in reversed(compared)}
    words = {word: name for lower, name in whole.items() for word in lower.split(".")} | whole
    near = get_close_matches(missed.strip("*?.").lower(), words, 1)
    return words[near[0]] if near else None
