"""The reader in JavaScript: its tests in Node, and its files in the Python package."""

from __future__ import annotations

import json
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
TESTS = Path(__file__).parent
JS = Path(__file__).parents[2] / "js"
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def node(*arguments: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
    # The programs that the tests start find the interpreter and the package of this run.
    package = str(Path(ingot.__file__).parents[1])
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": package}
    return subprocess.run(
        [str(NODE), *map(str, arguments)],
        env=environment,
        input=given,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


@needs_node
@pytest.mark.parametrize("path", sorted(TESTS.glob("*.test.mjs")), ids=lambda path: path.stem)
def test_javascript_tests_pass(path: Path) -> None:
    run = node("--test", "--test-reporter=tap", path)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr
    counts = {word: int(count) for word, count in re.findall(r"^# (\w+) (\d+)$", run.stdout, re.MULTILINE)}
    # A file without tests counts as one that passes.
    assert counts["pass"] > 1, run.stdout
    assert counts["pass"] == counts["tests"], run.stdout


def exported(text: str) -> set[str]:
    """Return the names that a module, or a declaration of one, exports, without types."""
    kinds = r"(?:declare )?(?:async )?(?:function\*?|class|const)"
    names = re.findall(rf"^export {kinds} (\w+)", text, re.MULTILINE)
    again = re.findall(r"^export \{([^}]*)\}", text, re.MULTILINE)
    return {*names, *re.findall(r"\w+", " ".join(again))}


def test_package_has_the_modules_and_their_types() -> None:
    folder = files("ingot") / "web"
    package = json.loads((folder / "package.json").read_text("utf-8"))
    assert package["exports"] == {"types": "./index.d.ts", "default": "./index.js"}
    assert (package["name"], package["version"]) == ("ingot-tensors", ingot.__version__)
    module, types = (exported((folder / path).read_text("utf-8")) for path in ("index.js", "index.d.ts"))
    assert module == types
    assert len(types) > 20
    assert (folder / "README.md").is_file()


def test_javascript_dtypes_equal_format_md() -> None:
    text = (Path(__file__).parents[2] / "crates" / "format" / "FORMAT.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+|—) \|", text, re.MULTILINE)
    folder = files("ingot") / "web"
    (table,) = re.findall(
        r"(?s)const DTYPE_TABLE = \{\n(.*?)\n\};", (folder / "src" / "raw.js").read_text("utf-8")
    )
    assert re.findall(r"^  (\w+): \[(\d+), (\d+|null)\],$", table, re.MULTILINE) == [
        (dtype, bits, "null" if number == "—" else number) for dtype, bits, number in rows
    ]
    (union,) = re.findall(r"(?s)export type Dtype =(.*?);", (folder / "index.d.ts").read_text("utf-8"))
    assert re.findall(r'"(\w+)"', union) == [dtype for dtype, _, _ in rows]
    assert len(rows) == 22


def test_javascript_modules_import_only_each_other() -> None:
    modules = {path.name: path.read_text("utf-8") for path in (JS / "src").glob("*.js")}
    floors = ["errors", "address", "decode", "file", "http", "source", "read", "json", "raw", "safetensors"]
    floors += ["bintensors", "foreign", "header", "write", "shard_index", "model", "parameters"]
    assert set(modules) == {f"{floor}.js" for floor in floors}
    entry = (JS / "index.js").read_text("utf-8")
    for number, (name, module) in enumerate(
        [*((floor, modules[f"{floor}.js"]) for floor in floors), ("", entry)]
    ):
        code = re.sub(r"(?m)^ *(//|\*|/\*).*$", "", module)
        assert not re.search(r"\bimport\(|\brequire\b|\beval\b|\bnew Function\b|innerHTML\s*=", code)
        # A module imports only modules before it, by a relative path that needs no build.
        below = [f"./{other}.js" if name else f"./src/{other}.js" for other in floors[:number]]
        imported = re.findall(r"\bfrom \"([^\"]*)\"|^import \"", code, re.MULTILINE)
        assert set(imported) <= set(below)
        assert len(imported) == len(re.findall(r"(?m)^(?:import\b|export .* from )", code))


def test_viewer_modules_have_no_import_cycle() -> None:
    modules = {path.name: path.read_text("utf-8") for path in (JS / "viewer").glob("*.js")}
    assert len(modules) > 10
    below: dict[str, set[str]] = {}
    for name, module in modules.items():
        code = re.sub(r"(?m)^ *(//|\*|/\*).*$", "", module)
        assert not re.search(
            r"\bimport\(|\brequire\b|\beval\b|\bFunction\(|innerHTML|outerHTML|insertAdjacent|\.write\(", code
        )
        imported = re.findall(
            r"^import (?:\{[^}]*\}|\w+) from \"([^\"]*)\"(?: with .*)?;$", code, re.MULTILINE
        )
        assert len(imported) == len(re.findall(r"(?m)^import\b", code))
        outside = {path for path in imported if path.startswith("..")}
        assert all((JS / "viewer" / path).resolve().parent == JS / "src" for path in outside)
        below[name] = {path.removeprefix("./") for path in imported} - outside
    while free := [name for name, needs in below.items() if not needs & below.keys()]:
        for name in free:
            del below[name]
    assert below == {}
