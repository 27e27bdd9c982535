"""The table of `main.py`: a row for each scenario, for people and for comparing."""

import statistics
from pathlib import Path

import record
from duel import Samples
from scenarios import Scenario

HEAD = ("what", "peer", "ingot", "peer's", "ratio", "lowest to highest", "spread", "owed", "aim", "verdict")


def row(scenario: Scenario, samples: Samples) -> dict:
    """The figures of one scenario."""
    ours, theirs = statistics.median(samples.ours), statistics.median(samples.theirs)
    # Round by round too, since both sides of a round saw the same machine.
    each = [b / a for a, b in zip(samples.ours, samples.theirs, strict=True)]
    found = {
        "what": scenario.what,
        "peer": scenario.peer,
        "unit": samples.unit,
        "rounds": len(samples.ours),
        "ours": ours,
        "theirs": theirs,
        "ratio": theirs / ours,
        "ratio_lowest": min(each),
        "ratio_highest": max(each),
        "spread_ours": _spread(samples.ours),
        "spread_theirs": _spread(samples.theirs),
        "result": scenario.result,
    }
    if scenario.goal is not None:
        goal = scenario.goal
        found |= {
            "owed": goal.owed,
            "aim": goal.aim,
            "goal_of": goal.of,
            "verdict": goal.met(found["ratio"] if goal.of == "ratio" else ours),
        }
    return found | {"samples_ours": samples.ours, "samples_theirs": samples.theirs}


def _spread(samples: list[float]) -> float:
    """Half of the samples lie within this part of the median."""
    if len(samples) < 2:
        return 0.0
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return (third - first) / statistics.median(samples)


def cells(row: dict) -> tuple[str, ...]:
    """`row` as text, in the order of `HEAD`."""
    if "verdict" not in row:
        goals: tuple[str, ...] = ("", "", "")
    elif row["goal_of"] == "ratio":
        goals = (f"≥ {row['owed']:g}×", f"≥ {row['aim']:g}×", row["verdict"])
    else:
        goals = (*(f"≤ {_figure(row[goal], row['unit'])}" for goal in ("owed", "aim")), row["verdict"])
    return (
        row["what"],
        row["peer"],
        _figure(row["ours"], row["unit"]),
        _figure(row["theirs"], row["unit"]),
        f"{_short(row['ratio'])}×",
        f"{_short(row['ratio_lowest'])} to {_short(row['ratio_highest'])}",
        f"{row['spread_ours']:.0%}, {row['spread_theirs']:.0%}",
        *goals,
    )


def _figure(value: float, unit: str) -> str:
    return f"{_short(value * 1000)} ms" if unit == "s" else f"{_short(value)} {unit}"


def _short(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def markdown(found: dict) -> str:
    """The whole record as a page."""
    rows = found["rows"]
    name = f"{found['peer']} {found['versions'][found['peer']]}"
    table = [HEAD, ("---",) * len(HEAD), *(cells(row) for row in rows)]
    notes: dict[str, list[str]] = {}
    for row in rows:
        notes.setdefault(row["result"], []).append(row["what"])
    return "\n".join(
        [
            f"# Against {name}",
            "",
            *(line + "\n" for line in record.sentences(found)),
            *("| " + " | ".join(cell for cell in line) + " |" for line in table),
            "",
            "What the results are:",
            "",
            *(f"- {', '.join(whats)}: {result}." for result, whats in notes.items()),
            "",
        ]
    )


def write(found: dict, directory: Path) -> Path:
    """Write `found` as JSON and as Markdown, and return the path of the Markdown."""
    name = f"{found['date'][:10]}-{found['peer']}-{found['versions'][found['peer']]}"
    record.keep(found, directory / f"{name}.json")
    page = directory / f"{name}.md"
    page.write_text(markdown(found))
    return page
