"""Commands that write correct files, replace none without `--overwrite`, and write none in a dry run."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from support.commands import good, in_a_pipe, in_a_terminal, run
from support.models import save, transformer

RULES = str(Path(__file__).with_name("rules.json"))
WRITING = {
    "merge": ["merge", "a.safetensors", "-o", "out"],
    "rename": ["rename", "a.safetensors", "out", "-s", "model", "m"],
    "rewrite": ["rewrite", "a.safetensors", "out", "--remap", RULES],
    "cast": ["cast", "a.safetensors", "out", "--dtype", "F16"],
    "export": ["export", "a.safetensors", "lm_head.weight", "-o", "out"],
    "clean": ["meta", "clean", "a.safetensors", "-o", "out"],
    "repair": ["repair", "a.safetensors", "out"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save(tmp_path / "a.safetensors", metadata={"format": "pt", "note": "one"})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", WRITING)
def test_commands_write_nothing_in_a_dry_run(command: str, folder: Path) -> None:
    printed = good(*WRITING[command], "--dry-run").out
    assert "would write" in printed or command in ("rename", "repair")
    assert os.listdir(folder) == ["a.safetensors"]


@pytest.mark.parametrize("command", WRITING)
def test_commands_replace_a_file_with_overwrite_only(command: str, folder: Path) -> None:
    (folder / "out").write_text("precious")
    for extra in ([], ["--dry-run"]):
        refused = run(*WRITING[command], *extra)
        assert refused.code == 2
        assert "--overwrite" in refused.err
        assert (folder / "out").read_text() == "precious"
    good(*WRITING[command], "--overwrite")
    assert (folder / "out").stat().st_size > 100
    assert sorted(os.listdir(folder)) == ["a.safetensors", "out"]


def test_rename_warns_if_it_renames_nothing(folder: Path) -> None:
    printed = run("rename", "a.safetensors", "out", "-s", "absent", "b", "--json")
    assert printed.code == 0
    assert "a.safetensors: no tensor is renamed" in printed.err
    assert printed.json()["renamed"] == {}
    assert (folder / "out").exists()
    good("rename", "a.safetensors", "new", "-s", "model", "m")


def test_commands_replace_a_checkpoint_with_force_only(folder: Path) -> None:
    split = ["split", "a.safetensors", "parts", "--max-shard-size", "100KB"]
    planned = good(*split, "--dry-run", "--json").json()["files"]
    assert not (folder / "parts").exists()
    assert good(*split, "--json").json()["files"] == planned
    before = sorted(os.listdir("parts"))
    assert run("split", "a.safetensors", "parts").code == 2
    assert sorted(os.listdir("parts")) == before
    good("split", "a.safetensors", "parts", "--overwrite")
    assert os.listdir("parts") == ["model.safetensors"]


@pytest.mark.parametrize(
    "words",
    [["set", "a.safetensors", "k=v"], ["rm", "a.safetensors", "note"], ["clean", "a.safetensors"]],
    ids=lambda words: words[0],
)
def test_edit_dry_run_prints_the_changes(words: list[str], folder: Path) -> None:
    before = (folder / "a.safetensors").read_bytes()
    answer = good("meta", *words, "--dry-run", "--json").json()
    assert answer["outcome"] == "dry-run"
    assert answer["set"] or answer["removed"]
    assert (folder / "a.safetensors").read_bytes() == before


def test_meta_exports_and_imports_metadata(folder: Path) -> None:
    pairs = {"format": "pt", "text": "模型 \x1b\u202e\n", "empty": ""}
    (folder / "in.json").write_text(json.dumps(pairs))
    good("meta", "import", "a.safetensors", "in.json", "--replace")
    assert ingot.inspect("a.safetensors").metadata == pairs
    good("meta", "export", "a.safetensors", "out.json")
    assert json.loads((folder / "out.json").read_bytes()) == pairs
    assert run("meta", "export", "a.safetensors", "out.json").code == 2
    piped = in_a_pipe("meta", "import", "a.safetensors", "-", folder=folder, stdin=b'{"text": "new"}')
    assert piped.code == 0
    assert ingot.inspect("a.safetensors").metadata == pairs | {"text": "new"}


@pytest.mark.parametrize("text", ['{"a": 1}', "[]", "{", '{"a": "1", "a": "2"}', '{"a": null}', "\x00"])
def test_meta_rejects_invalid_metadata(text: str, folder: Path) -> None:
    (folder / "in.json").write_text(text)
    before = (folder / "a.safetensors").read_bytes()
    refused = run("meta", "import", "a.safetensors", "in.json")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert (folder / "a.safetensors").read_bytes() == before


def test_meta_opens_an_editor(folder: Path) -> None:
    editor = folder / "editor"
    editor.write_text("""#!/bin/sh\nsed -i 's/"one"/"two"/' "$1"\n""")
    editor.chmod(editor.stat().st_mode | stat.S_IXUSR)
    ended = in_a_pipe("meta", "edit", "a.safetensors", folder=folder, VISUAL=str(editor), EDITOR=str(editor))
    assert ended.code == 0, ended
    assert ingot.inspect("a.safetensors").metadata == {"format": "pt", "note": "two"}


