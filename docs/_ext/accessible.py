"""Corrections to the theme, for keyboards and screen readers, and to the reading of docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.ext.napoleon.docstring import GoogleDocstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx

MENDS = (
    # Captions are headings of some level.
    ('<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    # The two asides have names of their own.
    ('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="Pages">'),
    ('<aside class="toc-drawer', '<aside aria-label="On this page" class="toc-drawer'),
    # What scrolls can be reached by the keyboard.
    ("<pre>", '<pre tabindex="0">'),
    ('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
)
SEARCH = ('<div id="search-results">', '<h1>Search</h1><div id="search-results">')
SEVERAL = re.compile(r"^(\w+(?:, \w+)+) : (.*)$")


def mended(html: str) -> str:
    """Return a page with the corrections."""
    for found, better in MENDS:
        html = html.replace(found, better)
    return html


def finish(app: Sphinx, error: Exception | None) -> None:
    """Correct every page that was written."""
    if error is None and app.builder.name == "html":
        for path in Path(app.outdir).rglob("*.html"):
            html = mended(path.read_text("utf-8"))
            path.write_text(html.replace(*SEARCH) if path.name == "search.html" else html, "utf-8")


def each_attribute(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Split attributes that a docstring describes together: napoleon accepts one name for each entry."""
    try:
        begin = lines.index("Attributes")
    except ValueError:
        return
    number = begin
    while number < len(lines):
        several = SEVERAL.match(lines[number])
        if several:
            end = number + 1
            while end < len(lines) and lines[end].startswith(" "):
                end += 1
            text = lines[number + 1 : end]
            entries = [[f"{one} : {several[2]}", *text] for one in several[1].split(", ")]
            lines[number:end] = [line for entry in entries for line in entry]
        number += 1


def parse_as_method(docstring: GoogleDocstring) -> list[str]:
    """Parse the docstring of a property or a type like a method's.

    In "The address: a token is in it" napoleon takes the first part for the type of the property.
    """
    docstring._what = "method"
    docstring._parse()
    return []


def skip_undocumented_fields(
    app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object
) -> bool | None:
    """Skip the fields of named tuples, whose docstrings only count them: the class describes them."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the corrections to the build."""
    GoogleDocstring._parse_attribute_docstring = parse_as_method  # type: ignore[method-assign]
    app.connect("build-finished", finish)
    app.connect("autodoc-skip-member", skip_undocumented_fields)
    # Before napoleon.
    app.connect("autodoc-process-docstring", each_attribute, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
