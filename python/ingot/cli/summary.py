"""``ingot PATH``: what a file is, on one screen."""

from __future__ import annotations

from collections import Counter

import click

from . import arguments
from .screen import Screen, printing
from .sources import Source, opened, parameters
from .tables import cut
from .wording import count, nbytes, plural, shape, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._native import TensorInfo

# Of each list, so that all of it stays on a screen of 24 lines.
_LINES = 5
_LABEL = 12


@click.command(short_help="What a file is, on one screen; `ingot PATH` is short for it.")
@arguments.path
@printing
def command(screen: Screen, path: str) -> int:
    """Print what a file is, on one screen."""
    source = opened(path)
    infos = source.infos()
    facts = _facts(source, infos)
    if screen.as_json:
        screen.answer(facts)
        return 0
    screen.say(screen.strong(shown(path)))
    for label, lines in _parts(source, infos, facts):
        for at, line in enumerate(lines):
            head = "" if at else label
            # What was read from the file is cut on a terminal only.
            text = shown(line)
            room = screen.width - _LABEL - 2
            screen.say(f"  {head:<{_LABEL}}{cut(text, room) if screen.is_terminal else text}".rstrip())
    return 0


def _facts(source: Source, infos: list[TensorInfo]) -> dict[str, object]:
    by_dtype: dict[str, dict[str, int]] = {}
    for info in infos:
        sums = by_dtype.setdefault(info.dtype, {"tensors": 0, "parameters": 0, "nbytes": 0})
        sums["tensors"] += 1
        sums["parameters"] += parameters(info)
        sums["nbytes"] += info.nbytes
    return {
        "path": source.path,
        "format": source.handle.format,
        "files": len(source.files),
        "nbytes": source.nbytes_of_files(),
        "tensors": len(infos),
        "parameters": sum(sums["parameters"] for sums in by_dtype.values()),
        "tensor_nbytes": sum(sums["nbytes"] for sums in by_dtype.values()),
        "dtypes": dict(sorted(by_dtype.items(), key=lambda item: -item[1]["nbytes"])),
        "metadata": source.metadata(),
    }


def _parts(source: Source, infos: list[TensorInfo], facts: dict[str, object]) -> list[tuple[str, list[str]]]:
    total = sum(map(parameters, infos))
    size, data = source.nbytes_of_files(), sum(info.nbytes for info in infos)
    files = plural(len(source.files), "file")
    parts = [
        ("format", [f"{source.handle.format}, {files} of {nbytes(size)}"]),
        ("tensors", [f"{len(infos):,}"]),
        ("parameters", [f"{count(total)} ({total:,})" if total >= 1000 else str(total)]),
        ("data", [nbytes(data)]),
        ("dtypes", _dtypes(facts)),
        ("modules", _modules(infos)),
        ("largest", _largest(infos)),
        ("metadata", _metadata(source.metadata())),
    ]
    return [(label, lines) for label, lines in parts if lines]


def _dtypes(facts: dict[str, object]) -> list[str]:
    dtypes = facts["dtypes"]
    assert isinstance(dtypes, dict)
    lines = [
        f"{dtype}: {plural(sums['tensors'], 'tensor')}, {count(sums['parameters'])} parameters, "
        f"{nbytes(sums['nbytes'])}"
        for dtype, sums in dtypes.items()
    ]
    return _first(lines, "dtype")


def _modules(infos: list[TensorInfo]) -> list[str]:
    sizes: Counter[str] = Counter()
    for info in infos:
        sizes[info.name.partition(".")[0]] += info.nbytes
    # A list of single tensors is no list of modules.
    if not 1 < len(sizes) < len(infos):
        return []
    return _first([f"{name}: {nbytes(size)}" for name, size in sizes.most_common()], "module")


def _largest(infos: list[TensorInfo]) -> list[str]:
    from heapq import nlargest

    found = nlargest(3, infos, key=lambda info: info.nbytes)
    return [f"{info.name}: {info.dtype} {shape(info.shape)}, {nbytes(info.nbytes)}" for info in found]


def _metadata(pairs: dict[str, str]) -> list[str]:
    return _first([f"{key}: {abridged(value)}" for key, value in pairs.items()], "key")


def abridged(value: str) -> str:
    """A value of the metadata for one line; pictures and other long ones by their length."""
    return value if len(value) <= 200 else f"{value[:60]}… ({len(value):,} characters)"


def _first(lines: list[str], noun: str) -> list[str]:
    if len(lines) <= _LINES:
        return lines
    kept = lines[: _LINES - 1]
    return [*kept, f"and {plural(len(lines) - len(kept), noun)} more"]
