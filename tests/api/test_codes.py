"""docs/reference/codes.md has every code of an error, with its cause and its mend."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import ingot
from support.scripts import script

ROOT = Path(__file__).parents[2]


CODES = script("codes")
WORDS: dict[str, dict[str, Any]] = tomllib.loads(CODES.WORDS.read_text("utf-8"))


def test_the_page_is_what_the_sources_have() -> None:
    found = CODES.Found()
    assert CODES.faults(found, WORDS) == []
    assert CODES.PAGE.read_text("utf-8") == CODES.rendered(found, WORDS), "run scripts/codes"


@pytest.mark.parametrize("missing", ["cause", "mend"])
def test_a_code_without_a_cause_or_a_mend_is_told_of(missing: str) -> None:
    found = CODES.Found()
    words = {**WORDS, "hole": {key: text for key, text in WORDS["hole"].items() if key != missing}}
    assert CODES.faults(found, words) == ["hole: no cause or no mend in docs/reference/codes.toml"]


def test_a_new_code_of_each_kind_of_source_is_told_of() -> None:
    found = CODES.Found()
    found.classes["new-in-rust"].add("HeaderError")
    assert CODES.faults(found, WORDS) == ["new-in-rust: no cause or no mend in docs/reference/codes.toml"]


def test_a_code_that_no_source_has_any_more_is_told_of() -> None:
    said = CODES.faults(CODES.Found(), {**WORDS, "gone": {"cause": "A.", "mend": "B."}})
    assert said == ["gone: stands in docs/reference/codes.toml, and no source has it"]


def test_every_code_of_the_vectors_and_of_the_format_is_on_the_page() -> None:
    vectors = [path.read_text("utf-8") for path in (ROOT / "tests" / "vectors").glob("*.toml")]
    named = set(re.findall(r'^code = "([a-z-]+)"', "\n".join(vectors), re.MULTILINE))
    assert len(named) > 20
    assert named | CODES.rules().keys() <= WORDS.keys()


def test_what_is_raised_has_the_class_that_the_page_gives(tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    with pytest.raises(ingot.HeaderError) as caught:
        ingot.safe_open(broken, "np")
    page = CODES.PAGE.read_text("utf-8")
    section = page.partition(f"## `{caught.value.code}`\n")[2].partition("\n## ")[0]
    assert "`HeaderError`" in section.splitlines()[1]
