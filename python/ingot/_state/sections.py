"""Dicts of many tensors in a tree, whose JSON is kept for the next save of the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from json.encoder import encode_basestring_ascii
from typing import Any

from .objects import TreePath


class Section:
    """The node of a dict of tensors, or of dicts of tensors such as the state of an optimizer.

    Parameters
    ----------
    prefix : str
        The beginning of all names.
    keys : list of str
        The keys of the dict.
    inner : list of tuple of str, optional
        The keys of the dict under each key.

    Attributes
    ----------
    names : list of str
        The names of the tensors.
    are_distinct : bool
        Whether no two tensors have one name.
    """

    __slots__ = ("_inner", "_keys", "_prefix", "_text", "_tied", "are_distinct", "names")

    def __init__(self, prefix: str, keys: list[str], inner: list[tuple[str, ...]] | None) -> None:
        self._prefix, self._keys, self._inner = prefix, keys, inner
        if inner is None:
            self.names = [prefix + key for key in keys]
        else:
            pairs = zip(keys, inner, strict=True)
            self.names = [f"{prefix}{key}.{last}" for key, lasts in pairs for last in lasts]
        self.are_distinct = len({*self.names, "__metadata__"}) == len(self.names) + 1
        self._tied: dict[str, str] | None = None
        self._text = ""

    def is_of(self, prefix: str, keys: list[str], inner: list[tuple[str, ...]] | None) -> bool:
        """Return whether this is the node of a dict with these keys."""
        return self._prefix == prefix and self._keys == keys and self._inner == inner

    def text(self, tied: Mapping[str, str]) -> str:
        """Return the node as JSON, in which `tied` replaces names."""
        own = {name: tied[name] for name in self.names if name in tied} if tied else {}
        if own != self._tied:
            self._text, self._tied = self._rendered([own.get(name, name) for name in self.names]), own
        return self._text

    def _rendered(self, names: Sequence[str]) -> str:
        nodes = [f'{{"$tensor":{name}}}' for name in map(encode_basestring_ascii, names)]
        if self._inner is not None:
            quoted = {key: encode_basestring_ascii(key) for key in {*chain.from_iterable(self._inner)}}
            rest = iter(nodes)
            nodes = [
                f"{{{','.join([f'{quoted[last]}:{next(rest)}' for last in lasts])}}}" for lasts in self._inner
            ]
        keys = map(encode_basestring_ascii, self._keys)
        return f"{{{','.join([f'{key}:{node}' for key, node in zip(keys, nodes, strict=True)])}}}"


class Kept:
    """What a save leaves for the next save of the same structure.

    Attributes
    ----------
    sections : dict of path to Section
        The sections of the tree.
    plan : object
        The plan of several ranks. None before the first.
    """

    def __init__(self) -> None:
        self.sections: dict[TreePath, Section] = {}
        self.plan: Any = None
