"""ModelSpec 1.0.1: read, validate, write."""

from __future__ import annotations

import base64
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot import modelspec

MUST = {
    "modelspec.sai_model_spec": "1.0.1",
    "modelspec.architecture": "stable-diffusion-xl-v1-base",
    "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
    "modelspec.title": "Ducks",
    "modelspec.resolution": "1024x1024",
}
SHOULD = {
    "modelspec.description": "Ducks on ponds, naïve 🦆",
    "modelspec.author": "A. Drake",
    "modelspec.date": "2024-06-03",
    "modelspec.hash_sha256": "0x" + "ab" * 32,
}

# A picture of 2 x 3 pixels.
GIF = "R0lGODdhAgADAIEAAMgKCgAAAAAAAAAAACwAAAAAAgADAAAIBgABCBwYEAA7"


def found(pairs: dict[str, str]) -> list[tuple[str, str]]:
    return [(row.severity, row.key.removeprefix("modelspec.")) for row in modelspec.validate(pairs)]


def jpeg(width: int, height: int) -> str:
    """Return a JPEG without pixels as a data URL. It contains the size of the picture."""
    frame = struct.pack(">BHHB", 8, height, width, 3) + bytes(9)
    image = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xff\xc0\x00\x11" + frame + b"\xff\xda\x00\x02\xff\xd9"
    return "data:image/jpeg;base64," + base64.b64encode(image).decode()


def test_validate_accepts_a_full_spec() -> None:
    assert found(MUST | SHOULD | {"modelspec.thumbnail": jpeg(256, 256), "modelspec.tags": "a, b"}) == []


def test_validate_reports_missing_required_keys() -> None:
    for key in MUST:
        pairs = {k: v for k, v in (MUST | SHOULD).items() if k != key}
        assert found(pairs) == [("error", key.removeprefix("modelspec."))], key
    assert found({}) == [("error", "sai_model_spec")]


def test_validate_warns_of_missing_recommended_keys() -> None:
    assert found(MUST) == [("warning", key.removeprefix("modelspec.")) for key in SHOULD]


def test_validate_depends_on_the_kind_of_model() -> None:
    def of(architecture: str) -> list[tuple[str, str]]:
        pairs = MUST | SHOULD | {"modelspec.architecture": architecture}
        del pairs["modelspec.resolution"]
        return found(pairs)

    assert of("flux-1-dev") == [("error", "resolution")]
    assert of("flux-1-dev/lora") == []
    assert of("llama-2") == [("error", "data_format"), ("warning", "format_type")]
    assert of("gpt-neo-x/lora") == []
    assert of("qwen-image") == [("error", "resolution")]
    assert of("something-new") == []


@pytest.mark.parametrize(
    ("key", "text", "severity"),
    [
        ("sai_model_spec", "one", "error"),
        ("sai_model_spec", "2.0.0", "note"),
        ("architecture", "Stable Diffusion!", "warning"),
        ("resolution", "1024", "error"),
        ("resolution", "0x512", "error"),
        ("date", "yesterday", "error"),
        ("hash_sha256", "ab" * 32, "error"),
        ("hash_sha256", "0x" + "AB" * 32, "error"),
        ("is_negative_embedding", "yes", "error"),
        ("prediction_type", "noise", "warning"),
        ("timestep_range", "999,0", "error"),
        ("timestep_range", "9", "error"),
        ("encoder_layer", "two", "error"),
        ("thumbnail", "http://example.org/a.jpg", "error"),
        ("thumbnail", "data:image/avif;base64,AAAA", "warning"),
        ("thumbnail", f"data:image/gif;base64,{GIF}", "warning"),
        ("thumbnail", f"data:image/png;base64,{GIF}", "error"),
        ("thumbnail", f"data:image/gif;base64,{GIF[:-4]}", "error"),
        ("thumbnail", "data:image/jpeg;base64,@", "error"),
        ("thumbnail", "data:image/jpeg;base64,AAAA", "error"),
        ("thumbnail", jpeg(512, 256), "note"),
        ("colour", "blue", "note"),
    ],
)
def test_validate_reports_a_malformed_value(key: str, text: str, severity: str) -> None:
    assert found(MUST | SHOULD | {f"modelspec.{key}": text}) == [(severity, key)]


