"""Failures of every command: the exit status, one line on standard error, and the output of ``--json``."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import numpy
import pytest

import ingot.delta
from ingot.cli.program import COMMANDS, program
from ingot.cli.screen import in_options, status
from support.commands import command_line, environment, every, in_a_pipe, run
from support.models import save


def has_json(command: click.Command) -> bool:
    return any("--json" in parameter.opts for parameter in command.params)


# The arguments of each command beside the file.
MORE = {
    ("info",): ["a"],
    ("stats",): ["a"],
    ("cat",): ["a"],
    ("diff",): ["model.safetensors"],
    ("meta", "set"): ["k=v"],
    ("meta", "rm"): ["k"],
    ("meta", "import"): ["pairs.json"],
    ("lora", "merge"): ["model.safetensors", "out.bt"],
    ("lora", "convert"): ["out.bt", "--to", "kohya"],
    ("modelspec", "set"): ["title=x"],
    ("modelspec", "thumbnail"): ["-o", "out.jpg"],
    ("convert",): ["out.bt"],
    ("export",): ["a"],
    ("split",): ["out"],
    ("merge",): ["-o", "out.bt"],
    ("rename",): ["out.bt", "-s", "a", "b"],
    ("rewrite",): ["out.bt", "--remap", "rules.json"],
    ("cast",): ["out.bt", "--dtype", "F16"],
    ("delta", "diff"): ["model.safetensors", "-o", "out"],
    ("delta", "apply"): ["patch.safetensors", "-o", "out"],
    ("delta", "compose"): ["-o", "out"],
    ("repair",): ["out.bt"],
    ("download",): ["out.bt"],
    ("upload",): ["s3://bucket/x"],
    ("view",): ["--html", "out.html"],
}
JSON = [words for words, command in every(program) if has_json(command)]
# `credentials` reads no file.
READING = [words for words in JSON if words != ("credentials",)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a file with a truncated header, and some valid files."""
    sound = save(tmp_path / "model.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(sound.read_bytes()[:100])
    ingot.delta.diff(sound, sound, tmp_path / "patch.safetensors")
    (tmp_path / "pairs.json").write_text("{}")
    (tmp_path / "rules.json").write_text('[{"select": "*"}]')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failure(*words: object) -> dict[str, object]:
    """Check the common parts of a failure, and return its answer."""
    ended = run(*words)
    found: dict[str, object] = ended.json()
    assert found.keys() == {"error", "code", "exit_status"}
    assert ended.err == f"error: {found['error']}\n"
    assert found["exit_status"] == ended.code > 0
    assert isinstance(found["code"], str)
    return found


# Commands that copy or hash any file, whatever its contents.
WHOLE = {("hash",), ("download",), ("upload",)}


@pytest.mark.parametrize("words", [words for words in READING if words not in WHOLE], ids=" ".join)
def test_json_of_a_truncated_file_has_the_error(words: tuple[str, ...]) -> None:
    found = failure(*words, "cut.safetensors", *MORE.get(words, []), "--json")
    assert found["exit_status"] == 1
    assert found["code"] == "header-past-end"
    assert "cut.safetensors" in str(found["error"])


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_json_of_a_missing_file_has_the_error(words: tuple[str, ...], tmp_path: Path) -> None:
    path = f"{tmp_path}/missing.safetensors"
    # A download takes URLs.
    url = f"file://{path}" if words == ("download",) else path
    found = failure(*words, url, *MORE.get(words, []), "--json")
    assert (found["exit_status"], found["code"]) == (2, "ENOENT")
    assert str(found["error"]).startswith(f"{path}: ")


@pytest.mark.parametrize("words", JSON, ids=" ".join)
def test_json_of_a_bad_argument_has_the_error(words: tuple[str, ...]) -> None:
    found = failure(*words, "--json", "--nope", "model.safetensors")
    assert (found["exit_status"], found["code"]) == (2, "usage")
    assert "--nope" in str(found["error"])


def test_json_after_two_dashes_is_a_path() -> None:
    ended = run("ls", "--", "--json")
    assert (ended.code, ended.out) == (2, "")


def test_unknown_option_names_the_nearest() -> None:
    for words, command in every(program):
        for parameter in command.params:
            long = [option for option in parameter.opts if option.startswith("--") and len(option) > 5]
            for option in long:
                ended = run(*words, option[:-1])
                assert ended.code == 2
                assert f"no such option `{option[:-1]}`: did you mean `{option}`" in ended.err, ended


@pytest.mark.parametrize("group", [(), ("meta",), ("modelspec",)], ids=" ".join)
def test_unknown_command_names_the_nearest(group: tuple[str, ...]) -> None:
    for words, _ in every(program):
        if words[:-1] == group:
            wrong = f"{words[-1]}x"
            ended = run(*group, wrong)
            assert (ended.code, ended.out) == (2, "")
            assert f"`{wrong}`: did you mean `{words[-1]}`?" in ended.err


def test_commands_exit_with_130_after_ctrl_c() -> None:
    line = command_line("meta", "import", "model.safetensors", "-", "--json")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, env=environment(), text=True, **pipes) as process:
        # The command waits for standard input once Python and its modules have started.
        status = Path(f"/proc/{process.pid}/wchan")
        while "pipe" not in status.read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "error: interrupted\n")
    assert out == '{"error": "interrupted", "code": "interrupted", "exit_status": 130}\n'


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exit_quietly_after_a_closed_pipe(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [command, "--help"]
    done = subprocess.run(
        command_line(*words), stdout=write, stderr=subprocess.PIPE, env=environment(), check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_commands_print_failures_on_standard_error_only() -> None:
    for words in (["ls", "missing"], ["ls", "cut.safetensors"], ["ls"], ["ls", "--nope"], ["lss"]):
        ended = in_a_pipe(*words)
        assert ended.out == ""
        assert ended.err.startswith("error: ")
        assert ended.err.count("\n") == 1


def test_help_documents_each_exit_status() -> None:
    lines = [line.split() for line in run("--help").out.splitlines()]
    for code in (0, 1, 2, 130, 141):
        assert [str(code)] in [words[:1] for words in lines]


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "model.safetensors"],
        ["ls", "--json", "model.safetensors"],
        ["summary", "--json", "model.safetensors"],
        ["meta", "get", "--json", "model.safetensors"],
        ["hash", "--json", "model.safetensors"],
        ["check", "model.safetensors"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_commands_report_a_full_disk_in_one_line(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command_line(*words), stdout=full, stderr=subprocess.PIPE, env=environment(), check=False
        )
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")


def test_exit_status_is_1_for_failures_and_2_for_wrong_paths() -> None:
    failures = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EIO, errno.EMFILE)
    assert {status(OSError(number, "", "x")) for number in failures} == {1}
    wrong = (errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)
    assert {status(OSError(number, "", "x")) for number in wrong} == {2}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has a file that opens and cannot be read")
def test_failed_reads_name_the_file(tmp_path: Path) -> None:
    # The first memory page of a process.
    unreadable = "/proc/self/mem"
    model = str(save(tmp_path / "model.safetensors", {"a": numpy.zeros(2, "f4")}))
    for words in (
        ("ls", unreadable),
        ("convert", unreadable, str(tmp_path / "new.safetensors")),
        ("meta", "import", model, unreadable),
        ("modelspec", "set", model, "--thumbnail", unreadable),
    ):
        done = run(*words)
        assert (done.code, done.err) == (1, f"error: {unreadable}: Input/output error\n"), words


def test_commands_give_no_advice_for_python() -> None:
    """Convert the advice for a directory that is not writable, as `ingot-io` words it."""
    faults = Path(__file__).parents[2] / "crates" / "io" / "src" / "error" / "faults.rs"
    advice = re.findall(r'"(save_file\(.*?)"', faults.read_text(encoding="utf-8"))
    assert len(advice) == 1
    assert "writable" in in_options(advice[0])
    assert "save_file" not in in_options(advice[0])
