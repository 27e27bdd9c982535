"""Parts of pages that are made from tables of the repository."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from docutils.nodes import Node
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
DIFFERENCES = ROOT / "tests" / "peers" / "safetensors" / "DIFFERENCES.toml"
FLOORS = ROOT / "scripts" / "check-floors"
RECORD = ROOT / "benches" / "record" / "2026-11-23-safetensors-0.8.0.json"
VERSIONS = ROOT / "requirements" / "versions.toml"
VERDICTS = {
    "accept": "accepts such files",
    "reject": "rejects such files",
    "writes-other-bytes": "writes other bytes",
    "writes-what-it-cannot-read": "writes a file that it cannot read",
}
# Columns of a drawing, without its frame.
WIDTH = 76


def script(path: Path) -> ModuleType:
    """Import a script, which has no suffix."""
    loader = SourceFileLoader(path.name.replace("-", "_"), str(path))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def differences() -> str:
    """Return a section for each difference, in Markdown."""
    sections = []
    for one in tomllib.loads(DIFFERENCES.read_text("utf-8"))["difference"]:
        codes = ", ".join(f"[`{code}`](/reference/codes.md#{code})" for code in one.get("codes", ()))
        sections.append(
            f"## {one['title']}\n\n{one['reason'].strip()}\n\n"
            f"ingot {VERDICTS[one['ours']]}{f' ({codes})' if codes else ''}; "
            f"the other library {VERDICTS[one['upstream']]}. Test vectors: "
            + ", ".join(f"`{vector}`" for vector in one["vectors"])
            + ".\n"
        )
    return "\n".join(sections)


def floors() -> str:
    """Return a drawing for each crate, its top floor first, in Markdown."""
    drawings = []
    for crate, storeys in script(FLOORS).FLOORS.items():
        lines = ["┌" + "─" * (WIDTH + 2) + "┐"]
        for storey in reversed(storeys):
            lines += [f"│ {line:^{WIDTH}} │" for line in broken("   ".join(storey.split()))]
            lines.append("├" + "─" * (WIDTH + 2) + "┤")
        lines[-1] = "└" + "─" * (WIDTH + 2) + "┘"
        drawings.append(f"### {crate}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(drawings)


def broken(text: str) -> list[str]:
    """Return the words of a text, in lines of at most `WIDTH`."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]}   {word}".strip()
        if len(longer) <= WIDTH:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def versions() -> str:
    """Return a table of the supported versions, in Markdown."""
    table = tomllib.loads(VERSIONS.read_text("utf-8"))
    pythons = table["python"]["versions"]
    lines = ["| | oldest | newest tested |", "|---|---|---|", f"| Python | {pythons[0]} | {pythons[-1]} |"]
    for name, ends in table.items():
        if "oldest" in ends:
            oldest, newest = (ends[end][0].partition("==")[2] for end in ("oldest", "newest"))
            lines.append(f"| {name} | {oldest} | {newest} |")
    return "\n".join(lines)


def benchmarks() -> str:
    """Return the record against safetensors as a table, with its machine, in Markdown.

    The Markdown of the record has formatted figures, and more columns: the spread and the goals of each row.
    """
    found = json.loads(RECORD.read_text("utf-8"))
    machine, packages = found["machine"], found["versions"]
    lines = ["| what | ingot | peer | ratio |", "|---|---|---|---|"]
    for line in RECORD.with_suffix(".md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 10 and re.search(r"[×x]$", cells[4]):
            what, peer, ours, theirs, ratio = cells[:5]
            lines.append(f"| {what} | {ours} | {theirs}{' ¹' if peer == 'bintensors' else ''} | {ratio} |")
    where = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_nbytes'] / 2**30:.0f} GiB, "
        f"{machine['kernel'].split('-')[0]}, {machine['file_system']}, {found['date'][:10]}. "
    )
    peers = ", ".join(f"{name} {version}" for name, version in packages.items())
    return f"{where}Versions: {peers}.\n\n" + "\n".join(lines)


def commands() -> str:
    """Return the help of each command, in Markdown."""
    import click

    from ingot.cli.program import SECTIONS, program

    settings = {**program.context_settings, "max_content_width": WIDTH + 4, "terminal_width": WIDTH + 4}
    whole = click.Context(program, info_name="ingot", **settings)
    parts = [f"## ingot\n\n```text\n{program.get_help(whole)}\n```\n"]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names:
            command = program.get_command(whole, name)
            assert command is not None
            help_text = command.get_help(click.Context(command, parent=whole, info_name=name))
            parts.append(f"### ingot {name}\n\n```text\n{help_text}\n```\n")
    return "\n".join(parts)


class Benchmarks(SphinxDirective):
    """The directive ``{benchmarks}``."""

    def run(self) -> list[Node]:
        """Parse the table."""
        self.env.note_dependency(str(RECORD.with_suffix(".md")))
        return self.parse_text_to_nodes(benchmarks())


class Commands(SphinxDirective):
    """The directive ``{commands}``."""

    def run(self) -> list[Node]:
        """Parse the sections."""
        return self.parse_text_to_nodes(commands(), allow_section_headings=True)


class Differences(SphinxDirective):
    """The directive ``{differences}``."""

    def run(self) -> list[Node]:
        """Parse the sections."""
        self.env.note_dependency(str(DIFFERENCES))
        return self.parse_text_to_nodes(differences(), allow_section_headings=True)


class Floors(SphinxDirective):
    """The directive ``{floors}``."""

    def run(self) -> list[Node]:
        """Parse the drawings."""
        self.env.note_dependency(str(FLOORS))
        return self.parse_text_to_nodes(floors(), allow_section_headings=True)


class Versions(SphinxDirective):
    """The directive ``{versions}``."""

    def run(self) -> list[Node]:
        """Parse the table."""
        self.env.note_dependency(str(VERSIONS))
        return self.parse_text_to_nodes(versions())


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("benchmarks", Benchmarks)
    app.add_directive("commands", Commands)
    app.add_directive("differences", Differences)
    app.add_directive("floors", Floors)
    app.add_directive("versions", Versions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
