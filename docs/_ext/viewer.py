"""The viewer, as a page beside those of the documentation: the file that `ingot view --html` writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PAGE = "viewer.html"


def write(app: Sphinx, error: Exception | None) -> None:
    """Put it into the finished site."""
    from ingot._view import report

    if error is None and app.builder.name == "html":
        (Path(app.outdir) / PAGE).write_text(report.page(), "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    # After `accessible`, which mends every page: this one holds digests of itself, and must stay as it is.
    app.connect("build-finished", write, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
