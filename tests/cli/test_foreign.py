"""`ingot PATH` and `ingot ls` on files of other formats."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from support.commands import environment, good, in_a_terminal, run
from support.processes import python


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    arrays = {"w": numpy.ones((30, 40), numpy.float32), "layer.10.b": numpy.zeros(3, numpy.int8)}
    numpy.savez(tmp_path / "in.npz", **arrays, **{"layer.2.b": arrays["layer.10.b"]}, text=numpy.array(["a"]))
    return tmp_path / "in.npz"


def test_ls_of_foreign_files_uses_natural_order(npz: Path) -> None:
    assert good("ls", npz).rows() == [
        ["layer.2.b", "I8", "[3]"],
        ["layer.10.b", "I8", "[3]"],
        ["w", "F32", "[30, 40]"],
    ]
    assert good("ls", npz, "--sort", "size").rows()[0][0] == "w"
    assert [row[0] for row in good("ls", npz, "--sort", "file").rows()] == ["w", "layer.10.b", "layer.2.b"]
    assert good("ls", npz, "--keys", "w*").rows() == [["w", "F32", "[30, 40]"]]


def test_ls_of_foreign_files_shows_an_unknown_position_as_a_dash(npz: Path) -> None:
    assert good("ls", "-l", npz).rows()[2] == ["w", "F32", "[30, 40]", "1200", "4800", "-", "-", "in.npz"]
    assert good("ls", "--json", npz, "--keys", "w*").json() == {
        "tensors": [
            {
                "name": "w",
                "dtype": "F32",
                "shape": [30, 40],
                "begin": None,
                "end": None,
                "nbytes": 4800,
                "parameters": 1200,
                "file": "in.npz",
            }
        ]
    }


def test_summary_of_foreign_files_has_format_and_totals(npz: Path) -> None:
    printed = good(npz).out
    assert "format      npz, 1 file of" in printed
    assert "parameters  1.21K (1,206)" in printed
    assert "F32: 1 tensor, 1.20K parameters, 4.80 kB" in printed
    assert "others      text.npy: array of objects, records or text <U1" in printed
    answer = good(npz, "--json").json()
    assert (answer["format"], answer["tensors"], answer["parameters"]) == ("npz", 3, 1206)
    assert answer["dtypes"]["I8"] == {"tensors": 2, "parameters": 6, "nbytes": 6, "unsized": 0}
    assert answer["others"] == [
        {"name": "text.npy", "kind": "array of objects, records or text", "value": "<U1"}
    ]


def test_ls_of_foreign_files_shows_unconvertible_entries_without_shape(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    wide = torch.ones(2, dtype=torch.complex128)
    torch.save({"a": torch.ones(2), "wide": wide}, tmp_path / "in.pt")
    assert good("ls", "-l", tmp_path / "in.pt").rows()[1] == ["wide", "complex128", "?", *"----", "in.pt"]
    printed = good(tmp_path / "in.pt").out
    assert "complex128: 1 tensor, cannot be converted" in printed
    assert "parameters  2" in printed
    assert good("ls", "--json", tmp_path / "in.pt").json()["tensors"][1]["parameters"] is None
    assert good(tmp_path / "in.pt", "--json").json()["dtypes"]["complex128"]["unsized"] == 1


def test_ls_of_foreign_files_lists_columns_of_one_name(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table([pa.array([1, 2]), pa.array([0.5, 1.5])], names=["a", "a"])
    with pa.OSFile(str(tmp_path / "in.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    rows = [["a", "I64", "[2]"], ["a", "F64", "[2]"]]
    assert good("ls", tmp_path / "in.arrow").rows() == rows
    assert good("ls", "-r", tmp_path / "in.arrow").rows() == rows[::-1]


def test_ls_of_foreign_files_escapes_names(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"a\x1b[31m": torch.ones(2), "note\u202e": "\x1b]0;x\x07"}, tmp_path / "in.pt")
    for arguments in (["ls", "in.pt"], ["in.pt"], ["ls", "-l", "in.pt"]):
        printed = in_a_terminal(*arguments, folder=tmp_path, NO_COLOR="1", TERM="dumb").out
        assert "a\\x1b[31m" in printed
        assert not set(printed) & set("\x1b\x07\u202e")


def test_ls_of_foreign_files_takes_a_folder_and_a_prefix(npz: Path) -> None:
    assert good("ls", npz.parent).rows()[2][0] == "w"
    assert run("ls", npz.parent / "gone").code == 2


def test_ls_of_damaged_foreign_files_fails_as_convert_does(npz: Path) -> None:
    npz.write_bytes(npz.read_bytes()[:-30])
    ended = run("ls", npz)
    assert ended.code == 1
    assert ended.err.startswith(f"error: {npz}: ")
    assert ended.out == ""


def test_ls_of_an_unknown_format_fails_as_for_safetensors(tmp_path: Path) -> None:
    (tmp_path / "page.safetensors").write_bytes(b"<!doctype html><html>" + b" " * 100)
    for command in (["ls"], []):
        ended = run(*command, tmp_path / "page.safetensors")
        assert ended.code == 1
        assert "HTML" in ended.err


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
from ingot.cli import main
sys.argv = ["ingot", *sys.argv[1:]]
sys.exit(main())
"""


def test_ls_of_foreign_files_names_missing_numpy(tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    ended = python("-c", WITHOUT_NUMPY, "ls", tmp_path / "cut.safetensors", **environment())
    assert ended.code == 1
    assert "cut.safetensors: " in ended.err
    assert "install" not in ended.err


def test_package_runs_as_a_program(npz: Path) -> None:
    ended = python("-m", "ingot", "ls", npz, **environment())
    assert (ended.code, ended.out, ended.err) == (0, good("ls", npz).out, "")
