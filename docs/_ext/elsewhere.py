"""Files of the repository that are pages of the site too, and links to them.

Files such as FORMAT.md are also read in the repository, so their links lead to files. On the site these links
lead to pages, or to a copy of a file that is not a page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Files of the repository, and the pages that include them.
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "project/security.md",
    "benches/README.md": "explained/benches.md",
    "crates/format/FORMAT.md": "explained/format.md",
    "crates/remote/README.md": "guides/remote-crate.md",
    "js/README.md": "guides/javascript-api.md",
}
# A page of its own on the site.
VIEWER = "js/viewer.html"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)")
RULE = re.compile(r"^\*\*([A-Z]\d+)\.\*\*", re.MULTILINE)


def led_to_pages(text: str, file: Path, page: str) -> str:
    """The text of `file`, with links that hold where it is shown, on `page`."""
    here = (DOCS / page).parent

    def led(match: re.Match[str]) -> str:
        words, target, anchor = match[1], (file.parent / match[2]).resolve(), match[3] or ""
        if not target.is_relative_to(ROOT):
            raise ValueError(f"{file}: a link that leaves the repository: {match[2]}")
        name = target.relative_to(ROOT).as_posix()
        if name in PAGES:
            # A rule has a name of its own on the whole site.
            is_rule = name.endswith("FORMAT.md") and re.fullmatch(r"#[a-z]\d+", anchor)
            return f"[{words}]({anchor if is_rule else f'/{PAGES[name]}{anchor}'})"
        if target.is_relative_to(DOCS) and target.suffix == ".md":
            return f"[{words}](/{target.relative_to(DOCS).as_posix()}{anchor})"
        if name == VIEWER:
            viewer = os.path.relpath(DOCS / "viewer.html", here)
            return f'<a class="reference internal" href="{viewer}">{words}</a>'
        if target.is_dir():
            return f"{words} (`{name}` in the repository)"
        return f"[{words}]({os.path.relpath(target, here)})"

    def shown(match: re.Match[str]) -> str:
        return f"![{match[1]}]({os.path.relpath((file.parent / match[2]).resolve(), here)})"

    return RULE.sub(r"(\1)=\n\g<0>", IMAGE.sub(shown, LINK.sub(led, text)))


def read(app: Sphinx, page: str, content: list[str]) -> None:
    """A page, before it is parsed."""
    path = Path(app.env.doc2path(page))
    content[0] = led_to_pages(content[0], path, path.relative_to(DOCS).as_posix())


def included(app: Sphinx, file: Path, page: str, content: list[str]) -> None:
    """A file that a page includes, before it is parsed. MyST gives the last part of the page's name only."""
    content[0] = led_to_pages(content[0], (DOCS / file).resolve(), f"{app.env.docname}.md")


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.connect("source-read", read)
    app.connect("include-read", included)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
