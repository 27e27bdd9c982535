"""``ingot PATH``: a summary of a file, on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot._read.kind import Kind, configurations, kind_of
from ingot.cli import arguments
from ingot.cli.screen import (
    Column,
    Screen,
    count,
    csv,
    described,
    nbytes,
    plural,
    printing,
    shape,
    shown,
    status,
)
from ingot.cli.sources import models_of, open_model
from ingot.cli.table import cut, wrapped
from ingot.errors import SafetensorError

if TYPE_CHECKING:
    from ingot.cli.sources import Opened, Row

# The most items of each list, so that the summary fits on a screen of 24 lines.
_LINES = 5
_LABEL = 12
# Lists of values that may be long, which would fill the screen.
_CUT = ("metadata", "others")


class Totals(NamedTuple):
    """Sums over the tensors of one dtype."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    unsized: int = 0
    """Tensors that cannot be converted, whose size is unknown. They are not in the sums."""

    def plus(self, tensors: int, info: Row) -> Totals:
        """Return the totals with `tensors` more tensors like `info`."""
        return Totals(
            self.tensors + tensors,
            self.parameters + tensors * (info.parameter_count or 0),
            self.nbytes + tensors * (info.nbytes or 0),
            self.unsized + tensors * (info.nbytes is None),
        )


@arguments.command(short_help="Summarise a file on one screen. Short form: `ingot PATH`.")
@arguments.several
@csv
@printing
def command(screen: Screen, paths: tuple[str, ...]) -> int:
    """Print a summary of a file on one screen: kind, format, dtypes, largest tensors, metadata.

    The kind is what the names and shapes of the tensors show: a LoRA and its rank, a language model and its
    size, a quantisation. Also summarises files that `ingot convert` reads. Only headers are read.

    Several paths, and a directory of several models, become a table with a line for each model. The exit
    status is the greatest of all paths.

    --json and --csv print the same facts for programs. rank is the least and the greatest rank of an adapter:
    a list in JSON, and the columns min_rank and max_rank in CSV. alpha is a number if the metadata or the
    configuration has it, or `stored` if only the tensors have it, which `ingot lora info` reads.
    """
    models = models_of(paths)
    if len(paths) > 1 or models != [*paths] or screen.as_csv:
        return _table(screen, models)
    source = open_model(models[0])
    infos: Sequence[Row] = source.infos()
    dtypes = _totals(infos)
    if screen.as_json:
        screen.answer(_facts(source, infos, dtypes))
        return 0
    screen.say(screen.strong(shown(source.path)))
    for label, lines in _parts(source, infos, dtypes):
        texts = [text for line in lines for text in _fitted(screen, label, shown(line))]
        for head, text in zip_longest([label], texts, fillvalue=""):
            screen.say(f"  {head:<{_LABEL}}{text}".rstrip())
    return 0


def _fitted(screen: Screen, label: str, line: str) -> list[str]:
    """Return the lines of a value that fit beside the label. Text of the user is cut, all else wraps."""
    room = max(screen.width - _LABEL - 2, _LABEL)
    if not screen.is_terminal:
        return [line]
    if label in _CUT:
        return [cut(line, room)]
    first, *rest = wrapped(line, room)
    return [first, *(f"  {part}" for part in wrapped(" ".join(rest), room - 2))] if rest else [first]


_COLUMNS = (
    Column("file", named=True),
    Column("kind"),
    Column("base"),
    Column("rank", whole=True),
    Column("alpha", whole=True, spare=True),
    Column("dtype", spare=True),
    Column("size", right=True),
    Column("title", spare=True),
)
# The keys of --json. The rank is two columns, since a cell of CSV has one value.
_FIELDS = ("path", "kind", "base", "min_rank", "max_rank", "alpha", "packing", "dtype", "nbytes", "title")
# Keys with the title of a model, the best first.
_TITLES = ("modelspec.title", "title", "ss_output_name")


def _table(screen: Screen, models: Sequence[str]) -> int:
    """Print a line for each model."""
    every: list[dict[str, Any]] = []
    rows, greatest = [], 0
    for model in models:
        try:
            facts = _row(model)
        except (SafetensorError, OSError) as error:
            every.append(screen.failed(model, error))
            greatest = max(greatest, status(error))
            continue
        every.append(facts)
        rows.append(_values(facts) if screen.as_csv else _cells(screen, facts))
    screen.answer({"models": every})
    screen.table([*map(Column, _FIELDS)] if screen.as_csv else _COLUMNS, rows)
    return greatest


def _row(model: str) -> dict[str, Any]:
    source = open_model(model)
    metadata = source.metadata()
    found = _kind(source, source.infos())
    title = next((metadata[key] for key in _TITLES if metadata.get(key)), None)
    size = source.nbytes_of_files()
    return {"path": source.path, **found._asdict(), "nbytes": size, "title": title}


def _values(facts: dict[str, Any]) -> list[str]:
    """Return the cells of CSV."""
    least, most = facts["rank"] or (None, None)
    values = {**facts, "min_rank": least, "max_rank": most, "alpha": _alpha(facts["alpha"])}
    return ["" if values[name] is None else str(values[name]) for name in _FIELDS]


