"""Draw the record of `fresh_loads.py` or `gpu.py` as an SVG: a bar for each side, as long as its median.

plot.py RECORD PICTURE [CHART]    CHART draws one chart alone, such as `warm`

A picture with a name that ends in `-narrow` is for phones: each label is above its bar. The colours follow
the theme of the page.
"""

import json
import sys
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

BAR, HEAD = 18, 34
TITLES = {
    "warm": "Loading 2 GiB into private memory, file in the page cache",
    "cold": "The same, file on the disk",
    "small": "20,000 small tensors, file in the page cache",
    "gpu": "Loading onto a GPU, file in the page cache",
}
OURS, RAW, OTHERS = "#d9822b", "#9a9a9a", "#5c7080"
STYLE = """\
<style>
svg { font-family: system-ui, sans-serif }
text { fill: #222 } .note { fill: #666 } .ground { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .note { fill: #aaa } .ground { fill: #131416 } }
</style>"""


class Shape(NamedTuple):
    """The sizes of a picture, in pixels."""

    width: int
    #: The column of labels; 0 if labels are above their bars.
    label: int
    #: The room for a figure after the longest bar.
    figure: int
    row: int


WIDE, NARROW = Shape(860, 300, 130, 24), Shape(360, 0, 100, 42)


def drawn(found: dict, shape: Shape, only: str | None = None) -> str:
    """Return the picture of all charts, or of one."""
    parts, y = [], 8
    for name, title in TITLES.items():
        if name in found and only in (None, name):
            part, y = _chart(title, found[name], shape, y)
            parts += part
    packages = [f"{package} {version}" for package, version in found["versions"].items()]
    note = f"{found['machine']['cores']} cores. {', '.join(packages)}"
    for line in wrap(note, shape.width // 6):
        parts.append(_text(8, y + 14, line, 10, kind="note"))
        y += 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {shape.width} {y + 10}">'
    ground = '<rect class="ground" width="100%" height="100%"/>'
    return "\n".join([head, STYLE, ground, *parts, "</svg>", ""])


def _chart(title: str, rows: dict, shape: Shape, y: int) -> tuple[list[str], int]:
    parts = []
    for line in wrap(title, shape.width // 8):
        parts.append(_text(8, y + 16, line, 14, weight="bold"))
        y += 18
    y += HEAD - 18
    # The best raw row is one of the others.
    shown = {side: row for side, row in rows.items() if "samples" in row}
    longest = max(row["seconds"] for row in shown.values())
    for side, row in sorted(shown.items(), key=lambda pair: pair[1]["seconds"]):
        begin = shape.label or 8
        width = max(1.0, (shape.width - begin - shape.figure) * row["seconds"] / longest)
        colour = OURS if side == "ingot" else RAW if side.startswith("raw") else OTHERS
        if shape.label:
            parts.append(_text(begin - 8, y + 13, side, 12, anchor="end"))
        else:
            parts.append(_text(begin, y + 8, side, 12))
        bar = y if shape.label else y + 13
        parts.append(f'<rect x="{begin}" y="{bar}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
        figure = f"{row['seconds']:.3g} s" + ("" if side == "ingot" else f", {row['ratio']:.2g}×")
        parts.append(_text(begin + width + 6, bar + 13, figure, 12))
        y += shape.row
    return parts, y + 6


def _text(
    x: float,
    y: float,
    text: str,
    size: int,
    weight: str = "normal",
    anchor: str = "start",
    kind: str = "text",
) -> str:
    look = f'class="{kind}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y}" {look}>{escape(text)}</text>'


if __name__ == "__main__":
    record, picture = map(Path, sys.argv[1:3])
    shape = NARROW if picture.stem.endswith("-narrow") else WIDE
    picture.write_text(drawn(json.loads(record.read_text()), shape, *sys.argv[3:]))
