"""Completion by real shells, in a terminal, with the lines that `ingot completion` prints."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

import ingot.numpy
from ingot.cli.program import COMMANDS
from support.commands import environment, good

NAMES = ["layer.2.weight", "layer.10.weight", "lm head, tied", "\x1b[31m"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, another file, a folder, and the command `ingot` of this checkout."""
    folder = tmp_path / "models"
    (folder / "mods").mkdir(parents=True)
    tensors = {name: numpy.zeros(1) for name in NAMES}
    ingot.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "notes, old.txt").write_text("")
    script = tmp_path / "bin" / "ingot"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m ingot "$@"\n')
    script.chmod(0o755)
    return folder


def variables(folder: Path) -> dict[str, str]:
    path = f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return environment(PATH=path, HOME=str(folder.parent), TERM="dumb")


def asked(folder: Path, line: str) -> list[str]:
    """Return the completions of `line` that the command offers a shell: kind and word."""
    words = line.split(" ")
    answer = subprocess.run(
        ["ingot"],
        cwd=folder,
        env=variables(folder)
        | {"_INGOT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stderr == ""
    return [line for line in answer.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("ingot ls mod", ["file,mod"]),
        ("ingot verify model.safetensors mod", ["file,mod"]),
        ("ingot check model.safetensors mod", ["file,mod"]),
        ("ingot convert model.safetensors mod", ["file,mod"]),
        ("ingot merge model.safetensors -o mod", ["file,mod"]),
        ("ingot meta get mod", ["file,mod"]),
        ("ingot model.s", ["file,model.s"]),
        ("ingot mod", ["plain,modelspec", "plain,model.safetensors", "plain,mods/"]),
        ("ingot info model.safetensors layer", ["plain,layer.2.weight", "plain,layer.10.weight"]),
        (
            "ingot cat model.safetensors l",
            ["plain,layer.2.weight", "plain,layer.10.weight", "plain,lm head, tied"],
        ),
        ("ingot info https://127.0.0.1:1/model.safetensors l", []),
        ("ingot info missing.safetensors l", []),
        ("ingot export model.safetensors --outp", ["plain,--output"]),
    ],
)
def test_completion_completes_paths_and_tensors(folder: Path, line: str, answer: list[str]) -> None:
    assert asked(folder, line) == answer


@pytest.mark.parametrize("name", COMMANDS)
def test_completion_covers_every_command_with_a_path(folder: Path, name: str) -> None:
    without = {"completion", "delta", "download", "lora", "meta", "modelspec"}
    assert asked(folder, f"ingot {name} mod") == ([] if name in without else ["file,mod"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ingot ls mod", "ingot ls model.safetensors"),
        ("ingot info model.safetensors layer.1", "ingot info model.safetensors layer.10.weight"),
    ],
)
def test_completion_works_in_bash(folder: Path, line: str, expected: str) -> None:
    (folder / "mods").rmdir()
    (folder.parent / "completion").write_text(good("completion", "bash").out)
    ours, theirs = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env=variables(folder),
        start_new_session=True,
    )
    os.close(theirs)
    try:
        os.write(ours, b". ../completion; PS1=READY\n")
        # The terminal also shows the typed text: the second occurrence is the prompt.
        read_until(ours, "READY", 2)
        os.write(ours, line.encode() + b"\t")
        read_until(ours, expected, 1)
    finally:
        bash.kill()
        bash.wait()
        os.close(ours)


def read_until(terminal: int, text: str, times: int) -> None:
    """Read the output of a terminal until `text` has occurred `times` times."""
    shown, end = "", time.monotonic() + 60
    while shown.count(text) < times:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 1 << 16).decode("utf-8", "replace")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ingot ls mod", {"model.safetensors", "mods/"}),
        ("ingot ls no", {"notes, old.txt"}),
        ("ingot info model.safetensors lm", {"lm head, tied"}),
        ("ingot has", {"hash\tPrint hashes of files: SHA-256, BLAKE3, AutoV1 to AutoV3, …"}),
    ],
)
def test_completion_works_in_fish(folder: Path, line: str, expected: set[str]) -> None:
    script = good("completion", "fish").out + f'\ncomplete --do-complete "{line}"\n'
    ran = subprocess.run(
        ["fish", "--no-config", "-c", script],
        cwd=folder,
        env=variables(folder) | {"LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.splitlines()) == expected