def _cells(screen: Screen, facts: dict[str, Any]) -> list[str]:
    """Return the cells of a table for people."""
    rank, dtype = _rank(facts["rank"]), facts["packing"] or facts["dtype"]
    what = (facts["kind"], facts["base"], rank, _alpha(facts["alpha"]), dtype)
    return [facts["path"], *(cell or "" for cell in what), screen.size(facts["nbytes"]), facts["title"] or ""]


def _rank(rank: tuple[int, int] | None) -> str:
    if rank is None:
        return ""
    return str(rank[0]) if rank[0] == rank[1] else f"{rank[0]}–{rank[1]}"


def _alpha(alpha: float | str | None) -> str | None:
    return alpha if alpha is None or isinstance(alpha, str) else f"{alpha:g}"


def _kind(source: Opened, infos: Sequence[Row]) -> Kind:
    return kind_of(infos, source.metadata(), configurations(source.index or source.files[0]))


def _totals(infos: Sequence[Row]) -> dict[str, Totals]:
    """Return the totals of each dtype, the largest first."""
    # Of 20,000 tensors, only a few differ in dtype and shape.
    kinds = list(map(attrgetter("dtype", "shape"), infos))
    alike = dict(zip(kinds, infos, strict=True))
    counts = Counter(kinds)
    totals: dict[str, Totals] = {}
    for kind, number in counts.items():
        totals[kind[0]] = totals.get(kind[0], Totals()).plus(number, alike[kind])
    return dict(sorted(totals.items(), key=lambda item: -item[1].nbytes))


def _sum(dtypes: dict[str, Totals]) -> Totals:
    return Totals(*map(sum, zip(*dtypes.values(), strict=True))) if dtypes else Totals()


def _facts(source: Opened, infos: Sequence[Row], dtypes: dict[str, Totals]) -> dict[str, object]:
    total = _sum(dtypes)
    return {
        "path": source.path,
        "format": source.format,
        "files": len(source.files),
        "nbytes": source.nbytes_of_files(),
        "tensors": len(infos),
        "parameters": total.parameters,
        "tensor_nbytes": total.nbytes,
        "dtypes": described(dtypes),
        "kind": described(_kind(source, infos)),
        "metadata": source.metadata(),
        "others": described(source.others()),
    }


def _parts(source: Opened, infos: Sequence[Row], dtypes: dict[str, Totals]) -> list[tuple[str, list[str]]]:
    total = _sum(dtypes)
    parameters = total.parameters
    text = _kind(source, infos).text
    files = plural(len(source.files), "file")
    parts = [
        ("kind", [text] if text else []),
        ("format", [f"{source.format}, {files} of {nbytes(source.nbytes_of_files())}"]),
        ("tensors", [f"{len(infos):,}"]),
        ("parameters", [f"{count(parameters)} ({parameters:,})" if parameters >= 1000 else str(parameters)]),
        ("data", [nbytes(total.nbytes)]),
        ("dtypes", _dtypes(dtypes)),
        ("modules", _modules(infos)),
        ("largest", _largest(infos)),
        ("metadata", _metadata(source.metadata())),
        ("others", _others(source)),
    ]
    return [(label, lines) for label, lines in parts if lines]


def _dtypes(dtypes: dict[str, Totals]) -> list[str]:
    lines = []
    for dtype, sums in dtypes.items():
        sizes = f"{count(sums.parameters)} parameters, {nbytes(sums.nbytes)}"
        sized = "cannot be converted" if sums.unsized else sizes
        lines.append(f"{dtype}: {plural(sums.tensors, 'tensor')}, {sized}")
    return _first(lines, "dtype")


def _modules(infos: Sequence[Row]) -> list[str]:
    sizes: Counter[str] = Counter()
    for info in infos:
        sizes[info.name.partition(".")[0]] += info.nbytes or 0
    # A list of single tensors is not a list of modules.
    if not 1 < len(sizes) < len(infos):
        return []
    return _first([f"{name}: {nbytes(size)}" for name, size in sizes.most_common()], "module")


def _largest(infos: Sequence[Row]) -> list[str]:
    from heapq import nlargest

    sized = [info for info in infos if info.nbytes is not None]
    found = nlargest(3, sized, key=attrgetter("nbytes"))
    return [
        f"{info.name}: {info.dtype} {shape(info.shape or ())}, {nbytes(info.nbytes or 0)}" for info in found
    ]


def _metadata(pairs: dict[str, str]) -> list[str]:
    return _first([f"{key}: {abridged(value)}" for key, value in pairs.items()], "key")


def _others(source: Opened) -> list[str]:
    return _first([f"{one.name}: {one.kind} {one.value}".rstrip() for one in source.others()], "value")


def abridged(value: str) -> str:
    """Return a metadata value for one line: the start and the length if it is long."""
    return value if len(value) <= 200 else f"{value[:60]}… ({len(value):,} characters)"


def _first(lines: list[str], noun: str) -> list[str]:
    if len(lines) <= _LINES:
        return lines
    kept = lines[: _LINES - 1]
    return [*kept, f"and {plural(len(lines) - len(kept), noun)} more"]
