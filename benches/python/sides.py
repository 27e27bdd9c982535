"""The sides of one row, each measured in fresh processes: their figures, and the lines that show them."""

import statistics
from collections.abc import Mapping

from goal import Goal

MIB = 1 << 20
Goals = Mapping[str, Goal | None]


def figures(runs: dict[str, list[dict]], ours: str, goals: Goals) -> dict[str, dict]:
    """Return for each side its median time, and the ratio to the median of `ours`."""
    if ours not in runs:
        raise SystemExit(f"every ratio is to {ours}: --only has to leave it in")
    seconds = {side: [run["seconds"] for run in its] for side, its in runs.items()}
    base = statistics.median(seconds[ours])
    return {
        side: figure(statistics.median(samples), base, goals.get(side)) | {"samples": samples}
        for side, samples in seconds.items()
    }


def figure(seconds: float, ours: float, goal: Goal | None) -> dict:
    return {
        "seconds": seconds,
        "ratio": seconds / ours,
        "owed": goal and goal.owed,
        "aim": goal and goal.aim,
    }


def peak_mib(runs: list[dict]) -> float:
    return max(run["peak_nbytes"] for run in runs) / MIB


def line(row: str, side: str, figure: dict, goal: Goal | None, mib: float | None = None) -> str:
    memory = "" if mib is None else f"{mib:.0f} MiB"
    return (
        f"{row:8} {side:48} {figure['seconds']:8.3f} s {memory:>12} {figure['ratio']:7.2f}× {goal or ''}"
    ).rstrip()


def memory(row: str, mib: float, goal: Goal) -> str:
    """Return a line with ingot's memory beyond the tensors."""
    return (
        f"{row:8} ingot takes {mib:.0f} MiB beside its tensors: owed {goal.owed:g} MiB, aim {goal.aim:g} MiB"
    )
