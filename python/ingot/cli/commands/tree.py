"""``ingot tree``: the tensors by module path, with repeats as one."""

from __future__ import annotations

import click

from ingot.cli import arguments
from ingot.cli.modules import Group, grouped, tree
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import chosen, opened
from ingot.cli.tables import Column
from ingot.cli.wording import count, nbytes, shape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot.typing import Glob

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
    groups = grouped(tree(chosen(path, opened(path).in_natural_order(), keys, drop)), expand)
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
        # In a pipe each line stands for itself.
        label = "  " * level + group.label if human else path
        tensor = group.tensor
        yield (
            label,
            str(group.tensors),
            count(group.parameters) if human else str(group.parameters),
            nbytes(group.nbytes) if human else str(group.nbytes),
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