def test_meta_get_rejects_a_missing_key(folder: Path) -> None:
    assert run("meta", "get", "a.safetensors", "nope").code == 2
    assert good("meta", "get", "a.safetensors", "note").out == "one\n"


def test_diff_exits_with_1_if_files_differ(folder: Path) -> None:
    other = transformer()
    other["lm_head.weight"] = other["lm_head.weight"].copy()
    other["lm_head.weight"][3, 4] = 100
    save(folder / "b.safetensors", other, {"format": "pt", "note": "one"})
    assert run("diff", "a.safetensors", "b.safetensors").code == 0
    ended = run("diff", "a.safetensors", "b.safetensors", "--values", "--json")
    assert ended.code == 1
    ((name, row),) = ended.json()["values"].items()
    before = float(transformer()["lm_head.weight"][3, 4])
    assert (name, row["different"], row["max_abs"]) == ("lm_head.weight", 1, 100 - before)
    assert 0 < row["relative_l2"] < 1
    assert 0.5 < row["cosine"] < 1


EIGHTS = ["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"]
BITS = dict.fromkeys(EIGHTS, 8) | {"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32}
BITS |= {"F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64, "F4": 4}


def test_cat_and_export_handle_every_dtype(folder: Path) -> None:
    specs = {
        code: {"dtype": code, "shape": [2, 4], "data": b"\1\0" * (bits // 2) if bits > 8 else b"\1" * bits}
        for code, bits in BITS.items()
    }
    ingot.serialize_file(specs, "all.safetensors")
    found = ingot.numpy.load_file("all.safetensors")
    for code in BITS:
        rows = good("cat", "all.safetensors", code).rows()
        assert len(rows) == 2
        good("cat", "all.safetensors", f"{code}[0]", "--json").json()
        good("export", "all.safetensors", code)
        exported = numpy.load(f"{code}.npy")
        kept = found[code]
        assert numpy.array_equal(exported, kept.astype(exported.dtype), equal_nan=exported.dtype.kind in "fc")
    assert len(good("stats", "all.safetensors", "--all").rows()) == len(BITS)


def test_cat_prints_parts_of_scalars_and_empty_tensors(folder: Path) -> None:
    save(
        folder / "s.safetensors",
        {"scalar": numpy.array(3.5), "none": numpy.zeros((0, 4)), "x[0]": numpy.arange(4)},
    )
    assert good("cat", "s.safetensors", "scalar").out == "3.5\n"
    assert good("cat", "s.safetensors", "none").out == ""
    assert good("cat", "s.safetensors", "x[0]").out == "0\t1\t2\t3\n"
    assert good("cat", "s.safetensors", "x[0][...]").out == "0\t1\t2\t3\n"
    assert good("cat", "s.safetensors", "x[0][-1]").out == "3\n"
    good("stats", "s.safetensors", "--all")


def test_commands_show_a_bar_on_standard_error_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.cli import screen

    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    monkeypatch.setattr(screen, "_PATIENCE", 0.0)
    with screen.bar(screen.Screen(), "Reading") as tell:
        tell(4, 9)
    assert out.getvalue() == ""
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(screen, "_PATIENCE", 3600.0)
    with screen.bar(screen.Screen(), "Reading") as tell:
        tell(4, 9)
        assert out.getvalue() == ""
        monkeypatch.setattr(screen, "_PATIENCE", 0.0)
        tell(5, 9)
        assert out.getvalue() == "\rReading:  55 % of 9 B"
    assert out.getvalue().endswith("\n")


@pytest.mark.parametrize(
    "words",
    [
        ["stats", "shards", "--all", "--bins", "4"],
        ["stats", "shards", "--all"],
        ["hash", "shards", "-a", "sha256", "-a", "autov3"],
        ["verify", "shards"],
        ["diff", "shards", "s.safetensors", "--values"],
        ["merge", "shards", "-o", "merged.safetensors"],
        ["split", "s.safetensors", "again", "--max-shard-size", "100000"],
        ["rename", "shards", "renamed.safetensors", "-s", "model", "m"],
        ["export", "shards", "lm_head.weight", "model.embed_tokens.weight"],
        ["export", "shards", "lm_head.weight", "model.embed_tokens.weight", "--raw"],
        ["cast", "shards", "cast.safetensors", "--dtype", "F32"],
    ],
    ids=" ".join,
)
def test_commands_show_one_bar(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.cli import screen

    monkeypatch.chdir(tmp_path)
    ingot.split(save(tmp_path / "s.safetensors"), tmp_path / "shards", 100_000)
    told: list[tuple[int, int]] = []
    bars: list[str] = []

    @contextmanager
    def recording(progress: Any, title: str) -> Iterator[Any]:
        # Record the progress that the called functions report.
        if progress is True:
            bars.append(title)
            progress = lambda done, total: told.append((done, total))  # noqa: E731
        yield progress or None

    monkeypatch.setattr(screen, "_PATIENCE", 0.0)
    monkeypatch.setattr(screen.Screen, "shows_bars", True)
    monkeypatch.setattr(screen.progress, "reporting", recording)
    run(*words)
    assert len(bars) == 1
    assert len({total for _, total in told}) == 1
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 0
    # `ingot.verify` reports small files when it has read all of them.
    assert len(told) > 1 or words[0] == "verify"


def test_commands_have_help_and_a_version() -> None:
    assert good("--version").out == f"ingot {ingot.__version__}\n"
    assert "Exit status" in good("--help").out
    assert run().code in (0, 2)
    assert "Usage: ingot" in in_a_terminal("-h").out


@pytest.mark.parametrize("late", [False, True])
def test_merge_reports_a_late_interrupt(folder: Path, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ingot._write.rearrange.merge

    def interrupted(*arguments: object, **options: object) -> None:
        # Python handles a signal that comes during the rename only after the rename.
        if late:
            real(*arguments, **options)
        raise KeyboardInterrupt

    # The command inspects the signature of the function.
    update_wrapper(interrupted, real)
    monkeypatch.setattr(ingot._write.rearrange, "merge", interrupted)
    for told in ("out", "out"):
        ended = run("merge", "a.safetensors", "-o", told, "--overwrite")
        said = f"warning: {told}: is written and complete: the interruption came after it\n" if late else ""
        assert (ended.code, ended.err) == (130, said + "error: interrupted\n")
        assert Path(told).exists() == late


def test_repair_reports_what_it_left_out(folder: Path) -> None:
    os.truncate("a.safetensors", (folder / "a.safetensors").stat().st_size - 10)
    assert run("ls", "a.safetensors").code == 1
    planned = good("repair", "a.safetensors", "mended.safetensors", "--dry-run", "--json").json()
    assert not (folder / "mended.safetensors").exists()
    answer = good("repair", "a.safetensors", "mended.safetensors", "--json").json()
    assert answer == planned
    (finding,) = answer["findings"]
    assert (finding["code"], finding["done"]) == ("truncated", "tensor-left-out")
    assert "the file is 10 bytes short" in finding["found"]
    assert finding["tensor"] not in ingot.numpy.load_file("mended.safetensors")
    assert answer["tensors"] == len(ingot.numpy.load_file("mended.safetensors"))
    shown = good("repair", "a.safetensors", "mended.safetensors", "--overwrite").rows()
    assert shown == [["truncated", finding["tensor"], finding["found"], "tensor left out"]]
    assert good("repair", "mended.safetensors", "again.safetensors").out == ""
    ended = in_a_terminal("repair", "mended.safetensors", "third.safetensors", folder=folder)
    assert "wrote third.safetensors" in ended.out
    assert "the source breaks no rule" in ended.out


def test_repair_of_an_unreadable_file_writes_nothing(folder: Path) -> None:
    (folder / "page.safetensors").write_text("<!DOCTYPE html><html></html>")
    ended = run("repair", "page.safetensors", "mended.safetensors")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "HTML" in ended.err
    assert not (folder / "mended.safetensors").exists()
