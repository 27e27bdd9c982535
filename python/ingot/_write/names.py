"""New names for the tensors of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ingot._base.keys import not_found
from ingot._base.text import _quoted


def known_renaming(rename: object) -> object:
    """Return `rename`, which must be a dict, a callable or None."""
    if rename is not None and not callable(rename) and not hasattr(rename, "keys"):
        raise TypeError(f"rename must be a dict, a callable or None, found {type(rename).__name__}")
    return rename


def renaming(
    names: list[str], rename: Mapping[str, str] | Callable[[str], str] | None, path: str
) -> Callable[[str], str]:
    """What gives the new name for an old one."""
    if rename is None:
        return str
    give: Callable[[str], str]
    if callable(rename):
        give = rename
    else:
        table = dict(rename)
        for name in table.keys() - set(names):
            raise not_found(names, name, path)

        def looked_up(name: str) -> str:
            return table.get(name, name)

        give = looked_up

    def checked(name: str) -> str:
        new = give(name)
        if not isinstance(new, str):
            raise TypeError(
                f"tensor {_quoted(name)}: expected a str for its new name, found {type(new).__name__}"
            )
        return new

    return checked
