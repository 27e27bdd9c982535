"""The reader in JavaScript: its own tests, run by Node, and that the package brings it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import ingot

NODE = shutil.which("node")
TESTS = Path(__file__).parent / "web"
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def node(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # The programs that the tests start find the interpreter and the package of this run.
    package = str(Path(ingot.__file__).parents[1])
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": package}
    return subprocess.run(
        [str(NODE), *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )


@needs_node
@pytest.mark.parametrize("path", sorted(TESTS.glob("*.test.mjs")), ids=lambda path: path.stem)
def test_the_tests_in_javascript_pass(path: Path) -> None:
    run = node("--test", "--test-reporter=tap", path)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr
    counts = {word: int(count) for word, count in re.findall(r"^# (\w+) (\d+)$", run.stdout, re.MULTILINE)}
    # A file without tests counts as one that passes.
    assert counts["pass"] > 1, run.stdout
    assert counts["pass"] == counts["tests"], run.stdout


def test_the_package_brings_the_module_and_its_types() -> None:
    folder = files("ingot") / "web"
    module = (folder / "safetensors.js").read_text("utf-8")
    types = (folder / "safetensors.d.ts").read_text("utf-8")
    exported = set(re.findall(r"^export (?:async )?(?:function|class|const) (\w+)", module, re.MULTILINE))
    declared = set(re.findall(r"^export (?:declare )?(?:function|class|const) (\w+)", types, re.MULTILINE))
    assert exported == declared
    assert len(exported) > 10


def test_the_dtypes_are_those_of_format_md() -> None:
    text = (Path(__file__).parents[1] / "crates" / "format" / "FORMAT.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+|—) \|", text, re.MULTILINE)
    folder = files("ingot") / "web"
    (table,) = re.findall(
        r"(?s)const DTYPE_TABLE = \{\n(.*?)\n\};", (folder / "safetensors.js").read_text("utf-8")
    )
    assert re.findall(r"^  (\w+): \[(\d+), (\d+|null)\],$", table, re.MULTILINE) == [
        (dtype, bits, "null" if number == "—" else number) for dtype, bits, number in rows
    ]
    (union,) = re.findall(r"(?s)export type Dtype =(.*?);", (folder / "safetensors.d.ts").read_text("utf-8"))
    assert re.findall(r'"(\w+)"', union) == [dtype for dtype, _, _ in rows]
    assert len(rows) == 22


def test_the_module_needs_nothing_else() -> None:
    module = (files("ingot") / "web" / "safetensors.js").read_text("utf-8")
    assert not re.search(r"\bimport\b|\brequire\b|\beval\b|\bnew Function\b|innerHTML\s*=", module)
