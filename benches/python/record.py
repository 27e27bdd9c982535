"""What was measured, where and with what: as a table for people and as JSON for comparing."""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import ingot
from duel import Samples
from scenarios import Scenario

PACKAGES = ("safetensors", "bintensors", "torch", "numpy", "ml_dtypes")
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


def conditions(directory: Path, scale: float) -> dict:
    """Everything that the figures depend on and the code does not say."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "scale": scale,
        "cache": "warm: files in the page cache",
        "collector": "Python's cyclic garbage collector on, as by default",
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": f"{platform.system()} {platform.release()}",
            "file_system": _file_system(directory),
            "load_at_start": os.getloadavg()[0],
        },
        "versions": {"ingot": ingot.__version__, "python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in PACKAGES},
        "commit": _commit(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    found = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if directory.resolve().is_relative_to(mount) and len(mount) >= len(found[0]):
            found = (mount, kind)
    return found[1]


def _commit() -> str:
    """The commit measured, with a mark where files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def sentences(found: dict) -> list[str]:
    """`conditions` for people."""
    machine, versions = found["machine"], dict(found["versions"])
    lines = [
        f"{found['date']}, commit {found['commit']}. {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_nbytes'] / 2**30:.0f} GiB, {machine['kernel']}, {machine['file_system']}, "
        f"load {machine['load_at_start']:.1f} at the start.",
        ", ".join(f"{package} {version}" for package, version in versions.items()) + ".",
        "Medians. Both sides were compared byte by byte first, then ran turn by turn in one process (the "
        "long header and the import: in fresh processes, in turn). Files in the page cache, garbage "
        "collector on. Saves write new files; a row says durable=True where ours flushes to the disk, the "
        "peers never do.",
        "Ratio: the peer's median over ours, then the lowest and the highest of the single rounds. Spread: "
        "the part of the median within which the middle half of the samples lies, ours and the peer's.",
    ]
    if found["scale"] != 1:
        lines.insert(0, f"NOT TO BE QUOTED: sizes scaled by {found['scale']:g}.")
    return lines


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
            *(line + "\n" for line in sentences(found)),
            *("| " + " | ".join(cell for cell in line) + " |" for line in table),
            "",
            "What the results are:",
            "",
            *(f"- {', '.join(whats)}: {result}." for result, whats in notes.items()),
            "",
        ]
    )


def write(found: dict, directory: Path) -> Path:
    """Write `found` as JSON and as Markdown. Gives the path of the latter."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"{found['date'][:10]}-{found['peer']}-{found['versions'][found['peer']]}"
    (directory / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    page = directory / f"{name}.md"
    page.write_text(markdown(found))
    return page
