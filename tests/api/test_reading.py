"""The record of the sentences that had to be read twice, and the script that draws files for a reading."""

from __future__ import annotations

import tomllib
from typing import Any

from support.scripts import script

READING = script("draw-reading")


def record() -> list[dict[str, Any]]:
    draws: list[dict[str, Any]] = tomllib.loads(READING.RECORD.read_text("utf-8"))["draw"]
    return draws


def test_record_has_complete_draws_in_order() -> None:
    draws = record()
    assert [draw["seed"] for draw in draws] == list(range(1, len(draws) + 1))
    for draw in draws:
        assert len(draw["marks"]) == READING.FILES + READING.PAGES
        assert all(sentence and why for marks in draw["marks"].values() for sentence, why in marks)


def test_check_rejects_two_marks_in_a_file_of_the_last_draw() -> None:
    draws = record()
    path = next(iter(draws[-1]["marks"]))
    draws[-1]["marks"] = {other: [] for other in draws[-1]["marks"]}
    assert [fault for fault in READING.faults(draws) if "last draw" in fault] == []
    draws[-1]["marks"][path] = [["One sentence.", "odd"], ["Another one.", "odd"]]
    assert f"{path} has 2 marks in the last draw, expected at most 1" in READING.faults(draws)


def test_check_rejects_a_marked_sentence_that_is_still_in_its_file() -> None:
    marks = {"scripts/draw-reading": [["All pages are equally likely.", "for this test"]]}
    assert any("still has the marked sentence" in fault for fault in READING.faults_of(marks))
