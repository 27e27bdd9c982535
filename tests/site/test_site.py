"""The site that `make docs` built: it requests no other host, and no link is broken."""

from __future__ import annotations

import inspect
import re
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

SITE = Path(__file__).parents[2] / "site"
# Resources that a browser fetches by itself, by element.
FETCHED = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "input": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
    "track": "src",
    "video": "src",
}
# Relations of a `link` that nothing is fetched for.
NAMED_ONLY = {"canonical", "next", "prev", "index", "search", "author", "license", "alternate"}

pytestmark = pytest.mark.skipif(
    not (SITE / "index.html").exists(), reason="the site is not built: `make docs`"
)


class Page(HTMLParser):
    """The anchors, links, resources and scripts of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.styles: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        self._inside = tag
        self.ids |= {has[name] for name in ("id", "name") if name in has}
        self.styles.append(has.get("style", ""))
        self.fetched += [has[name] for name in ("srcset", "poster") if name in has]
        if tag == "a" and "href" in has:
            self.links.append(has["href"])
        elif tag in FETCHED and not (tag == "link" and has.get("rel") in NAMED_ONLY):
            self.fetched.append(has.get(FETCHED[tag], ""))

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.styles.append(data)
        elif self._inside == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


@cache
def page(path: Path) -> Page:
    return Page(path)


def pages() -> list[Path]:
    found = sorted(SITE.rglob("*.html"))
    assert len(found) > 50
    return found


def leads_away(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def test_pages_request_no_other_host() -> None:
    style = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")
    asked = {
        (path.relative_to(SITE).as_posix(), address) for path in pages() for address in page(path).fetched
    }
    sheets = {sheet: sheet.read_text("utf-8") for sheet in SITE.rglob("*.css")}
    sheets |= {path: "\n".join(page(path).styles) for path in pages()}
    asked |= {
        (path.relative_to(SITE).as_posix(), address)
        for path, text in sheets.items()
        for found in style.findall(text)
        for address in found
    }
    assert len(asked) > 100
    assert [(where, address) for where, address in sorted(asked) if leads_away(address)] == []


def test_scripts_request_no_other_host() -> None:
    asks = re.compile(
        r"(?:fetch|import|importScripts|WebSocket|EventSource|sendBeacon|open)\(\s*[`'\"](?:https?:|wss?:)?//"
    )
    scripts = {path: path.read_text("utf-8") for path in SITE.rglob("*.js")}
    scripts |= {path: "\n".join(page(path).scripts) for path in pages()}
    assert len(scripts) > 50
    assert [path.name for path, text in scripts.items() if asks.search(text)] == []


def test_links_lead_to_a_page_and_an_anchor() -> None:
    broken = []
    for path in pages():
        for link in page(path).links:
            if leads_away(link):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / unquote(file)).resolve() if file else path
            is_there = target.is_relative_to(SITE) and target.is_file()
            if not is_there or (
                anchor and target.suffix == ".html" and unquote(anchor) not in page(target).ids
            ):
                broken.append((path.relative_to(SITE).as_posix(), link))
    assert broken == []


def test_viewer_is_linked_from_home_and_guide() -> None:
    for name in ("index", "guides/viewer"):
        path = SITE / f"{name}.html"
        targets = [(path.parent / link.partition("#")[0]).resolve() for link in page(path).links]
        assert SITE / "viewer.html" in targets, name


def test_format_rules_have_anchors() -> None:
    links = {link for link in page(SITE / "reference" / "codes.html").links if "format.html#" in link}
    assert {f"../explained/format.html#{rule}" for rule in ("f1", "f9", "f12", "b3", "i6")} <= links


def test_pages_have_markdown_and_are_listed_for_language_models() -> None:
    listed = re.findall(r"\]\(([^)]+\.md)\)", (SITE / "llms.txt").read_text("utf-8"))
    assert len(listed) > 40
    assert all((SITE / name).stat().st_size > 100 for name in listed)
    made = {path.with_suffix(".md").relative_to(SITE).as_posix() for path in pages()}
    assert made - {"genindex.md", "py-modindex.md", "search.md", "viewer.md"} == set(listed)


def test_public_names_have_a_reference_entry() -> None:
    names = re.findall(r"^\| `(\w[\w.]*)", (SITE / "reference" / "names.md").read_text("utf-8"), re.MULTILINE)
    assert len(names) > 100
    places = {place for path in pages() if "reference" in path.parts for place in page(path).ids}
    modules = (
        "",
        "torch.",
        "dcp.",
        "numpy.",
        "modelspec.",
        "lora.",
        "delta.",
        "remap.",
        "typing.",
        "compat.",
        "errors.",
        "flax.",
        "engines.lightning.",
        "engines.accelerate.",
        "engines.transformers.",
    )
    missing = [name for name in names if not any(f"ingot.{module}{name}" in places for module in modules)]
    assert [name for name in missing if f"module-ingot.{name}" not in places] == []


def test_public_functions_and_classes_have_pages() -> None:
    folder = SITE / "reference" / "python" / "generated"
    made = {path.stem.removesuffix("-class") for path in folder.glob("*.html")}
    names = set()
    for module in ("ingot", "ingot.torch", "ingot.numpy", "ingot.dcp", "ingot.modelspec"):
        loaded = import_module(module)
        for name in loaded.__all__:
            value = getattr(loaded, name)
            # Exceptions and dicts of options have one page for all of them.
            is_class = isinstance(value, type) and not issubclass(value, (Exception, dict))
            if is_class or inspect.isroutine(value):
                names.add(f"{module}.{name}")
    assert names - made == set()


def test_names_of_pages_differ_in_more_than_case() -> None:
    names = [path.relative_to(SITE).as_posix().lower() for path in pages()]
    assert len(names) == len(set(names))


def test_entries_of_the_reference_have_text() -> None:
    entry = re.compile(
        r'<dt class="sig sig-object py" id="([\w.]+)">(?:(?!</dt>).)*</dt>\s*<dd>\s*</dd>', re.DOTALL
    )
    empty = {name for path in pages() for name in entry.findall(path.read_text("utf-8"))}
    assert empty == set()


def test_no_clause_of_a_docstring_is_taken_for_a_type() -> None:
    rendered = {path.relative_to(SITE).as_posix(): path.read_text("utf-8") for path in pages()}
    artefacts = ('Type<span class="colon">', "Alias for field number")
    assert [(name, one) for name, html in rendered.items() for one in artefacts if one in html] == []
