"""Every command on a real model, on a .bt file and on a sharded checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
import pytest

import ingot
import ingot.numpy
from ingot.cli.program import COMMANDS
from support.commands import good, run
from support.models import minilm, save

NAME = "encoder.layer.3.attention.self.query.bias"
TENSORS = 104
PARAMETERS = 22_713_728


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module", params=["safetensors", "bt", "sharded"])
def model(request: pytest.FixtureRequest, folder: Path) -> Path:
    """Return the real model as one safetensors file, as a .bt file, or as a directory with several files."""
    if request.param == "safetensors":
        return Path(shutil.copy(minilm(), folder / "model.safetensors"))
    if request.param == "bt":
        ingot.rewrite(minilm(), folder / "model.bt")
        return folder / "model.bt"
    ingot.split(minilm(), folder / "shards", "30MB")
    return folder / "shards"


@pytest.fixture(scope="module")
def expected() -> dict[str, numpy.ndarray]:
    return ingot.numpy.load_file(minilm())


def test_summary_command(model: Path) -> None:
    facts = good(model, "--json").json()
    assert (facts["tensors"], facts["parameters"]) == (TENSORS, PARAMETERS)
    assert facts["dtypes"]["F32"]["tensors"] == TENSORS - 1
    assert facts["files"] == (3 if model.is_dir() else 1)
    assert "22.7M (22,713,728)" in good("summary", model).out


def test_ls_command(model: Path, expected: dict[str, numpy.ndarray]) -> None:
    tensors = good("ls", model, "--json").json()["tensors"]
    assert {row["name"]: tuple(row["shape"]) for row in tensors} == {
        name: array.shape for name, array in expected.items()
    }
    assert all(row["end"] - row["begin"] == row["nbytes"] for row in tensors)
    rows = good("ls", "-l", model).rows()
    assert [row[0] for row in rows] == [row["name"] for row in tensors]
    assert good("ls", "-q", model).out.splitlines() == [row["name"] for row in tensors]


def test_tree_command(model: Path) -> None:
    rows = {row[0]: row for row in good("tree", model).rows()}
    assert rows["encoder.layer.0-5"][1:3] == ["96", "10646784"]
    assert sum(
        int(row[2]) for path, row in rows.items() if "." not in path or path.startswith("pooler.dense")
    )
    modules = good("tree", model, "--json").json()["modules"]
    assert sum(module["parameters"] for module in modules) == PARAMETERS
    assert len(good("tree", model, "--expand").rows()) > len(rows)
    assert len(good("tree", model, "-L", "1").rows()) == 3


def test_info_command(model: Path) -> None:
    facts = good("info", model, NAME, "--json").json()
    assert (facts["dtype"], facts["shape"], facts["nbytes"]) == ("F32", [384], 1536)
    assert ["dtype", "F32"] in good("info", model, NAME).rows()


def test_params_and_layers_commands(model: Path) -> None:
    assert good("params", model, "--json").json()["total"] == PARAMETERS
    assert good("params", model, "-q").out == f"{PARAMETERS}\n"
    assert len(good("layers", model).rows()) == TENSORS


def test_stats_command(model: Path, expected: dict[str, numpy.ndarray]) -> None:
    for name, row in good("stats", model, "--all", "--json").json()["tensors"].items():
        array = expected[name].astype(numpy.float64)
        assert (row["min"], row["max"]) == (array.min(), array.max())
        assert row["mean"] == pytest.approx(array.mean(), abs=1e-12)
        assert row["std"] == pytest.approx(array.std(), rel=1e-9)
        assert row["zeros"] == numpy.count_nonzero(array == 0)
    assert len(good("stats", model, NAME).rows()) == 1


def test_cat_command(model: Path, expected: dict[str, numpy.ndarray]) -> None:
    assert [float(text) for text in good("cat", model, NAME).out.split()] == expected[NAME].tolist()
    part = "pooler.dense.weight[1:5:2, -3:]"
    answer = good("cat", model, part, "--json").json()
    assert numpy.array_equal(answer["values"], expected["pooler.dense.weight"][1:5:2, -3:])


def test_hash_and_verify_commands(model: Path) -> None:
    digests = good("hash", model, "-a", "sha256", "--json").json()["hashes"]
    assert len(digests) == (3 if model.is_dir() else 1)
    # The model stores no digests, so that it cannot be verified.
    assert run("verify", model).code == 1


def test_modelspec_command(model: Path) -> None:
    assert run("modelspec", "show", model).code == 1
    assert run("modelspec", "validate", model).code == 1


def test_mem_command(model: Path) -> None:
    rows = {row[0]: row[1:] for row in good("mem", model).rows()}
    assert rows["as stored"][1] == str((PARAMETERS - 512) * 4 + 512 * 8)
    assert rows["BF16, F16"][1] == str((PARAMETERS - 512) * 2 + 512 * 8)


def test_check_command(model: Path) -> None:
    answer = good("check", model, "--values", "--json").json()
    assert answer == {"source": str(model), "tensors": TENSORS, "problems": []}


def test_diff_command(model: Path, folder: Path) -> None:
    assert run("diff", minilm(), model, "--values", "-q").code in (0, 1)
    found = run("diff", minilm(), model, "--values", "--json").json()
    assert (found["tensors"], found["values"]) == ({}, {})


def test_doctor_command(model: Path) -> None:
    found = good("doctor", model, "--json").json()
    assert found["ingot"]["found"] == ingot.__version__
    assert found["backend"]["found"] in ("mmap", "pread")
    # The names in the extras of this distribution.
    assert {"click", "gguf", "jax", "ml-dtypes", "numpy", "torch"} <= found.keys()


def test_meta_reads_metadata(model: Path) -> None:
    if not model.is_dir():
        assert good("meta", "get", model, "format").out == "pt\n"
        assert good("meta", "get", model, "--json").json() == {"metadata": {"format": "pt"}}
    assert isinstance(json.loads(good("meta", "export", model).out), dict)


def test_meta_changes_metadata(model: Path) -> None:
    if model.is_dir():
        # Metadata of an index has tests of its own.
        model = model / "model-00001-of-00003.safetensors"
    assert good("meta", "set", model, "a=b=c", "empty=", "--json").json()["set"] == ["a", "empty"]
    assert ingot.inspect(model).metadata == {"format": "pt", "a": "b=c", "empty": ""}
    good("meta", "rm", model, "a", "empty")
    good("meta", "clean", model)
    assert ingot.inspect(model).metadata == {"format": "pt"}
    good("meta", "clean", "--all", model)
    assert not ingot.inspect(model).metadata
    good("meta", "set", model, "format=pt")


@pytest.fixture
def index(folder: Path, tmp_path: Path) -> Path:
    """The index of a checkpoint of three files."""
    ingot.split(minilm(), tmp_path / "shards", "30MB")
    return tmp_path / "shards" / "model.safetensors.index.json"


def of_files(index: Path) -> list[dict[str, str] | None]:
    return [ingot.inspect(file).metadata for file in sorted(index.parent.glob("*.safetensors"))]


def test_meta_of_a_checkpoint_reads_its_index(index: Path) -> None:
    before = json.loads(index.read_text())
    index.chmod(0o640)
    for path in (index.parent, index):
        assert good("meta", "set", path, "a=b=c", "title=é").out.endswith("rewritten\n")
        assert good("meta", "get", path, "a").out == "b=c\n"
        assert json.loads(index.read_text())["metadata"] == {**before["metadata"], "a": "b=c", "title": "é"}
        assert good("meta", "set", path, "a=b=c").out == "unchanged\n"
        good("meta", "set", path, "a=d", "--dry-run")
        answer = good("meta", "rm", path, "a", "--json").json()
        assert answer == {"outcome": "rewritten", "set": [], "removed": ["a"]}
        good("meta", "clean", path)
        assert json.loads(index.read_text()) == before
    assert index.stat().st_mode & 0o777 == 0o640
    assert of_files(index) == [{"format": "pt"}] * 3
    assert not list(index.parent.glob(".*"))
    good("check", index.parent)


def test_meta_leaves_the_weight_map_of_an_index(index: Path, tmp_path: Path) -> None:
    before = index.read_bytes()
    for words in (["set", index, "total_size=1"], ["rm", index, "total_size"]):
        ended = run("meta", *words)
        assert ended.code == 2
        assert "`total_size` is not text" in ended.err
    # The output of `meta get --json`.
    copied = tmp_path / "copied.json"
    copied.write_text(json.dumps(good("meta", "get", index, "--json").json()["metadata"]))
    assert good("meta", "import", index, copied, "--replace").out == "unchanged\n"
    assert index.read_bytes() == before


def test_meta_changes_every_file_of_a_checkpoint(index: Path) -> None:
    before = index.read_bytes()
    answer = good("meta", "set", index.parent, "--files", "format=np", "a=b", "--json").json()
    assert [Path(one["file"]).name for one in answer["files"]] == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    assert of_files(index) == [{"format": "np", "a": "b"}] * 3
    good("meta", "rm", index.parent, "--files", "a", "--dry-run")
    assert of_files(index) == [{"format": "np", "a": "b"}] * 3
    good("meta", "rm", index.parent, "--files", "a")
    assert of_files(index) == [{"format": "np"}] * 3
    assert index.read_bytes() == before


def test_export_command(model: Path, tmp_path: Path, expected: dict[str, numpy.ndarray]) -> None:
    good("export", model, NAME, "pooler.dense.weight", "-d", tmp_path)
    assert numpy.array_equal(numpy.load(tmp_path / f"{NAME}.npy"), expected[NAME])
    good("export", model, NAME, "--raw", "-o", tmp_path / "raw")
    assert (tmp_path / "raw").read_bytes() == expected[NAME].tobytes()


def test_split_and_merge_commands(model: Path, tmp_path: Path, expected: dict[str, numpy.ndarray]) -> None:
    whole = tmp_path / "whole.safetensors"
    assert good("merge", model, "-o", whole, "--json").json()["tensors"] == TENSORS
    files = good("split", whole, tmp_path / "parts", "--max-shard-size", "40MB", "--json").json()["files"]
    assert sum(file["tensors"] for file in files) == TENSORS
    good("merge", *[file["file"] for file in files], "-o", tmp_path / "again.bt")
    again = ingot.numpy.load_file(tmp_path / "again.bt")
    assert again.keys() == expected.keys()
    assert all(numpy.array_equal(again[name], array) for name, array in expected.items())


def test_rewrite_command(model: Path, tmp_path: Path, expected: dict[str, numpy.ndarray]) -> None:
    rules = tmp_path / "rules.json"
    stack = {"stack": "layers.key.bias", "old": "encoder.layer.{i}.attention.self.key.bias"}
    rules.write_text(json.dumps([stack, {"select": "*"}]))
    found = good("rewrite", model, tmp_path / "r.bt", "--remap", rules, "--json").json()
    assert {one["name"]: one["shape"] for one in found["tensors"]}["layers.key.bias"] == [6, 384]
    stacked = ingot.numpy.load_file(tmp_path / "r.bt", keys="layers.key.bias")["layers.key.bias"]
    parts = [expected[f"encoder.layer.{layer}.attention.self.key.bias"] for layer in range(6)]
    assert numpy.array_equal(stacked, numpy.stack(parts))


def test_rename_command(model: Path, tmp_path: Path) -> None:
    good("rename", model, tmp_path / "r.bt", "-s", r"^encoder\.layer\.(\d+)", r"h.\1", "-n", NAME, "q")
    names = set(ingot.safe_open(tmp_path / "r.bt", "np"))
    assert "q" in names
    assert "h.3.attention.self.key.bias" in names
    assert len(names) == TENSORS


def test_delta_command(model: Path, tmp_path: Path) -> None:
    new, patch, result = (tmp_path / name for name in ("new.bt", "patch.safetensors", "result.bt"))
    good("cast", model, new, "--dtype", "f16", "--keys", "*LayerNorm*")
    answer = good("delta", "diff", model, new, "-o", patch, "--step", "7", "--json").json()
    assert answer["step"] == 7
    assert all("LayerNorm" in name for name in answer["tensors"])
    assert good("delta", "info", patch, "--json").json() == answer
    good("delta", "compose", patch, "-o", tmp_path / "same.safetensors")
    good("delta", "apply", model, tmp_path / "same.safetensors", "-o", result, "--verify")
    assert result.read_bytes() == new.read_bytes()
    copy = tmp_path / "copy"
    (shutil.copytree if model.is_dir() else shutil.copy)(model, copy)
    ended = run("delta", "apply", copy, patch, "--in-place")
    assert (ended.code, "write a new file" in ended.err) == (1, True)
    assert run("delta", "apply", model, patch).code == 2


def test_repair_command(model: Path, tmp_path: Path, expected: dict[str, numpy.ndarray]) -> None:
    answer = good("repair", model, tmp_path / "r.safetensors", "--json").json()
    assert (answer["tensors"], answer["findings"]) == (TENSORS, [])
    mended = ingot.numpy.load_file(tmp_path / "r.safetensors")
    assert all(numpy.array_equal(mended[name], array) for name, array in expected.items())


def test_cast_command(model: Path, tmp_path: Path, expected: dict[str, numpy.ndarray]) -> None:
    good("cast", model, tmp_path / "c.safetensors", "--dtype", "f16", "--except", "*LayerNorm*")
    found = ingot.numpy.load_file(tmp_path / "c.safetensors")
    for name, array in expected.items():
        kept = "LayerNorm" in name or array.dtype != numpy.float32
        assert numpy.array_equal(found[name], array if kept else array.astype(numpy.float16))


def test_lora(tmp_path: Path) -> None:
    base, adapter, new = (tmp_path / f"{name}.safetensors" for name in ("base", "adapter", "new"))
    save(base, {"conv_in.weight": numpy.zeros((2, 2), "f4")})
    factors = {"lora_up.weight": numpy.ones((2, 1), "f4"), "lora_down.weight": numpy.ones((1, 2), "f4")}
    save(adapter, {f"lora_unet_conv_in.{part}": factor for part, factor in factors.items()})
    assert ["kind", "LoRA"] in good("lora", "info", adapter).rows()
    assert "1 tensor of 1 changed" in good("lora", "merge", base, adapter, new, "--also", adapter, "2").out
    assert ingot.numpy.load_file(new)["conv_in.weight"].tolist() == [[3, 3], [3, 3]]
    good("lora", "convert", adapter, tmp_path / "peft", "--to", "peft")
    assert (tmp_path / "peft" / "adapter_config.json").is_file()
    refused = run("merge", base, adapter, "-o", tmp_path / "out.safetensors")
    assert refused.code == 1
    assert "`ingot lora merge`" in refused.err


def test_commands_all_have_a_test() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    words = {word for name in tested for word in name.split("_")}
    # The commands with tests of their own.
    assert (
        set(COMMANDS) - words - {"completion", "convert", "credentials", "download", "upload", "view"}
        == set()
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_all_have_a_summary(command: str) -> None:
    assert good(command, "--help").out.startswith(f"Usage: ingot {command} ")
    assert f"  {command} " in good("--help").out
