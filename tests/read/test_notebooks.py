"""HTML for notebooks: folded trees and tables, escaped, without scripts, of a bounded size."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot
import ingot.compat.safetensors
import ingot.numpy
from ingot._base.html import MOST_ROWS, page, table, tree
from ingot._base.text import _escaped

TAGS = {"div", "b", "small", "table", "tr", "td", "details", "summary", "blockquote"}
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</td></table></details><h1>",
    '"><svg/onload=alert(1)>',
    "a.<b>.c&amp;",
    "'; --",
    "\u202egnp.exe",
    "\x1b[31mred",
    "line\nbreak",
]


class Seen(HTMLParser):
    """A parser that collects the elements and the text of a page, and checks that it is well formed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert attributes == []
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    handle_decl = handle_pi = unknown_decl = handle_comment

    @property
    def rows(self) -> int:
        return self.tags.get("tr", 0) + self.tags.get("summary", 0)

    @property
    def hidden(self) -> int:
        """Return the number of tensors that the page counts but does not list."""
        found = re.findall(r"… and ([\d,]+) more", "\n".join(self.text))
        return sum(int(count.replace(",", "")) for count in found)


def many(path: Path, names: list[str]) -> Path:
    array = np.zeros(1, np.uint8)
    ingot.numpy.save_file(dict.fromkeys(names, array), path)
    return path


def test_handle_html_shows_a_folded_tree(tmp_path: Path) -> None:
    path = many(tmp_path / "t", ["layers.10.w", "layers.2.w", "layers.2.b", "head"])
    file = ingot.safe_open(path, "np")
    seen = Seen(file._repr_html_())
    assert seen.tags["details"] == 3
    text = " ".join(seen.text)
    assert str(path) in text
    assert "4 tensors" in text
    assert re.search(r"head.*layers.*2.*b.*w.*10.*w", text)
    assert text.count("U8") == 4
    file.close()
    assert "closed" in " ".join(Seen(file._repr_html_()).text)
    assert Seen(ingot.compat.safetensors.safe_open(path, "np")._repr_html_()).rows == 7


def test_checkpoint_html_opens_no_shard(tmp_path: Path) -> None:
    many(tmp_path / "whole", [f"layers.{number}.w" for number in range(12)])
    ingot.split(tmp_path / "whole", tmp_path / "shards", 4)
    file = ingot.safe_open(tmp_path / "shards", "np")
    for shard in file.shards[1:]:
        Path(shard).unlink()
    text = " ".join(Seen(file._repr_html_()).text)
    assert "12 tensors" in text
    assert "model-00003-of-00003.safetensors" in text


def test_html_escapes_names(tmp_path: Path) -> None:
    path = tmp_path / "<b>.safetensors"
    many(path, HOSTILE)
    converted = ingot.convert(path, tmp_path / "<i>.npz", drop=[HOSTILE[0]])
    pages = {
        "handle": ingot.safe_open(path, "np"),
        "description": ingot.inspect(path),
        "conversion": converted,
    }
    for shown in pages.values():
        text = "".join(Seen(shown._repr_html_()).text)  # type: ignore[attr-defined]
        assert not re.search("[\x00-\x1f\x7f\u202e]", text)
    # Dots split names; the rest of each name is shown.
    shown_names = "".join(Seen(pages["handle"]._repr_html_()).text)  # type: ignore[attr-defined]
    for name in HOSTILE:
        assert all(_escaped(part) in shown_names for part in name.split("."))


def test_verification_html_lists_each_differing_tensor(tmp_path: Path) -> None:
    path = many(tmp_path / "t", ["<b>", "good"])
    ingot.numpy.save_file(ingot.numpy.load_file(path), path, checksums=True)
    assert Seen(ingot.verify(path)._repr_html_()).rows == 0
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    data[-2] ^= 1
    path.write_bytes(data)
    report = ingot.verify(path, raises=False)
    seen = Seen(report._repr_html_())
    assert seen.rows == len(report.bad) == 2
    text = " ".join(seen.text)
    assert "NOT ok" in text
    for row in report.bad:
        assert row.expected in text
        assert row.found in text


@pytest.mark.parametrize(
    "name",
    [lambda n: f"t{n}", lambda n: f"layers.{n}.w", lambda n: f"a.{n % 7}.b.{n}", lambda n: "x." * n + "w"],
    ids=["flat", "modules", "nested", "deep"],
)
def test_html_limits_the_rows(name: Callable[[int], str]) -> None:
    names = [name(number) for number in range(3000)]
    seen = Seen(page("many", [], tree((name, ("U8",)) for name in names)))
    assert seen.rows == MOST_ROWS == 500
    assert seen.tags.get("tr", 0) + seen.hidden == len(names)
    seen = Seen(table([name] for name in names))
    assert (seen.rows, seen.hidden) == (MOST_ROWS, len(names) - MOST_ROWS)


def test_html_shows_top_modules_first(tmp_path: Path) -> None:
    names = [f"{module}.{number}" for module in "abc" for number in range(1000)]
    text = Seen(tree((name, ()) for name in names)).text
    assert [part.strip() for part in text if part.strip() in {*"abc"}] == [*"abc"]


@given(st.lists(st.text(alphabet=st.sampled_from("ab.<&>\"'\u202e"), max_size=12), unique=True, max_size=40))
def test_html_shows_each_tensor_once(names: list[str]) -> None:
    seen = Seen(tree((name, ("F32", [1, 2])) for name in names))
    assert seen.tags.get("tr", 0) == len(names)
    assert seen.hidden == 0


def test_html_cuts_long_texts() -> None:
    shown: Any = page("x" * 10**6, ["y" * 10**6], table([["z" * 10**6]]))
    assert len(shown) < 5000
