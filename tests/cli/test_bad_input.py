"""Hostile names and files, wrong arguments and closed pipes cause a message of one line and no traceback."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tomllib
import unicodedata
from pathlib import Path

import numpy
import pytest

from ingot.cli.commands.export import distinct
from support.commands import command_line, environment, good, in_a_pipe, in_a_terminal, run
from support.models import save

HOSTILE = (
    "\x1b[31mred",
    "\x1b]52;c;cm0gLXJm\x1b\\",
    "\x9b31m",
    "a\r\nb\tc",
    "bell\x07\b\x00\x7f",
    "\u202egnp.exe\u2066",
    "zero\u200bwidth\ufeff",
    "a\u2028b",
    "tag\U000e0041",
    "../../etc/passwd",
    "/etc/cron.d/x",
    "NUL",
    "=1+1",
    "%s%n{0}{name}[0]",
    "-rf",
    "",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arrays = {name: numpy.arange(3.0) for name in HOSTILE}
    metadata = {name: name for name in HOSTILE}
    return save(tmp_path_factory.mktemp("bad") / "hostile.safetensors", arrays, metadata)


def is_shown(text: str) -> bool:
    """Return whether a terminal shows all of it. Newlines and the tabs between cells are ingot's."""
    plain = text.replace("\n", "").replace("\t", "")
    return not any(unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in plain)


READING = [
    ["summary"],
    ["ls"],
    ["ls", "-l"],
    ["tree"],
    ["tree", "--expand"],
    ["params"],
    ["layers"],
    ["stats", "--all"],
    ["stats", "--all", "--bins", "3"],
    ["mem"],
    ["check", "--values"],
    ["meta", "get"],
    ["hash"],
    ["meta", "export"],
    ["doctor"],
]


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_commands_escape_names_and_metadata(words: list[str], hostile: Path) -> None:
    for form in ([], ["--json"], ["--quiet"]):
        if words == ["meta", "export"] and form:
            continue
        ended = good(*words, hostile, *form)
        assert is_shown(ended.out), ascii(ended.out)
        if form == ["--json"]:
            ended.json()


def test_commands_escape_names_in_a_terminal(hostile: Path) -> None:
    for words in (["summary"], ["ls", "-l"], ["tree"], ["layers"], ["meta", "get"], ["stats", "--all"]):
        out = in_a_terminal(*words, hostile, NO_COLOR="1").out
        assert is_shown(out), ascii(out)


@pytest.mark.parametrize("name", HOSTILE)
def test_commands_escape_one_tensor_or_key(name: str, hostile: Path) -> None:
    commands = (["info", hostile], ["cat", hostile], ["stats", hostile], ["meta", "get", hostile])
    for words in commands:
        for form in ([], ["--json"]):
            ended = good(*words, *form, "--", name)
            assert is_shown(ended.out), ascii(ended.out)
    missing = run("info", "--", hostile, name + "\x1b]0;x\x07")
    assert missing.code == 2
    assert is_shown(missing.err)


def test_commands_print_a_row_on_one_line(hostile: Path) -> None:
    rows = good("ls", hostile).rows()
    assert [len(row) for row in rows] == [3] * len(HOSTILE)
    assert {row["name"] for row in good("ls", hostile, "--json").json()["tensors"]} == set(HOSTILE)


def test_export_makes_no_paths_of_names(hostile: Path, tmp_path: Path) -> None:
    folder = tmp_path / "within"
    folder.mkdir()
    good("export", "-d", folder, "--", hostile, *HOSTILE)
    assert [path.name for path in tmp_path.iterdir()] == ["within"]
    files = list(folder.iterdir())
    assert len(files) == len(HOSTILE)
    assert all(numpy.load(file).tolist() == [0.0, 1.0, 2.0] for file in files)


