"""The data of a record besides its figures: machine, date and versions. And its storage."""

import importlib.metadata
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import ingot

PACKAGES = ("safetensors", "bintensors", "torch", "numpy", "ml_dtypes")


def conditions(directory: Path, scale: float) -> dict:
    """Return the conditions of the figures: machine, date, versions and storage."""
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


def keep(found: dict, path: Path) -> None:
    """Write `found` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
