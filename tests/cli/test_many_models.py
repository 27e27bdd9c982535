"""Commands with several paths, and with folders of several models."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot
from ingot.cli.table import cell_width, distinct_cuts
from ingot.numpy import save_file
from support.commands import good, in_a_terminal, run

MODULE = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"


def lora(path: Path, rank: int, metadata: dict[str, str] | None = None) -> Path:
    down, up = numpy.zeros((rank, 768), numpy.float16), numpy.zeros((320, rank), numpy.float16)
    save_file({f"{MODULE}.lora_down.weight": down, f"{MODULE}.lora_up.weight": up}, path, metadata)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "loras"
    made.mkdir()
    for number in (1, 2, 10):
        metadata = {"ss_tag_frequency": "{}", "modelspec.title": f"Style {number}", "format": "pt"}
        lora(made / f"style{number}.safetensors", number, metadata)
    return made


def test_summary_of_a_folder_is_a_table_in_natural_order(folder: Path) -> None:
    rows = good(folder).rows()
    assert [row[0].rpartition("/")[2] for row in rows] == [f"style{n}.safetensors" for n in (1, 2, 10)]
    assert [row[1:6] for row in rows] == [
        ["LoRA", "Stable Diffusion 1.x", str(n), "", "F16"] for n in (1, 2, 10)
    ]
    assert [row[7] for row in rows] == ["Style 1", "Style 2", "Style 10"]


def test_summary_of_several_paths_as_json_and_csv(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    models = good("summary", *paths, "--json").json()["models"]
    assert [(one["path"], one["kind"], one["base"]) for one in models] == [
        (str(path), "LoRA", "Stable Diffusion 1.x") for path in paths
    ]
    table = [*csv.DictReader(io.StringIO(good(*paths, "--csv").out))]
    assert [row["title"] for row in table] == ["Style 1", "Style 10", "Style 2"]


def test_summary_has_the_same_rank_and_alpha_as_json_and_csv(tmp_path: Path) -> None:
    parts = {"down": (16, 768), "up": (320, 16)}
    other = {f"{MODULE}_1.lora_{part}.weight": numpy.zeros(shape, "f2") for part, shape in parts.items()}
    for number, metadata in enumerate(({"ss_network_alpha": "8"}, None)):
        path = lora(tmp_path / f"{number}.safetensors", 4, metadata)
        tensors = {**ingot.numpy.load_file(path), **other, f"{MODULE}.alpha": numpy.zeros((), "f4")}
        save_file(tensors, path, metadata, overwrite=True)
    models = good(tmp_path, "--json").json()["models"]
    assert [(one["rank"], one["alpha"]) for one in models] == [([4, 16], 8), ([4, 16], "stored")]
    table = [*csv.DictReader(io.StringIO(good(tmp_path, "--csv").out))]
    expected = {*models[0]} - {"rank", "text"} | {"min_rank", "max_rank"}
    assert [{*row} for row in table] == [expected] * 2
    assert [(row["min_rank"], row["max_rank"], row["alpha"]) for row in table] == [
        ("4", "16", "8"),
        ("4", "16", "stored"),
    ]
    assert [row[3:5] for row in good(tmp_path).rows()] == [["4–16", "8"], ["4–16", "stored"]]


def test_summary_lists_a_model_once(folder: Path) -> None:
    again = [folder, folder / "style1.safetensors", folder / ".." / "loras" / "style2.safetensors", folder]
    assert [row[0].rpartition("/")[2] for row in good(*again).rows()] == [
        f"style{number}.safetensors" for number in (1, 2, 10)
    ]
    assert len(good("hash", *again).rows()) == 3
    models = good("meta", "set", *again, "author=me", "--json").json()["models"]
    assert len(models) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are not any bytes")
def test_folder_may_have_names_that_are_not_utf_8(folder: Path) -> None:
    data = (folder / "style1.safetensors").read_bytes()
    for name in (b"caf\xe9.safetensors", b"caf\xe8.safetensors"):
        Path(os.fsdecode(bytes(folder) + b"/" + name)).write_bytes(data)
    assert [row[0].rpartition("/")[2][:9] for row in good(folder).rows()][:2] == ["caf\\udce8", "caf\\udce9"]
    for words in (["hash"], ["ls"], ["check"], ["lora", "info"], ["meta", "clean"]):
        assert "caf\\udce9" in good(*words, folder).out


def test_csv_quotes_and_escapes(tmp_path: Path) -> None:
    lora(tmp_path / "a.safetensors", 4, {"modelspec.title": 'a, "b"\n\x1b'})
    table = [*csv.reader(io.StringIO(good(tmp_path / "a.safetensors", "--csv").out))]
    assert table[1][-1] == 'a, "b"\n\x1b'
    shown = in_a_terminal(tmp_path / "a.safetensors", "--csv").out
    assert "\x1b" not in shown
    assert '\\x0a\\x1b"' in shown
    assert run(tmp_path / "a.safetensors", "--csv", "--json").code == 2


def test_summary_continues_after_a_broken_file(folder: Path) -> None:
    (folder / "style3.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{")
    ended = run(folder)
    assert ended.code == 1
    assert len(ended.rows()) == 3
    assert ended.err.startswith(f"error: {folder}/style3.safetensors: ")
    models = run(folder, "--json").json()["models"]
    assert sum("error" in one for one in models) == 1


def test_csv_holds_no_formula(tmp_path: Path) -> None:
    for number, title in enumerate(("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", " =1", "-1.5", "a=b")):
        lora(tmp_path / f"{number}.safetensors", 1, {"title": title})
    rows = list(csv.DictReader(io.StringIO(good(tmp_path, "--csv").out)))
    titles = [row["title"] for row in rows]
    assert titles == ["'=cmd|' /C calc'!A0", "'+1+1", "'-2+3", "'@SUM(A1)", "' =1", "-1.5", "a=b"]


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["hash", "-a", "autov3"],
        ["meta", "get"],
        ["modelspec", "validate"],
        ["modelspec", "show"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_listing_continues_after_a_broken_file(folder: Path, words: list[str], as_json: bool) -> None:
    broken = folder / "style2.safetensors"
    broken.write_bytes(b"\xff" * 20)
    found = run(*words, folder, *(["--json"] if as_json else []))
    assert found.code == 1
    assert found.err.count("error: ") == 1
    assert str(broken) in found.err
    assert all(f"style{number}.safetensors" in found.out for number in (1, 10))
    if as_json:
        (listed,) = found.json().values()
        assert [one["path"] for one in listed if "error" in one] == [str(broken)]


def test_verify_of_a_folder_continues_after_a_broken_file(tmp_path: Path) -> None:
    for number in range(3):
        save_file({"w": numpy.zeros(2)}, tmp_path / f"{number}.safetensors", checksums=True)
    assert good("verify", tmp_path).out.count(": ok: ") == 3
    (tmp_path / "1.safetensors").write_bytes(b"\xff" * 20)
    ended = run("verify", tmp_path, "--json")
    assert ended.code == 1
    assert ["error" in one for one in ended.json()] == [False, True, False]


def test_columns_of_one_width_are_narrowed_alike(tmp_path: Path) -> None:
    for number in range(2):
        save_file({f"{'a' * 30}{at}": numpy.zeros(2) for at in range(2)}, tmp_path / f"{'b' * 20}{number}.bt")
    ended = in_a_terminal("ls", tmp_path.name, folder=tmp_path.parent, columns=60, NO_COLOR="1")
    title = ended.out.splitlines()[0]
    model, name = title.index("name"), title.index("dtype") - title.index("name")
    assert abs(model - name) <= 8, title


def test_ls_of_a_folder_selects_tensors_that_some_models_have(folder: Path) -> None:
    save_file({"w": numpy.zeros(2)}, folder / "other.safetensors")
    assert [row[1] for row in good("ls", folder, "--keys", "w").rows()] == ["w"]
    ended = run("ls", folder, "--keys", "nope")
    assert ended.code == 2
    assert ended.err.startswith("error: 4 models: no tensor has a name of --keys and --drop")


def test_hash_rejects_an_unknown_algorithm_once(folder: Path) -> None:
    found = run("hash", folder, "-a", "sha255")
    assert found.code == 2
    assert found.err.count("error: ") == 1


def test_folder_of_shards_and_files_has_a_line_for_each_model(tmp_path: Path) -> None:
    ingot.numpy.save_file({"a": numpy.zeros(1000), "b": numpy.zeros(1000)}, tmp_path / "whole.safetensors")
    for name in ("a", "b"):
        ingot.split(
            tmp_path / "whole.safetensors", tmp_path, "8KB", filename_pattern=f"{name}{{suffix}}.safetensors"
        )
    assert len([*tmp_path.iterdir()]) == 7
    names = [Path(row[0]).name for row in good(tmp_path).rows()]
    assert names == ["a.safetensors.index.json", "b.safetensors.index.json", "whole.safetensors"]


def test_ls_hash_and_check_take_folders(folder: Path) -> None:
    rows = good("ls", folder).rows()
    assert len(rows) == 6
    assert {Path(row[0]).name for row in rows} == {path.name for path in folder.iterdir()}
    assert len(good("ls", folder, "--json").json()["models"]) == 3
    assert len(good("hash", folder, "-a", "autov3", "--csv").out.splitlines()) == 4


def test_rows_of_a_narrow_terminal_never_look_alike(tmp_path: Path) -> None:
    for number in range(3):
        lora(tmp_path / f"a_very_long_name_of_a_style_{number:02}_of_a_painter_of_old.safetensors", 4)
    for columns in (40, 60, 80):
        shown = in_a_terminal(
            "hash", tmp_path.name, folder=tmp_path.parent, columns=columns, NO_COLOR="1"
        ).out
        # Digests are not cut, so the names are above them.
        text = "".join(shown.split())
        assert all(f"_style_{number:02}_of_a_painter_of_old.safetensors" in text for number in range(3))


def test_names_of_files_are_cut_after_all_other_columns(folder: Path) -> None:
    long = "a_very_long_name_of_a_style_of_a_painter"
    for number in (1, 2):
        (folder / f"style{number}.safetensors").rename(folder / f"{long}_{number}.safetensors")
    for columns, name in ((100, f"loras/{long}_1.safetensors "), (80, f"…{long}_1… "), (60, "_1… ")):
        ended = in_a_terminal(folder.name, folder=folder.parent, columns=columns, NO_COLOR="1")
        lines = ended.out.splitlines()
        assert name in lines[1], lines
        assert max(map(len, lines)) <= columns
        assert len({line.split()[0] for line in lines[:4]}) == 4
        note = " ".join(lines[4:])
        assert note == "left out: alpha, dtype, title; widen the terminal, or use --json"


def test_names_lose_what_all_of_them_have_first() -> None:
    names = [f"loras/{name}.safetensors" for name in ("ducks_of_old_masters", "pixels")]
    assert [*distinct_cuts(names, 27).values()] == ["loras/ducks_of_old_masters…", "loras/pixels.safetensors"]
    assert [*distinct_cuts(names, 22).values()] == ["…ducks_of_old_masters…", "loras/pixels…"]
    assert [*distinct_cuts(["Stable Diffusion XL", "Stable Diffusion 1.x"], 12).values()] == [
        "Stable Di…XL",
        "Stable D…1.x",
    ]


def test_csv_on_a_terminal_has_bytes(folder: Path) -> None:
    lines = in_a_terminal(folder.name, "--csv", folder=folder.parent, columns=200).out.splitlines()
    sizes = [row["nbytes"] for row in csv.DictReader(lines)]
    assert sizes == [str((folder / f"style{number}.safetensors").stat().st_size) for number in (1, 2, 10)]


def test_lora_info_of_a_folder_is_a_table(folder: Path) -> None:
    rows = good("lora", "info", folder).rows()
    assert [row[1:5] for row in rows] == [["LoRA", "kohya", str(rank), ""] for rank in (1, 2, 10)]
    assert {row[5] for row in rows} == {"Stable Diffusion 1.x"}
    (folder / "style3.safetensors").write_bytes(b"\xff" * 20)
    save_file({"w": numpy.zeros(2)}, folder / "vae.safetensors")
    ended = run("lora", "info", folder, "--json")
    assert ended.code == 1
    assert ended.err.count("error: ") == 2
    assert [one.get("ranks") for one in ended.json()] == [[1], [2], None, [10], None]
    table = [*csv.DictReader(io.StringIO(run("lora", "info", folder, "--csv").out))]
    assert [row["rank"] for row in table] == ["1", "2", "10"]


@pytest.mark.parametrize("more", [[], ["--html", "out.html"]], ids=" ".join)
def test_view_of_a_folder_of_models_names_a_command(folder: Path, more: list[str]) -> None:
    (folder / "style1.safetensors").rename(folder / "a b.safetensors")
    ended = run("view", folder, *more)
    assert ended.code == 2
    assert "a directory of 3 models" in ended.err
    assert f"type `ingot view '{folder}/a b.safetensors'`, or `ingot {folder}` for a table" in ended.err


@given(st.sets(st.text("abcdef日", max_size=30), max_size=12), st.integers(8, 20))
def test_distinct_cuts_differ(texts: set[str], width: int) -> None:
    cuts = distinct_cuts(texts, width)
    assert len({*cuts.values()}) == len(texts)
    assert all(cell_width(cut) <= width or cut == text for text, cut in cuts.items())


def test_json_of_one_model_in_a_list_of_paths_is_a_summary(folder: Path) -> None:
    facts = json.loads(good(folder / "style1.safetensors", "--json").out)
    assert facts["kind"]["rank"] == [1, 1]


def test_folder_with_more_models_in_folders_warns(folder: Path) -> None:
    (folder / "empty").mkdir()
    for name in ("old", "new"):
        (folder / name).mkdir()
        lora(folder / name / "style.safetensors", 4)
    ended = run(folder)
    assert (ended.code, len(ended.rows())) == (0, 3)
    assert ended.err == f"warning: {folder}: left out the 2 directories in it: new, old\n"


def test_check_of_a_folder_says_that_values_are_not_read(folder: Path) -> None:
    assert good("check", folder).out.endswith("3 paths, values not read: all is well\n")
    assert good("check", folder, "--values").out.endswith("3 paths: all is well\n")
