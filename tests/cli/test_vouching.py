"""hash, verify and modelspec."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy
import pytest

import ingot
import ingot.numpy
from support.commands import good, run
from support.models import minilm, save, transformer

SPEC = {
    "modelspec.sai_model_spec": "1.0.1",
    "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
    "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
    "modelspec.title": "Ducks \x1b[31m\u202e",
    "modelspec.thumbnail": "data:image/jpeg;base64," + "A" * 4000,
}


def data_of(path: Path) -> bytes:
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "sealed.safetensors"
    ingot.numpy.save_file(transformer(2), path, checksums="blake3")
    return path


def test_hash_command_equals_other_tools(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {"a": numpy.arange(400_000)}, {"ss_v2": "True", "x": "y"})
    content, data = path.read_bytes(), data_of(path)
    rows = {row[0]: row[1] for row in good("hash", path, "--all").rows()}
    assert rows["sha256"] == hashlib.sha256(content).hexdigest()
    assert rows["autov1"] == hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8]
    assert rows["autov2"] == rows["sha256"][:10]
    assert rows["autov3"] == hashlib.sha256(data).hexdigest()
    assert rows["autov3_short"] == rows["autov3"][:12]
    assert rows["crc32"] == f"{zlib.crc32(content):08x}"
    assert rows["modelspec"] == "0x" + rows["autov3"]
    assert good("hash", path, "-a", "md5", "-q").out == hashlib.md5(content).hexdigest() + "\n"
    other = tmp_path / "other.safetensors"
    other.write_bytes(content)
    answer = good("hash", path, other, path, "--json").json()["hashes"]
    assert [one["digest"] for one in answer] == [rows["sha256"]] * 2


def test_hash_command_of_the_real_model() -> None:
    assert good("hash", minilm(), "-q").out.strip() == hashlib.sha256(minilm().read_bytes()).hexdigest()


def test_hash_command_rejects_an_unknown_algorithm(sealed: Path) -> None:
    ended = run("hash", sealed, "-a", "nope\x1b[31m")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "\x1b" not in ended.err


def test_verify_command_accepts_a_sealed_file(sealed: Path) -> None:
    assert "ok: 13 tensors checked by blake3" in good("verify", sealed).out
    answer = good("verify", sealed, "--json").json()
    assert (answer["ok"], answer["checked"]) == (True, 13)
    other = sealed.with_name("other.safetensors")
    other.write_bytes(sealed.read_bytes())
    both = good("verify", sealed, other, "--json").json()
    assert [one["checked"] for one in both] == [13, 13]


def test_verify_command_names_the_tensor_of_a_flipped_bit(sealed: Path) -> None:
    content = bytearray(sealed.read_bytes())
    content[-1] ^= 1
    sealed.write_bytes(content)
    ended = run("verify", sealed)
    assert ended.code == 1
    (bad,) = run("verify", sealed, "--json").json()["bad"]
    assert f"tensor `{bad['tensor']}`" in ended.out
    assert run("verify", sealed, "-q").out == ""


def test_verify_command_rejects_a_file_without_digests(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors")
    assert run("verify", path).code == 1
    digest = good("hash", path, "-q").out.strip()
    good("verify", path, "--expected-sha256", digest)
    assert run("verify", path, "--expected-sha256", "0" * 64).code == 1
    assert run("verify", path, "--expected-sha256", "0").code == 2
    assert run("verify", path, path, "--expected-sha256", digest).code == 2


def test_modelspec_command_shows_the_keys(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", metadata=SPEC)
    rows = dict(good("modelspec", "show", path).rows())
    assert rows["modelspec.title"] == "Ducks \\x1b[31m\\u202e"
    assert rows["modelspec.thumbnail"] == "image/jpeg;base64, 3.00 kB"
    assert good("modelspec", "show", path, "--json").json() == {"modelspec": SPEC}
    silent = save(tmp_path / "silent.safetensors")
    assert run("modelspec", "show", silent).code == 1


def test_modelspec_command_finds_faults(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", metadata={**SPEC, "modelspec.date": "yesterday"})
    ended = run("modelspec", "validate", path, "--json")
    assert ended.code == 1
    assert ("error", "modelspec.date") in {(finding["severity"], finding["key"]) for finding in ended.json()}
    assert run("modelspec", "validate", save(tmp_path / "silent.safetensors")).code == 1


def test_modelspec_command_sets_keys_and_hash(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", metadata={"format": "pt"})
    good("modelspec", "set", path, "title=A = B", "architecture=gpt-2/lora", "implementation=x", "--hash")
    pairs = ingot.inspect(path).metadata
    assert pairs is not None
    assert pairs["format"] == "pt"
    assert pairs["modelspec.title"] == "A = B"
    assert pairs["modelspec.sai_model_spec"] == "1.0.1"
    assert pairs["modelspec.hash_sha256"] == "0x" + hashlib.sha256(data_of(path)).hexdigest()
    good("verify", path)
    good("modelspec", "validate", path)
    good("meta", "rm", path, "modelspec.title")
    assert "modelspec.title" not in (ingot.inspect(path).metadata or {})


def test_modelspec_command_rejects_an_empty_value(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", metadata={})
    ended = run("modelspec", "set", path, "title=")
    assert ended.code == 2
    assert "title: expected a value: `ingot meta rm PATH modelspec.title` removes the key" in ended.err
    assert not ingot.inspect(path).metadata


@pytest.mark.parametrize(
    "words",
    [[], ["nope=1"], ["title"], ["date=yesterday"], ["resolution=big"], ["title=a", "modelspec.title=b"]],
)
def test_modelspec_command_rejects_invalid_keys(words: list[str], tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", metadata=SPEC)
    before = path.read_bytes()
    assert run("modelspec", "set", path, *words).code == 2
    assert path.read_bytes() == before
