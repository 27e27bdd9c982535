"""The viewer as one file, which opens by a double click: alone, or with a report in it.

The file is `viewer.html` in `web`. `scripts/bundle-viewer` writes it.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_POLICY = '<meta http-equiv="Content-Security-Policy" content="'
_SCRIPT = '<script id="viewer">'


@cache
def _viewer() -> str:
    return (files("ingot") / "web" / "viewer.html").read_text("utf-8")


def policy() -> str:
    """Return the content security policy of the page."""
    return _viewer().partition(_POLICY)[2].partition('"')[0]


def page(report: str | None = None) -> str:
    """Return the viewer as HTML, with a report of `report.made` in it or with nothing open.

    Parameters
    ----------
    report
        JSON.
    """
    if report is None:
        return _viewer()
    # The report is the only part that comes from a file: nothing in it may end the element.
    data = report.replace("<", "\\u003c")
    element = f'<script type="application/json" id="report">{data}</script>\n'
    return _viewer().replace(_SCRIPT, element + _SCRIPT, 1)
