"""README.md and docs/: short, with links that lead somewhere, and programs that run."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Its programs name servers of others. What they call is tested against servers of our own (tests/remote).
FAR = "docs/guides/urls.md"


def called(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def programs(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """What its headings are called in links, as GitHub makes them, and its rules, as the site does."""
    text = page.read_text("utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    rules = re.findall(r"^\*\*([A-Z]\d+)\.\*\*", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads + rules}


every_page = pytest.mark.parametrize("page", PAGES, ids=called)
every_program = pytest.mark.parametrize("page", list(filter(programs, PAGES)), ids=called)


def test_the_readme_is_read_in_a_minute() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 150


def test_every_page_stands_in_the_list_of_guides() -> None:
    index = ROOT / "docs" / "index.md"
    linked = set(LINK.findall(index.read_text("utf-8")))
    pages = {page.relative_to(index.parent).as_posix() for page in index.parent.rglob("*.md")}
    assert linked == pages - {"index.md"}


@every_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text("utf-8")):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@every_program
def test_the_programs_of_a_page_run_in_their_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for program in programs(page):
        code = compile(program, called(page), "exec")
        frameworks = re.findall(r"^import (jax|torch|numpy)\b", program, re.MULTILINE)
        if called(page) != FAR and all(map(find_spec, frameworks)):
            exec(code, names)
