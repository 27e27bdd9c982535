"""Draw the record of `fresh_loads.py` or `gpu.py` as an SVG: a bar for each side, as long as its median.

plot.py RECORD PICTURE [CHART]    CHART draws one chart alone, such as `warm`
"""

import json
import sys
from html import escape
from pathlib import Path

WIDTH, LABEL, BAR, GAP, HEAD = 860, 300, 18, 6, 34
TITLES = {
    "warm": "Loading 2 GiB into private memory, file in the page cache",
    "cold": "The same, file on the disk",
    "small": "20,000 small tensors, file in the page cache",
    "gpu": "Loading onto a GPU, file in the page cache",
}
OURS, RAW, OTHERS = "#d9822b", "#b8b8b8", "#5c7080"


def drawn(found: dict, only: str | None = None) -> str:
    """Return the picture of all charts, or of one."""
    parts, y = [], 8
    for name, title in TITLES.items():
        if name in found and only in (None, name):
            part, y = _chart(title, found[name], y)
            parts += part
    versions = found["versions"]
    note = ", ".join(f"{package} {version}" for package, version in versions.items())
    parts.append(_text(8, y + 14, f"{found['machine']['cores']} cores. {note}", 10, "#777"))
    style = "font-family: system-ui, sans-serif"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 24}" style="{style}">'
    # A ground of its own, since a page may be dark.
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


def _chart(title: str, rows: dict, y: int) -> tuple[list[str], int]:
    parts = [_text(8, y + 16, title, 14, "#222", "bold")]
    y += HEAD
    # The best raw row is one of the others.
    shown = {side: row for side, row in rows.items() if "samples" in row}
    longest = max(row["seconds"] for row in shown.values())
    for side, row in sorted(shown.items(), key=lambda pair: pair[1]["seconds"]):
        width = max(1.0, (WIDTH - LABEL - 130) * row["seconds"] / longest)
        colour = OURS if side == "ingot" else RAW if side.startswith("raw") else OTHERS
        parts.append(_text(LABEL - 8, y + 13, side, 12, "#222", anchor="end"))
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
        figure = f"{row['seconds']:.3g} s" + ("" if side == "ingot" else f", {row['ratio']:.2g}×")
        parts.append(_text(LABEL + width + 6, y + 13, figure, 12, "#222"))
        y += BAR + GAP
    return parts, y + 12


def _text(
    x: float, y: float, text: str, size: int, colour: str, weight: str = "normal", anchor: str = "start"
) -> str:
    look = f'font-size="{size}" fill="{colour}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y}" {look}>{escape(text)}</text>'


if __name__ == "__main__":
    record, picture = map(Path, sys.argv[1:3])
    picture.write_text(drawn(json.loads(record.read_text()), *sys.argv[3:]))