def test_export_gives_distinct_safe_file_names() -> None:
    names = [*HOSTILE, "x" * 60_000, "é" * 60_000, "case", "CASE", "..", ".", "~", "con.x", "a b", "\ud800"]
    files = distinct(names, "npy")
    assert len({file.lower() for file in files}) == len(names)
    for file in files:
        assert len(file) <= 220
        assert os.path.basename(file) == file
        assert file[0] not in ".-~"
        assert set(file) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789%._-")
        assert file.partition(".")[0].lower() not in ("nul", "con")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "too short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "LFS"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (b"PK\x03\x04" + bytes(100), "ZIP"),
        (b"\x80\x02}q\x00X" + bytes(100), "pickle"),
        (b"GGUF" + bytes(100), "GGUF"),
        (b"\xff" * 100, ""),
        ((1 << 40).to_bytes(8, "little") + b"{}", ""),
        ((30).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[9', ""),
    ],
)
@pytest.mark.parametrize("command", ["summary", "ls", "tree", "check", "meta get", "doctor", "merge -o x"])
def test_commands_name_other_kinds_of_files(content: bytes, said: str, command: str, tmp_path: Path) -> None:
    path = tmp_path / "model\x1b[31m.safetensors"
    path.write_bytes(content)
    ended = run(*command.split(), path)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert is_shown(ended.err)
    assert said.lower() in ended.err.lower()


def test_commands_name_a_truncated_file(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors")
    os.truncate(path, path.stat().st_size - 10)
    ended = run("stats", path, "--all")
    assert ended.code == 1
    assert "truncated" in ended.err or "shorter" in ended.err or "10 bytes" in ended.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing.safetensors"],
        ["ls", "nothing.safetensors"],
        ["lss"],
        ["ls"],
        ["ls", "--nope", "model.safetensors"],
        ["ls", "--keys", "nope.*", "model.safetensors"],
        ["--nope"],
        ["info", "model.safetensors", "nope"],
        ["cat", "model.safetensors", "lm_head.weight[nope]"],
        ["cat", "model.safetensors", "lm_head.weight[0:1:2:3]"],
        ["cat", "model.safetensors", "lm_head.weight[9999]"],
        ["stats", "model.safetensors"],
        ["stats", "model.safetensors", "nope"],
        ["meta", "set", "model.safetensors", "novalue"],
        ["meta", "rm", "model.safetensors", "nope"],
        ["meta", "import", "model.safetensors", "nothing.json"],
        ["split", "model.safetensors", "out", "--max-shard-size", "many"],
        ["split", "model.safetensors", "out", "--filename-pattern", "../x{suffix}"],
        ["rename", "model.safetensors", "out.safetensors"],
        ["rename", "model.safetensors", "out.safetensors", "-n", "nope", "x"],
        ["rename", "model.safetensors", "out.safetensors", "-s", ".*", "same"],
        ["rename", "model.safetensors", "out.safetensors", "-s", "a", r"\9"],
        ["cast", "model.safetensors", "out.safetensors", "--dtype", "F99"],
        ["cast", "model.safetensors", "model.safetensors", "--dtype", "F16"],
        ["merge", "model.safetensors", "-o", "model.safetensors"],
        ["export", "model.safetensors", "nope"],
        ["diff", "model.safetensors", "nothing.safetensors"],
    ],
    ids=" ".join,
)
def test_commands_exit_with_2_after_bad_usage(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "model.safetensors")
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    ended = run(*arguments)
    assert (ended.code, ended.out) == (2, ""), ended
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert path.read_bytes() == before


def test_commands_take_a_path_with_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "-rf.safetensors")
    save(tmp_path / "ls")
    monkeypatch.chdir(tmp_path)
    assert "-rf.safetensors" in good("--", "-rf.safetensors").out
    assert good("ls", "--", "-rf.safetensors").out == good("ls", "./ls").out
    assert "./ls" in good("./ls").out


@pytest.mark.parametrize("form", [[], ["--json"], ["-l"]])
def test_commands_are_quiet_after_a_closed_pipe(form: list[str], tmp_path: Path) -> None:
    path = save(tmp_path / "many.safetensors", {f"t.{at}": numpy.zeros(1) for at in range(20_000)})
    line = command_line("ls", path, *form)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_commands_escape_letters_that_the_encoding_lacks(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {"模型": numpy.zeros(1)})
    ended = in_a_pipe("ls", path, PYTHONIOENCODING="ascii")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("\\u6a21\\u578b\t")


