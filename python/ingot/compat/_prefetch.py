"""The plans that upstream's `prefetch` refuses, in its words."""

from __future__ import annotations

from ingot.errors import SafetensorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._native import Checkpoint


def refuse_bad_plan(checkpoint: Checkpoint, plan: dict[str, slice | None] | None) -> None:
    """Raise what upstream raises for `plan`, before `ingot.safe_open.prefetch` judges it."""
    if plan is None:
        return
    if not isinstance(plan, dict):
        raise TypeError(f"{type(plan).__name__!r} object is not an instance of 'dict'")
    if not plan:
        raise SafetensorError("prefetch plan selects no tensors", code="invalid-plan")
    for name, rows in plan.items():
        if not isinstance(name, str):
            raise SafetensorError("prefetch plan keys must be tensor names", code="invalid-plan")
        words = _fault(name, rows, checkpoint.info(name).shape)
        if words is not None:
            raise SafetensorError(words, code="invalid-plan", tensor=name)


def _fault(name: str, rows: object, shape: tuple[int, ...]) -> str | None:
    """What is wrong with the rows of one tensor; None where nothing is."""
    if rows is None:
        return None
    if not isinstance(rows, slice):
        return f"prefetch plan values must be None or a slice, got {type(rows)} for {name}"
    if not shape:
        return f"cannot slice rows of the 0-d tensor {name}"
    bounds = {"start": rows.start, "stop": rows.stop}
    if any(
        not isinstance(bound, int) or abs(bound) >= 2**63 for bound in bounds.values() if bound is not None
    ):
        return f"prefetch plan slice bounds for {name} must be integers or None"
    for which, bound in bounds.items():
        if bound is not None and not -shape[0] <= bound <= shape[0]:
            return f"prefetch plan slice {which} {bound} for {name} is out of range for {shape[0]} rows"
    try:
        *_, step = rows.indices(shape[0])
    except (TypeError, ValueError) as fault:
        return f"invalid prefetch plan slice for {name}: {type(fault).__name__}: {fault}"
    return None if step == 1 else f"prefetch plan slices must have step 1, got {step} for {name}"
