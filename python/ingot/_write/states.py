"""The training state in the metadata of a file, which names its tensors: FORMAT.md, "Training state".

A file that is made of tensors of other files gets their state, with the new names, or no state. No tree is
decoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ingot._base.text import _escaped
from ingot._native import STATE_KEY, Checkpoint, Sources
from ingot.errors import CheckpointError

#: The version of the schema.
VERSION = 1
#: Values of a tree. A reader takes up to 100 bytes of memory for each.
MAX_NODES = 4_000_000

#: A tensor of a new file: the number of a source, the number of a tensor in it, and the new name.
Pick = tuple[int, int, str]


# The text


def head_of(text: str, shown: str) -> dict[str, Any]:
    """Return the outer object of a state. `shown` is the file in messages.

    Raises
    ------
    CheckpointError
        The text is invalid, or of a later version.
    """
    head = parsed(text, shown)
    version = head.get("version") if isinstance(head, dict) else None
    if type(version) is not int or version < 1:
        raise _fault(shown, f"{STATE_KEY} in the metadata is invalid: expected a version, found {version!r}")
    if version > VERSION:
        reason = f"expected version {VERSION} of {STATE_KEY}, found {version}: update ingot"
        raise _fault(shown, reason, "later-state", expected=VERSION, found=version)
    return dict(head)


def tree_of(head: Mapping[str, Any], shown: str, content: Callable[[Any], memoryview]) -> Any:
    """Return the JSON of the tree. `content` returns the bytes of a tensor, for a long tree."""
    return head["tree"] if "tree" in head else parsed(content(head.get("tensor")), shown)


def parsed(content: str | memoryview, shown: str) -> Any:
    """Return the JSON in `content`. Raises before memory is taken for more values than a tree may have."""
    try:
        text = content if isinstance(content, str) else str(content, "utf-8")
    except UnicodeDecodeError as error:
        raise _fault(shown, f"the tree is not UTF-8 ({error})") from None
    # Strings may contain these characters, so that a text with many of them is counted again without its
    # strings.
    if _has_too_many(text) and _has_too_many(re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        raise _fault(shown, f"the tree has more than {MAX_NODES:,} values", "state-too-large")
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except RecursionError:
        raise _fault(shown, "the tree is nested too deep", "state-too-large") from None
    except ValueError as error:
        raise _fault(shown, f"{STATE_KEY} is invalid JSON ({_escaped(str(error))})") from None


def _has_too_many(text: str) -> bool:
    """Return whether a text has more commas and opening brackets than a tree may have values."""
    return len(text) > 2 * MAX_NODES and sum(map(text.count, ",[{")) > MAX_NODES


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _fault(shown: str, reason: str, code: str = "invalid-state", **facts: Any) -> CheckpointError:
    return CheckpointError(f"{shown}: {reason}", code=code, **facts)


def tensors_in(tree: Any) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield the nodes of a tree that name a tensor, each with its tag and the name."""
    left = [tree]
    while left:
        node = left.pop()
        if type(node) is list:
            left += node
        elif type(node) is dict:
            left += node.values()
            for tag in ("$tensor", "$numbers"):
                content = node.get(tag)
                name = content[0] if type(content) is list and content else content
                if isinstance(name, str):
                    yield node, tag, name


def tensors_of(checkpoint: Checkpoint, text: str) -> list[tuple[str, str]]:
    """Return the tensors that the state in `text` names, each as the tag of its node and the name.

    Raises
    ------
    CheckpointError
        The text is invalid, of a later version, or names a tensor that the file lacks.
    """
    shown = "the file" if checkpoint.path is None else _escaped(checkpoint.path)

    def content(name: Any) -> memoryview:
        check(name)
        return checkpoint.tensor_bytes(name, 0, checkpoint.info(name).nbytes)

    def check(name: Any) -> None:
        if not isinstance(name, str) or name not in checkpoint:
            raise _fault(shown, f"the training state names {name!r}, which the file lacks", tensor=name)

    found = [(tag, name) for _, tag, name in tensors_in(tree_of(head_of(text, shown), shown, content))]
    for _, name in found:
        check(name)
    return found


# Files that are made of tensors of other files


class Followed(NamedTuple):
    """The tensors and the metadata of a new file."""

    picks: list[Pick]
    metadata: dict[str, str] | None
    #: Whether a source has a training state, and the new file has none.
    is_lost: bool


def follow(held: Sources, picks: list[Pick], metadata: Mapping[str, str] | None) -> Followed:
    """Return the tensors and the metadata of a new file, with the training state of its source.

    The state has the new names of the tensors. It is left out if the new file lacks one of its tensors, or if
    several sources have a state.
    """
    pairs = None if metadata is None else {key: one for key, one in metadata.items() if key != STATE_KEY}
    texts = [(at, text) for at in range(len(held)) if (text := _text(held, at)) is not None]
    states = [_State(held, at, text) for at, text in texts]
    new = states[0].renamed(picks) if len(states) == 1 else None
    if new is None or new != states[0].text:
        # If there is a new text, it contains the tree.
        trees = [state.tree for state in states]
        picks = [pick for pick in picks if pick[:2] not in trees]
    pairs = pairs if new is None else {**(pairs or {}), STATE_KEY: new}
    return Followed(picks, pairs, bool(states) and new is None)


def _text(held: Sources, at: int) -> str | None:
    """Return the state that `load_state` finds in a source: in its index, or in its only file."""
    index, files = held.index_metadata(at), [*held.metadata(at).values()]
    found = files[0] if index is None and len(files) == 1 else index
    text = (found or {}).get(STATE_KEY)
    return text if isinstance(text, str) else None


class _State:
    """The training state of a source."""

    def __init__(self, held: Sources, at: int, text: str) -> None:
        self.text = text
        self._held, self._at = held, at
        self._names = held.names(at)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        #: None if the text is invalid, or of a later version.
        self._head: dict[str, Any] | None = None
        with suppress(CheckpointError):
            self._head = head_of(text, "")

    @property
    def tree(self) -> tuple[int, int | None]:
        """The source, and the number of the tensor that holds a long tree."""
        head = self._head or {}
        tensor = None if "tree" in head else head.get("tensor")
        return self._at, self._numbers.get(tensor) if isinstance(tensor, str) else None

    def renamed(self, picks: list[Pick]) -> str | None:
        """Return the state for a file of `picks`, or None if one of its tensors is not among them."""
        new = {self._names[number]: name for at, number, name in picks if at == self._at}
        if self._head is None:
            return self.text if all(new.get(name) == name for name in self._names) else None
        try:
            tree = tree_of(self._head, "", self._content)
            nodes = [*tensors_in(tree)]
            names = {name: new[name] for *_, name in nodes}
        except (CheckpointError, LookupError):
            return None
        _, number = self.tree
        long = () if number is None else (self._names[number],)
        if all(new.get(name) == name for name in (*long, *names)):
            return self.text
        for node, tag, name in nodes:
            content = node[tag]
            node[tag] = names[name] if isinstance(content, str) else [names[name], *content[1:]]
        head = {key: one for key, one in self._head.items() if key != "tensor"}
        return json.dumps({**head, "tree": tree}, separators=(",", ":"), allow_nan=False)

    def _content(self, name: Any) -> memoryview:
        return self._held.tensor_bytes(self._at, self._numbers[name])
