"""Match tensor names with patterns: ``*`` is any text and ``?`` one character.

Everything else is literal, because names have brackets too. The name of a tensor matches only that
tensor, even if it has a ``*``.
"""

from __future__ import annotations

from itertools import islice

from ingot.errors import TensorNotFoundError

from .text import _escaped, _quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# Names that are compared with one that matches nothing.
_MOST_COMPARED = 10_000


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that returns whether a name matches."""
    # Imported here: few loads have patterns.
    import re

    parts = (".*" if part == "*" else "." if part == "?" else re.escape(part) for part in pattern)
    compiled = re.compile("".join(parts), re.DOTALL)
    return lambda name: compiled.fullmatch(name) is not None


def matching(names: Collection[str], pattern: str, path: str | None) -> set[str]:
    """Return the names that match.

    Raises
    ------
    TensorNotFoundError
        No name matches. The message has the nearest one.
    """
    if pattern in names:
        return {pattern}
    found = set(filter(matcher(pattern), names))
    if not found:
        raise not_found(names, pattern, path)
    return found


def not_found(names: Collection[str], pattern: str, path: str | None) -> TensorNotFoundError:
    """Return the error for a name or a pattern that matches nothing."""
    near = _nearest(names, pattern)
    hint = "" if near is None else f" — did you mean {_quoted(near)}?"
    where = "" if path is None else f"{_escaped(path)}: "
    is_pattern = "*" in pattern or "?" in pattern
    reason = "no name in the file matches this pattern" if is_pattern else "the file has none of this name"
    return TensorNotFoundError(
        f"{where}tensor {_quoted(pattern)}: {reason}{hint}",
        code="unknown-tensor",
        path=path,
        tensor=pattern,
    )


def _nearest(names: Collection[str], pattern: str) -> str | None:
    from difflib import get_close_matches

    compared = list(islice(names, _MOST_COMPARED))
    # A pattern is often one word of a name.
    whole = {name.lower(): name for name in reversed(compared)}
    words = {word: name for lower, name in whole.items() for word in lower.split(".")} | whole
    near = get_close_matches(pattern.strip("*?.").lower(), words, 1)
    return words[near[0]] if near else None
