"""``ingot tree``: the tensors by module path, with repeated modules on one line."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import click

from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, count, printing, shape
from ingot.cli.sources import chosen, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._native import TensorInfo
    from ingot.typing import Glob


# The tree of modules, from the names of the tensors.


# The deepest level of modules; the dots in the rest of a path are part of the name. This limits the
# recursion.
_DEEPEST = 64


@dataclass(slots=True)
class Node:
    """The module and the tensor with a path; one of them may be missing."""

    tensor: TensorInfo | None = None
    children: dict[str, Node] = field(default_factory=dict)
    likeness: Hashable = None


@dataclass(slots=True)
class Group:
    """One module, or several equal modules with consecutive numbers."""

    label: str
    repeats: int
    tensor: TensorInfo | None
    children: list[Group]
    tensors: int
    parameters: int
    nbytes: int
    dtypes: tuple[str, ...]


def tree(infos: Iterable[TensorInfo]) -> Node:
    """Return the modules in the order of `infos`."""
    root = Node()
    for info in infos:
        node = root
        for part in info.name.split(".", _DEEPEST):
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = Node()
            node = child
        node.tensor = info
    return root


def grouped(node: Node, expand: bool, times: int = 1) -> list[Group]:
    """Return the children of `node`. Unless `expand`, consecutive equal modules become one group.

    All numbers are multiplied by the number of repeats of the modules above, so that they add up.
    """
    alike: list[list[tuple[str, Node]]] = []
    last: Hashable = None
    for label, child in node.children.items():
        likeness = None if expand else _likeness(child)
        if alike and likeness == last and _continues(alike[-1][-1][0], label) and not expand:
            alike[-1].append((label, child))
        else:
            alike.append([(label, child)])
        last = likeness
    return [_group(same, expand, times * len(same)) for same in alike]


def _group(same: list[tuple[str, Node]], expand: bool, times: int) -> Group:
    (label, node), own = same[0], same[0][1].tensor
    if len(same) > 1:
        label = f"{label}-{same[-1][0]}"
    children = grouped(node, expand, times)
    # A module that contains only one module shares its line.
    if len(children) == 1 and own is None:
        only = children[0]
        only.label, only.repeats = f"{label}.{only.label}", only.repeats * len(same)
        return only
    dtypes = dict.fromkeys(dtype for child in children for dtype in child.dtypes)
    if own is not None:
        dtypes[own.dtype] = None
    return Group(
        label=label,
        repeats=len(same),
        tensor=own,
        children=children,
        tensors=sum(child.tensors for child in children) + (times if own else 0),
        parameters=sum(child.parameters for child in children) + (times * own.parameter_count if own else 0),
        nbytes=sum(child.nbytes for child in children) + (times * own.nbytes if own else 0),
        dtypes=tuple(dtypes),
    )


def _likeness(node: Node) -> Hashable:
    """Return a key that is equal for modules with the same names, dtypes and shapes."""
    if node.likeness is None:
        own = node.tensor and (node.tensor.dtype, node.tensor.shape)
        node.likeness = own, tuple((label, _likeness(child)) for label, child in node.children.items())
    return node.likeness


def _continues(label: str, following: str) -> bool:
    return _is_number(label) and _is_number(following) and int(following) == int(label) + 1


def _is_number(label: str) -> bool:
    # `01` is not a number here, since a range would print it as 1. Digits of other scripts are not either.
    return label.isascii() and label.isdigit() and len(label) < 10 and str(int(label)) == label


_COLUMNS = (
    Column("module"),
    Column("tensors", right=True, spare=True),
    Column("parameters", right=True),
    Column("size", right=True),
    Column("dtype", spare=True),
    Column("shape"),
)


@arguments.command(short_help="Show the tensors as a tree of modules.")
@arguments.path
@click.option("-L", "--depth", type=click.IntRange(1), metavar="N", help="Show N levels.  [default: all]")
@click.option("--expand", is_flag=True, help="Show repeated modules one by one.")
@arguments.selecting
@printing
def command(
    screen: Screen, path: str, depth: int | None, expand: bool, keys: Glob | None, drop: Glob | None
) -> int:
    """Show the tensors as a tree of modules. Repeated modules are one row: `layers.0-31`."""
    source = opened(path)
    groups = grouped(tree(chosen(source, source.in_natural_order(), keys, drop)), expand)
    if screen.as_json:
        screen.answer({"modules": [_described(group, "", depth or 0) for group in groups]})
        return 0
    screen.table(_COLUMNS, _rows(screen, groups, depth))
    return 0


def _rows(screen: Screen, groups: list[Group], depth: int | None) -> Iterator[tuple[str, ...]]:
    human = screen.is_terminal
    rest = [(group, 0, "") for group in reversed(groups)]
    while rest:
        group, level, above = rest.pop()
        path = f"{above}.{group.label}" if above else group.label
        # In a pipe, each line shows the full path.
        label = "  " * level + group.label if human else path
        tensor = group.tensor
        yield (
            label,
            str(group.tensors),
            count(group.parameters) if human else str(group.parameters),
            screen.size(group.nbytes),
            ",".join(group.dtypes),
            "" if tensor is None else shape(tensor.shape),
        )
        if depth is None or level + 1 < depth:
            rest.extend((child, level + 1, path) for child in reversed(group.children))


def _described(group: Group, above: str, depth: int, level: int = 1) -> dict[str, object]:
    path = f"{above}.{group.label}" if above else group.label
    children = [] if level == depth else [_described(one, path, depth, level + 1) for one in group.children]
    return {
        "path": path,
        "repeats": group.repeats,
        "tensors": group.tensors,
        "parameters": group.parameters,
        "nbytes": group.nbytes,
        "dtypes": list(group.dtypes),
        "shape": None if group.tensor is None else group.tensor.shape,
        "modules": children,
    }