def test_json_has_text_for_values_that_json_lacks(tmp_path: Path) -> None:
    values = numpy.array([1.0, numpy.nan, -numpy.inf])
    path = save(tmp_path / "model.safetensors", {"a": values})
    assert good("cat", path, "a", "--json").json()["values"] == [1.0, "nan", "-inf"]
    ended = run("check", path, "--values", "--json")
    assert ended.code == 1
    assert [problem["kind"] for problem in ended.json()["problems"]] == ["nan", "infinity"]


def test_commands_take_deep_names_and_deep_json(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {"a." * 50_000: numpy.zeros(1), ".": numpy.zeros(1)})
    for form in ([], ["--json"], ["--expand"]):
        good("tree", path, *form)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    ended = run("meta", "import", path, tmp_path / "deep.json")
    assert ended.code == 2


def test_check_finds_what_readers_accept(tmp_path: Path) -> None:
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "extra": 1}}
    header["b"] = {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}
    text = json.dumps(header).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\x02" + bytes(4))
    ended = run("check", path, "--json")
    assert ended.code == 1
    found = ended.json()["problems"]
    assert [problem["kind"] for problem in found] == ["not-strict", "misaligned"]
    assert found[1]["where"] == "b"


def test_commands_name_a_missing_package_in_one_line(tmp_path: Path) -> None:
    path = save(tmp_path / "模.safetensors", {"模": numpy.zeros(1)})
    program = (
        f"import sys; sys.modules['click'] = None; sys.argv = ['ingot', 'ls', {str(path)!r}]; "
        "sys.stdout.isatty = lambda: True; import ingot.cli; sys.exit(ingot.cli.main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.returncode == 2
    assert done.stderr == "error: the command needs click: pip install 'ingot-tensors[cli]'\n"


def test_wheel_has_the_command_and_its_extra() -> None:
    folder = Path(__file__).parents[2]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"ingot": "ingot.cli:main"}
    pinned = (folder / "requirements" / "test.txt").read_text()
    names = [requirement.partition(">=")[0] for requirement in project["optional-dependencies"]["cli"]]
    assert names == ["click"]
    assert all(f"\n{name}==" in pinned for name in names)


def test_commands_that_look_import_no_framework(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors")
    # One process: what a command imports stays for the next ones.
    program = (
        "import json, sys; from ingot.cli.program import run; "
        "found = lambda: [name for name in ('numpy', 'torch', 'tqdm', 'ml_dtypes') if name in sys.modules]; "
        "ends = [(line[0], run(line), found()) for line in json.load(sys.stdin)]; print(json.dumps(ends))"
    )
    commands = ("summary", "ls", "tree", "info", "params", "check", "meta get", "mem", "stats")
    extra = {"info": ["lm_head.weight"], "stats": ["lm_head.weight"]}
    lines = [[*command.split(), str(path), *extra.get(command, [])] for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[line[0], 0, []] for line in lines]


def test_library_works_without_the_command() -> None:
    program = "import sys, ingot; sys.exit('click' in sys.modules or 'ingot.cli' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=environment()).returncode == 0


def test_pipes_and_csv_hold_names_that_can_be_used_again(tmp_path: Path) -> None:
    names = [
        "a b\tc\nnew",
        "family 👨\u200d👩\u200d👧 ❤\ufe0f",
        "a\u200db",
        "\u202eback",
        'say "x", y',
        "line\rend",
    ]
    path = save(tmp_path / "model.safetensors", {name: numpy.zeros(1) for name in names})
    table = csv.DictReader(io.StringIO(good("ls", path, "--csv").out, newline=""))
    assert {row["name"] for row in table} == {*names}
    quiet = good("ls", path, "-q").out.splitlines()
    assert {*quiet} == {
        "a b\\x09c\\x0anew",
        names[1],
        "a\\u200db",
        "\\u202eback",
        'say "x", y',
        "line\\x0dend",
    }
    assert is_shown(in_a_terminal("ls", path, NO_COLOR="1").out)
    assert is_shown(in_a_terminal("ls", path, "--csv", NO_COLOR="1").out)
