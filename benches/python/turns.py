"""Sides that alternate, so that no side gains from its position or from a change of the machine's speed."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Taken = TypeVar("Taken")

# If set, as builds.py does, only the first side is measured, each time after this returned.
wait_for_turn: Callable[[], object] | None = None


def in_turn(rounds: int, measure: Callable[[str], Taken], sides: Iterable[str]) -> dict[str, list[Taken]]:
    """`measure` of every side, `rounds` times. The first of a round is the last of the next."""
    found: dict[str, list[Taken]] = {side: [] for side in sides}
    if wait_for_turn is not None:
        first = next(iter(found))
        for _ in range(rounds):
            wait_for_turn()
            found[first].append(measure(first))
        return found
    for round_ in range(rounds):
        for side in found if round_ % 2 == 0 else reversed(found):
            found[side].append(measure(side))
    return found