def test_validate_reports_a_hostile_thumbnail() -> None:
    whole = base64.b64decode(jpeg(256, 256).partition(",")[2])[2:]
    tails = (
        b"",
        b"\xff",
        b"\xff\xe0",
        b"\xff\xe0\x00\x00" * 1000,
        b"\xff" * 1000,
        whole[:-2],
        whole + b"<script>",
    )
    for tail in tails:
        text = "data:image/jpeg;base64," + base64.b64encode(b"\xff\xd8" + tail).decode()
        assert found(MUST | SHOULD | {"modelspec.thumbnail": text}) == [("error", "thumbnail")], tail[:10]


def test_metadata_rejects_what_validate_rejects() -> None:
    keys = {"architecture": "flux-1-dev", "implementation": "x", "title": "t"}
    with pytest.raises(ValueError, match=r"modelspec\.resolution: is missing"):
        modelspec.metadata(**keys)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        modelspec.metadata(**keys, colour="blue")
    with pytest.raises(TypeError, match="resolution must be a str, found int"):
        modelspec.metadata(**keys, resolution=512)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a.safetensors", "a.bt"])
def test_metadata_is_read_back_with_the_hash_of_the_data(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    pairs = modelspec.metadata(
        architecture="stable-diffusion-v1/lora",
        implementation="diffusers",
        title="Ducks 🦆",
        author=None,
        tags="pond,, duck ",
        others={"ss_v2": "True"},
    )
    arrays = {"a": np.arange(700_000), "b": np.ones(3, np.uint8)}
    ingot.numpy.save_file(arrays, path, pairs, checksums=["modelspec", "blake3"])
    spec = modelspec.read(path)
    assert (spec.title, spec.base_architecture, spec.part) == ("Ducks 🦆", "stable-diffusion-v1", "lora")
    assert (spec.tag_list, spec.author, spec.other) == (["pond", "duck"], None, {})
    data = hashlib.sha256(arrays["a"].tobytes() + arrays["b"].tobytes()).hexdigest()
    assert spec.hash_sha256 == "0x" + data == ingot.hash(path, "modelspec")
    report = ingot.verify(path, raises=False)
    assert report.ok
    assert report.modelspec == ("0x" + data, data, True)


def test_verify_rejects_a_wrong_modelspec_hash(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    ingot.numpy.save_file({"a": np.arange(9)}, path)
    ingot.update_metadata(path, {"modelspec.hash_sha256": "0x" + "00" * 32})
    report = ingot.verify(path, raises=False)
    assert not report.ok
    assert not report.modelspec.same
    assert "modelspec.hash_sha256: expected 0x0000" in str(report)
    with pytest.raises(ingot.IntegrityError) as caught:
        ingot.numpy.load_file(path, verify=True)
    assert (caught.value.code, caught.value.tensor) == ("digest-mismatch", None)
    ingot.update_metadata(path, {"modelspec.hash_sha256": "unknown"})
    assert not ingot.verify(path, raises=False).ok
    with pytest.raises(ingot.IntegrityError, match="is not a SHA-256"):
        ingot.numpy.load_file(path, verify=True)


def test_read_of_a_file_without_modelspec_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    ingot.numpy.save_file({"a": np.arange(9)}, path)
    assert modelspec.read(path) is None
    assert modelspec.read({"format": "pt"}) is None
    for other in (3, None, ["modelspec.title"]):
        with pytest.raises(TypeError, match=f"expected a path .* found {type(other).__name__}"):
            modelspec.read(other)
    assert modelspec.read({"modelspec.title": "t", "modelspec.new": "x"}).other == {"new": "x"}
