"""The code that the viewer shows for a tensor reads that tensor."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from support.commands import good

NODE, BASH = shutil.which("node"), shutil.which("bash")
pytestmark = pytest.mark.skipif(NODE is None or BASH is None, reason="node or bash is not installed")

NAMES = [
    "-x",
    "--help",
    "--",
    "w[0]",
    "=ls",
    "~",
    "a b\tc\nd",
    "'$HOME' \"`id`\" \\x41",
    "größe.重み",
    "'é\\",
    "#{}*?!;&|<>()",
    "",
]


def codes(*tensors: dict[str, Any]) -> list[dict[str, str]]:
    module = files("ingot") / "web" / "viewer" / "code.js"
    script = (
        f"import {{ codeFor }} from {json.dumps(str(module))};"
        f"for (const one of {json.dumps(tensors)}) console.log(JSON.stringify(codeFor(one)));"
    )
    code = [str(NODE), "--input-type=module", "-e", script]
    ended = subprocess.run(code, capture_output=True, text=True, check=True)
    return [dict(json.loads(line)) for line in ended.stdout.splitlines()]


def tensor(path: str, name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "path": path, "position": 0, "nbytes": 8, "isUrl": False, "hasRange": True} | more


@pytest.mark.parametrize("file", ["model.safetensors", "-m o'del[1].safetensors"])
def test_code_reads_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    ingot.numpy.save_file({name: numpy.array([n, -n]) for n, name in enumerate(NAMES)}, file)
    with ingot.safe_open(file, "np") as handle:
        begins = {name: os.path.getsize(file) - 16 * len(NAMES) + handle.info(name).begin for name in NAMES}
    found = codes(*(tensor(file, name, position=begins[name], nbytes=16) for name in NAMES))
    # The shell splits the words, and the command runs in this process.
    lines = ["ingot() { printf '%s\\0' $# \"$@\"; }"]
    lines += [f"{one['Command']}\n{one['dd']} status=none\ncat tensor.bin >> read" for one in found]
    ended = subprocess.run([str(BASH)], input="\n".join(lines).encode(), capture_output=True, check=True)
    words = iter(ended.stdout.decode().split("\0"))
    calls = [[next(words) for _ in range(int(next(words)))] for _ in found]
    assert [good(*call).out for call in calls] == [f"{n}\t{-n}\n" for n in range(len(NAMES))]
    assert numpy.fromfile("read", numpy.int64)[::2].tolist() == [*range(len(NAMES))]
    for n, one in enumerate(found):
        scope: dict[str, Any] = {}
        exec(one["Python, numpy"], scope)
        assert scope["array"].tolist() == [n, -n]


def test_code_for_addresses() -> None:
    addresses = [
        "https://host/a[1].safetensors",
        "hf://owner/name/model.safetensors",
        "s3://bucket/m.safetensors",
    ]
    for path, code in zip(
        addresses, codes(*(tensor(path, "x", isUrl=True) for path in addresses)), strict=True
    ):
        assert "open_url(" in code["Rust"]
        assert path in code["Rust"]
        assert "dd" not in code
        # curl supports https: only. It needs -g, since it reads brackets as patterns.
        assert ("curl" in code) == path.startswith("https:")
        assert code.get("curl", "curl -gL").startswith("curl -gL")


def test_code_has_no_command_for_a_name_that_is_no_argument() -> None:
    [code] = codes(tensor("m.safetensors", "a\0b"))
    assert "Command" not in code
    assert '"a\\u0000b"' in code["Python, torch"]


@pytest.mark.parametrize("file", ["my-lora.safetensors", "my.bt", "weights"])
def test_report_has_the_name_of_its_file(tmp_path: Path, file: str) -> None:
    ingot.numpy.save_file({"x": numpy.arange(3)}, tmp_path / file)
    (tmp_path / "config.json").write_text("{}")
    good("view", tmp_path / file, "--html", tmp_path / "r.html")
    report = re.search(r'id="report">(.*?)</script>', (tmp_path / "r.html").read_text())
    assert report is not None
    names = [one["name"] for one in json.loads(report[1])[0]["files"]]
    assert names == [file if "." in file else f"{file}.safetensors", "config.json"]
