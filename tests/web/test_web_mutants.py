"""Randomly changed headers and indexes: the readers in JavaScript and in Rust agree on them.

`INGOT_HEADERS` sets the number; `make nightly` tries more.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from oracle import rendered, row
from test_web import needs_node, node

import ingot
from ingot._native import Checkpoint, ShardIndex
from support.mutants import TELLING, mutant
from support.record import note
from vectors.case import indexes, vectors

pytestmark = [pytest.mark.slow, needs_node]

INDEX = "index.json"
# All headers, and headers of one test, which must end in time on a busy machine.
HEADERS = int(os.environ.get("INGOT_HEADERS", "20000"))
HEADERS_OF_ONE_TEST = 20000
# The largest vectors to change, in bytes. Larger ones only test a size.
LONGEST = 4096
# Tokens of a JSON header, and other bytes.
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+|[^"\d\s]|\s+|.', re.DOTALL)


def kind_of(token: bytes) -> bytes:
    return b"0" if token.isdigit() else token[:1]


class Case(NamedTuple):
    """A file, and how it is read."""

    kind: str
    file: bytes
    is_strict: bool


class Seeds:
    """The originals: the vectors that all readers share, and files that ingot writes."""

    def __init__(self) -> None:
        written = [base64.b64decode(case["file"]) for case in rendered()]
        files = [*(vector.file() for vector in vectors()), *written]
        self.files = [file for file in files if len(file) <= LONGEST]
        self.parts = [parts for file in self.files if (parts := cut(file))]
        self.indexes = [case["bytes"] for case in indexes() if len(case["bytes"]) <= LONGEST]
        texts = [*(head for head, _ in self.parts), *self.indexes]
        numbers = [str(number).encode() for number in TELLING]
        tokens = sorted({*numbers, *(token for text in texts for token in TOKEN.findall(text))})
        # Grouped by the kind of token, which its first byte shows.
        self.tokens = {kind: [*group] for kind, group in groupby(tokens, kind_of)}

    def case(self, dice: random.Random) -> Case:
        is_strict = dice.random() < 0.2
        match dice.randrange(6):
            case 0:
                return Case("header", mutant(self.files, dice), is_strict)
            case 1:
                return Case("index", self.changed(dice.choice(self.indexes), dice), is_strict)
            case _:
                head, data = dice.choice(self.parts)
                head = self.changed(head, dice)
                return Case("header", len(head).to_bytes(8, "little") + head + data, is_strict)

    def changed(self, text: bytes, dice: random.Random) -> bytes:
        """The text with some bytes, or some of its tokens, changed."""
        if dice.random() < 0.3:
            return mutant([text], dice)
        tokens = TOKEN.findall(text)
        for _ in range(dice.choice([1, 1, 2, 4])):
            at, end = sorted(dice.choices(range(len(tokens) + 1), k=2))
            end = min(end, at + dice.choice([1, 2, 13]))
            match dice.randrange(6):
                case 0:
                    del tokens[at:end]
                case 1:
                    tokens[at:at] = tokens[at:end]
                case 2:
                    tokens[at:at] = [dice.choice(self.tokens[dice.choice([*self.tokens])])]
                case 3:
                    tokens[at:at] = [b" "]
                case _:
                    tokens[at:end] = [dice.choice(self.tokens[kind_of(token)]) for token in tokens[at:end]]
        return b"".join(tokens)


def cut(file: bytes) -> tuple[bytes, bytes] | None:
    """The header and the data of a file that is long enough for its header."""
    end = 8 + int.from_bytes(file[:8], "little")
    return (file[8:end], file[end:]) if 8 < end <= len(file) else None


def in_rust(case: Case) -> dict[str, Any]:
    try:
        if case.kind == "index":
            path = Path(INDEX)
            path.write_bytes(case.file)
            index = ShardIndex.read(path)
            assert index is not None
            return {"weightMap": [*map(list, index.weight_map().items())], "metadata": index.metadata()}
        checkpoint = Checkpoint.from_buffer(case.file, "refuse" if case.is_strict else "accept")
    except (ingot.HeaderError, ingot.CheckpointError) as error:
        numbers = (error.expected, error.found, error.begin, error.end)
        return {
            "code": error.code,
            "message": str(error),
            "tensor": error.tensor,
            "numbers": [None if number is None else str(number) for number in numbers],
        }
    infos = [checkpoint.info(name) for name in checkpoint.offset_names()]
    metadata = checkpoint.metadata()
    return {
        "format": checkpoint.format,
        "tensors": [row(info.name, info.dtype, info.shape, info.begin, info.end) for info in infos],
        "metadata": None if metadata is None else [*map(list, metadata.items())],
    }


def in_javascript(cases: list[Case]) -> list[dict[str, Any]]:
    lines = [
        json.dumps({"kind": kind, "file": base64.b64encode(file).decode(), "strict": is_strict})
        for kind, file, is_strict in cases
    ]
    run = node(Path(__file__).with_name("verdicts.mjs"), given="\n".join(lines))
    assert run.returncode == 0, run.stderr
    # Not `splitlines`: a name may hold other line ends.
    return [json.loads(line) for line in run.stdout.removesuffix("\n").split("\n")]


def comparable(said: dict[str, Any]) -> dict[str, Any]:
    """Return a verdict without allowed differences."""
    if message := said.get("message"):
        # Each reader has its own messages for invalid JSON, and its own text for numbers that the format does
        # not allow.
        is_own = re.search(r"invalid JSON|the number -|not an integer", message)
        return said | {"message": "its own words" if is_own else message.removeprefix(f"{INDEX}: ")}
    if "weightMap" not in said:
        return said | {"metadata": said["metadata"] and sorted(said["metadata"])}
    # One reader returns the metadata as JSON text, the other as a value.
    text = said["metadata"]
    metadata = json.loads(text) if isinstance(text, str) else text
    return {"metadata": metadata, "weightMap": sorted(said["weightMap"])}


def agree(case: Case, found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether both agree. If one of two faults is invalid JSON, each may name either."""
    codes = [found.get("code"), expected.get("code")]
    is_either = "invalid-json" in codes and None not in codes and not is_json(case)
    return is_either or comparable(found) == comparable(expected)


def is_json(case: Case) -> bool:
    text = case.file if case.kind == "index" else (cut(case.file) or (b"", b""))[0]
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("first", range(0, HEADERS, HEADERS_OF_ONE_TEST))
def test_javascript_reader_agrees_with_rust_on_changed_files(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seeds = Seeds()
    numbers = range(first, min(first + HEADERS_OF_ONE_TEST, HEADERS))
    cases = [seeds.case(random.Random(f"header {number}")) for number in numbers]
    verdicts = [*zip(cases, in_javascript(cases), map(in_rust, cases), strict=True)]
    differ = [at for at in zip(numbers, verdicts, strict=True) if not agree(*at[1])]
    note("changed headers and indexes, JavaScript against Rust", len(cases), len(differ))
    assert not differ, f"{differ[0]!s:.5000}"
    accepted = sum("code" not in expected for _, _, expected in verdicts)
    assert 0 < accepted < len(cases)
